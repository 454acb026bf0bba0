"""Put the parts of a sweep together: choose each kernel's table from all journals, and measure nothing.

Merging does the sweep once more from what all parts have measured (`aot_tune.tuner.sweep.shards`). Where
something is missing it is given the other parts' journals, so that the next round of the parts goes on from
all of them. What is complete is published; a second merge of the same parts changes no byte.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import check_hash, source_hash
from aot_tune.errors import StoreError, TableError, TuneError
from aot_tune.tables import files, store, writer
from aot_tune.tables.table import Table
from aot_tune.tuner import publish
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import CompileJob
from aot_tune.tuner.compile.pool import CompilePool
from aot_tune.tuner.plan.candidates import plan
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.crew import RoundOver
from aot_tune.tuner.sweep.decision import Decision
from aot_tune.tuner.sweep.journal import JournalContent
from aot_tune.tuner.sweep.kernel import KernelSweep
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.tuner.sweep.shards import (
    Part,
    PartHands,
    differences,
    incumbent,
    incumbent_path,
    journal_folder,
    others_folder,
)
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted


@dataclass(kw_only=True)
class Merged:
    """The result of a merge."""

    published: list[Path] = field(default_factory=list)
    """The tables that are complete, in the order of the kernels."""

    changed: int = 0
    """Number of files that changed."""

    missing: dict[str, dict[int, list[Problem]]] = field(default_factory=dict)
    """By kernel and number of the part, the problems of which results are missing."""

    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By kernel, why its table is not published although nothing is missing."""

    commands: dict[int, str] = field(default_factory=dict)
    """By number of the part, the command to give now."""

    @property
    def complete(self) -> bool:
        """Whether every kernel's table was published."""
        return not self.missing and not self.refused


class _NoCompiler(CompileFeed):
    """Compiles nothing: what a merge looks at was compiled where it was measured."""

    def __init__(self) -> None:
        super().__init__(_none)

    def submit(self, jobs: Iterable[CompileJob]) -> None:
        """Drop the jobs."""


def _none() -> CompilePool:
    raise AssertionError("a merge compiles nothing")


class _Parts:
    """The parts of one sweep, by number.

    Raises:
        TuneError: They do not go together.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders: dict[int, Path] = {}
        self.headless: set[Path] = set()
        """The journals that do not say their conditions, which count as absent."""
        described: dict[int, Part] = {}
        for folder in folders:
            part = Part.read(folder)
            number = part.shard.number
            if number in self.folders:
                raise TuneError(
                    f"{self.folders[number]} and {folder} are both shard {part.shard}; leave one of them out"
                )
            self.folders[number], described[number] = folder, part
        first = min(described)
        self.any = described[first]
        self.parts = described
        for number, part in described.items():
            self._check(self.folders[first], self.folders[number], part)

    def _check(self, first: Path, folder: Path, part: Part) -> None:
        one = self.any
        for what, mine, its in (
            ("number of shards", one.shard.of, part.shard.of),
            ("arch", str(one.arch), str(part.arch)),
            ("GPU and its multiprocessors", one.device, part.device),
            ("--exhaustive", one.exhaustive, part.exhaustive),
            ("kernels and their problems", one.owners, part.owners),
        ):
            if mine != its:
                shown = f": {mine} and {its}" if what != "kernels and their problems" else ""
                raise TuneError(
                    f"{first} and {folder} are of different sweeps, the {what} differ{shown}; merge parts of "
                    "the same command, and make the others again"
                )
        for kernel in one.owners:
            paths = [incumbent_path(where, one.arch, kernel) for where in (first, folder)]
            try:
                tables = [files.read_bytes(path) if path.exists() else None for path in paths]
            except (StoreError, TableError) as error:
                raise TuneError(f"{error}; remove that part, and make it again") from error
            if tables[0] != tables[1]:
                raise TuneError(
                    f"{first} and {folder} began from different tables of {kernel}; make them again from "
                    "the same checkout"
                )

    def command(self, number: int) -> str:
        """The command that measures one part."""
        if number in self.parts:
            return self.parts[number].command
        words = shlex.split(self.any.command)
        words[words.index("--shard") + 1] = f"{number}/{self.any.shard.of}"
        words[words.index("--out") + 1] = f"part{number}"
        return shlex.join(words)


def merge(
    folders: Sequence[Path],
    kernels: Mapping[str, FoundKernel],
    progress: Progress,
    out: Path | None = None,
    *,
    allow_worse: bool = False,
) -> Merged:
    """Publish the tables of a sweep's parts, or say what is missing.

    Args:
        folders: The parts, in any order.
        kernels: The declarations, by name.
        progress: Receives remarks.
        out: The folder of tables to write to; each package's own when None.
        allow_worse: Whether entries may gain less than those of the present table without a known reason.

    Raises:
        TuneError: The parts do not go together, or with the declarations that are here.
    """
    parts = _Parts(folders)
    merged = Merged()
    for name in parts.any.owners:
        if name not in kernels:
            raise TuneError(f"the parts hold {name}, which is not declared here; name its module: --module")
        _merge_kernel(parts, kernels[name], progress, out, merged, allow_worse=allow_worse)
    wanted = {number for of in merged.missing.values() for number in of}
    merged.commands = {number: parts.command(number) for number in sorted(wanted)}
    if merged.missing:
        _share(parts)
    return merged


def _merge_kernel(
    parts: _Parts,
    found: FoundKernel,
    progress: Progress,
    out: Path | None,
    merged: Merged,
    *,
    allow_worse: bool,
) -> None:
    tunable, name, one = found.tunable, found.tunable.name, parts.any
    owners = one.owners[name]
    contents = _contents(parts, name, progress)
    if not contents:
        merged.missing[name] = _by_owner(owners, list(owners))
        return
    identity = _identity(parts, contents, found)
    first = parts.folders[min(parts.folders)]
    old = incumbent(first, one.arch, name)
    device = Device.reference(one.arch).with_sm_count(*one.device)
    planned = plan(found, one.arch, list(owners), incumbent=old, device=device)
    whole = name not in one.partial
    decision = Decision(planned, identity, old, whole=whole)
    records = [record for number in sorted(contents) for record in contents[number].records]
    kernel_sweep = KernelSweep(
        planned,
        _NoCompiler(),
        PartHands(None, lambda problem: False),
        SweepResults(None, records),
        progress,
        portfolio=decision.portfolio,
        first_sizes=decision.first_sizes,
        next_sizes=decision.next_sizes,
        exhaustive=one.exhaustive,
    )
    path = store.table_path(out or store.package_folder(tunable), one.arch, name)

    def beside(there: Table | None) -> tuple[Table, list[str]]:
        if there != decision.old:
            decision.join(there)
        table = sweep.rechecked_table(kernel_sweep, decision, swept)
        return table, publish.refusals(table, there, tunable, wrong=swept.wrong, allow_worse=allow_worse)

    def present(path: Path) -> Table | None:
        return sweep.present_table(path) if path.exists() else old

    try:
        swept = kernel_sweep.run()
        table, refusals = beside(old)
        if path.exists() and not refusals and _present_bytes(path) == writer.dump(table):
            merged.published.append(path)
            return
        published = publish.publish_beside(path, old, read=present, decide=beside)
    except RoundOver as over:
        edges = [tunable.bucket_of(problem) for problem in over.missing]
        merged.missing[name] = _by_owner(owners, list(dict.fromkeys(edges)))
        return
    for line in kernel_sweep.disagreements():
        progress.note(line)
    if decision.remark is not None:
        progress.note(f"{name}: {decision.remark}")
    for problem, reason in swept.unopened.items():
        progress.note(f"{name} {problem}: left out: {reason}")
    if published.refusals:
        merged.refused[name] = published.refusals
        return
    merged.published.append(path)
    merged.changed += 1


def _present_bytes(path: Path) -> bytes:
    try:
        return files.read_bytes(path)
    except (StoreError, TableError) as error:
        raise TuneError(f"{error}; remove it, or name another folder with --out") from error


def _contents(parts: _Parts, kernel: str, progress: Progress) -> dict[int, JournalContent]:
    """The journals of a kernel, by number of the part.

    A part that has not begun with it has none, nor has one whose journal does not say its conditions.
    """
    found = {}
    for number, folder in parts.folders.items():
        paths = sorted((journal_folder(folder) / str(parts.any.arch)).glob(f"{kernel}.*"))
        paths = [path for path in paths if path.suffix == ".jsonl" and path.name.split(".")[0] == kernel]
        if len(paths) > 1:
            raise TuneError(f"{folder} holds several journals of {kernel}: {paths}; leave one of them")
        for path in paths:
            again = parts.command(number)
            content = journals.read(path, accepts, advice=f"move it away and make this part again: {again}")
            if content.identity:
                found[number] = content
            else:
                parts.headless.add(path)
                if number in parts.any.owners[kernel].values():
                    progress.note(f"{path} holds no readable header; run again: {again}")
    return found


def _identity(parts: _Parts, contents: Mapping[int, JournalContent], found: FoundKernel) -> Mapping[str, str]:
    """The conditions of all journals of a kernel, which must be the same, and those of the code here."""
    numbers = sorted(contents)
    identity = contents[numbers[0]].identity
    for number in numbers[1:]:
        if differs := differences(identity, contents[number].identity):
            raise TuneError(
                f"{parts.folders[numbers[0]]} and {parts.folders[number]} were made under different "
                f"conditions, {found.tunable.name}: {differs}; make one of them again"
            )
    here = {"source_hash": source_hash(found.tunable), "check_hash": check_hash(found.tunable)}
    made = {name: identity.get(name, "") for name in here}
    if made != here:
        raise TuneError(
            f"the parts were made from another source of {found.tunable.name}: {differences(made, here)}; "
            "merge them where that source is, or make them again"
        )
    return identity


def _by_owner(owners: Mapping[Problem, int], problems: Sequence[Problem]) -> dict[int, list[Problem]]:
    found: dict[int, list[Problem]] = {}
    for problem in problems:
        found.setdefault(owners[problem], []).append(problem)
    return dict(sorted(found.items()))


def _share(parts: _Parts) -> None:
    """Give each part the journals of the others, but for those that say no conditions."""
    arch = parts.any.arch
    for kernel in parts.any.owners:
        for number, folder in parts.folders.items():
            for path in (journal_folder(folder) / str(arch)).glob(f"{kernel}.*jsonl"):
                for other, there in parts.folders.items():
                    named = path.name.split(".")[0] == kernel
                    if other != number and named and path not in parts.headless:
                        place = others_folder(there, arch, kernel) / f"{number}.jsonl"
                        place.parent.mkdir(parents=True, exist_ok=True)
                        files.write_atomic(place, path.read_bytes(), durable=False)


def modules_of(folders: Sequence[Path]) -> tuple[str, ...]:
    """The modules that declare the kernels of some parts.

    Raises:
        TuneError: A folder is no part.
    """
    return tuple(dict.fromkeys(module for folder in folders for module in Part.read(folder).modules))


def merged_lines(merged: Merged) -> list[str]:
    """What a person must know of a merge that is not complete."""
    lines = [
        f"{kernel}: shard {number} lacks results of {counted(len(problems), 'bucket')}, first {problems[0]}"
        for kernel, of in merged.missing.items()
        for number, problems in of.items()
    ]
    lines += [
        f"{kernel}: not published: {reason}" for kernel, all_ in merged.refused.items() for reason in all_
    ]
    if merged.commands:
        lines.append("the next round; merge all parts again once these have run:")
        lines += [f"  {command}" for command in merged.commands.values()]
    return lines
