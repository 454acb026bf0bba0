"""One part of a sweep, measured on one of several machines that share nothing but files.

A part is a folder: ``part.json`` says which problems of which kernels are whose, ``incumbents`` holds the
tables from which the sweep began, ``journal`` what was measured here, and ``others`` copies of the other
parts' journals, which merging puts there (`aot_tune.tuner.sweep.merge`). Each part does the whole sweep
again from all these journals, measures what is missing of its own problems, and stops where it needs what
others have not measured yet: a round is over. So the tables are those of one machine.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError
from aot_tune.tables import files, store
from aot_tune.tables.table import Table
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.measure.request import Session
from aot_tune.tuner.plan.candidates import DeviceKernel, plan
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.crew import Crew, Hands, RoundOver, Seat, Task
from aot_tune.tuner.sweep.decision import Decision
from aot_tune.tuner.sweep.journal import Journal, Record
from aot_tune.tuner.sweep.kernel import KernelSweep, length
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.tuner.sweep.report import Shard, SweepReport, SweepRequest, SweptKernel
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

DESCRIPTION = "part.json"
SCHEMA = 1


class NotHere(Exception):
    """Something would have to be measured that is not measured here."""


class AbsentSeat(Seat):
    """A GPU of another machine: what is in the journals can be read, and nothing can be measured."""

    measures = False

    def __init__(self) -> None:
        super().__init__(-1, _never, _never)

    @property
    def session(self) -> Session:
        """There is none.

        Raises:
            NotHere: Always.
        """
        raise NotHere


def _never(*_: object) -> NoReturn:
    raise NotHere


class PartHands(Hands):
    """Does the tasks of a part's own problems, and looks whether the others' are done.

    Args:
        crew: Measures; None where nothing is measured.
        mine: Whether a problem is the part's own.
    """

    def __init__(self, crew: Crew | None, mine: Callable[[Problem], bool]) -> None:
        self._crew, self._mine = crew, mine

    def takes(self, problem: Problem) -> bool:
        """Whether it is the part's own."""
        return self._crew is not None and self._mine(problem)

    def run(self, tasks: Sequence[Task], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Have the own tasks done, and look through the others'.

        Raises:
            RoundOver: Results of others' tasks are missing.
        """
        own = [task for task in tasks if task.problem is not None and self.takes(task.problem)]
        if self._crew is not None and own:
            self._crew.run(own, meanwhile)
        missing = []
        for task in tasks:
            if task.problem is not None and not self.takes(task.problem):
                try:
                    task.work(AbsentSeat())
                except NotHere:
                    missing.append(task.problem)
        if missing:
            raise RoundOver(missing)


# Who measures what ------------------------------------------------------------------------------------------


def assigned(
    kernels: Sequence[FoundKernel], arch: Arch, buckets: Callable[[FoundKernel], Sequence[Problem]], of: int
) -> dict[str, dict[Problem, int]]:
    """The number of the part that measures each bucket, by kernel.

    All buckets stand in a line, kernel after kernel, and the line is cut into parts of equal length. So few
    kernels are in two parts, and what buckets of a kernel share is compiled in few places. It depends on the
    declarations alone.
    """
    line: list[tuple[str, Problem]] = []
    lengths: list[float] = []
    for found in kernels:
        kernel = DeviceKernel(found, arch)
        for bucket in buckets(found):
            line.append((found.tunable.name, bucket))
            configs = len(found.tunable.space(arch, bucket))
            lengths.append(length(kernel, bucket, kernel.default(bucket), configs))
    total, owners = sum(lengths), dict[str, dict[Problem, int]]()
    for (name, bucket), end, own in zip(line, accumulate(lengths), lengths, strict=True):
        middle = end - own / 2
        owners.setdefault(name, {})[bucket] = min(of, 1 + int(of * middle / total))
    return owners


@dataclass(frozen=True, kw_only=True)
class Part:
    """What ``part.json`` says."""

    shard: Shard
    """Which part it is."""

    arch: Arch
    """The arch."""

    command: str
    """The command that measures it."""

    modules: tuple[str, ...]
    """The modules that --module named."""

    device: tuple[str, int]
    """The name of its GPUs, and the number of their multiprocessors."""

    exhaustive: bool
    """Whether every candidate is measured."""

    partial: tuple[str, ...]
    """The kernels of which not all buckets are swept."""

    owners: Mapping[str, Mapping[Problem, int]]
    """The number of the part that measures each bucket, by kernel."""

    def text(self) -> str:
        """As JSON."""
        owners = {
            name: [[dict(problem), number] for problem, number in of.items()]
            for name, of in self.owners.items()
        }
        own = {
            "schema": SCHEMA,
            "shard": str(self.shard),
            "arch": str(self.arch),
            "command": self.command,
            "modules": list(self.modules),
            "device": list(self.device),
            "exhaustive": self.exhaustive,
            "partial": list(self.partial),
            "owners": owners,
        }
        return json.dumps(own, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Part:
        """Read a part's description.

        Raises:
            TuneError: There is none, or it is damaged or of another release.
        """
        path = folder / DESCRIPTION
        if folder.exists() and not folder.is_dir():
            raise TuneError(f"{folder} is not a folder; name folders that aot-tune tune --shard made")
        try:
            said: dict[str, Any] = json.loads(path.read_bytes())
            if said["schema"] != SCHEMA:
                raise ValueError(f"its schema is {said['schema']}, this release reads {SCHEMA}")
            name, sm_count = said["device"]
            return cls(
                shard=Shard.parse(said["shard"]),
                arch=Arch.parse(said["arch"]),
                command=str(said["command"]),
                modules=tuple(map(str, said["modules"])),
                device=(str(name), int(sm_count)),
                exhaustive=bool(said["exhaustive"]),
                partial=tuple(map(str, said["partial"])),
                owners={
                    str(kernel): {Problem(problem): int(number) for problem, number in of}
                    for kernel, of in said["owners"].items()
                },
            )
        except FileNotFoundError as error:
            raise TuneError(
                f"{folder} is no part of a sweep: it has no {DESCRIPTION}; name folders that "
                "aot-tune tune --shard made"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise TuneError(f"{path} cannot be used: {reason}; make this part again") from error


# The files of a part ----------------------------------------------------------------------------------------


def journal_folder(part: Path) -> Path:
    """The folder of a part's own journals."""
    return part / "journal"


def incumbent_path(part: Path, arch: Arch, kernel: str) -> Path:
    """The table from which a part's sweep of a kernel began."""
    return store.table_path(part / "incumbents", arch, kernel)


def others_folder(part: Path, arch: Arch, kernel: str) -> Path:
    """The folder of the other parts' journals of a kernel."""
    return part / "others" / str(arch) / kernel


def incumbent(part: Path, arch: Arch, kernel: str) -> Table | None:
    """The table from which a part's sweep of a kernel began; None where there was none."""
    return sweep.present_table(incumbent_path(part, arch, kernel))


def records_of_others(part: Path, arch: Arch, kernel: str, identity: Mapping[str, str]) -> Iterator[Record]:
    """The records in the other parts' journals of a kernel, but for those that say no conditions.

    Raises:
        TuneError: One of them was made under other conditions.
    """
    folder = others_folder(part, arch, kernel)
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
        content = journals.read(path, accepts, advice="remove it and merge all parts again")
        if not content.identity:
            continue  # a copy of a journal that was empty or damaged: as if that part had not begun
        if dict(content.identity) != dict(identity):
            raise TuneError(
                f"{path}: {differences(content.identity, identity)}; its times cannot be mixed with those "
                "made here: make all parts under the same conditions"
            )
        yield from content.records


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What differs between two conditions, in words."""
    return "; ".join(
        f"{name} was {one.get(name, 'not set')}, is {other.get(name, 'not set')}"
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    )


# Measuring a part -------------------------------------------------------------------------------------------


def measure(request: SweepRequest, progress: Progress) -> SweepReport:
    """Measure what is missing of one part of a sweep; publish nothing.

    Args:
        request: Names the shard, the part's folder and the GPUs.
        progress: Receives each event.

    Raises:
        TuneError: The folder holds another part, or as `aot_tune.tuner.sweep.run.run`.
    """
    shard, folder = request.shard, request.part
    assert shard is not None
    assert folder is not None
    owners = assigned(request.kernels, request.arch, request.buckets, shard.of)
    there = Part.read(folder) if (folder / DESCRIPTION).exists() else None
    if there is not None and (there.shard, there.arch, there.owners) != (shard, request.arch, owners):
        raise TuneError(
            f"{folder} holds shard {there.shard} of another sweep ({there.command}); name another folder "
            "with --out, or remove it"
        )

    command, describing = request.command(), threading.Lock()

    def part(
        request: SweepRequest, found: FoundKernel, feed: CompileFeed, crew: Crew, progress: Progress
    ) -> SweptKernel:
        device, conditions = crew.open(found)
        described = Part(
            shard=shard,
            arch=request.arch,
            command=command,
            modules=request.modules,
            device=(device.name, device.sm_count),
            exhaustive=request.exhaustive,
            partial=tuple(
                found.tunable.name for found in request.kernels if not sweep.is_whole(request, found)
            ),
            owners=owners,
        )
        with describing:
            _describe(folder, described, request)
        mine = {bucket for bucket, number in owners[found.tunable.name].items() if number == shard.number}
        if not mine:
            return _row(found, request, device, waits="has none of its problems")
        return _measure_part(
            request, found, feed, crew, progress, folder=folder, mine=mine, conditions=conditions,
            device=device,
        )  # fmt: skip

    return sweep.run(dataclasses.replace(request, journal=journal_folder(folder)), progress, part)


def _describe(folder: Path, part: Part, request: SweepRequest) -> None:
    """Write a part's description and the tables from which it begins, unless they are there."""
    path = folder / DESCRIPTION
    if path.exists():
        return
    for found in request.kernels:
        table = store.table_path(sweep.table_folder(request, found), request.arch, found.tunable.name)
        if table.exists():
            kept = incumbent_path(folder, request.arch, found.tunable.name)
            kept.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(kept, files.read_bytes(table))
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, part.text().encode())


def _measure_part(
    request: SweepRequest,
    found: FoundKernel,
    feed: CompileFeed,
    crew: Crew,
    progress: Progress,
    *,
    folder: Path,
    mine: set[Problem],
    conditions: Mapping[str, str],
    device: Device,
) -> SweptKernel:
    name, arch, tunable = found.tunable.name, request.arch, found.tunable
    identity = sweep.identity_of(conditions, request, found)
    old = incumbent(folder, arch, name)
    planned = plan(found, arch, request.buckets(found), incumbent=old, device=device)
    progress.started(kernel=name, arch=arch, problems=len(mine), jobs=len(planned.jobs), device=device.name)
    decision = Decision(planned, identity, old, whole=sweep.is_whole(request, found))
    path = sweep.journal_path(request, found)
    with Journal.open(path, identity, accepts=accepts, fresh=request.fresh) as journal:
        results = SweepResults(journal, records_of_others(folder, arch, name, identity))
        if journal.damage:
            progress.note(journal.damage)
        kernel_sweep = KernelSweep(
            planned,
            feed,
            PartHands(crew, lambda problem: tunable.bucket_of(problem) in mine),
            results,
            progress,
            portfolio=decision.portfolio,
            first_sizes=decision.first_sizes,
            next_sizes=decision.next_sizes,
            exhaustive=request.exhaustive,
        )
        waits = "complete; merge the parts"
        try:
            swept = kernel_sweep.run()
            sweep.rechecked_table(kernel_sweep, decision, swept)
        except RoundOver as over:
            kernel_sweep.recheck_early()
            waits = f"{counted(len(over.missing), 'problem')} of other parts missing; merge the parts"
    swept = kernel_sweep.swept
    return dataclasses.replace(
        _row(found, request, device, waits=waits),
        problems=len(mine),
        failures=swept.failures,
        measure_s=results.measure_s,
        verify_s=results.verify_s,
        resumed=results.resumed,
        unopened=tuple(
            f"{problem}: {reason}"
            for problem, reason in swept.unopened.items()
            if tunable.bucket_of(problem) in mine
        ),
    )


def _row(found: FoundKernel, request: SweepRequest, device: Device, *, waits: str) -> SweptKernel:
    return SweptKernel(
        kernel=found.tunable.name,
        evidence="measured",
        problems=0,
        speedup=1.0,
        failures=0,
        compile_s=0.0,
        measure_s=0.0,
        verify_s=0.0,
        path=None,
        device_name=device.name,
        waits=f"part {request.shard}: {waits}",
    )
