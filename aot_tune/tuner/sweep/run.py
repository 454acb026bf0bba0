"""`aot-tune tune`, from a request to published tables, measured or predicted.

Kernels are predicted one after another. When measuring, the longest comes first, and the next one begins as
soon as a GPU or a compiler would rest (`aot_tune.tuner.schedule.overlap`), so that no GPU waits for the end
of a kernel. Each is published as soon as it is complete. In a limited time they are measured one after
another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
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
from aot_tune.tuner.compile.job_queue import JobQueue
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.measure.blame import Strikes
from aot_tune.tuner.measure.request import Session
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.plan.candidates import SweepPlan, plan
from aot_tune.tuner.ray.cluster import Cluster
from aot_tune.tuner.schedule.overlap import may_begin, run_overlapping
from aot_tune.tuner.sweep import predict
from aot_tune.tuner.sweep.budget import length_of_kernel
from aot_tune.tuner.sweep.crew import Crew, Start
from aot_tune.tuner.sweep.decision import Decision
from aot_tune.tuner.sweep.journal import Journal, JournalWriteError, check_resumable
from aot_tune.tuner.sweep.kernel import KernelSweep
from aot_tune.tuner.sweep.progress import Brief, Finished, InTurn, KernelEnded, Progress, Started
from aot_tune.tuner.sweep.report import JOURNALS, SweepReport, SweepRequest, SweptKernel
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.tuner.sweep.stale import stale_buckets, whole_reason
from aot_tune.tuner.sweep.state import KernelTimes
from aot_tune.values.problem import Problem

CUBINS = Path("build/cubins")
"""The folder where cubins are kept between runs, for all archs: each name is a digest that contains the
arch."""


_STOPS_ALL = (GpuLostError, JournalWriteError, StoreError)
"""Errors after which no other kernel could be swept either: the GPU is lost, or nothing can be written."""


_SHORTEST_S = 1.0
"""The least time for a kernel, seconds: one bucket of each is always swept."""


def run(request: SweepRequest, progress: Progress) -> SweepReport:
    """Sweep the kernels asked for and publish their tables.

    A kernel that cannot be swept leaves the others running: its row has the reason. The error of the only
    kernel is raised. What can be found before anything is measured is found for all kernels first: wrong
    declarations, tables that could not be replaced, and journals made under other conditions.

    Args:
        request: What to sweep; a request without a GPU predicts.
        progress: Receives each event.

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
    progress = InTurn(progress) if request.verbose else Brief(progress)
    with ExitStack() as stack:
        cluster = None
        if request.ray is not None:
            cluster = stack.enter_context(_cluster(request, progress))
            request = dataclasses.replace(request, gpus=tuple(range(len(cluster.gpus))))
        order: list[str] = []
        feeds = stack.enter_context(_Feeds(partial(CompileFeed, _pool(request, cluster), order)))
        here = cluster is None and not request.predicts
        sessions = stack.enter_context(
            _Sessions(
                _start(request, progress, cluster),
                request.kernels[0],
                request.gpus if here else (),
                progress,
            )
        )
        if here:
            feeds.living()  # its children start meanwhile too
        rows = _refused(request, progress, sessions)
        kernels = [found for found in request.kernels if found.tunable.name not in rows]
        alone = request.predicts or request.time_budget_s is not None or len(kernels) < 2
        if not alone:
            lengths = {
                found.tunable.name: length_of_kernel(found, request.arch, request.buckets(found))
                for found in kernels
            }
            kernels.sort(key=lambda found: -lengths[found.tunable.name])
        order += [found.tunable.name for found in kernels]
        choice = "--gpus {}" if cluster is None else cluster.choice()
        crew = stack.enter_context(Crew(request.gpus, sessions, progress.note, order, choice))
        begun: list[str] = []

        def sweep(found: FoundKernel) -> SweptKernel:
            name, feed = found.tunable.name, feeds.living()
            begun.append(name)
            left_s = _left_s(request, monotonic() - started, kernels.index(found), kernels)
            within = dataclasses.replace(request, time_budget_s=left_s)
            try:
                if request.predicts:
                    row = predict.predict_kernel(request, found, feed, progress)
                else:
                    row = measure_kernel(within, found, feed, crew, progress)
            except AotTuneError as error:
                row = _failed(request, found, error, progress)
            finally:
                progress.show(KernelEnded(kernel=name))
            feed.drop(name)  # what is queued still is of buckets that are not swept
            rows[name] = row
            if request.verbose:
                _note_choices(row, progress)
            return row

        if alone:
            for found in kernels:
                sweep(found)
        else:
            run_overlapping(
                sweep,
                kernels,
                begins=lambda in_flight: may_begin(
                    in_flight=in_flight,
                    planned=all(crew.has_begun(name) or name in rows for name in begun),
                    gpus=crew.size,
                    waiting=crew.waiting,
                    compilers_rest=feeds.living().rests,
                ),
                stop=crew.close,
                stopped=MeasuringStopped,
            )
        gpus = crew.usage()
    in_order = tuple(rows[found.tunable.name] for found in request.kernels)
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


class _Sessions:
    """Opens sessions on GPUs, on this machine's before they are asked for.

    A process that measures needs some seconds for its imports, and so do the checks of declarations, which
    pass meanwhile. A GPU on which no session can be opened says so when one is asked for.

    Args:
        start: Opens a session.
        found: Any kernel of the sweep.
        early: The GPUs on which to open one now.
        progress: Receives what these sessions tell.
    """

    def __init__(self, start: Start, found: FoundKernel, early: Sequence[int], progress: Progress) -> None:
        self._start, self._progress = start, progress
        self._opened: dict[int, Session] = {}
        for index in early:
            with suppress(AotTuneError):
                self._opened[index] = start(found, index, Strikes(progress.note))

    def __enter__(self) -> _Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        while self._opened:
            self._opened.popitem()[1].close()

    def __call__(self, found: FoundKernel, index: int, strikes: Strikes) -> Session:
        """A session that its caller closes: the one that is open, or a new one."""
        session = self._opened.pop(index, None)
        if session is None:
            return self._start(found, index, strikes)
        session.turn_to(found, strikes)
        return session

    def identity(self, found: FoundKernel, index: int) -> Mapping[str, str]:
        """The conditions of a GPU's times."""
        if index in self._opened:
            return self._opened[index].identity()
        with closing(self._start(found, index, Strikes(self._progress.note))) as session:
            return session.identity()


class _Feeds:
    """The compile feed of a sweep; a new one where an error has ended the last.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], CompileFeed]) -> None:
        self._make, self._lock, self._stack = make, threading.Lock(), ExitStack()
        self._feed: CompileFeed | None = None

    def __enter__(self) -> _Feeds:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def living(self) -> CompileFeed:
        """The feed that goes on."""
        with self._lock:
            if self._feed is None or self._feed.ended:
                self._feed = self._stack.enter_context(self._make())
            return self._feed


def _left_s(
    request: SweepRequest, spent_s: float, place: int, kernels: Sequence[FoundKernel]
) -> float | None:
    """The kernel's share of the time that is left, by its number of buckets; None where time is unlimited."""
    if request.time_budget_s is None:
        return None
    counts = [len(request.buckets(found)) for found in kernels[place:]]
    return max(_SHORTEST_S, (request.time_budget_s - spent_s) * counts[0] / sum(counts))


def _cluster(request: SweepRequest, progress: Progress) -> Cluster:
    """The Ray cluster that a request names."""
    return Cluster(request.ray or "", request.arch, request.kernels, progress.note)


def _start(request: SweepRequest, progress: Progress, cluster: Cluster | None) -> Start:
    """Opens sessions on the GPUs of a cluster, or of this machine."""

    def start(found: FoundKernel, index: int, strikes: Strikes) -> Session:
        where = f"GPU {index}: " if len(request.gpus) > 1 else ""

        def tell(line: str) -> None:
            progress.note(where + line)

        if cluster is not None:
            return cluster.session(found, index, tell, strikes)
        session = MeasureSession(found, index, on_event=tell, strikes=strikes)
        session.prepare()
        return session

    return start


def _pool(request: SweepRequest, cluster: Cluster | None) -> Callable[[], JobQueue]:
    """Makes the pool of compilers, on the nodes of a cluster or on this machine."""
    cubins = request.cubins or CUBINS
    if cluster is not None:
        return partial(cluster.pool, request.jobs, cubins)
    return partial(
        CompilePool,
        request.jobs or usable_cores(),
        folder=cubins,
        # Where nothing is compiled yet, children start while the GPUs' processes do.
        at_once=not request.predicts and not any(cubins.glob("*.cubin")),
    )


def _refused(request: SweepRequest, progress: Progress, sessions: _Sessions) -> dict[str, SweptKernel]:
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
    conditions = sessions.identity(left[0], request.gpus[0])
    for found in left:
        try:
            check_resumable(journal_path(request, found), _identity_of(conditions, request, found))
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
        refusals=(str(error),),
        failed=True,
    )


def only_stale(request: SweepRequest, progress: Progress) -> SweepRequest:
    """The part of a request that source, compiler or declaration made stale; each reason is told.

    The kernels of which nothing is stale are left out, maybe all of them. A request that predicts is compared
    with the measured tables, which it never replaces; what was predicted already of what is stale there is
    not predicted again.

    Raises:
        TuneError: A table that is there cannot be read.
    """
    kernels, problems = [], dict(request.problems)
    for found in request.kernels:
        tunable, name = found.tunable, found.tunable.name
        folder = store.package_folder(tunable) if request.predicts else table_folder(request, found)
        table = present_table(store.table_path(folder, request.arch, name))
        reason, stale = _stale(request, found, table)
        if request.predicts and (reason is not None or stale):
            reason, stale = _unpredicted(request, found, reason, stale, progress)
        if reason is not None:
            progress.note(f"{name}: all of it is stale: {reason}")
            kernels.append(found)
            continue
        for bucket, why in stale.items():
            progress.note(f"{name} {bucket} is stale: {why}")
        if stale:
            kernels.append(found)
            if len(stale) < len(tunable.buckets):
                problems[name] = tuple(stale)
    return dataclasses.replace(request, kernels=tuple(kernels), problems=problems)


def _stale(
    request: SweepRequest, found: FoundKernel, table: Table | None, *, may_be_predicted: bool = False
) -> tuple[str | None, Mapping[Problem, str]]:
    """Why all of a kernel is stale, and where not all is, why each stale bucket that is asked for is."""
    reason = whole_reason(found.tunable, request.arch, table, may_be_predicted=may_be_predicted)
    if reason is not None or table is None:
        return reason, {}
    asked = set(request.buckets(found))
    return None, {
        bucket: why for bucket, why in stale_buckets(found.tunable, table).items() if bucket in asked
    }


def _unpredicted(
    request: SweepRequest,
    found: FoundKernel,
    reason: str | None,
    stale: Mapping[Problem, str],
    progress: Progress,
) -> tuple[str | None, Mapping[Problem, str]]:
    """What is left of a kernel's stale part, in the same form, without that which is predicted already."""
    path = store.table_path(table_folder(request, found), request.arch, found.tunable.name)
    all_of_it, missing = _stale(request, found, predict.earlier(path), may_be_predicted=True)
    if all_of_it is not None:
        return reason, stale
    left = missing if reason is not None else {one: why for one, why in stale.items() if one in missing}
    if not left:
        reasons = reason or "; ".join(dict.fromkeys(stale.values()))
        progress.note(f"{found.tunable.name}: {reasons}; what is stale is predicted already in {path}")
    return None, left


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
) -> SweptKernel:
    """Sweep one kernel on the GPUs and publish its table."""
    started, name = monotonic(), found.tunable.name
    path = store.table_path(table_folder(request, found), request.arch, found.tunable.name)
    old = present_table(path)
    device, conditions = crew.open(found)
    planned = plan(found, request.arch, request.buckets(found), incumbent=old, device=device)
    progress.show(
        Started(
            kernel=found.tunable.name,
            arch=request.arch,
            problems=len(planned.problems),
            jobs=len(planned.jobs),
            device=device.name if len(request.gpus) == 1 else f"{len(request.gpus)} {device.name}",
        )
    )
    identity = _identity_of(conditions, request, found)
    whole = _is_whole(request, found)
    decision = _decision(planned, identity, old, request, whole=whole)
    path_of_journal = journal_path(request, found)
    with Journal.open(path_of_journal, identity, accepts=accepts, fresh=request.fresh) as journal:
        results = SweepResults(journal)
        for line in _opened(journal, results, path_of_journal):
            progress.note(f"{name}: {line}")
        kernel_sweep = KernelSweep(
            planned,
            feed,
            crew,
            results,
            progress,
            decision,
            exhaustive=request.exhaustive,
            budget_s=request.time_budget_s,
        )
        swept = kernel_sweep.run()

        def beside(there: Table | None) -> tuple[Table, list[str]]:
            if there != decision.old:
                decision.join(there)
            table = kernel_sweep.table()
            if broken := kernel_sweep.broken():
                return table, [broken]
            return table, publish.refusals(
                table, there, found.tunable, wrong=swept.wrong, unreached=swept.unreached,
                allow_worse=request.allow_worse,
            )  # fmt: skip

        published = publish.publish_beside(path, old, read=present_table, decide=beside)
        table = published.table
        for line in (*kernel_sweep.disagreements(), *_remarks(decision, published, swept, whole=whole)):
            progress.note(f"{name}: {line}")
        # The table holds the results now; the next sweep measures anew.
        if not published.refusals and (kept := journal.retire()):
            progress.note(f"{name}: {kept}")
    return SweptKernel(
        kernel=found.tunable.name,
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
    if decision.remark is not None:
        yield decision.remark
    yield from unserved(times)
    yield from crowded_out(times, table.portfolio, whole=whole)
    if not published.refusals:
        yield from publish.removed_entries(published.old, table)
        for bucket, what in publish.worse_entries(table, published.old, decision.tunable).items():
            yield f"{bucket}: {what}"


def _identity_of(conditions: Mapping[str, str], request: SweepRequest, found: FoundKernel) -> dict[str, str]:
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
    if not _is_whole(request, found):
        chosen = "\n".join(str(bucket) for bucket in request.buckets(found))
        name += f".{hashlib.sha256(chosen.encode()).hexdigest()[:8]}"
    return (request.journal or JOURNALS) / str(request.arch) / f"{name}.jsonl"


def _opened(journal: Journal, results: SweepResults, path: Path) -> Iterator[str]:
    """Lines that a person should see about a journal that was just opened."""
    if journal.damage:
        yield journal.damage
    if results.resumed:
        yield f"{results.resumed} measurements of an earlier run are taken over from {path}"


def _is_whole(request: SweepRequest, found: FoundKernel) -> bool:
    """Whether all declared buckets of a kernel are swept."""
    return request.limit is None and found.tunable.name not in request.problems
