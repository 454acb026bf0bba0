"""`aot-tune doctor KERNEL`: checklist of a kernel's declaration, tables and archive.

Each line that is not done gives the next step. Reads files and launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune.cli.documents.declared import table_states
from aot_tune.cubins.archive import FILE_NAME, Archive, Section
from aot_tune.cubins.origin import declared_code, difference
from aot_tune.declare import checks
from aot_tune.declare.blanks import blank_mistakes
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import ArchiveError
from aot_tune.serve import loader
from aot_tune.tables import store
from aot_tune.values.arch import Arch
from aot_tune.values.text import counted


@dataclass(frozen=True, kw_only=True)
class Step:
    """Step from a declaration to a kernel that is served with its tables."""

    done: bool
    """Whether nothing is left to do."""

    what: str
    """What is done; or what is missing, and the command or the change that adds it."""

    def __str__(self) -> str:
        return f"[{'x' if self.done else ' '}] {self.what}"


def checklist(kernel: FoundKernel, arch: Arch, mistakes: Sequence[str]) -> list[Step]:
    """Return the steps of a kernel for an arch.

    Args:
        kernel: The kernel's declaration, and the module that printed commands name.
        arch: The arch that the kernel is tuned for.
        mistakes: The mistakes that `declaration_problems` reports.
    """
    tunable = kernel.tunable
    if blank := blank_mistakes(tunable):
        return [Step(done=False, what=mistake.text) for mistake in blank]
    return [
        *_declared(tunable, arch, mistakes),
        *([] if mistakes else (*_remarked(tunable, arch), _modelled(tunable, arch))),
        *_tuned(kernel, arch),
        _compiled(kernel, arch),
    ]


def _declared(tunable: Declaration, arch: Arch, mistakes: Sequence[str]) -> Iterator[Step]:
    for mistake in mistakes:
        text = mistake.removeprefix(f"{tunable.name}: ")
        yield Step(done=False, what=f"the declaration is wrong: {text}")
    if not mistakes:
        problems = counted(len(tunable.typical_problems), "typical problem")
        most = max(len(tunable.candidates(arch, problem)) for problem in tunable.typical_problems)
        candidates = f"at most {counted(most, 'candidate')} each"
        what = f"declared without a mistake of form for {problems} on {arch}, {candidates}"
        yield Step(done=True, what=f"{what}; results are compared when a GPU measures them")


def _remarked(tunable: Declaration, arch: Arch) -> Iterator[Step]:
    remarks = checks.declaration_remarks(tunable, arch)
    for remark in remarks:
        yield Step(done=False, what=f"remark: {remark.removeprefix(f'{tunable.name}: ')}")
    if not remarks:
        what = "sizes and scalars are passed at launch, arguments are seeded, every arch has configs"
        yield Step(done=True, what=what)


def _modelled(tunable: Declaration, arch: Arch) -> Step:
    space = tunable.candidates(arch, tunable.typical_problems[0])
    if len({(config.kernel, tuple(config.constants.items())) for config in space}) <= 1:
        return Step(done=True, what="the configs differ in hints alone: work is not needed")
    if tunable.work is None and (reason := checks.uncounted(tunable, arch)):
        what = (
            "work is absent, and the kernel's code cannot be followed in its place: "
            f"{reason}; if it multiplies matrices, tune ranks no candidate without a GPU of the arch: add "
            "work=lambda config, problem: Work(...), or tune on such a GPU"
        )
        return Step(done=False, what=what)
    if tunable.work is None:
        what = (
            "work is absent: without a GPU of the arch, tune ranks configs that differ in constants by what "
            "a few blocks of the kernel's code multiply, load and store; add "
            "work=lambda config, problem: Work(...), or tune on such a GPU"
        )
        return Step(done=False, what=what)
    if tunable.tiles is None:
        what = "work is there; without tiles the grid's blocks are counted, right unless they loop over tiles"
        return Step(done=True, what=what)
    return Step(done=True, what="work and tiles are there for predictions without a GPU")


def _tuned(kernel: FoundKernel, arch: Arch) -> Iterator[Step]:
    tunable = kernel.tunable
    command = f"aot-tune tune {tunable.name} --arch {arch}{kernel.module_option}"
    used = [file for file in table_states(tunable, arch) if file.usable]
    if not used:
        yield Step(done=False, what=f"no table for {arch} is used; {command}")
        return
    for file in used:
        table = store.read_table(file.path)
        missing = [bucket for bucket in tunable.buckets if table.entry(bucket) is None]
        yield Step(
            done=not missing and "tune again" not in file.state,
            what=f"table {file.path}: {file.state}"
            + (
                f"; {counted(len(missing), 'declared bucket')} without an entry; {command}" if missing else ""
            ),
        )


def _compiled(kernel: FoundKernel, arch: Arch) -> Step:
    tunable = kernel.tunable
    paths = [folder / str(arch) / FILE_NAME for folder, _ in loader.folders(tunable)]
    command = f"aot-tune compile --arch {arch} --kernel {tunable.name}{kernel.module_option}"
    for path in paths:
        section = _section(path, tunable)
        if section is None:
            continue
        if changed := difference(declared_code(tunable), section.origin):
            return Step(done=False, what=f"archive {path} is left out: {changed}; {command}")
        return Step(done=True, what=f"archive {path}; aot-tune check compares it with the tables")
    return Step(done=False, what=f"no archive of cubins: a first launch compiles; {command}")


def _section(path: Path, tunable: Declaration) -> Section | None:
    try:
        return Archive(path).section(tunable.name) if path.exists() else None
    except ArchiveError:
        return None
