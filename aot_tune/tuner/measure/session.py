"""Measure one kernel's configs on one GPU from a process that holds no CUDA context, and survive them.

When a config hangs, crashes the worker or poisons the GPU's context:

1. The worker has reported which config it was running. That config is blamed and no other. The worker's
   process group is killed.
2. A fresh worker must pass a canary. After `Limits.recoveries` workers in a row that do not, the sweep stops
   with a `GpuLostError`.
3. The config runs again, as the first in the fresh worker. If it passes, the fault is forgiven, once on each
   problem.
4. Otherwise it is recorded (stage ``timeout`` or ``fault``), the worker is replaced once more, and the sweep
   goes on with the other configs.
5. A config that was recorded on `FAULTS_TO_STRIKE` problems is struck: it is not run again for this kernel.

A config that runs out of memory is also tried again in a fresh worker. It is recorded as ``memory`` and is
never struck for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from aot_tune.declare.discovery import FoundKernel
from aot_tune.nvidia import cutile
from aot_tune.tuner.measure.gpu_lock import GpuLock
from aot_tune.tuner.measure.rounds import MOST_ROUNDS, combined, in_turn, settled
from aot_tune.tuner.measure.supervise import GpuLostError, Limits, OutOfMemory, Supervisor
from aot_tune.tuner.measure.trials import Conditions, Cubins, Strikes, TrialRun
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.tuner.measure.worker.backend import RECHECK_SEEDS, SEEDS, TIMING
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

GPU_BACKEND = "aot_tune.tuner.measure.worker.gpu:GpuBackend"


class MeasureSession:
    """Holds one GPU and a worker on it. For use by one thread.

    Args:
        found: The kernel.
        gpu_index: The GPU's index as torch counts, ``cuda:<index>``.
        limits: Time limits.
        on_event: Receives one line for a person when a worker is replaced or a config is struck.
        backend: ``package.module:Class`` of the backend in the worker; tests name a scripted one.
        arguments: The backend's keyword arguments; those of `GPU_BACKEND` when None.

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
    ) -> None:
        self._limits = limits or Limits()
        self._on_event = on_event
        self._gpu = gpu_state.identity(gpu_index)
        name = found.tunable.name
        self._lock = GpuLock(self._gpu["uuid"] or f"cuda-{gpu_index}", f"tuning {name}")
        own = {"module": found.module, "name": name, "gpu_index": gpu_index}
        init = {"backend": backend, "arguments": own if arguments is None else dict(arguments)}
        self._supervisor = Supervisor(init, self._limits, on_event)
        self._strikes = Strikes(on_event)
        self.conditions: list[Conditions] = []
        """The conditions of each request that was answered, in order."""
        self.verify_s = 0.0
        """Time that all requests so far spent verifying, seconds."""

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

    # What is measured on ------------------------------------------------------------------------------------

    def identity(self) -> dict[str, str]:
        """The conditions without which times cannot be compared: GPU, driver, compiler, way of timing."""
        compiler = cutile.compiler_version() or ""
        return {**self._gpu, "cuda_tile": cutile.version(), "tileiras": compiler, "timing": TIMING}

    def device(self) -> Device:
        """The GPU as grids are computed for it; starts the worker."""
        device: Device = self._supervisor.ask("device")
        return device

    # Measuring ----------------------------------------------------------------------------------------------

    def measure(self, problem: Problem, configs: Cubins) -> list[Outcome]:
        """Verify and time each config once.

        Args:
            problem: The problem.
            configs: The candidates.

        Returns:
            One outcome for each config, in their order.

        Raises:
            GpuLostError: The GPU does not come back; its `outcomes` are those that came before.
            DeclarationError: The declaration is wrong, for example because the kernel changes an argument
                that it does not name.
        """
        return list(self._run("measure", problem, configs, SEEDS).values())

    def finals(self, problem: Problem, configs: Cubins) -> list[Outcome]:
        """Time verified configs again, interleaved in rounds, until their order is outside the noise or tied.

        Args:
            problem: The problem.
            configs: The finalists; they were measured before, and are not verified again.

        Returns:
            For each finalist its median over the rounds, or its failure in one of them. There are at most
            `MOST_ROUNDS` rounds; `aot_tune.tuner.measure.rounds.settled` says when fewer suffice.
        """
        failures: dict[Config, Outcome] = {}
        taken: dict[Config, list[Measurement]] = {config: [] for config in configs}
        for number in range(MOST_ROUNDS):
            left = [config for config in configs if config not in failures]
            order = {config: configs[config] for config in in_turn(left, number)}
            for config, outcome in self._run("time", problem, order, SEEDS).items():
                if isinstance(outcome, Measurement):
                    taken[config].append(outcome)
                elif outcome is not None:
                    failures[config] = outcome
            survivors = [taken[config] for config in configs if config not in failures]
            if not survivors or settled(survivors):
                break
        return [failures.get(config) or combined(config, taken[config]) for config in configs]

    def recheck(
        self, problem: Problem, configs: Cubins, seeds: tuple[int, int] = RECHECK_SEEDS
    ) -> list[Failure]:
        """Verify winners again, on other seeds, in a process that has timed nothing.

        Rechecks that follow one another share that process. Do them together, because a start takes seconds.

        Returns:
            A failure for each config that is wrong or fails in another way.
        """
        if not self._supervisor.unused:
            self._supervisor.replace("winners are checked again in a fresh process")
        outcomes = self._run("check", problem, configs, seeds)
        return [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]

    def remember_fault(self, problem: Problem, config: Config, message: str) -> None:
        """Count a config's fault or time-out that an earlier run recorded in the journal."""
        self._strikes.count(problem, config, message)

    # Running ------------------------------------------------------------------------------------------------

    def _run(
        self, method: str, problem: Problem, configs: Cubins, seeds: tuple[int, ...]
    ) -> dict[Config, Any]:
        """Run trials until each has an outcome, whatever happens; return them in the order of `configs`."""
        run = TrialRun(method, problem, configs, self._strikes)
        try:
            while run.pending:
                run.attempt(self._supervisor, seeds, self._limits)
        except OutOfMemory as error:
            for config in list(run.pending):
                run.finish(config, Failure(config=config, stage="memory", message=str(error)))
        except GpuLostError as error:
            kept = [outcome for outcome in run.outcomes.values() if outcome is not None]
            raise GpuLostError(str(error), kept) from error
        finally:
            self.conditions += run.conditions
            self.verify_s += run.verify_s
        return {config: run.outcomes[config] for config in configs}
