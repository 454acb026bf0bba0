"""Profile one config on one problem: compile it and its neighbours, time it, count it, try one change.

Without a GPU the facts come from the machine code and the table. With one they come from a measuring process,
so that a hang is killed; a profiled launch is never a time, and its process measures nothing afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.kernel_source.block_counts import NotCountedError
from aot_tune.errors import CutileError, TuneError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.remarks import Remark, remarks_of
from aot_tune.tuner.choose.states import in_worst_state, other_states
from aot_tune.tuner.choose.times import is_tie
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileResult
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.measure.counting import COUNTING_BACKEND, CountingSession
from aot_tune.tuner.measure.request import Finals, Measure, TimeInState
from aot_tune.tuner.measure.worker.backend import Counters
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, plan_only
from aot_tune.tuner.plan.judged import NOT_JUDGED, judgement
from aot_tune.tuner.plan.model import Launched, least_us
from aot_tune.tuner.plan.shortlist import predictions
from aot_tune.tuner.profile.facts import Class, Facts, classify, facts_of
from aot_tune.tuner.profile.rules import Change, Expected, Finding, change, difference, findings
from aot_tune.tuner.sweep.resources import CUBINS
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change of config, measured next to the config."""

    change: Change
    """The change."""

    before_us: float | None = None
    """The config's time in the same rounds, in its worst state, microseconds; None without a time."""

    after_us: float | None = None
    """The changed config's time, likewise."""

    better: bool = False
    """Whether it is faster beyond a tie."""

    failure: str = ""
    """Why it has no time; empty where it has one, or without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What bounds a config on a problem."""

    kernel: str
    """The kernel's name."""

    arch: Arch
    """The arch."""

    problem: Problem
    """The problem."""

    config: Config
    """The config."""

    device: str
    """The GPU's name; without a GPU, the reference device that roofs and waves are computed for."""

    facts: Facts
    """The facts."""

    bound: Class | None
    """What bounds the launch; None where no time is known."""

    findings: tuple[Finding, ...]
    """The findings, the most severe first."""

    here_us: float | None = None
    """The time measured here, microseconds."""

    table_us: float | None = None
    """The time in the table, microseconds."""

    counters: Counters = field(default_factory=Counters)
    """The GPU's counters, or why there are none."""

    tried: Tried | None = None
    """The one change; None where none is worth trying."""

    failure: str = ""
    """Why the config does not run here; empty where it does, or without a GPU."""


def profile(
    kernel: FoundKernel,
    arch: Arch,
    problem: Problem,
    config: Config,
    *,
    gpu: int | None,
    table_us: float | None,
    expected: Mapping[Config, Expected],
    on_event: Callable[[str], None],
) -> Profile:
    """Profile a config on a problem.

    Args:
        kernel: The kernel.
        arch: The arch.
        problem: The problem.
        config: The config.
        gpu: The GPU's index, as torch counts; None where there is none of the arch.
        table_us: The config's time in the table, microseconds.
        expected: Times that the table expects of other configs; the model expects those of the rest.
        on_event: Receives a line for the user.

    Raises:
        TuneError: The config does not compile, or the GPU is taken or lost.
        UsageError: The config is not in the search space, or may not run.
    """
    session = (
        None if gpu is None else CountingSession(kernel, gpu, on_event=on_event, backend=COUNTING_BACKEND)
    )
    pool = partial(CompilePool, usable_cores(), folder=CUBINS)
    with session or nullcontext(), CompileFeed(pool) as feed:
        device = Device.reference(arch) if session is None else session.device()
        profiled = _Profiled(DeviceKernel(kernel, arch, device), problem, config, feed)
        return profiled.run(session, table_us, expected)


class _Profiled:
    """A config on a problem, with its neighbours."""

    def __init__(self, kernel: DeviceKernel, problem: Problem, config: Config, feed: CompileFeed) -> None:
        self._kernel, self._problem, self._config = kernel, problem, config
        space = kernel.space(problem)
        if config not in space:
            raise UsageError(
                f"{config} is in no search space of {kernel.tunable.name} for {problem} on {kernel.arch}"
            )
        if (refused := kernel.failure(problem, config)) is not None:
            raise UsageError(f"{config} may not run {problem} on {kernel.arch}: {refused.message}")
        near = [other for other in space if difference(config, other) is not None]
        self._plan: ProblemPlan = plan_only(kernel, problem, [config, *near])
        feed.submit(self._plan.jobs.values())
        self._compiled: Mapping[str, CompileResult] = feed.wait(
            {job.key for job in self._plan.jobs.values()}, lambda: None
        )
        own = self._compiled[self._plan.jobs[config].key]
        if isinstance(own, CompileFailure):
            raise TuneError(f"{config} does not compile for {problem}: {own.message}")
        self._rate = 2.0 if _has_8_bits(kernel, problem) else 1.0
        self._near = [other for other in self._plan.candidates if other in near]

    def run(
        self, session: CountingSession | None, table_us: float | None, expected: Mapping[Config, Expected]
    ) -> Profile:
        """Gather the facts, with a GPU where there is a session, and measure the one change."""
        here = None if session is None else self._measured(session)
        failed = here.message if isinstance(here, Failure) else ""
        here_us = here.mean_us if isinstance(here, Measurement) else None
        counters = Counters(refusal="there is no GPU of the arch here")
        if session is not None:
            counters = Counters(refusal="the config does not run here")
            if here_us is not None:
                counters = session.counters(self._problem, self._config, self._cubin(self._config))
        facts = self._facts(self._config, here_us or table_us)
        facts = replace(facts, remarks=self._remarks(), counters=counters.values)
        found = findings(facts)
        result = Profile(
            kernel=self._kernel.tunable.name,
            arch=self._kernel.arch,
            problem=self._problem,
            config=self._config,
            device=self._kernel.device.name,
            facts=facts,
            bound=classify(facts),
            findings=found,
            here_us=here_us,
            table_us=table_us,
            counters=counters,
            failure=failed,
        )
        neighbours = {other: own for other in self._near if (own := self._facts(other, None)).resident}
        wanted = change(self._config, facts, found, neighbours, {**self._modelled(), **expected})
        if wanted is None:
            return result
        tried = Tried(change=wanted)
        if session is not None and here_us is not None:
            tried = self._tried(session, wanted)
        return replace(result, tried=tried)

    # The facts ----------------------------------------------------------------------------------------------

    def _facts(self, config: Config, us: float | None) -> Facts:
        result = self._compiled[self._plan.jobs[config].key]
        own = result if isinstance(result, Compiled) else None
        return facts_of(
            launched(self._kernel, self._problem, config),
            self._kernel.device,
            own.resources if own else None,
            own.loop if own else None,
            us=us,
            rate=self._rate,
        )

    def _modelled(self) -> dict[Config, Expected]:
        """Return the neighbours' times by the model; empty where it cannot rank them."""
        times = predictions(self._kernel, self._plan, [self._config, *self._near], self._compiled)
        worth = str(judgement(self._kernel.tunable) or NOT_JUDGED) if times else ""
        return {
            other: Expected(ratio=us / times[self._config], by="model", worth=worth)
            for other, us in times.items()
        }

    def _remarks(self) -> tuple[Remark, ...]:
        """Compile the config once more for the compiler's remarks; none where it cannot write them."""
        job, tunable = self._plan.jobs[self._config], self._kernel.tunable
        with tempfile.TemporaryDirectory(prefix="aot-tune-remarks-") as folder:
            path = Path(folder, "remarks")
            kernel = tunable.kernel_of(self._config)
            try:
                cutile.compile_cubin(kernel, job.hints, job.signature, job.arch, remarks=path)
                return remarks_of(path.read_text())
            except (CutileError, OSError):  # a compiler before 13.4
                return ()

    # The GPU ------------------------------------------------------------------------------------------------

    def _cubin(self, config: Config) -> Path | None:
        result = self._compiled[self._plan.jobs[config].key]
        return result.path if isinstance(result, Compiled) else None

    def _measured(self, session: CountingSession, *others: Config) -> Outcome:
        """Verify and time the config, and others with it; return the last one's outcome."""
        configs = (self._config, *others)
        least = least_us([self._kernel.launched(self._problem, c) for c in configs], self._kernel.device)
        cubins = {config: self._cubin(config) for config in configs}
        return session.answer(Measure(self._problem, cubins, least_us=least))[-1]

    def _tried(self, session: CountingSession, wanted: Change) -> Tried:
        """Measure the config and the changed one, in the GPU's states and in finals."""
        outcome = self._measured(session, wanted.config)
        configs = {config: self._cubin(config) for config in (self._config, wanted.config)}
        states: dict[str, dict[Config, Measurement]] = {}
        if isinstance(outcome, Measurement):
            finals = _timed(session.answer(Finals(self._problem, configs)))
            for state in other_states(finals):
                request = TimeInState(self._problem, configs, state=state)
                states[state] = _timed(session.answer(request))
            if all(configs.keys() <= run.keys() for run in (finals, *states.values())):
                judged = in_worst_state(finals, states)  # type: ignore[arg-type]
                before, after = judged[self._config], judged[wanted.config]
                return Tried(
                    change=wanted,
                    before_us=before.mean_us,
                    after_us=after.mean_us,
                    better=after.mean_us < before.mean_us and not is_tie(before, after),
                )
        failure = outcome.message if isinstance(outcome, Failure) else "it fails in a state of the GPU"
        return Tried(change=wanted, failure=failure)


def launched(kernel: DeviceKernel, problem: Problem, config: Config) -> Launched:
    """Return the facts of a launch: declared, else counted by following the code, else derived."""
    if kernel.tunable.work is not None:
        return kernel.launched(problem, config)
    try:
        return kernel.counted(problem, config)
    except NotCountedError:
        return kernel.derived(problem, config)


def _timed(outcomes: list[Outcome]) -> dict[Config, Measurement]:
    return {outcome.config: outcome for outcome in outcomes if isinstance(outcome, Measurement)}


def _has_8_bits(kernel: DeviceKernel, problem: Problem) -> bool:
    """Return whether products are of 8-bit floats, which the tensor units multiply twice as fast."""
    return any("float8" in str(getattr(arg, "dtype", "")) for arg in kernel.launch_args(problem))
