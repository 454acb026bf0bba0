"""`aot-tune verify`: whether tables hold on this machine's GPU, by a sample of entries. Writes no table."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune.cli.documents import find
from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.documents.recorded import RecordedDocument
from aot_tune.declare import selection
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import StoreError, TableError, TuneError, UsageError
from aot_tune.nvidia.nvml import Gpu, driver_version, visible_gpus
from aot_tune.replay.record.again import Again
from aot_tune.replay.record.program import record
from aot_tune.tables.fit import mismatch
from aot_tune.tables.table import geometric_mean
from aot_tune.tuner.choose.verdict import CONFIDENCE, FAILING, Finding, bound, draw
from aot_tune.tuner.measure.gpu_lock import GpuLock
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.tuner.sweep.report import SweepRequest
from aot_tune.tuner.verify import Drawn, verify
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted

_MARKED: tuple[Finding, ...] = ("fails", "slower", "weaker", "beaten", "unknown")


@dataclass(frozen=True, kw_only=True)
class VerifiedEntry:
    """Result for an entry."""

    kernel: str
    """Kernel's name."""

    bucket: Problem | str
    """Problem at the bucket's edge; of a recorded table the problem in words."""

    config: Config | str
    """Winner in the table; of a recorded table in words."""

    findings: Mapping[Finding, str]
    """Findings, each in words; empty where the entry holds."""

    mean_us: float | None
    """Winner's time here, microseconds; None where it has none."""

    table_us: float
    """Winner's time in the table, microseconds."""

    gain: float | None
    """Gain over the default here, the mean of the GPU's states; of a recorded table over the library's first
    config. None where it is unknown."""

    table_gain: float | None
    """Gain over the default in the table, in the same states; None where it cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Report of `aot-tune verify`."""

    gpu: str
    """GPU model."""

    driver: str
    """Version of the GPU driver."""

    measured_on: tuple[str, ...]
    """GPU models of the tables."""

    seed: int | None
    """Seed of the sample; None where the entries are those that a program searched."""

    of: Mapping[str, int]
    """Number of entries of each kernel's table."""

    entries: tuple[VerifiedEntry, ...]
    """Sample."""

    less_than: int | None
    """Number above that of all failing entries, with 95 % confidence; None where one fails, and without a
    seed."""

    holds: bool | None
    """Whether the tables hold here; None where nothing can be said."""

    ended: str = ""
    """How the program ended before its end; empty where it did not, and without a program."""

    @property
    def same_model(self) -> bool:
        """Return whether all tables were measured on this GPU model."""
        return self.measured_on == (self.gpu,)


def verification(
    kernels: Sequence[str],
    modules: Sequence[str],
    folder: Path | None,
    count: int | None,
    seed: int,
    progress: Progress,
) -> Verification:
    """Measure a sample of the tables' entries on this machine's GPU.

    Args:
        kernels: The names of the kernels; all that have tables where none is named.
        modules: Modules that declare kernels.
        folder: Verify this folder's tables; by default those that launches read.
        count: The number of entries; as many as bound failing ones below 5 % where None.
        seed: The seed of the sample.
        progress: Receives each event.

    Raises:
        TuneError: Nothing can be said: there is no GPU, another process holds it, or it is lost.
        TableError: A table is malformed or belongs to another kernel.
        UsageError: There is no such table or kernel.
    """
    gpu, arch = _gpu()
    tables = _tables(find.declared(modules), kernels, arch, modules, folder, progress)
    samples = draw([document.table for _, document in tables], count, seed)
    drawn = [
        Drawn(kernel=kernel, table=document.table, entries=entries)
        for (kernel, document), entries in zip(tables, samples, strict=True)
        if entries
    ]
    request = SweepRequest(kernels=tuple(each.kernel for each in drawn), arch=arch, gpus=(gpu.index,))
    result = verify(request, drawn, seed, progress)
    verified = tuple(
        VerifiedEntry(
            kernel=each.table.kernel,
            bucket=verdict.entry.bucket,
            config=verdict.entry.config,
            findings=verdict.findings,
            mean_us=verdict.mean_us,
            table_us=verdict.entry.mean_us,
            gain=verdict.gain,
            table_gain=verdict.table_gain,
        )
        for each, verdicts in zip(drawn, result.verdicts, strict=True)
        for verdict in verdicts
    )
    of = {each.table.kernel: len(each.table.entries) for each in drawn}
    known = [entry.kernel for entry in verified if "unknown" not in entry.findings]
    fails = any(name in entry.findings for entry in verified for name in FAILING)
    return Verification(
        gpu=result.device.name,
        driver=result.driver,
        measured_on=tuple(dict.fromkeys(each.table.built_with.device_name for each in drawn)),
        seed=seed,
        of=of,
        entries=verified,
        less_than=None if fails else bound([(known.count(name), size) for name, size in of.items()]),
        holds=False if fails else (True if len(known) == len(verified) else None),
    )


def recorded_verification(
    program: str, kernels: Sequence[str], modules: Sequence[str], folder: Path | None, progress: Progress
) -> Verification:
    """Search the problems of a program again, and judge the recorded winners by the new times.

    Args:
        program: The program and its arguments, which calls the library.
        kernels: The names of recorded kernels; all where none is named.
        modules: Modules of the libraries.
        folder: Verify this folder's tables; by default those of AOT_TUNE_TABLES, of `modules` and aot_tune's.
        progress: Receives each remark.

    Raises:
        TuneError: Nothing can be said: there is no GPU, a tuner holds it, or the program searched no problem
            of the tables.
        TableError: A table is malformed.
        UsageError: There is no such table or program.
    """
    try:
        command = shlex.split(program)
    except ValueError as error:
        raise UsageError(f"--program: {error}: {program}") from None
    if not command:
        raise UsageError('--program is empty: --program "python -m pytest tests"')
    plain, dotted = find.split(kernels)
    if plain:
        raise UsageError(f"{plain[0]} is the name of a declared kernel: leave out --program")
    gpu, arch = _gpu()
    try:
        documents, unreadable = find.tables_found(None, arch, modules, folder, libraries=True)
    except StoreError as error:  # such as a module that is not installed: no verdict on its tables
        raise UsageError(str(error)) from None
    if unreadable:
        raise unreadable[0]
    recorded = [each for each in documents if isinstance(each, RecordedDocument)]
    names = {each.name for each in recorded}
    if missing := [name for name in dotted if name not in names]:
        raise UsageError(
            f"{missing[0]} has no recorded table for {arch} there; name its folder or its library's module: "
            "--folder, --module"
        )
    if not recorded:
        raise UsageError(f"no recorded table for {arch} is there; name its folder: --folder")
    documents_by_path = {
        str(each.path.absolute()): each for each in recorded if not dotted or each.name in dotted
    }
    with tempfile.TemporaryDirectory(prefix="aot-tune-verify-") as temporary:
        lock = GpuLock(gpu.uuid or f"cuda-{gpu.index}", "verifying recorded tables")
        try:
            result = record(
                command,
                out=Path(temporary, "tables"),
                package=None,
                journals=Path(temporary, "journals"),
                against=[*map(Path, documents_by_path)],
            )
        finally:
            lock.release()
    for site in result.sites:
        for remark in site.remarks:
            progress.note(f"{site.kernel}: {remark}")
    ended = f"it was ended by {result.interrupted}" if result.interrupted else ""
    ended = ended or (f"its exit code is {result.exit_code}" if result.exit_code else "")
    judged = _once(Again(**values) for site in result.sites for values in site.again)
    if not judged:
        why = f"; {ended}" if ended else ""
        raise TuneError(f"nothing is measured: the program searched no problem of a recorded table{why}")
    verified = tuple(
        VerifiedEntry(
            kernel=each.kernel,
            bucket=each.problem,
            config=each.config,
            findings=each.findings,
            mean_us=each.mean_us,
            table_us=each.table_us,
            gain=each.gain,
            table_gain=each.table_gain,
        )
        for each in judged
    )
    fails = any(name in entry.findings for entry in verified for name in FAILING)
    compared = [documents_by_path[path] for path in dict.fromkeys(each.path for each in judged)]
    of: dict[str, int] = {}
    for document in compared:
        of[document.name] = of.get(document.name, 0) + len(document.winners())
    return Verification(
        gpu=gpu.name,
        driver=driver_version() or "",
        measured_on=tuple(dict.fromkeys(each.table.built_with.device_name for each in compared)),
        seed=None,
        of=of,
        entries=verified,
        less_than=None,
        holds=False if fails else (None if ended else True),
        ended=ended,
    )


def _once(judged: Iterable[Again]) -> list[Again]:
    """Return each search once, where several processes made it: the first that fails, else the first."""
    by_key: dict[str, Again] = {}
    for each in judged:
        known = by_key.setdefault(each.key, each)
        if any(name in each.findings for name in FAILING) and not any(n in known.findings for n in FAILING):
            by_key[each.key] = each
    return [*by_key.values()]


def _gpu() -> tuple[Gpu, Arch]:
    """Return the first GPU that may be used, and its arch.

    Raises:
        TuneError: There is none.
    """
    for gpu in visible_gpus() or ():
        if gpu.arch is not None:
            return gpu, gpu.arch
    raise TuneError(
        "nothing is measured: this process may use no GPU that cuTile compiles for; run it where one is. "
        "aot-tune check needs none"
    )


def _tables(
    declared: Mapping[str, FoundKernel],
    names: Sequence[str],
    arch: Arch,
    modules: Sequence[str],
    folder: Path | None,
    progress: Progress,
) -> list[tuple[FoundKernel, DeclaredDocument]]:
    """Return the declared kernels with their tables; of several tables the first, as launches do."""
    plain, dotted = find.split(names)
    if dotted:
        raise UsageError(f"{dotted[0]} is a recorded kernel: {_RECORDED}")
    wanted = {kernel.tunable.name: kernel for kernel in selection.chosen_kernels(declared, plain)}
    documents, unreadable = find.tables_found(None, arch, modules, folder)
    if unreadable:
        raise unreadable[0]
    chosen: dict[str, tuple[FoundKernel, DeclaredDocument]] = {}
    for document in documents:
        if not isinstance(document, DeclaredDocument):
            progress.note(f"{document.name} is not verified: {_RECORDED}")
        elif document.name in wanted and document.table.entries:
            kernel = wanted[document.name]
            place = document.right_place(document.path, document.table)
            reason = f"it belongs in {place}" if place else mismatch(kernel.tunable, arch, document.table)
            if reason is not None:
                raise TableError(f"{document.path}: {reason}; aot-tune check says more")
            chosen.setdefault(document.name, (kernel, document))
    if missing := [name for name in plain if name not in chosen]:
        raise UsageError(f"{missing[0]} has no table for {arch}; make it: aot-tune tune {missing[0]}")
    if not chosen:
        raise UsageError(f"no table for {arch} has an entry of a declared kernel")
    return list(chosen.values())


_RECORDED = 'only its library can search again: aot-tune verify --program "python ..."'


# Text -------------------------------------------------------------------------------------------------------


def verification_lines(result: Verification) -> list[str]:
    """Return the report as text: the GPU, a row for each kernel, each finding, and the conclusion."""
    models = " and ".join(result.measured_on)
    is_it = (
        "the GPU model of the tables"
        if result.same_model
        else f"not the GPU model of the tables ({models}): gains are compared, times are not"
    )
    total = sum(result.of.values())
    heads = ("kernel", "entries", *_MARKED, "gain here", "in the table", "time here / table")
    rows = [
        _row(kernel, [entry for entry in result.entries if entry.kernel == kernel], timed=result.same_model)
        for kernel in result.of
    ]
    return [
        f"{result.gpu}, driver {result.driver or 'unknown'}: {is_it}",
        f"{len(result.entries)} of {total:,} entries, "
        + ("which the program searched" if result.seed is None else f"seed {result.seed}"),
        *aligned([heads, *rows]),
        *(
            f"{name}: {entry.kernel} {entry.bucket}: {entry.findings[name]}"
            for name in _MARKED
            for entry in result.entries
            if name in entry.findings
        ),
        *_conclusion(result, total),
    ]


def _row(kernel: str, entries: Sequence[VerifiedEntry], *, timed: bool) -> tuple[str, ...]:
    both = [(entry.gain, entry.table_gain) for entry in entries if entry.gain and entry.table_gain]
    times = [entry.mean_us / entry.table_us for entry in entries if entry.mean_us] if timed else []
    counts = [sum(name in entry.findings for entry in entries) for name in _MARKED]
    return (
        kernel,
        str(len(entries)),
        *(str(number or "-") for number in counts),
        f"{geometric_mean(gain for gain, _ in both if gain):.2f}x" if both else "-",
        f"{geometric_mean(gain for _, gain in both if gain):.2f}x" if both else "-",
        f"{geometric_mean(times):.2f}" if times else "-",
    )


def _conclusion(result: Verification, total: int) -> list[str]:
    unknown = sum("unknown" in entry.findings for entry in result.entries)
    known = counted(len(result.entries) - unknown, "entry", "entries")
    if result.holds is False:
        step, verb = ("record", "record") if result.seed is None else ("tune", "tune")
        again = (
            f"{step} again"
            if result.same_model
            else f"it says nothing of the tables' own GPU model; {step} for this"
        )
        return [f"the tables do not hold here, by {known}; {again}: aot-tune {verb}"]
    if result.less_than is None:
        lines = [f"{known}: none fails, and none is slower than the library's first config"]
    else:
        least = (
            f"with {CONFIDENCE:.0%} confidence fewer than {result.less_than} of the {total:,} "
            f"({result.less_than / total:.1%}) do"
        )
        lines = [f"{known}: none fails, and none is slower than its default in every state; {least}"]
    if result.holds:
        return [*lines, "the tables hold here"]
    if result.ended:
        return [
            *lines,
            f"the program did not search all that it would: {result.ended}; nothing can be said of the rest",
        ]
    them = counted(unknown, "entry", "entries")
    return [*lines, f"nothing can be said of {them}: run it again on an idle GPU"]
