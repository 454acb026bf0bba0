"""Declarations that `aot-tune new` began, imported as their authors would, with some blanks filled in.

Run as a program it begins one for each kernel that it is given and prints what came of them as JSON:
``python -m tests.support.begun FOLDER lib.kernels:kernel ...``.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from aot_tune.cli.start.new import begin
from aot_tune.declare.blanks import blank_mistakes, blanks_of
from aot_tune.declare.checks import declaration_problems
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch

ARCHS = tuple(map(Arch.parse, ("sm90", "sm100")))


class Outcome(NamedTuple):
    """What `aot-tune new` made of a kernel."""

    kinds: list[str]
    """The kind of the kernel."""

    blanks: list[str]
    """The fields that are blank."""

    written: dict[str, list[str]]
    """What the declaration names as outputs, inplace and reset."""

    clusters: list[list[int]]
    """The values of num_ctas that each arch searches; none where it is no hint."""

    most: int
    """The largest number of candidates of a problem."""

    mistakes: list[str]
    """What doctor finds wrong with it, beside the blanks."""


def imported(place: str, folder: Path, filled: Mapping[str, str] | None = None) -> Tunable:
    """The declaration that was begun for a kernel; `folder` is on the path, and in it a new package is made.

    Args:
        place: Module and name of the kernel.
        folder: A folder on the path.
        filled: What the author writes in place of each blank, by field.
    """
    text = begin(place).text
    for field, code in (filled or {}).items():
        text, count = re.subn(
            rf"^    {field}=blank\(.*?^    \),$", f"    {field}={code},", text, flags=re.M | re.S
        )
        assert count == 1, f"{field} is not blank in:\n{text}"
    package = f"begun_{len(list(folder.glob('begun_*')))}_{folder.name.replace('-', '_')}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    (folder / package / "declared.py").write_text(text)
    importlib.invalidate_caches()
    module = importlib.import_module(f"{package}.declared")
    (tunable,) = (value for value in vars(module).values() if isinstance(value, Tunable))
    return tunable


def outcome(place: str, folder: Path) -> Outcome:
    """Begin a kernel's declaration, import it, and look at it as doctor does."""
    tunable = imported(place, folder)
    problem = tunable.typical_problems[0]
    spaces = [tunable.candidates(arch, problem) for arch in ARCHS]
    blank = {f"{tunable.name}: {one.text}" for one in blank_mistakes(tunable)}
    found = [one for arch in ARCHS for one in declaration_problems(tunable, arch) if one not in blank]
    named = {"outputs": tunable.outputs, "inplace": tunable.inplace, "reset": tunable.reset}
    return Outcome(
        kinds=list(begin(place).kinds),
        blanks=[field for field, _ in blanks_of(tunable)],
        written={field: list(names) for field, names in named.items() if names},
        clusters=[
            sorted({one.hints["num_ctas"] for one in space if "num_ctas" in one.hints}) for space in spaces
        ],
        most=max(map(len, spaces)),
        mistakes=found,
    )


def main(folder: str, *places: str) -> None:
    """Print the outcome of each place."""
    warnings.simplefilter("ignore")  # of libraries
    sys.path.insert(0, folder)
    print(json.dumps({place: outcome(place, Path(folder)) for place in places}))


if __name__ == "__main__":
    main(*sys.argv[1:])
