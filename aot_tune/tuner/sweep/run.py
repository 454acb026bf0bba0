"""`aot-tune tune`, from a request to published tables: kernel after kernel, measured or predicted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic

from aot_tune.declare.checks import declaration_problems
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.errors import DeclarationError, TuneError
from aot_tune.nvidia import cutile
from aot_tune.tables import files, store
from aot_tune.tables.table import Table, geometric_mean
from aot_tune.tuner import publish
from aot_tune.tuner.choose.portfolio import crowded_out
from aot_tune.tuner.choose.times import unserved
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.pool import CompilePool
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.plan.candidates import plan
from aot_tune.tuner.sweep import predict
from aot_tune.tuner.sweep.decision import Decision
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.tuner.sweep.kernel import KernelSweep, KernelTimes
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest, SweptKernel
from aot_tune.tuner.sweep.results import SweepResults

CUBINS = Path("build/cubins")
"""The folder where cubins are kept between runs, for all archs: each name is a digest that contains the
arch."""

JOURNALS = Path("build/journal")
"""The folder of journals. That of a whole sweep is ``<arch>/<kernel>.jsonl`` below it."""


def run(request: SweepRequest, progress: Progress) -> SweepReport:
    """Sweep the kernels asked for and publish their tables.

    Args:
        request: What to sweep; a request without a GPU predicts.
        progress: Receives each event.

    Raises:
        TuneError: The sweep cannot start, go on or be saved; all finished results are in the journal.
        DeclarationError: A declaration is wrong; nothing was measured of that kernel.
    """
    started = monotonic()
    if cutile.release() < cutile.TUNE_SINCE:
        since = ".".join(map(str, cutile.TUNE_SINCE))
        raise TuneError(
            f"cuda-tile {cutile.version() or 'is not installed; version'} "
            f"{since} or later is needed to tune: pip install 'aot-tune[tune]'"
        )
    for found in request.kernels:
        _check(found, request)
    pool = partial(CompilePool, request.jobs or os.cpu_count() or 1, folder=request.cubins or CUBINS)
    tune = predict.predict_kernel if request.predicts else _measure_kernel
    rows: list[SweptKernel] = []
    with CompileFeed(pool) as feed:
        for found in request.kernels:
            row = tune(request, found, feed, progress)
            rows.append(row)
            if request.verbose:
                _note_choices(row, progress)
    report = SweepReport(
        arch=request.arch,
        device_name=rows[0].device_name if rows else "",
        rows=tuple(rows),
        seconds=monotonic() - started,
        resumed=sum(row.resumed for row in rows),
    )
    progress.finished(report.rows)
    return report


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


def _measure_kernel(
    request: SweepRequest, found: FoundKernel, feed: CompileFeed, progress: Progress
) -> SweptKernel:
    """Sweep one kernel on the GPU and publish its table."""
    assert request.gpu is not None
    started, before = monotonic(), feed.counts()
    path = store.table_path(table_folder(request, found), request.arch, found.tunable.name)
    old = present_table(path)
    with MeasureSession(found, request.gpu, on_event=progress.note) as session:
        device = session.device()
        planned = plan(found, request.arch, request.buckets(found), incumbent=old, device=device)
        progress.started(
            kernel=found.tunable.name,
            arch=request.arch,
            problems=len(planned.problems),
            jobs=len(planned.jobs),
            device=device.name,
        )
        identity = {**session.identity(), "source_hash": source_hash(found.tunable)}
        # A journal may be resumed on another card of the same model: figures of one model are comparable.
        identity.pop("uuid")
        whole = _whole(request, found)
        decision = Decision(planned, identity, old, whole=whole)
        journal_path = _journal_path(request, found)
        with Journal.open(journal_path, identity) as journal:
            results = SweepResults(journal)
            for line in _opened(journal, results, journal_path):
                progress.note(line)
            kernel_sweep = KernelSweep(
                planned,
                feed,
                session,
                results,
                progress,
                portfolio=decision.portfolio,
                exhaustive=request.exhaustive,
            )
            swept = kernel_sweep.run()

            def beside(there: Table | None) -> tuple[Table, list[str]]:
                if there != decision.old:
                    decision.join(there, swept)
                table = _rechecked_table(kernel_sweep, decision, swept)
                broken = kernel_sweep.broken()
                return table, [broken] if broken else publish.refusals(table, there, found.tunable)

            published = publish.publish_beside(path, old, read=present_table, decide=beside)
            table = published.table
            times = decision.sweep(swept)
            for line in (*unserved(times), *crowded_out(times, table.portfolio, whole=whole)):
                progress.note(line)
        if not published.refusals:
            for line in publish.removed_entries(published.old, table):
                progress.note(line)
            # The table holds the results now; the next sweep measures anew.
            journal_path.replace(journal_path.with_suffix(".done"))
    return SweptKernel(
        kernel=found.tunable.name,
        evidence="measured",
        problems=len(swept.candidates),
        speedup=geometric_mean(entry.gain for entry in table.entries),
        failures=swept.failures,
        compile_s=max(feed.last_result_s - started, 0.0) if feed.counts() != before else 0.0,
        measure_s=swept.measure_s,
        verify_s=swept.verify_s,
        path=None if published.refusals else path,
        changed=publish.changed_entries(published.old, table),
        resumed=results.resumed,
        device_name=device.name,
        refusals=published.refusals,
    )


def _journal_path(request: SweepRequest, found: FoundKernel) -> Path:
    """The path of a kernel's journal; with ``--fresh`` an earlier journal there is set aside.

    A partial selection has a journal of its own, so that publishing it leaves that of an unfinished whole
    sweep.
    """
    name = found.tunable.name
    if not _whole(request, found):
        chosen = "\n".join(str(bucket) for bucket in request.buckets(found))
        name += f".{hashlib.sha256(chosen.encode()).hexdigest()[:8]}"
    path = (request.journal or JOURNALS) / str(request.arch) / f"{name}.jsonl"
    if request.fresh and path.exists():
        path.replace(path.with_suffix(".old"))
    return path


def _opened(journal: Journal, results: SweepResults, path: Path) -> Iterator[str]:
    """Lines that a person should see about a journal that was just opened."""
    if journal.damage:
        yield journal.damage
    if results.resumed:
        yield f"{results.resumed} measurements of an earlier run are taken over from {path}"


def _rechecked_table(kernel_sweep: KernelSweep, decision: Decision, swept: KernelTimes) -> Table:
    """Choose a table, verify its winners in a fresh process, and repeat until all of them are right."""
    while True:
        table = decision.table(swept)
        winners = {
            entry.bucket: entry.config for entry in table.entries if entry.bucket in swept.portfolio_times
        }
        if not kernel_sweep.recheck(winners):
            return table


def _whole(request: SweepRequest, found: FoundKernel) -> bool:
    return request.limit is None and found.tunable.name not in request.problems
