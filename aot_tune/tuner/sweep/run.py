"""Run `aot-tune tune`: from a request to published tables, measured or predicted.

Kernels are predicted one after another. When measuring, the longest kernel comes first, and the next begins
as soon as a GPU or a compiler would be idle (`aot_tune.tuner.schedule.overlap`), so that no GPU waits for the
end of a kernel. Each table is published as soon as it is complete. With a time budget the kernels are
measured one after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

from aot_tune.declare.checks import declaration_problems, declaration_remarks
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import check_hash, source_hash
from aot_tune.errors import AotTuneError, DeclarationError, StoreError, TuneError
from aot_tune.nvidia import cutile
from aot_tune.tables import files, store
from aot_tune.tables.table import Table, geometric_mean
from aot_tune.tuner import publish
from aot_tune.tuner.choose.incumbent import kept_without
from aot_tune.tuner.choose.portfolio import crowded_out
from aot_tune.tuner.choose.times import unserved
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.plan.candidates import NO_COMPILER, SweepPlan, plan
from aot_tune.tuner.schedule.overlap import may_begin, run_overlapping
from aot_tune.tuner.sweep import predict
from aot_tune.tuner.sweep.budget import length_of_kernel
from aot_tune.tuner.sweep.decision import Decision
from aot_tune.tuner.sweep.gpus import GpuPool
from aot_tune.tuner.sweep.journal import Journal, JournalWriteError, check_resumable
from aot_tune.tuner.sweep.kernel import KernelSweep
from aot_tune.tuner.sweep.progress import Finished, InTurn, KernelEnded, Progress, Started
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest, SweptKernel
from aot_tune.tuner.sweep.resources import Resources, opened
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.tuner.sweep.state import KernelTimes
from aot_tune.values.device import Device

_STOPS_ALL = (GpuLostError, JournalWriteError, StoreError)
"""Errors that stop all kernels: the GPU is lost, or nothing can be written."""


_SHORTEST_S = 1.0
"""The least time for a kernel, seconds: one bucket of each is always swept."""


def run(request: SweepRequest, progress: Progress) -> SweepReport:
    """Sweep the request's kernels and publish their tables.

    A kernel that cannot be swept does not stop other kernels: its row has the reason. The error of the only
    kernel is raised. Wrong declarations, tables that could not be replaced, and journals of other conditions
    are detected for all kernels before anything is measured.

    Args:
        request: The request; without a GPU it predicts.
        progress: Receives each event.

    Raises:
        TuneError: The sweep cannot start, continue or be saved; all finished results are in the journal.
        StoreError: Nothing can be written.
        AotTuneError: The only kernel cannot be swept.
    """
    started = monotonic()
    if cutile.release() < cutile.TUNE_SINCE:
        since, installed = ".".join(map(str, cutile.TUNE_SINCE)), cutile.version()
        raise TuneError(
            f"cuda-tile {f'{installed} is' if installed else 'is not'} installed; "
            f"{since} or later is needed to tune: pip install 'aot-tune[tune]'"
        )
    if cutile.compiler_version() is None:  # before a journal is found to be of another compiler
        raise TuneError(NO_COMPILER)
    progress = InTurn(progress, brief=not request.verbose)
    with opened(request, progress) as resources:
        request = resources.request
        rows = _refused(request, progress)
        with GpuPool(
            request.gpus, resources.session, progress.note, resources.order, resources.choice
        ) as gpu_pool:
            rows |= _unresumable(request, gpu_pool, progress, rows)
            kernels = [kernel for kernel in request.kernels if kernel.tunable.name not in rows]
            at_once = not request.predicts and request.time_budget_s is None and len(kernels) > 1
            if at_once:
                lengths = {
                    kernel.tunable.name: length_of_kernel(kernel, request.arch, request.buckets(kernel))
                    for kernel in kernels
                }
                kernels.sort(key=lambda kernel: -lengths[kernel.tunable.name])
            resources.order.extend(kernel.tunable.name for kernel in kernels)
            _Kernels(request, progress, resources, gpu_pool, kernels, rows, started).sweep(at_once=at_once)
            gpus = gpu_pool.usage()
    in_order = tuple(rows[kernel.tunable.name] for kernel in request.kernels)
    report = SweepReport(
        arch=request.arch,
        device_name=next((row.device_name for row in in_order if row.device_name), ""),
        rows=in_order,
        seconds=monotonic() - started,
        resumed=sum(row.resumed for row in in_order),
        gpus=gpus,
    )
    progress.show(Finished(rows=report.rows, gpus=report.gpus))
    return report


@dataclass(frozen=True)
class _Kernels:
    """Sweeps kernels one after another, or several at once."""

    request: SweepRequest
    progress: Progress
    resources: Resources
    gpu_pool: GpuPool
    kernels: Sequence[FoundKernel]
    """The kernels in the order in which they begin."""
    rows: dict[str, SweptKernel]
    """Receives each kernel's row by name."""
    started: float
    """Start of the sweep, monotonic seconds."""
    begun: list[str] = field(default_factory=list)
    """The names of the kernels that have begun."""

    def sweep(self, *, at_once: bool) -> None:
        """Sweep all kernels."""
        if not at_once:
            for kernel in self.kernels:
                self._one(kernel)
            return
        run_overlapping(
            self._one,
            self.kernels,
            begins=self._may_begin,
            stop=self.gpu_pool.close,
            stopped=MeasuringStopped,
        )

    def _may_begin(self, running: int) -> bool:
        return may_begin(
            running=running,
            planned=all(self.gpu_pool.has_begun(name) or name in self.rows for name in self.begun),
            gpus=self.gpu_pool.size,
            waiting=self.gpu_pool.waiting,
            compilers_rest=self.resources.feed().rests,
        )

    def _one(self, kernel: FoundKernel) -> None:
        name, feed, request = kernel.tunable.name, self.resources.feed(), self.request
        self.begun.append(name)
        left_s = _left_s(request, monotonic() - self.started, self.kernels.index(kernel), self.kernels)
        within = dataclasses.replace(request, time_budget_s=left_s)
        try:
            if request.predicts:
                row = predict.predict_kernel(request, kernel, feed, self.progress)
            else:
                row = measure_kernel(within, kernel, feed, self.gpu_pool, self.progress)
        except AotTuneError as error:
            row = _failed(request, kernel, error, self.progress)
        finally:
            self.progress.show(KernelEnded(kernel=name))
        feed.drop(name)  # jobs still in the queue belong to buckets that are not swept
        self.rows[name] = row
        if request.verbose:
            _note_choices(row, self.progress)


def _left_s(
    request: SweepRequest, spent_s: float, place: int, kernels: Sequence[FoundKernel]
) -> float | None:
    """Return the kernel's share of the remaining time, by its buckets; None without a limit."""
    if request.time_budget_s is None:
        return None
    counts = [len(request.buckets(kernel)) for kernel in kernels[place:]]
    return max(_SHORTEST_S, (request.time_budget_s - spent_s) * counts[0] / max(sum(counts), 1))


def _refused(request: SweepRequest, progress: Progress) -> dict[str, SweptKernel]:
    """Find the kernels that cannot be swept by their declaration or table; return their rows by name."""
    rows: dict[str, SweptKernel] = {}
    for kernel in request.kernels:
        try:
            _check(kernel, request)
        except AotTuneError as error:
            rows[kernel.tunable.name] = _failed(request, kernel, error, progress)
        else:
            for remark in declaration_remarks(kernel.tunable, request.arch):
                progress.note(f"remark: {remark}")
    return rows


def _unresumable(
    request: SweepRequest, gpu_pool: GpuPool, progress: Progress, refused: Collection[str]
) -> dict[str, SweptKernel]:
    """Find the other kernels whose journals are of other conditions; return their rows by name."""
    rows: dict[str, SweptKernel] = {}
    for kernel in () if request.predicts or request.fresh else request.kernels:
        if kernel.tunable.name not in refused:
            try:
                identity = _identity_of(*gpu_pool.open(kernel), request, kernel)
                check_resumable(request.journal_path(kernel), identity)
            except AotTuneError as error:
                rows[kernel.tunable.name] = _failed(request, kernel, error, progress)
    return rows


def _failed(
    request: SweepRequest, kernel: FoundKernel, error: AotTuneError, progress: Progress
) -> SweptKernel:
    """Report a kernel that cannot be swept, and return its row.

    Raises:
        AotTuneError: The error, where it stops all kernels or where there is no other kernel.
    """
    if isinstance(error, _STOPS_ALL) or len(request.kernels) == 1:
        raise error
    progress.note(f"{kernel.tunable.name}: cannot be swept: {error}")
    return SweptKernel(
        kernel=kernel.tunable.name,
        evidence="predicted" if request.predicts else "measured",
        problems=len(request.buckets(kernel)),
        refusals=(str(error),),
        failed=True,
    )


def _note_choices(row: SweptKernel, progress: Progress) -> None:
    """Show each entry of a table just written, and its gain over the default."""
    if row.path is None:
        return
    for entry in store.read_table(row.path).entries:
        gain = entry.gain
        won = (
            f"{gain:.2f}x the default's {entry.default_us} us"
            if gain > 1
            else "the default; no config beats it"
        )
        progress.note(
            f"{row.kernel} {entry.bucket}: {entry.config}: {entry.mean_us} us {entry.evidence}, {won}"
        )


def _check(kernel: FoundKernel, request: SweepRequest) -> None:
    """Refuse a wrong declaration, and a table that could not be replaced, before compiling."""
    problems = declaration_problems(kernel.tunable, request.arch)
    if problems:
        raise DeclarationError("\n".join(problems))
    path = request.table_path(kernel)
    files.check_writable(path.parent)
    files.check_replaceable(path)
    if not request.predicts:
        publish.present_table(path)


def measure_kernel(
    request: SweepRequest,
    kernel: FoundKernel,
    feed: CompileFeed,
    gpu_pool: GpuPool,
    progress: Progress,
) -> SweptKernel:
    """Sweep one kernel on the GPUs and publish its table."""
    started, name = monotonic(), kernel.tunable.name
    path = request.table_path(kernel)
    old = publish.present_table(path)
    device, conditions = gpu_pool.open(kernel)
    buckets = request.buckets(kernel)
    planned = plan(kernel, request.arch, buckets, incumbent=old, device=device)
    progress.show(
        Started(
            kernel=kernel.tunable.name,
            arch=request.arch,
            problems=len(planned.problems),
            jobs=len(planned.jobs),
            device=device.name if len(request.gpus) == 1 else f"{len(request.gpus)} {device.name}",
        )
    )
    identity = _identity_of(device, conditions, request, kernel)
    whole = request.is_whole(kernel)
    unverified = None
    if old is not None and not whole and old.check_hash != identity["check_hash"]:
        unverified = dataclasses.replace(old, check_hash=identity["check_hash"])
    decision = _decision(planned, identity, unverified or old, request, whole=whole)
    path_of_journal = request.journal_path(kernel)
    with Journal.open(path_of_journal, identity, accepts=accepts, fresh=request.fresh) as journal:
        results = SweepResults(journal)
        for line in _opened(journal, results, path_of_journal):
            progress.note(f"{name}: {line}")
        sweep_of = partial(
            KernelSweep, feed=feed, gpu_pool=gpu_pool, results=results, progress=progress,
            exhaustive=request.exhaustive, budget_s=request.time_budget_s,
        )  # fmt: skip
        kernel_sweep = sweep_of(planned, decision=decision)
        if unverified is not None and any((failed := kernel_sweep.verify(unverified, buckets)).values()):
            base = kept_without(unverified, failed)
            lost = [entry.bucket for entry in unverified.entries if base.entry(entry.bucket) is None]
            wrong, buckets = kernel_sweep.times.wrong, tuple(dict.fromkeys((*buckets, *lost)))
            planned = plan(kernel, request.arch, buckets, incumbent=base, device=device)
            decision = _decision(planned, identity, base, request, whole=whole)
            kernel_sweep = sweep_of(planned, decision=decision)
            kernel_sweep.exclude(wrong)
            progress.note(f"{name}: swept again, because its configs fail now: {'; '.join(map(str, lost))}")
        kernel_sweep.run()
        known = old

        def decide(present: Table | None) -> tuple[Table, list[str]]:
            nonlocal known
            if present != known:
                decision.join(present)
                known = present
            table, swept = kernel_sweep.table(), kernel_sweep.times
            if broken := kernel_sweep.broken():
                return table, [broken]
            return table, publish.refusals(
                table, present, kernel.tunable, wrong=swept.wrong, unreached=swept.unreached,
                allow_worse=request.allow_worse,
            )  # fmt: skip

        published = publish.decide_and_publish(path, old, read=publish.present_table, decide=decide)
        table, swept = published.table, kernel_sweep.times
        for line in (*kernel_sweep.disagreements(), *_remarks(decision, published, swept, whole=whole)):
            progress.note(f"{name}: {line}")
        # The table holds the results now; the next sweep measures again.
        if not published.refusals and (kept := journal.retire()):
            progress.note(f"{name}: {kept}")
    return SweptKernel(
        kernel=kernel.tunable.name,
        evidence="measured",
        problems=len(planned.problems),
        speedup=geometric_mean(entry.gain for entry in table.entries),
        failures=swept.failures,
        compile_s=max((feed.last_result_s(name) or started) - started, 0.0),
        measure_s=results.measure_s,
        verify_s=results.verify_s,
        path=None if published.refusals else path,
        changed=publish.changed_entries(published.old, table),
        resumed=results.resumed,
        device_name=device.name,
        refusals=published.refusals,
        left_out=(
            *(f"{problem}: {reason}" for problem, reason in swept.unopened.items()),
            *unserved(decision.sweep(swept)),
        ),
        unreached=tuple(
            f"{problem_plan.problem} "
            + ("has no entry" if table.entry(problem_plan.problem) is None else "keeps its entry")
            for problem_plan in planned.problems
            if problem_plan.problem in swept.unreached
        ),
        disturbed=tuple(
            f"{entry.bucket}: {entry.disturbed}" for entry in table.entries if entry.disturbed is not None
        ),
    )


# What one kernel's sweep calls ------------------------------------------------------------------------------


def _decision(
    planned: SweepPlan, identity: Mapping[str, str], old: Table | None, request: SweepRequest, *, whole: bool
) -> Decision:
    """Make a kernel's decision. With a time budget unreached entries stay where possible."""
    if request.time_budget_s is not None:
        with suppress(TuneError):  # they were made under other conditions
            return Decision(planned, identity, old, whole=False)
    return Decision(planned, identity, old, whole=whole)


def _remarks(
    decision: Decision, published: publish.Published, swept: KernelTimes, *, whole: bool
) -> Iterator[str]:
    """Yield lines for the user about a decided table."""
    table, times = published.table, decision.sweep(swept)
    if decision.remark is not None:
        yield decision.remark
    yield from crowded_out(times, table.portfolio, whole=whole)
    if not published.refusals:
        yield from publish.removed_entries(published.old, table)
        for bucket, change in publish.worse_entries(table, published.old, decision.tunable).items():
            yield f"{bucket}: {change}"


def _identity_of(
    device: Device, conditions: Mapping[str, str], request: SweepRequest, kernel: FoundKernel
) -> dict[str, str]:
    """Return the conditions of a kernel's results, the identity of its journal."""
    # A journal may be resumed on another GPU of the same model: times of one model are comparable.
    same = {name: text for name, text in conditions.items() if name != "uuid"}
    return {
        "kernel": kernel.tunable.name,
        "arch": str(request.arch),
        **same,
        "sm_count": str(device.sm_count),
        "source_hash": source_hash(kernel.tunable),
        "check_hash": check_hash(kernel.tunable),
    }


def _opened(journal: Journal, results: SweepResults, path: Path) -> Iterator[str]:
    """Yield lines for the user about an opened journal."""
    if journal.damage:
        yield journal.damage
    if results.resumed:
        yield f"{results.resumed} measurements of an earlier run are taken over from {path}"
