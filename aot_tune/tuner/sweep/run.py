"""`aot-tune tune`, from a request to published tables: kernel after kernel, measured or predicted."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
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
from aot_tune.tuner.choose.portfolio import crowded_out
from aot_tune.tuner.choose.times import unserved
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.pool import CompilePool
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.supervise import GpuLostError
from aot_tune.tuner.measure.trials import Strikes
from aot_tune.tuner.plan.candidates import SweepPlan, plan
from aot_tune.tuner.sweep import predict
from aot_tune.tuner.sweep.crew import Crew
from aot_tune.tuner.sweep.decision import Decision, to_recheck
from aot_tune.tuner.sweep.journal import Journal, JournalWriteError, check_resumable
from aot_tune.tuner.sweep.kernel import KernelSweep, KernelTimes, jobs_in_order
from aot_tune.tuner.sweep.progress import InTurn, Progress
from aot_tune.tuner.sweep.report import JOURNALS, SweepReport, SweepRequest, SweptKernel
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.tuner.sweep.stale import stale_buckets, whole_reason
from aot_tune.values.device import Device

CUBINS = Path("build/cubins")
"""The folder where cubins are kept between runs, for all archs: each name is a digest that contains the
arch."""


_STOPS_ALL = (GpuLostError, JournalWriteError, StoreError)
"""Errors after which no other kernel could be swept either: the GPU is lost, or nothing can be written."""


_SHORTEST_S = 1.0
"""The least time for a kernel, seconds: one bucket of each is always swept."""

Measure = Callable[[SweepRequest, FoundKernel, CompileFeed, Crew, Progress], SweptKernel]
"""Sweeps one kernel on the GPUs of a crew."""


def run(request: SweepRequest, progress: Progress, measure: Measure | None = None) -> SweepReport:
    """Sweep the kernels asked for and publish their tables.

    A kernel that cannot be swept leaves the others running: its row has the reason. The error of the only
    kernel is raised. What can be found before anything is measured is found for all kernels first: wrong
    declarations, tables that could not be replaced, and journals made under other conditions.

    Args:
        request: What to sweep; a request without a GPU predicts.
        progress: Receives each event.
        measure: Sweeps one kernel; `measure_kernel`, which publishes its table, when None.

    Raises:
        TuneError: The sweep cannot start, go on or be saved; all finished results are in the journal.
        StoreError: Nothing can be written.
        AotTuneError: The only kernel cannot be swept.
    """
    started = monotonic()
    if cutile.release() < cutile.TUNE_SINCE:
        since = ".".join(map(str, cutile.TUNE_SINCE))
        raise TuneError(
            f"cuda-tile {cutile.version() or 'is not installed; version'} "
            f"{since} or later is needed to tune: pip install 'aot-tune[tune]'"
        )
    pool = partial(CompilePool, request.jobs or os.cpu_count() or 1, folder=request.cubins or CUBINS)
    progress = InTurn(progress)
    refused = _refused(request, progress)
    rows: list[SweptKernel] = []
    with _crew(request, progress) as crew, ExitStack() as stack:
        feed = stack.enter_context(CompileFeed(pool))
        for place, found in enumerate(request.kernels):
            left_s = _left_s(request, monotonic() - started, place)
            row = refused.get(found.tunable.name)
            if row is None:
                try:
                    if request.predicts:
                        row = predict.predict_kernel(request, found, feed, progress)
                    else:
                        following = _following(request, place, refused)
                        within = dataclasses.replace(request, time_budget_s=left_s)
                        if measure is None:
                            row = measure_kernel(within, found, feed, crew, progress, following)
                        else:
                            row = measure(within, found, feed, crew, progress)
                        if row.unreached:  # what is queued is of buckets that are not swept
                            stack.close()
                            feed = stack.enter_context(CompileFeed(pool))
                except AotTuneError as error:
                    row = _failed(request, found, error, progress)
                    stack.close()  # what is queued is the failed kernel's, and the feed may have ended
                    feed = stack.enter_context(CompileFeed(pool))
            rows.append(row)
            if request.verbose:
                _note_choices(row, progress)
        gpus = crew.usage()
    report = SweepReport(
        arch=request.arch,
        device_name=next((row.device_name for row in rows if row.device_name), ""),
        rows=tuple(rows),
        seconds=monotonic() - started,
        resumed=sum(row.resumed for row in rows),
        gpus=gpus,
    )
    progress.finished(report.rows, report.gpus)
    return report


def _left_s(request: SweepRequest, spent_s: float, place: int) -> float | None:
    """The kernel's share of the time that is left, by its number of buckets; None where time is unlimited."""
    if request.time_budget_s is None:
        return None
    counts = [len(request.buckets(found)) for found in request.kernels[place:]]
    return max(_SHORTEST_S, (request.time_budget_s - spent_s) * counts[0] / sum(counts))


def _following(request: SweepRequest, place: int, refused: Mapping[str, SweptKernel]) -> FoundKernel | None:
    """The kernel to compile for while this one is measured.

    It is the next one, unless it has a journal already: then what it needs is known only when that is read.
    A kernel of another module waits for its turn: where a child cannot import it, nothing more is compiled.
    """
    left = [found for found in request.kernels[place + 1 :] if found.tunable.name not in refused]
    if not left or left[0].module != request.kernels[place].module:
        return None
    return None if journal_path(request, left[0]).exists() else left[0]


def _compile_ahead(request: SweepRequest, found: FoundKernel, feed: CompileFeed, device: Device) -> None:
    """Have a kernel's candidates compiled where a process has nothing else to do."""
    path = store.table_path(table_folder(request, found), request.arch, found.tunable.name)
    with suppress(AotTuneError):  # it is told when the kernel's turn comes
        planned = plan(
            found, request.arch, request.buckets(found), incumbent=present_table(path), device=device
        )
        feed.submit_later(jobs_in_order(planned))


def _crew(request: SweepRequest, progress: Progress) -> Crew:
    """The GPUs that a request names; none where it predicts."""

    def start(found: FoundKernel, index: int, strikes: Strikes) -> MeasureSession:
        where = f"GPU {index}: " if len(request.gpus) > 1 else ""
        return MeasureSession(
            found, index, on_event=lambda line: progress.note(where + line), strikes=strikes
        )

    return Crew(request.gpus, start, progress.note)


def _refused(request: SweepRequest, progress: Progress) -> dict[str, SweptKernel]:
    """Find the kernels that cannot be swept before anything is compiled; return their rows by name."""
    rows: dict[str, SweptKernel] = {}
    for found in request.kernels:
        try:
            _check(found, request)
        except AotTuneError as error:
            rows[found.tunable.name] = _failed(request, found, error, progress)
        else:
            for remark in declaration_remarks(found.tunable, request.arch):
                progress.note(f"remark: {remark}")
    left = [found for found in request.kernels if found.tunable.name not in rows]
    if request.predicts or request.fresh or not left:
        return rows
    with MeasureSession(left[0], request.gpus[0]) as session:
        conditions = session.identity()
    for found in left:
        try:
            check_resumable(journal_path(request, found), identity_of(conditions, request, found))
        except AotTuneError as error:
            rows[found.tunable.name] = _failed(request, found, error, progress)
    return rows


def _failed(
    request: SweepRequest, found: FoundKernel, error: AotTuneError, progress: Progress
) -> SweptKernel:
    """The row of a kernel that cannot be swept; called where the error is handled.

    Raises:
        AotTuneError: The error, where it stops all kernels or where there is no other kernel.
    """
    if isinstance(error, _STOPS_ALL) or len(request.kernels) == 1:
        raise error
    progress.note(f"{found.tunable.name}: cannot be swept: {error}")
    return SweptKernel(
        kernel=found.tunable.name,
        evidence="predicted" if request.predicts else "measured",
        problems=len(request.buckets(found)),
        speedup=1.0,
        failures=0,
        compile_s=0.0,
        measure_s=0.0,
        verify_s=0.0,
        path=None,
        refusals=(str(error),),
        failed=True,
    )


def only_stale(request: SweepRequest, progress: Progress) -> SweepRequest:
    """The part of a request that source, space, compiler or declaration made stale; each reason is told.

    The kernels of which nothing is stale are left out, maybe all of them.

    Raises:
        TuneError: A table that is there cannot be read.
    """
    kernels, problems = [], dict(request.problems)
    for found in request.kernels:
        tunable, name = found.tunable, found.tunable.name
        table = present_table(store.table_path(table_folder(request, found), request.arch, name))
        reason = whole_reason(tunable, request.arch, table)
        if reason is not None or table is None:
            progress.note(f"{name}: all of it is stale: {reason}")
            kernels.append(found)
            continue
        asked = set(request.buckets(found))
        stale = {bucket: why for bucket, why in stale_buckets(tunable, table).items() if bucket in asked}
        for bucket, why in stale.items():
            progress.note(f"{name} {bucket} is stale: {why}")
        if stale:
            kernels.append(found)
            if len(stale) < len(tunable.buckets):
                problems[name] = tuple(stale)
    return dataclasses.replace(request, kernels=tuple(kernels), problems=problems)


def _note_choices(row: SweptKernel, progress: Progress) -> None:
    """Show each entry of a table just written, and its gain over the default."""
    if row.path is None:
        return
    for entry in store.read_table(row.path).entries:
        gain = entry.gain
        won = (
            f"{gain:.2f}x the default's {entry.default_us} us"
            if gain > 1
            else "the default; nothing beats it"
        )
        progress.note(
            f"{row.kernel} {entry.bucket}: {entry.config}: {entry.mean_us} us {entry.evidence}, {won}"
        )


def _check(found: FoundKernel, request: SweepRequest) -> None:
    """Refuse, before anything is compiled, a wrong declaration and a table that could not be replaced."""
    problems = declaration_problems(found.tunable, request.arch)
    if problems:
        raise DeclarationError("\n".join(problems))
    path = store.table_path(table_folder(request, found), request.arch, found.tunable.name)
    if request.shard is None:
        files.check_writable(path.parent)
        files.check_replaceable(path)
    if not request.predicts:
        present_table(path)


def table_folder(request: SweepRequest, found: FoundKernel) -> Path:
    """The folder of tables to which a request writes a kernel's table."""
    if request.out is not None:
        return request.out
    return predict.TABLES if request.predicts else store.package_folder(found.tunable)


def present_table(path: Path) -> Table | None:
    """The table to be replaced; None where there is none.

    Raises:
        TuneError: The table that is there cannot be read, or is the table of another kernel or arch.
    """
    if not path.exists():
        return None
    try:
        table = store.read_table(path)
    except Exception as error:
        raise TuneError(f"{error}; restore it, or remove it to start over: {path}") from error
    publish.check_place(path, table)
    return table


def measure_kernel(
    request: SweepRequest,
    found: FoundKernel,
    feed: CompileFeed,
    crew: Crew,
    progress: Progress,
    following: FoundKernel | None = None,
) -> SweptKernel:
    """Sweep one kernel on the GPUs and publish its table; meanwhile compile for the one that follows."""
    started, before = monotonic(), feed.counts()
    path = store.table_path(table_folder(request, found), request.arch, found.tunable.name)
    old = present_table(path)
    device, conditions = crew.open(found)
    crew.warm(found)
    planned = plan(found, request.arch, request.buckets(found), incumbent=old, device=device)
    progress.started(
        kernel=found.tunable.name,
        arch=request.arch,
        problems=len(planned.problems),
        jobs=len(planned.jobs),
        device=device.name if len(request.gpus) == 1 else f"{len(request.gpus)} {device.name}",
    )
    identity = identity_of(conditions, request, found)
    whole = is_whole(request, found)
    decision = _decision(planned, identity, old, request, whole=whole)
    path_of_journal = journal_path(request, found)
    with Journal.open(path_of_journal, identity, accepts=accepts, fresh=request.fresh) as journal:
        results = SweepResults(journal)
        for line in _opened(journal, results, path_of_journal):
            progress.note(line)
        kernel_sweep = KernelSweep(
            planned,
            feed,
            crew,
            results,
            progress,
            portfolio=decision.portfolio,
            first_sizes=decision.first_sizes,
            next_sizes=decision.next_sizes,
            exhaustive=request.exhaustive,
            budget_s=request.time_budget_s,
            meanwhile=partial(_compile_ahead, request, following, feed, device) if following else None,
        )
        swept = kernel_sweep.run()

        def beside(there: Table | None) -> tuple[Table, list[str]]:
            if there != decision.old:
                decision.join(there)
            table = rechecked_table(kernel_sweep, decision, swept)
            if broken := kernel_sweep.broken():
                return table, [broken]
            return table, publish.refusals(
                table, there, found.tunable, wrong=swept.wrong, unreached=swept.unreached,
                allow_worse=request.allow_worse,
            )  # fmt: skip

        published = publish.publish_beside(path, old, read=present_table, decide=beside)
        table = published.table
        for line in (*kernel_sweep.disagreements(), *_remarks(decision, published, swept, whole=whole)):
            progress.note(line)
        # The table holds the results now; the next sweep measures anew.
        if not published.refusals and (kept := journal.retire()):
            progress.note(kept)
    return SweptKernel(
        kernel=found.tunable.name,
        evidence="measured",
        problems=len(planned.problems),
        speedup=geometric_mean(entry.gain for entry in table.entries),
        failures=swept.failures,
        compile_s=max(feed.last_result_s - started, 0.0) if feed.counts() != before else 0.0,
        measure_s=results.measure_s,
        verify_s=results.verify_s,
        path=None if published.refusals else path,
        changed=publish.changed_entries(published.old, table),
        resumed=results.resumed,
        device_name=device.name,
        refusals=published.refusals,
        unopened=tuple(f"{problem}: {reason}" for problem, reason in swept.unopened.items()),
        unreached=tuple(
            f"{each.problem} " + ("has no entry" if table.entry(each.problem) is None else "stays as it was")
            for each in planned.problems
            if each.problem in swept.unreached
        ),
        disturbed=tuple(
            f"{entry.bucket}: {entry.disturbed}" for entry in table.entries if entry.disturbed is not None
        ),
    )


def _decision(
    planned: SweepPlan, identity: Mapping[str, str], old: Table | None, request: SweepRequest, *, whole: bool
) -> Decision:
    """Decides a kernel's table. In a limited time the entries that are not reached stay, where they can."""
    if request.time_budget_s is not None:
        with suppress(TuneError):  # they were made under other conditions
            return Decision(planned, identity, old, whole=False)
    return Decision(planned, identity, old, whole=whole)


def _remarks(
    decision: Decision, published: publish.Published, swept: KernelTimes, *, whole: bool
) -> Iterator[str]:
    """Lines that a person should see about a table that was just decided."""
    table, times = published.table, decision.sweep(swept)
    yield from unserved(times)
    yield from crowded_out(times, table.portfolio, whole=whole)
    if not published.refusals:
        yield from publish.removed_entries(published.old, table)
        for bucket, what in publish.worse_entries(table, published.old, decision.tunable).items():
            yield f"{bucket}: {what}"


def identity_of(conditions: Mapping[str, str], request: SweepRequest, found: FoundKernel) -> dict[str, str]:
    """The conditions under which a kernel's results hold: they are the identity of its journal."""
    # A journal may be resumed on another card of the same model: figures of one model are comparable.
    same = {name: text for name, text in conditions.items() if name != "uuid"}
    return {
        "kernel": found.tunable.name,
        "arch": str(request.arch),
        **same,
        "source_hash": source_hash(found.tunable),
        "check_hash": check_hash(found.tunable),
    }


def journal_path(request: SweepRequest, found: FoundKernel) -> Path:
    """The path of a kernel's journal.

    A partial selection has a journal of its own, so that publishing it leaves that of an unfinished whole
    sweep.
    """
    name = found.tunable.name
    if not is_whole(request, found):
        chosen = "\n".join(str(bucket) for bucket in request.buckets(found))
        name += f".{hashlib.sha256(chosen.encode()).hexdigest()[:8]}"
    return (request.journal or JOURNALS) / str(request.arch) / f"{name}.jsonl"


def _opened(journal: Journal, results: SweepResults, path: Path) -> Iterator[str]:
    """Lines that a person should see about a journal that was just opened."""
    if journal.damage:
        yield journal.damage
    if results.resumed:
        yield f"{results.resumed} measurements of an earlier run are taken over from {path}"


def rechecked_table(kernel_sweep: KernelSweep, decision: Decision, swept: KernelTimes) -> Table:
    """Choose a table and verify its winners in a fresh process; where one falls, choose anew without it."""
    while True:
        table = decision.table(swept)
        if kernel_sweep.recheck(to_recheck(table, swept)):
            return table
        kernel_sweep.choose_portfolio()


def is_whole(request: SweepRequest, found: FoundKernel) -> bool:
    """Whether all declared buckets of a kernel are swept."""
    return request.limit is None and found.tunable.name not in request.problems
