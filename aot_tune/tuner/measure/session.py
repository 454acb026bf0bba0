"""Measure one kernel's configs on one GPU from a process that holds no CUDA context, and survive them.

What happens to a config that hangs, crashes the worker or poisons the GPU's context:

1. The worker said which config it was running: that is blamed, no other. Its process group is killed.
2. A fresh worker must pass a canary. `Limits.recoveries` in a row that do not are a `GpuLostError`.
3. The config runs again, first in the fresh worker. If it passes, that is forgiven, once on each problem.
4. Else it is recorded (stage ``timeout`` or ``fault``), the worker replaced once more, and the others go on.
5. A config that was recorded on two problems is struck: it is not run again for this kernel.

Running out of memory is retried in a fresh worker too, recorded as ``memory``, and never strikes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from aot_tune.declare.discovery import Found
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
    """Holds one GPU and a worker on it. Not for several threads.

    Args:
        found: The kernel.
        gpu_index: As torch counts: ``cuda:<index>``.
        limits: Time limits.
        on_event: Told in one line what a person may want to know: a worker replaced, a config struck.
        backend: What runs in the worker; the tests script another.
        arguments: The backend's keyword arguments; those of `GPU_BACKEND` when None.

    Raises:
        TuneError: Another tuner holds the GPU.
    """

    def __init__(
        self,
        found: Found,
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
        """Of each request that came to its end, in order."""
        self.verify_s = 0.0
        """Seconds of all requests so far that were spent verifying."""

    def __enter__(self) -> MeasureSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker and let others have the GPU."""
        self._supervisor.close()
        self._lock.release()

    # What is measured on ------------------------------------------------------------------------------------

    def identity(self) -> dict[str, str]:
        """What makes figures incomparable when it changes: GPU, UUID, driver, cuda-tile, tileiras, timing."""
        compiler = cutile.compiler_version() or ""
        return {**self._gpu, "cuda_tile": cutile.version(), "tileiras": compiler, "timing": TIMING}

    def device(self) -> Device:
        """The GPU as grids see it; starts the worker."""
        device: Device = self._supervisor.ask("device")
        return device

    # Measuring ----------------------------------------------------------------------------------------------

    def measure(
        self, problem: Problem, configs: Cubins, on_outcome: Callable[[Outcome], None] = lambda outcome: None
    ) -> list[Outcome]:
        """Verify and time each config once.

        Args:
            problem: The problem.
            configs: The candidates.
            on_outcome: Told each outcome as it comes; when it returns, the outcome counts as acknowledged.

        Returns:
            One outcome for each config, in their order.

        Raises:
            GpuLostError: The GPU does not come back; its `outcomes` are those reported before.
            DeclarationError: The kernel changes an argument that the declaration does not name, say.
        """
        return list(self._run("measure", problem, configs, SEEDS, on_outcome).values())

    def finals(
        self,
        problem: Problem,
        configs: Cubins,
        rounds: int = MOST_ROUNDS,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    ) -> list[Outcome]:
        """Time verified configs again, interleaved in rounds, until their order is outside the noise or tied.

        Args:
            problem: The problem.
            configs: The finalists; they were measured before, and are not verified again.
            rounds: The most rounds; `aot_tune.tuner.measure.rounds` says when fewer do.
            on_outcome: Told each finalist's outcome, once.

        Returns:
            For each finalist its median over the rounds, or the failure that it met this time.
        """
        failures: dict[Config, Outcome] = {}
        taken: dict[Config, list[Measurement]] = {config: [] for config in configs}
        for number in range(rounds):
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
        results = [failures.get(config) or combined(config, taken[config]) for config in configs]
        for result in results:
            on_outcome(result)
        return results

    def recheck(
        self, problem: Problem, configs: Cubins, seeds: tuple[int, int] = RECHECK_SEEDS
    ) -> list[Failure]:
        """Verify winners again, on other seeds, in a process that has timed nothing.

        Rechecks that follow one another share that process: do them together, starting one takes seconds.

        Returns:
            Those that are wrong, or fail in another way.
        """
        if not self._supervisor.unused:
            self._supervisor.replace("winners are checked again in a fresh process")
        outcomes = self._run("check", problem, configs, seeds)
        return [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]

    def remember_fault(self, problem: Problem, config: Config, message: str) -> None:
        """Count a config's fault or time-out that a journal knows of."""
        self._strikes.count(problem, config, message)

    def struck(self, config: Config) -> Failure | None:
        """Why a config is not run any more for this kernel, or None."""
        return self._strikes.struck(config)

    # Running ------------------------------------------------------------------------------------------------

    def _run(
        self,
        method: str,
        problem: Problem,
        configs: Cubins,
        seeds: tuple[int, ...],
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    ) -> dict[Config, Any]:
        """Run trials to their ends, whatever happens on the way; outcomes in the order of `configs`."""
        run = TrialRun(method, problem, configs, self._strikes, on_outcome)
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
