"""Measure kernels' configs on one GPU from a process that holds no CUDA context, and survive them.

When a config hangs, crashes the worker or poisons the GPU's context:

1. The worker has reported which config it was running. That config is blamed and no other. The worker and
   all that it started are killed.
2. A fresh worker must pass a canary. After `Limits.recoveries` workers in a row that do not, the GPU is lost:
   a `GpuLostError`. Where they do, but the problem cannot be opened in them, it is the problem that failed: a
   `ProblemFailedError`.
3. The config runs again, as the first in the fresh worker. If it passes, the fault is forgiven, once on each
   problem. A hang gets no second try where it lasted far longer than the other configs of the problem take
   (`aot_tune.tuner.measure.trials.HOPELESS`), or where the config hung on another problem before.
4. Otherwise it is recorded (stage ``timeout`` or ``fault``), the worker is replaced once more, and the sweep
   goes on with the other configs, whose provisional times are kept.
5. A config that was recorded on `FAULTS_TO_STRIKE` problems is struck: it is not run again for this kernel.

A wrong result counts only when a second worker finds it too, in `LAUNCHES` launches: the memory that found
it may have been damaged by another config. All configs of a request that were wrong are run again in one
worker, and a config that was confirmed to be wrong on one problem is believed to be on the others. So this
costs the start of a worker for each request with new ones. A config that changes the memory of the check is
blamed for that, tried once more, and recorded as ``verify``.

A config that runs out of memory is also tried again in a fresh worker. It is recorded as ``memory`` and is
never struck for it.

The worker lives on when the session turns to another kernel. Where it cannot, because the kernel's module
does not go with what the process holds, a fresh one is started for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from aot_tune.declare.discovery import FoundKernel
from aot_tune.nvidia import cutile
from aot_tune.tables.states import State
from aot_tune.tuner.measure.gpu_lock import GpuLock
from aot_tune.tuner.measure.rounds import MOST_ROUNDS, combined, in_turn, settled
from aot_tune.tuner.measure.supervise import Limits, Supervisor
from aot_tune.tuner.measure.trials import Conditions, Cubins, Pace, Strikes, TrialRun, ignore
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.tuner.measure.worker.backend import LAUNCHES, RECHECK_SEEDS, SEEDS, TIMING
from aot_tune.tuner.outcome import Failure, Measurement, Outcome, Stage
from aot_tune.tuner.process.worker import WorkerDied
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

GPU_BACKEND = "aot_tune.tuner.measure.worker.gpu:GpuBackend"


def _ignore_round(number: int, outcome: Outcome) -> None:
    pass


class Session(Protocol):
    """What a sweep asks of a session. `MeasureSession` is one, on a GPU of this machine."""

    @property
    def conditions(self) -> list[Conditions]:
        """The conditions of each request that was answered, in order."""

    @property
    def verify_s(self) -> float:
        """Time that all requests so far spent verifying, seconds."""

    @property
    def start_s(self) -> float:
        """Time that all starts of workers took so far, seconds."""

    @property
    def open_s(self) -> float:
        """Time that making problems' arguments and references took so far, seconds."""

    def turn_to(self, found: FoundKernel, strikes: Strikes) -> None:
        """Measure another kernel from here on."""

    def close(self) -> None:
        """Release the GPU."""

    def interrupt(self) -> None:
        """End what is being measured, called by another thread."""

    def identity(self) -> dict[str, str]:
        """The conditions without which times cannot be compared."""

    def device(self) -> Device:
        """The GPU as grids are computed for it."""

    def measure(
        self,
        problem: Problem,
        configs: Cubins,
        *,
        on_outcome: Callable[[Outcome], None] = ...,
        known: Mapping[Config, Measurement] | None = ...,
        least_us: float = ...,
    ) -> list[Outcome]:
        """Verify and time each config once."""

    def finals(
        self,
        problem: Problem,
        configs: Cubins,
        *,
        on_round: Callable[[int, Outcome], None] = ...,
        taken: Mapping[Config, Sequence[Measurement]] | None = ...,
    ) -> list[Outcome]:
        """Time verified configs again, interleaved in rounds."""

    def time_in_state(
        self,
        state: State,
        problem: Problem,
        configs: Cubins,
        *,
        on_outcome: Callable[[Outcome], None] = ...,
    ) -> list[Outcome]:
        """Time verified configs in one of the GPU's states."""

    def recheck(self, problem: Problem, configs: Cubins) -> list[Failure]:
        """Verify winners again, in a process that has timed nothing."""

    def remember_fault(self, problem: Problem, config: Config, message: str, stage: Stage = ...) -> None:
        """Count what an earlier run recorded in the journal."""

    def forget_faults(self, problem: Problem) -> None:
        """Count no fault on a problem any more."""


class MeasureSession:
    """Holds one GPU and a worker on it. For use by one thread.

    Args:
        found: The first kernel.
        gpu_index: The GPU's index as torch counts, ``cuda:<index>``.
        limits: Time limits.
        on_event: Receives one line for a person when a worker is replaced, a config is struck, or another
            process computes on the GPU when this begins.
        backend: ``package.module:Class`` of the backend in the worker; tests name a scripted one.
        arguments: The backend's keyword arguments; those of `GPU_BACKEND` when None.
        strikes: The faults of the first kernel's configs, which the sessions of several GPUs share; own ones
            when None.

    Raises:
        TuneError: Another tuner holds the GPU.
    """

    def __init__(
        self,
        found: FoundKernel,
        gpu_index: int = 0,
        limits: Limits | None = None,
        *,
        on_event: Callable[[str], None] = lambda line: None,
        backend: str = GPU_BACKEND,
        arguments: Mapping[str, object] | None = None,
        strikes: Strikes | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._on_event = on_event
        self._gpu = gpu_state.identity(gpu_index)
        self._lock = GpuLock(self._gpu["uuid"] or f"cuda-{gpu_index}", f"tuning {found.tunable.name}")
        # The worker sees its own GPU alone, so that no function of the declaration can use another one.
        uuid = self._gpu["uuid"]
        environment = {"CUDA_VISIBLE_DEVICES": uuid} if uuid else {}
        self._index_in_worker = 0 if uuid else gpu_index
        self._arguments = None if arguments is None else dict(arguments)
        init = {"backend": backend, "arguments": self._arguments_for(found)}
        self._supervisor = Supervisor(init, self._limits, on_event, environment)
        self._strikes = strikes or Strikes(on_event)
        self._paces: dict[str, Pace] = {}
        self._pace = self._paces.setdefault(found.tunable.name, Pace())
        self.conditions: list[Conditions] = []
        """The conditions of each request that was answered, in order."""
        self.verify_s = 0.0
        """Time that all requests so far spent verifying, seconds."""
        # The lock admits one tuner of a host. NVML also tells of those in other containers, and of servers.
        others = gpu_state.GpuMonitor(self._gpu["uuid"]).processes()
        if others:
            on_event(
                f"other processes compute on the GPU ({', '.join(map(str, sorted(others)))}): times taken "
                "beside them are marked as disturbed; stop them, or choose another GPU"
            )

    def _arguments_for(self, found: FoundKernel) -> dict[str, object]:
        """The backend's keyword arguments for a kernel."""
        own = {"module": found.module, "name": found.tunable.name, "gpu_index": self._index_in_worker}
        return own if self._arguments is None else self._arguments

    def turn_to(self, found: FoundKernel, strikes: Strikes) -> None:
        """Measure another kernel from here on.

        Args:
            found: The kernel.
            strikes: The faults of its configs.
        """
        self._strikes = strikes
        self._pace = self._paces.setdefault(found.tunable.name, Pace())
        self._supervisor.turn_to(self._arguments_for(found))
        self._lock.say(f"tuning {found.tunable.name}")

    def prepare(self) -> None:
        """Let the worker's process start and import what takes long; it touches no GPU yet."""
        self._supervisor.prepare()

    def __enter__(self) -> MeasureSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker and release the GPU."""
        self._supervisor.close()
        self._lock.release()

    def interrupt(self) -> None:
        """End what is being measured, called by another thread until the measuring one has ended.

        The measuring thread gets a `aot_tune.tuner.measure.supervise.MeasuringStopped`, and nothing is
        blamed.
        """
        self._supervisor.interrupt()

    @property
    def start_s(self) -> float:
        """Time that all starts of workers took so far, seconds."""
        return self._supervisor.start_s

    @property
    def open_s(self) -> float:
        """Time that making problems' arguments and references took so far, seconds."""
        return self._supervisor.open_s

    # What is measured on ------------------------------------------------------------------------------------

    def identity(self) -> dict[str, str]:
        """The conditions without which times cannot be compared: GPU, driver, compiler, way of timing."""
        compiler = cutile.compiler_version() or ""
        return {**self._gpu, "cuda_tile": cutile.version(), "tileiras": compiler, "timing": TIMING}

    def device(self) -> Device:
        """The GPU as grids are computed for it; starts the worker."""
        device = self._supervisor.ask("device")
        if not isinstance(device, Device):
            raise WorkerDied(None, "", f"described its GPU as {device!r:.80}")
        return device

    # Measuring ----------------------------------------------------------------------------------------------

    def measure(
        self,
        problem: Problem,
        configs: Cubins,
        *,
        on_outcome: Callable[[Outcome], None] = ignore,
        known: Mapping[Config, Measurement] | None = None,
        least_us: float = 0.0,
    ) -> list[Outcome]:
        """Verify and time each config once.

        Args:
            problem: The problem.
            configs: The candidates.
            on_outcome: Receives each outcome as soon as it stands. Each time comes twice: as provisional when
                it was taken, and once more when its rivals were timed, taken in turn with theirs where all
                are long.
            known: Provisional times of an earlier run: their configs are not verified and timed alone again.
                Those of configs that are not in `configs` say how fast the others are.
            least_us: The least time in which this GPU can solve the problem, microseconds: a shorter one is
                taken again, and a config without any other fails at the stage ``timing``.

        Returns:
            One outcome for each config, in their order.

        Raises:
            GpuLostError: The GPU does not come back.
            ProblemFailedError: The problem's arguments cannot be made.
            DeclarationError: The declaration is wrong, for example because the kernel changes an argument
                that it does not name.
        """
        run = TrialRun(
            "measure", problem, configs, self._strikes, self._pace, on_outcome,
            known=known, more={"least_us": least_us},
        )  # fmt: skip
        outcomes = self._run(run, problem, configs, SEEDS).values()
        return [outcome for outcome in outcomes if outcome is not None]

    def finals(
        self,
        problem: Problem,
        configs: Cubins,
        *,
        on_round: Callable[[int, Outcome], None] = _ignore_round,
        taken: Mapping[Config, Sequence[Measurement]] | None = None,
    ) -> list[Outcome]:
        """Time verified configs again, interleaved in rounds, until their order is outside the noise or tied.

        Args:
            problem: The problem.
            configs: The finalists; they were measured before, and are not verified again.
            on_round: Receives the number of a round, from 0, and each config's outcome in it as soon as it is
                there.
            taken: The rounds of an earlier run, for each config those from the first on. What they lack is
                timed, and the result is that of a run without interruption.

        Returns:
            For each finalist its median over the rounds, or its failure in one of them. There are at most
            `MOST_ROUNDS` rounds; `aot_tune.tuner.measure.rounds.settled` says when fewer suffice.

        Raises:
            GpuLostError: The GPU does not come back.
            ProblemFailedError: The problem's arguments cannot be made.
            DeclarationError: The declaration is wrong.
        """
        self._supervisor.prepare()  # winners are checked in a fresh process
        failures: dict[Config, Outcome] = {}
        earlier = {config: list((taken or {}).get(config, ())) for config in configs}
        rounds: dict[Config, list[Measurement]] = {config: [] for config in configs}
        for number in range(MOST_ROUNDS):
            left = [config for config in configs if config not in failures]
            missing = [config for config in in_turn(left, number) if len(earlier[config]) <= number]
            for config in left:
                rounds[config] += earlier[config][number : number + 1]
            for config, outcome in self._round(problem, configs, missing, number, on_round).items():
                if isinstance(outcome, Measurement):
                    rounds[config].append(outcome)
                elif outcome is not None:
                    failures[config] = outcome
            survivors = [rounds[config] for config in configs if config not in failures]
            if not survivors or settled(survivors):
                break
        return [failures.get(config) or combined(config, rounds[config]) for config in configs]

    def time_in_state(
        self,
        state: State,
        problem: Problem,
        configs: Cubins,
        *,
        on_outcome: Callable[[Outcome], None] = ignore,
    ) -> list[Outcome]:
        """Time verified configs in one of the GPU's states, launch by launch, in turn.

        Args:
            state: The state.
            problem: The problem.
            configs: The configs; they were measured before, and are not verified again.
            on_outcome: Receives each outcome as soon as it stands.

        Returns:
            One outcome for each config, in their order.

        Raises:
            GpuLostError: The GPU does not come back.
            ProblemFailedError: The problem's arguments cannot be made.
            DeclarationError: The declaration is wrong.
        """
        run = TrialRun(
            "time_in_state", problem, configs, self._strikes, self._pace, on_outcome, more={"state": state}
        )
        outcomes = self._run(run, problem, configs, SEEDS).values()
        return [outcome for outcome in outcomes if outcome is not None]

    def _round(
        self,
        problem: Problem,
        configs: Cubins,
        order: Sequence[Config],
        number: int,
        on_round: Callable[[int, Outcome], None],
    ) -> dict[Config, Outcome | None]:
        """Time some configs once, in this order; return the outcome of each."""
        if not order:
            return {}

        def standing(outcome: Outcome) -> None:
            if not (isinstance(outcome, Measurement) and outcome.provisional):
                on_round(number, outcome)

        cubins = {config: configs[config] for config in order}
        run = TrialRun("time", problem, cubins, self._strikes, self._pace, standing)
        return self._run(run, problem, cubins, SEEDS)

    def recheck(
        self,
        problem: Problem,
        configs: Cubins,
        seeds: tuple[int, int] = RECHECK_SEEDS,
        launches: int = LAUNCHES,
    ) -> list[Failure]:
        """Verify winners again, on other seeds and many times, in a process that has timed nothing.

        Rechecks that follow one another share that process. Do them together, because a start takes seconds.

        Args:
            problem: The problem.
            configs: The winners.
            seeds: The seeds of the arguments.
            launches: Launches of each config after its verification. Of a config whose launches take long
                there are fewer (`aot_tune.tuner.measure.worker.runner.LAUNCHES_SECONDS`).

        Returns:
            A failure for each config that has one. Only the stage ``verify`` means that it is wrong.

        Raises:
            GpuLostError: The GPU does not come back.
            ProblemFailedError: The problem's arguments cannot be made.
            DeclarationError: The declaration is wrong.
        """
        if not self._supervisor.unused:
            self._supervisor.replace("winners are checked again in a fresh process")
        run = TrialRun("check", problem, configs, self._strikes, self._pace, launches=launches)
        outcomes = self._run(run, problem, configs, seeds)
        return [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]

    def remember_fault(self, problem: Problem, config: Config, message: str, stage: Stage = "fault") -> None:
        """Count what an earlier run recorded in the journal: a config's fault, time-out or wrong result."""
        self._strikes.remember(problem, config, stage)

    def forget_faults(self, problem: Problem) -> None:
        """Count no fault on a problem any more, because another GPU, which is lost, reported them."""
        self._strikes.forget(problem)

    # Running ------------------------------------------------------------------------------------------------

    def _run(
        self, run: TrialRun, problem: Problem, configs: Cubins, seeds: tuple[int, ...]
    ) -> dict[Config, Outcome | None]:
        """Run trials until each has an outcome, whatever happens; return them in the order of `configs`."""
        try:
            while run.pending:
                run.attempt(self._supervisor, seeds, self._limits)
        finally:
            self.conditions += run.conditions
            self.verify_s += run.verify_s
        return {config: run.outcomes[config] for config in configs}
