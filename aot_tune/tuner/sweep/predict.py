"""Predict tables without a GPU of the arch: compile, rank by the model, mark entries `predicted`.

Touches no GPU and no measured table. A predicted entry keeps the default unless the model promises a gain of
10 % or more (`aot_tune.choose.points.PREDICTED_GAIN`). Where the model's choices lose to the defaults on the
kernel's measured table (`aot_tune.tuner.plan.judged`), every entry keeps it, and only the defaults are
compiled. Where `work` is absent it is counted by following the kernel's code. Where that is impossible it is
derived from the sizes of the arguments, but for a kernel that multiplies matrices: then all candidates are
compiled and none is ranked, as the report states. Where the configs differ only in hints, the defaults are
compiled to prove that they compile.

A first look predicts a fixed part: a few buckets of each kernel with a few candidates each, evenly spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from aot_tune.choose.points import PREDICTED_GAIN
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import check_hash, source_hash
from aot_tune.declare.kernel_source.block_counts import NotCountedError
from aot_tune.errors import AotTuneError, NewerSchemaError, TuneError
from aot_tune.nvidia import cutile
from aot_tune.tables import reader, store, writer
from aot_tune.tables.table import BuiltWith, Table, geometric_mean
from aot_tune.tuner import publish
from aot_tune.tuner.choose.entries import choose_entries, settle_portfolio
from aot_tune.tuner.choose.incumbent import check_joinable, differences
from aot_tune.tuner.choose.times import ProblemTimes, SweepTimes, unserved
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled, CompileResult, compiles_nowhere
from aot_tune.tuner.outcome import Failure, Measurement
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, SweepPlan, plan
from aot_tune.tuner.plan.judged import NOT_JUDGED, Judgement, judgement
from aot_tune.tuner.plan.model import Launched, predict_us
from aot_tune.tuner.plan.shortlist import Shortlist, is_ranked, lacks_work, multiplies, shortlist
from aot_tune.tuner.plan.sizes import sizes_inside, spread
from aot_tune.tuner.sweep.progress import CandidateFailed, CompileReporter, Progress, Started
from aot_tune.tuner.sweep.report import FIRST_LOOK_CANDIDATES, PREDICTED_FOLDER, SweepRequest, SweptKernel
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@dataclass(kw_only=True)
class Predicted:
    """The results of the compiler and the model for one kernel."""

    sweep: SweepTimes
    """The model's time of every remaining candidate at each edge, in the form of a measured sweep."""

    failures: dict[Problem, tuple[Failure, ...]] = field(default_factory=dict)
    """Candidates that do not compile, spill or do not fit."""


def predict_kernel(
    request: SweepRequest, kernel: FoundKernel, feed: CompileFeed, progress: Progress
) -> SweptKernel:
    """Predict one kernel's table and write it to the folder of predicted tables.

    Args:
        request: The request.
        kernel: The kernel.
        feed: Compiles.
        progress: Receives each event.

    Raises:
        TuneError: The folder holds measured tables, or nothing can be compiled here.
        DeclarationError: A function of the declaration raises.
    """
    started = monotonic()
    path = request.table_path(kernel)
    _check_folder(request, kernel)
    old = earlier(path)
    device = Device.reference(request.arch)
    judged = judgement(kernel.tunable)
    planned = plan(kernel, request.arch, request.buckets(kernel), device=device)
    planned = predicted_part(planned, judged, first_look=request.first_look)
    if request.first_look and old is not None and _predicts_more(old, planned):
        progress.note(
            f"{path} already predicts {len(old.entries)} buckets, more than a first look would: it stays"
        )
        return _left_alone(planned, path, old, judged)
    progress.show(
        Started(
            kernel=kernel.tunable.name,
            arch=request.arch,
            problems=len(planned.problems),
            jobs=len(planned.jobs),
            device=device.name,
        )
    )
    compiled = _compiled(planned, feed, progress)
    compile_s = monotonic() - started
    if broken := compiles_nowhere(compiled.values()):
        return _unpublished(planned, len(compiled), compile_s, broken)
    predicted = predict(planned, compiled, progress)
    if note := _note_of_work(planned, compiled):
        progress.note(note)
    for line in unserved(predicted.sweep):
        progress.note(line)
    whole = not request.first_look and request.limit is None and kernel.tunable.name not in request.problems

    def decide(present: Table | None) -> tuple[Table, list[str]]:
        if present != old:
            check_joinable(predicted.sweep, present, old)
        kept = None if whole or present is None or differences(predicted.sweep, present) else present
        # Parsed again for rounded floats: an unchanged prediction then equals the earlier table.
        table = reader.parse(writer.dump(predicted_table(planned, compiled, predicted.sweep, kept)))
        return table, publish.refusals(table, None, kernel.tunable)

    published = publish.decide_and_publish(path, old, read=earlier, decide=decide)
    table = published.table
    for line in publish.removed_entries(published.old, table) if not published.refusals else ():
        progress.note(line)
    return SweptKernel(
        kernel=kernel.tunable.name,
        evidence="predicted",
        problems=len(planned.problems),
        speedup=geometric_mean(entry.gain for entry in table.entries),
        failures=sum(map(len, predicted.failures.values())),
        compile_s=compile_s,
        path=None if published.refusals else path,
        changed=publish.changed_entries(published.old, table),
        device_name=device.name,
        refusals=published.refusals,
        leaves=_leaves(table),
        worth=_worth(planned, judged, compiled),
    )


def _leaves(table: Table) -> int:
    """Return the number of entries that leave the default."""
    return sum(entry.gain > 1.0 for entry in table.entries)


def _worth(planned: SweepPlan, judged: Judgement | None, compiled: Mapping[str, CompileResult]) -> str:
    """Return what the predictions are worth, in words."""
    kernel = planned.kernel
    ranked = any(
        is_ranked(kernel, problem_plan) or _derivation(kernel, problem_plan, compiled)
        for problem_plan in planned.problems
    )
    if not ranked and (judged is None or judged.gate is not None):
        return "not ranked: the default stays"
    return NOT_JUDGED if judged is None else str(judged)


def _derivation(
    kernel: DeviceKernel, problem_plan: ProblemPlan, compiled: Mapping[str, CompileResult]
) -> Callable[[Problem, Config], Launched] | None:
    """Return the function that derives the facts of a kernel without `work`.

    None if `work` is declared, or if the facts cannot be derived.
    """
    if not lacks_work(kernel, problem_plan):
        return None
    if not _uncounted(kernel, problem_plan):
        return kernel.counted
    return None if multiplies(problem_plan, compiled) else kernel.derived


def _uncounted(kernel: DeviceKernel, problem_plan: ProblemPlan) -> str:
    """Return the reason why the default's code could not be followed; empty where it could."""
    try:
        kernel.counted(problem_plan.problem, problem_plan.default)
    except NotCountedError as error:
        return str(error)
    return ""


def _note_of_work(planned: SweepPlan, compiled: Mapping[str, CompileResult]) -> str | None:
    """Return a note for the user on a kernel without `work` whose candidates differ in constants."""
    kernel, name = planned.kernel, planned.kernel.tunable.name
    lacking = [problem_plan for problem_plan in planned.problems if lacks_work(kernel, problem_plan)]
    if not lacking:
        return None
    reasons = {_uncounted(kernel, plan): multiplies(plan, compiled) for plan in lacking}
    reason = next(filter(None, reasons), None)
    if reason is None:
        return (
            f"{name}: work is not declared; candidates are ranked by the multiplications, loads and stores "
            "of a few blocks of each, counted by following their code"
        )
    uncounted = f"{name}: work is not declared, and it could not be counted by following the kernel's code"
    if not reasons[reason]:
        return (
            f"{uncounted}: {reason}; such problems are ranked as if each block loaded and stored its share "
            "of the arguments once"
        )
    return (
        f"{uncounted}: {reason}; such problems keep their defaults, without a ranking; add "
        "work=lambda config, problem: Work(...)"
    )


def predicted_part(planned: SweepPlan, judged: Judgement | None, *, first_look: bool) -> SweepPlan:
    """Keep the candidates that a prediction compares: in each problem the default, and others.

    No others where the model cannot rank them or loses to the defaults, few and evenly spread ones in a first
    look.
    """
    most = FIRST_LOOK_CANDIDATES - 1 if first_look else None

    def kept(problem_plan: ProblemPlan) -> ProblemPlan:
        others = [config for config in problem_plan.candidates if config != problem_plan.default]
        kernel, loses = planned.kernel, judged is not None and judged.gate is None
        if loses or not (is_ranked(kernel, problem_plan) or lacks_work(kernel, problem_plan)):
            others = []
        candidates = (problem_plan.default, *spread(others, most))
        jobs = {config: problem_plan.jobs[config] for config in candidates}
        return replace(problem_plan, candidates=candidates, jobs=jobs)

    return replace(planned, problems=tuple(map(kept, planned.problems)))


def _predicts_more(table: Table, planned: SweepPlan) -> bool:
    """Return whether a table of the same code and compiler has a plan's buckets and more."""
    present = {entry.bucket for entry in table.entries}
    return present > {problem_plan.problem for problem_plan in planned.problems} and not differences(
        _sweep(planned, {}), table
    )


def predict(planned: SweepPlan, compiled: Mapping[str, CompileResult], progress: Progress) -> Predicted:
    """Predict the times at every edge of the candidates that compile, fit and do not spill.

    Args:
        planned: The kernel's problems.
        compiled: Job key to result, for all of the plan's jobs.
        progress: Receives each failure once.
    """
    kernel = planned.kernel
    times: dict[Problem, dict[Config, Measurement]] = {}
    failures: dict[Problem, tuple[Failure, ...]] = {}
    reported: set[tuple[Config, str]] = set()
    for problem_plan in planned.problems:
        listed = shortlist(kernel, problem_plan, compiled, exhaustive=True)
        grids = tuple(failure for failure in problem_plan.refused if failure.stage != "legal")
        failures[problem_plan.problem] = (*grids, *listed.failures)
        for failure in failures[problem_plan.problem]:
            if (failure.config, failure.message) not in reported:
                reported.add((failure.config, failure.message))
                progress.show(
                    CandidateFailed(kernel=kernel.tunable.name, problem=problem_plan.problem, failure=failure)
                )
        times[problem_plan.problem] = _edge_times(planned, problem_plan, listed, compiled)
    return Predicted(sweep=_sweep(planned, times), failures=failures)


def _sweep(planned: SweepPlan, times: Mapping[Problem, Mapping[Config, Measurement]]) -> SweepTimes:
    """Return the model's times in the form of a measured sweep."""
    kernel, tunable, device = planned.kernel, planned.kernel.tunable, planned.kernel.device
    return SweepTimes(
        kernel=tunable.name,
        arch=kernel.arch,
        source_hash=source_hash(tunable),
        check_hash=check_hash(tunable),
        built_with=BuiltWith(
            device_name=device.name,
            sm_count=device.sm_count,
            cuda_tile=cutile.version(),
            tileiras=cutile.compiler_version() or "",
            driver="",
        ),
        axes=tunable.axes,
        tiles=tunable.tiles,
        defaults={problem_plan.problem: problem_plan.default for problem_plan in planned.problems},
        problems={problem: ProblemTimes(candidates=known) for problem, known in times.items()},
        evidence="predicted",
        least_gain=PREDICTED_GAIN,
    )


def predicted_table(
    planned: SweepPlan, compiled: Mapping[str, CompileResult], sweep: SweepTimes, kept: Table | None = None
) -> Table:
    """Choose the table from the model's times, points inside the buckets included.

    Args:
        planned: The kernel's problems.
        compiled: Job key to result.
        sweep: The result of `predict`.
        kept: A predicted table whose other entries stay, for a partial selection.
    """
    keep = tuple(entry.bucket for entry in kept.entries) if kept is not None else ()
    portfolio = settle_portfolio(sweep, kept, keep=keep)
    inside: dict[Problem, ProblemTimes] = {}
    for problem_plan in planned.problems:
        configs = tuple(dict.fromkeys([*portfolio, problem_plan.default]))
        timed = sweep.problems[problem_plan.problem].candidates
        for problem in sizes_inside(planned.kernel.tunable.axes, problem_plan.problem):
            known = times_at(planned, problem_plan, problem, [c for c in configs if c in timed], compiled)
            inside[problem] = ProblemTimes(portfolio=known)
    defaults = {problem: planned.kernel.tunable.default_config(sweep.arch, problem) for problem in inside}
    complete = replace(sweep, problems={**sweep.problems, **inside}, defaults={**defaults, **sweep.defaults})
    return choose_entries(complete, portfolio, incumbent=kept, keep=keep)


def _unpublished(planned: SweepPlan, failures: int, compile_s: float, refusal: str) -> SweptKernel:
    """Return the report of a kernel without a successful compilation."""
    return SweptKernel(
        kernel=planned.kernel.tunable.name,
        evidence="predicted",
        problems=len(planned.problems),
        failures=failures,
        compile_s=compile_s,
        device_name=planned.kernel.device.name,
        refusals=(refusal,),
    )


def _left_alone(planned: SweepPlan, path: Path, table: Table, judged: Judgement | None) -> SweptKernel:
    """Return the report of a kernel whose table is larger than a first look's."""
    return SweptKernel(
        kernel=planned.kernel.tunable.name,
        evidence="predicted",
        problems=len(table.entries),
        speedup=geometric_mean(entry.gain for entry in table.entries),
        path=path,
        device_name=planned.kernel.device.name,
        leaves=_leaves(table),
        worth=NOT_JUDGED if judged is None else str(judged),
    )


def _compiled(planned: SweepPlan, feed: CompileFeed, progress: Progress) -> Mapping[str, CompileResult]:
    """Compile all of a plan's jobs and report progress."""
    compilations = CompileReporter(feed.counts, planned.kernel.tunable.name, progress)
    feed.submit(planned.jobs)
    results = feed.wait([job.key for job in planned.jobs], compilations.report)
    compilations.report()
    return results


def _edge_times(
    planned: SweepPlan, problem_plan: ProblemPlan, listed: Shortlist, compiled: Mapping[str, CompileResult]
) -> dict[Config, Measurement]:
    """Return the model's times of the remaining candidates; of the default if it cannot rank them."""
    if listed.predicted_us:
        return {config: _as_time(config, us) for config, us in listed.predicted_us.items()}
    if problem_plan.default not in listed.configs:
        return {}
    if _derivation(planned.kernel, problem_plan, compiled) is not None:
        times = times_at(planned, problem_plan, problem_plan.problem, list(listed.configs), compiled)
        return dict(sorted(times.items(), key=lambda item: item[1].mean_us))
    return times_at(planned, problem_plan, problem_plan.problem, [problem_plan.default], compiled)


def times_at(
    planned: SweepPlan,
    problem_plan: ProblemPlan,
    problem: Problem,
    configs: list[Config],
    compiled: Mapping[str, CompileResult],
) -> dict[Config, Measurement]:
    """Return the model's times of some configs at a size of a bucket, from its edge's cubins.

    A launch at a size that 16 does not divide has a cubin of its own. Its machine code was the same as the
    edge's for all 96 configs of a matmul on sm_90.
    """
    kernel = planned.kernel
    launched = _derivation(kernel, problem_plan, compiled) or kernel.launched
    times = {}
    for config in configs:
        result = compiled[problem_plan.jobs[config].key]
        if isinstance(result, Compiled) and kernel.tunable.refusal(config, kernel.arch, problem) is None:
            try:
                facts = launched(problem, config)
            except NotCountedError:  # a config whose code is longer than the default's
                continue
            us = predict_us(facts, kernel.device, result.resources, result.loop)
            times[config] = _as_time(config, us)
    return times


def _as_time(config: Config, us: float) -> Measurement:
    return Measurement(config=config, mean_us=us, error_margin_us=0.0, num_samples=0)


def _check_folder(request: SweepRequest, kernel: FoundKernel) -> None:
    """Refuse to write into a package's own folder of tables."""
    folder = request.out or PREDICTED_FOLDER
    own = store.package_folder(kernel.tunable)
    if folder.resolve() == own.resolve():
        raise TuneError(
            f"{folder} holds the measured tables of {kernel.tunable.package}, and without a GPU of "
            f"{request.arch} tables are predicted; name another folder with --out, or omit --out for "
            f"{PREDICTED_FOLDER}"
        )


def earlier(path: Path) -> Table | None:
    """Read the predicted table of an earlier run; None where there is none.

    A file below build/ that cannot be read as a table is a build product and is replaced. A file elsewhere,
    or of a later release, may hold anything and stays.

    Raises:
        TuneError: The file holds measurements, cannot be read, or is the table of another kernel or arch.
    """
    if not path.exists():
        return None
    try:
        table = store.read_table(path)
    except AotTuneError as error:
        if path.is_relative_to(PREDICTED_FOLDER) and not isinstance(error, NewerSchemaError):
            return None
        raise TuneError(f"{error}; restore it, remove it, or name another folder with --out") from error
    publish.check_place(path, table)
    if any(entry.evidence == "measured" for entry in table.entries):
        raise TuneError(
            f"{path} holds measured entries, which predictions never replace; name another folder with --out"
        )
    return table
