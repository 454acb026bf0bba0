"""Read the problems that servers missed, from the files of AOT_TUNE_RECORD. Prints nothing."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aot_tune.declare.selection import chosen_problems
from aot_tune.errors import UsageError
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem

if TYPE_CHECKING:
    from aot_tune.declare.discovery import FoundKernel


def problems_of_files(
    kernels: Sequence[FoundKernel], paths: Sequence[Path], arch: Arch
) -> tuple[dict[str, tuple[Problem, ...]], list[str]]:
    """The problems that servers missed and appended to files, by kernel.

    Args:
        kernels: The chosen kernels.
        paths: The files of AOT_TUNE_RECORD; those that its processes made, ``<path>.<pid>``, are read too.
        arch: Problems that were missed on another arch are left out.

    Returns:
        The problems, and a line for a person for each line that is of no use here.

    Raises:
        UsageError: A file cannot be read, or none of them names a problem of these kernels.
    """
    by_name = {found.tunable.name: found.tunable for found in kernels}
    chosen: dict[str, tuple[Problem, ...]] = {}
    notes: dict[str, None] = {}
    for path in _files_of(paths):
        for number, line in enumerate(_lines_of(path), 1):
            try:
                told = json.loads(line)
                name, wanted = told.get("kernel"), told.get("problem")
                if "search" in told or told.get("arch") != str(arch) or name not in by_name:
                    continue  # a search of a library is recorded again, not swept
                problems = chosen_problems(by_name[name], wanted)
            except (ValueError, AttributeError, TypeError):
                notes[f"{path}, line {number}: it is no line of a server that missed; it is left out"] = None
            except UsageError as error:
                notes[f"{path}, line {number}: {error}; it is left out"] = None
            else:
                chosen[name] = tuple(dict.fromkeys((*chosen.get(name, ()), *problems)))
    if not chosen:
        names = ", ".join(map(str, paths))
        raise UsageError(f"--problems {names}: no line names a problem of these kernels on {arch}")
    return chosen, list(notes)


def _files_of(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        own = sorted(path.parent.glob(f"{glob.escape(path.name)}.*[0-9]"))
        if not path.is_file() and not own:
            raise UsageError(
                f"--problems {path}: there is no such file, and none of its processes: {path}.<pid>"
            )
        found += [*([path] if path.is_file() else []), *own]
    return found


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"--problems {path}: {error.strerror}") from None
