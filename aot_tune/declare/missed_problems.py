"""Read the problems that servers missed, from the files of AOT_TUNE_RECORD. Prints nothing."""

from __future__ import annotations

import glob
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aot_tune.declare.selection import chosen_problems
from aot_tune.errors import UsageError
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

if TYPE_CHECKING:
    from aot_tune.declare.discovery import FoundKernel


def problems_of_files(
    kernels: Sequence[FoundKernel], paths: Sequence[Path], arch: Arch
) -> tuple[dict[str, tuple[Problem, ...]], list[str]]:
    """Read the problems that servers missed and appended to files, by kernel.

    Args:
        kernels: The chosen kernels.
        paths: The files of AOT_TUNE_RECORD; the files of its processes, ``<path>.<pid>``, are read too.
        arch: Problems that were missed on another arch are left out.

    Returns:
        The problems, and a line for the user for each reason why lines of the files are left out.

    Raises:
        UsageError: A file cannot be read, or none of them names a problem of these kernels.
    """
    by_name = {kernel.tunable.name: kernel.tunable for kernel in kernels}
    chosen: dict[str, dict[Problem, None]] = {}
    unused: dict[str, list[str]] = {}
    for path in _files_of(paths):
        for number, line in enumerate(_lines_of(path), 1):
            try:
                record = json.loads(line)
                name, wanted = record.get("kernel"), record.get("problem")
                why = _other(record, by_name, arch)
                problems = chosen_problems(by_name[name], wanted) if why is None else ()
            except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
                why = "it is broken, no line that AOT_TUNE_RECORD writes"
            except UsageError as error:
                why = str(error)
            if why is not None:
                unused.setdefault(why, []).append(f"{path}, line {number}")
            else:
                chosen.setdefault(name, {}).update(dict.fromkeys(problems))
    notes = [
        f"{places[0]}: {why}; {counted(len(places), 'such line')} left out" for why, places in unused.items()
    ]
    if not chosen:
        names = ", ".join(map(str, paths))
        nothing = f"--problems {names}: no line names a problem of these kernels on {arch}"
        raise UsageError("\n".join([nothing, *notes]))
    return {name: tuple(problems) for name, problems in chosen.items()}, notes


def _other(record: Mapping[str, object], kernels: Container[str], arch: Arch) -> str | None:
    """Return why a line is not for this sweep, in words; None where it is."""
    if "search" in record:
        return "a library's search, which no sweep makes: run aot-tune record on that program again"
    name, missed_on = record["kernel"], record["arch"]
    if missed_on != str(arch):
        return f"it is of {missed_on!s:.40}, not {arch}: name it, --arch {missed_on!s:.40}"
    if name not in kernels:
        return f"it is of {name!s:.80}, which is not among the chosen kernels: name it, or its --module"
    return None


def _files_of(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        own = sorted(path.parent.glob(f"{glob.escape(path.name)}.*[0-9]"))
        if not path.is_file() and not own:
            raise UsageError(
                f"--problems {path}: there is no such file, and none of its processes: {path}.<pid>"
            )
        files += [*([path] if path.is_file() else []), *own]
    return files


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"--problems {path}: {error.strerror}") from None
