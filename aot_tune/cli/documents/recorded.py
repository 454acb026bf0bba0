"""Table of a recorded kernel, for the verbs. May import the kernel; launches nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune import environment
from aot_tune.cli.documents.document import Document, FileState, Finding, Winner
from aot_tune.cli.documents.former import Form
from aot_tune.cubins.archive import FILE_NAME, Archive, Section
from aot_tune.cubins.origin import difference
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import AotTuneError, StoreError, UsageError
from aot_tune.replay.document import TABLE, dump, parse
from aot_tune.replay.files import is_shipped, listed_recorded, right_place_of
from aot_tune.replay.fit import hash_now, kernel_of, misfit, other_library, recorded_code, why_local
from aot_tune.replay.nearest import NEAR
from aot_tune.replay.table import Launched, Library, RecordedEntry, RecordedTable, name_of
from aot_tune.replay.words import config_in_words, problem_in_words
from aot_tune.tables.table import geometric_mean
from aot_tune.values.arch import Arch
from aot_tune.values.text import aligned, counted


class RecordedDocument(Document):
    """Table of a recorded kernel and its file."""

    kind, noun, again = "recorded", "recorded table", "record again: aot-tune record"
    needs_declaration, baseline, place_name = False, "first", "problem"
    heads = ("arch", "recorded kernel", "library", "problems", "searches", "over first", "best", "on", "file")
    parse, dump = staticmethod(parse), staticmethod(dump)
    right_place = staticmethod(right_place_of)
    table: RecordedTable

    form = Form(
        shape=TABLE,
        compared="config, hints, mean_us, first_us",
        none={"grid": [1], "error_margin_us": 0.0, "num_samples": 1, "count": 1, "signature": "none"},
        values={"grid": (1,), "error_margin_us": 0.0, "num_samples": 1, "count": 1, "signature": "none"},
    )

    @property
    def name(self) -> str:
        """See the base class."""
        return name_of(self.table.module, self.table.kernel)

    # Showing ------------------------------------------------------------------------------------------------

    def overview(self) -> tuple[str, ...]:
        """See the base class."""
        gains = self.gains
        return (
            str(self.table.arch),
            self.name,
            _library(self.table.library),
            str(len(self.winners())),
            str(sum(entry.count for entry in self.table.entries)),
            f"{geometric_mean(gains):.2f}x" if gains else "-",
            f"{max(gains):.2f}x" if gains else "-",
            self.table.built_with.device_name,
            str(self.path),
        )

    def lines(self) -> list[str]:
        """Return the library and GPU, a row for each winner, and launches that no search measured."""
        heads = ("problem", "us", "+-", "first us", "gain", "count", "winner")
        return [
            f"{self.name} on {self.table.arch}, recorded: {self.path}",
            f"{_library(self.table.library)}; {self.made_with()}",
            *aligned([heads, *map(self._row, self.table.entries)]),
            *(f"launched, but not searched: {_launched(launch)}" for launch in self.table.launched),
        ]

    def _row(self, entry: RecordedEntry) -> tuple[str, ...]:
        count = entry.problem.sm_count
        return (
            ("" if count == self.table.built_with.sm_count else f"{count} SMs: ")
            + problem_in_words(entry.problem),
            f"{entry.mean_us:.2f}",
            f"{entry.error_margin_us:.2f}",
            "failed" if entry.first_us is None else f"{entry.first_us:.2f}",
            "-" if entry.gain is None else f"{entry.gain:.2f}x",
            str(entry.count),
            config_in_words(entry),
        )

    # Comparing ----------------------------------------------------------------------------------------------

    def winners(self, older: RecordedDocument | None = None) -> Mapping[Hashable, Winner]:
        """Return the entries that are replayed: the first of several winners of one problem."""
        winners: dict[Hashable, Winner] = {}
        for entry in self.entries(older):
            winners.setdefault((entry.space, entry.problem), _winner(entry))
        return winners

    def remarks(self, old: RecordedDocument) -> Iterator[str]:
        """See the base class."""
        yield from self.form_remarks(old)
        yield from self.source_remarks(old)
        if old.table.library != self.table.library:
            yield f"library {_library(old.table.library)} -> {_library(self.table.library)}"
        yield from self.built_with_remarks(old)

    # Checking -----------------------------------------------------------------------------------------------

    def faults(self, kernel: FoundKernel | None, *, own: bool) -> Iterator[Finding]:
        """See the base class. Imports the kernel."""
        table, again = self.table, "record again (aot-tune record), or remove the table"
        if is_shipped(self.path):
            yield from self._shipped_remarks()
            return
        if (reason := other_library(table.library)) is not None:
            yield self.finding("library", reason, f"install that version, {again}")
            return
        if (reason := why_local(table)) is not None:
            what = f"{reason}, so its code cannot be compared here"
            yield self.finding("kernel", what, "replaying compares it", remark=True)
            return
        try:
            present = kernel_of(table.module, table.kernel)
        except UsageError as error:
            yield self.finding("kernel", str(error), f"install the recorded version of the library, {again}")
            return
        if (reason := misfit(table, present, table.arch, hash_now(present))) is not None:
            yield self.finding("source_hash", reason, again)

    def _shipped_remarks(self) -> Iterator[Finding]:
        """Compare a shipped table with the library that is installed, if any; its form is checked anyway."""
        table = self.table
        if (reason := other_library(table.library)) is not None:
            what, fix = f"{reason}: its form is checked", "install that version to compare the code"
            yield self.finding("library", what, fix, remark=True)
            return
        try:
            present = kernel_of(table.module, table.kernel)
        except UsageError as error:
            yield self.finding("kernel", f"{error}: its form is checked", "install the library", remark=True)
            return
        if (reason := misfit(table, present, table.arch, hash_now(present))) is not None:
            again = "record the shipped tables again: python -m aot_tune.bench.libraries"
            yield self.finding("source_hash", reason, again)

    # Replaying ----------------------------------------------------------------------------------------------

    def left_out(self, arch: Arch) -> str | None:
        """Return why replaying would not use the table; None where it would.

        Raises:
            UsageError: The kernel's module cannot be imported, or has no such kernel.
        """
        if (right := right_place_of(self.path, self.table)) is not None:
            return f"it belongs in {right}"
        shipped = is_shipped(self.path)
        reason = None if shipped else other_library(self.table.library)
        if reason is not None or why_local(self.table) is not None:
            return reason
        kernel = kernel_of(self.table.module, self.table.kernel)
        return misfit(self.table, kernel, arch, hash_now(kernel), any_version=shipped)

    def cubins(self) -> tuple[Section | None, str]:
        """Return the usable section of the archive in the same folder, and its state in words."""
        archive = self.path.parent / FILE_NAME
        if why_local(self.table) is not None or not archive.exists():
            return None, "no cubins"
        try:
            section = Archive(archive).section(self.name)
            if section is None:
                return None, "no cubins"
            kernel = kernel_of(self.table.module, self.table.kernel)
            reason = difference(recorded_code(kernel), section.origin)
        except AotTuneError as error:
            return None, f"cubins left out: {error}"
        if reason is not None:
            return None, f"cubins left out: {reason}"
        launches = {(launch.hints, launch.signature) for launch in self.table.compilations}
        return section, f"cubins for {len(launches & set(section.keys))} of {len(launches)} launches"

    def answer_lines(self) -> list[str]:
        """Return a row for each winner, and whether it has a cubin."""
        section, _ = self.cubins()
        heads = ("problem", "us", "+-", "first us", "gain", "count", "winner", "cubin")
        rows = []
        for entry in self.table.entries:
            has = section is not None and section.has(tuple(entry.hints.items()), entry.signature)
            rows.append((*self._row(entry), "yes" if has else "no"))
        return aligned([heads, *rows])


def _winner(entry: RecordedEntry) -> Winner:
    data = {
        "config": entry.config,
        "hints": dict(entry.hints),
        "mean_us": entry.mean_us,
        "first_us": entry.first_us,
    }
    parts = {"config": entry.text, **{name: str(value) for name, value in entry.hints.items()}}
    return Winner(entry, parts, problem_in_words(entry.problem), config_in_words(entry), data)


def _launched(launched: Launched) -> str:
    """Return the hints of a launch, and the kernel's signature, which holds its constants."""
    hints = " ".join(f"{name}={value}" for name, value in launched.hints) or "no hints"
    return f"{hints}, {launched.signature}"


def _library(library: Library) -> str:
    """Return name and version. A program's own module has none."""
    return f"{library.name} {library.version}" if library.name else "no library"


@dataclass(frozen=True, kw_only=True)
class RecordedState(FileState):
    """File of a recorded table."""

    cubins: str = "not asked for"
    """Kernel's cubins in the archive of the same folder, in words."""


def recorded_states(folders: Sequence[Path], arch: Arch) -> Iterator[RecordedState]:
    """Yield the recorded tables for an arch in folders, in reading order."""
    for folder in folders:
        try:
            paths = listed_recorded([folder])
        except StoreError as error:
            yield RecordedState(kernel="-", path=folder, state=f"left out: {error}", usable=False)
            continue
        yield from (recorded_state(path, arch) for path in paths if path.parent.name == str(arch))


def recorded_state(path: Path, arch: Arch) -> RecordedState:
    """Return how many problems a file of a recorded table answers, or why it is left out."""
    try:
        document = RecordedDocument.read(path)
        reason = document.left_out(arch)
    except AotTuneError as error:
        return RecordedState(kernel=path.stem, path=path, state=f"left out: {error}", usable=False)
    if reason is not None:
        return RecordedState(kernel=path.stem, path=path, state=f"left out: {reason}", usable=False)
    problems = counted(len(document.winners()), "problem")
    state = f"{problems}, recorded on {document.table.built_with.device_name}"
    return RecordedState(kernel=path.stem, path=path, state=state, usable=True, cubins=document.cubins()[1])


def state_lines(files: Iterable[RecordedState], folders: Sequence[Path], arch: Arch) -> list[str]:
    """Return the recorded tables, in reading order, and the folders that were searched."""
    rows = [("  " + file.kernel, file.state, file.cubins, str(file.path)) for file in files]
    where = " ".join(map(str, folders)) or "no folder"
    return [f"recorded tables for {arch} in {where}:", *(aligned(rows) or ["  none"])]


def answered_lines(name: str, paths: Sequence[Path], archs: Iterable[Arch], arch: Arch) -> list[str]:
    """Return the answered problems of a recorded kernel, with their tables, and the rule for others.

    Args:
        name: The kernel's name.
        paths: The files of all recorded tables.
        archs: The archs that the kernel was recorded on.
        arch: The arch to report on.
    """
    on_miss = f"{environment.ON_MISS}={environment.on_miss()} decides"
    if arch not in archs:
        others = sorted(archs)
        return [
            f"{name} was not recorded on {arch}, so none of its problems is answered: {on_miss}",
            f"it was recorded on {' and '.join(map(str, others))}: aot-tune doctor {name} --arch {others[0]} "
            "prints the answered problems",
        ]
    lines = []
    for path in paths:
        if (path.stem, path.parent.name) == (name, str(arch)):
            state = recorded_state(path, arch)
            lines.append(f"{name} on {arch}: {path}: {state.state}; {state.cubins}")
            if state.usable:
                lines += RecordedDocument.read(path).answer_lines()
    return [
        *lines,
        "other problems of a recorded search space take the nearest that has the same of all that is "
        f"compiled in, at most {2**NEAR}x away in each dimension; where there is none, {on_miss}",
    ]
