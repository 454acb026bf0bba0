"""Measure configs on one GPU from a process without a CUDA context, and survive their faults.

When a config hangs, crashes the worker or poisons the GPU's context:

1. The worker has reported which config it was running. That config is blamed and no other. The worker and
   its processes are killed.
2. A fresh worker must pass a canary. After `Limits.recoveries` workers in a row that fail it, the GPU is
   lost: a `GpuLostError`. Where they pass it, but the problem cannot be opened in them, the problem has
   failed: a `ProblemFailedError`.
3. The config runs again, as the first in the fresh worker. If it passes, the fault is forgiven, once on each
   problem. A hang gets no second try where it lasted far longer than the other configs of the problem take
   (`aot_tune.tuner.measure.blame.HOPELESS`), or where the config hung on another problem before.
4. Otherwise it is recorded (stage ``timeout`` or ``fault``), the worker is replaced once more, and the sweep
   goes on with the other configs, whose provisional times are kept.
5. A config that was recorded on `FAULTS_TO_EXCLUDE` problems is excluded: it no longer runs for this kernel.

A wrong result counts only when a second worker confirms it in `LAUNCHES` launches: another config may have
damaged the memory of the first check. All wrong configs of a request run again in one worker. A config that
was confirmed to be wrong on one problem needs no confirmation on another. So this costs the start of a
worker for each request with new wrong configs. A config that changes the memory of the check is blamed for
that, tried once more, and recorded as ``verify``.

A config that runs out of memory is also tried again in a fresh worker. It is recorded as ``memory`` and is
never excluded for it.

The worker goes on when the session turns to another kernel. Where the kernel's module conflicts with the
process's state, a fresh worker is started for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from aot_tune.declare.discovery import FoundKernel
from aot_tune.nvidia import cutile
from aot_tune.tuner.measure.blame import FaultCounts, Pace
from aot_tune.tuner.measure.gpu_lock import GpuLock
from aot_tune.tuner.measure.request import Finals, OnOutcome, Recheck, Reported, Request, Spent, ignore
from aot_tune.tuner.measure.rounds import MOST_ROUNDS, combined, in_turn, settled
from aot_tune.tuner.measure.supervise import Limits, Supervisor
from aot_tune.tuner.measure.trials import TrialRun
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.tuner.measure.worker.backend import TIMING
from aot_tune.tuner.outcome import Measurement, Outcome
from aot_tune.tuner.process.worker import WorkerDied
from aot_tune.values.config import Config
from aot_tune.values.device import Device

GPU_BACKEND = "aot_tune.tuner.measure.worker.gpu:GpuBackend"


class MeasureSession:
    """Holds one GPU and a worker on it. For use by one thread.

    Args:
        kernel: The first kernel.
        gpu_index: The GPU's index as torch counts, ``cuda:<index>``.
        limits: Time limits.
        on_event: Receives one line for the user when a worker is replaced, a config is excluded, or another
            process computes on the GPU at the start.
        backend: ``package.module:Class`` of the backend in the worker; tests name a scripted one.
        arguments: The backend's keyword arguments; the arguments of `GPU_BACKEND` when None.
        fault_counts: The faults of the first kernel's configs, shared by the sessions of several GPUs; a new
            count when None.

    Raises:
        TuneError: Another tuner holds the GPU.
    """

    def __init__(
        self,
        kernel: FoundKernel,
        gpu_index: int = 0,
        limits: Limits | None = None,
        *,
        on_event: Callable[[str], None] = lambda line: None,
        backend: str = GPU_BACKEND,
        arguments: Mapping[str, object] | None = None,
        fault_counts: FaultCounts | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._gpu = gpu_state.identity(gpu_index)
        self._lock = GpuLock(self._gpu["uuid"] or f"cuda-{gpu_index}", f"tuning {kernel.tunable.name}")
        # The worker sees its own GPU alone, so that no function of the declaration can use another one.
        uuid = self._gpu["uuid"]
        environment = {"CUDA_VISIBLE_DEVICES": uuid} if uuid else {}
        self._index_in_worker = 0 if uuid else gpu_index
        self._arguments = None if arguments is None else dict(arguments)
        init = {"backend": backend, "arguments": self._arguments_for(kernel)}
        self._supervisor = Supervisor(init, self._limits, on_event, environment)
        self._fault_counts = fault_counts or FaultCounts(on_event)
        self._paces: dict[str, Pace] = {}
        self._pace = self._paces.setdefault(kernel.tunable.name, Pace())
        self._spent = Spent()
        # The lock admits one tuner of a host. NVML also reports tuners in other containers, and servers.
        others = gpu_state.GpuMonitor(self._gpu["uuid"]).processes()
        if others:
            on_event(
                f"other processes compute on the GPU ({', '.join(map(str, sorted(others)))}): times taken "
                "while they run are marked as disturbed; stop them, or choose another GPU"
            )

    def _arguments_for(self, kernel: FoundKernel) -> dict[str, object]:
        """Return the backend's keyword arguments for a kernel."""
        own = {"module": kernel.module, "name": kernel.tunable.name, "gpu_index": self._index_in_worker}
        return own if self._arguments is None else self._arguments

    def turn_to(self, kernel: FoundKernel, fault_counts: FaultCounts) -> None:
        """Measure another kernel from here on: see `aot_tune.tuner.measure.request.Session`."""
        self._fault_counts = fault_counts
        self._pace = self._paces.setdefault(kernel.tunable.name, Pace())
        self._supervisor.turn_to(self._arguments_for(kernel))
        self._lock.set_purpose(f"tuning {kernel.tunable.name}")

    def __enter__(self) -> MeasureSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker and release the GPU."""
        self._supervisor.close()
        self._lock.release()

    def interrupt(self) -> None:
        """End the measurement; called from another thread until the measuring thread has ended.

        The measuring thread gets a `aot_tune.tuner.measure.supervise.MeasuringStopped`, and nothing is
        blamed.
        """
        self._supervisor.interrupt()

    @property
    def spent(self) -> Spent:
        """Time spent on all requests so far."""
        return replace(self._spent, start_s=self._supervisor.start_s, open_s=self._supervisor.open_s)

    # The GPU ------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, str]:
        """Return the conditions under which times compare: GPU, driver, compiler, way of timing."""
        compiler = cutile.compiler_version() or ""
        return {**self._gpu, "cuda_tile": cutile.version(), "tileiras": compiler, "timing": TIMING}

    def device(self) -> Device:
        """Return the GPU as grids are computed for it; starts the worker."""
        device = self._supervisor.ask("device")
        if not isinstance(device, Device):
            raise WorkerDied(None, "", f"described its GPU as {device!r:.80}")
        return device

    # Measuring ----------------------------------------------------------------------------------------------

    def answer(self, request: Request, on_outcome: OnOutcome = ignore) -> list[Outcome]:
        """Execute a request: see `aot_tune.tuner.measure.request.Session`."""
        if isinstance(request, Finals):
            return self._finals(request, on_outcome)
        if isinstance(request, Recheck) and not self._supervisor.unused:
            self._supervisor.replace("winners are checked again in a fresh process")
        outcomes = self._run(request, on_outcome)
        return [outcome for config in request.configs if (outcome := outcomes[config]) is not None]

    def _finals(self, request: Finals, on_outcome: OnOutcome) -> list[Outcome]:
        configs, taken = request.configs, request.taken
        failures: dict[Config, Outcome] = {}
        rounds: dict[Config, list[Measurement]] = {config: [] for config in configs}
        for number in range(MOST_ROUNDS):
            left = [config for config in configs if config not in failures]
            missing = [config for config in in_turn(left, number) if len(taken.get(config, ())) <= number]
            for config in left:
                rounds[config] += taken.get(config, ())[number : number + 1]
            if missing:
                this = replace(request, configs={config: configs[config] for config in missing})
                for config, outcome in self._run(this, on_outcome, number).items():
                    if isinstance(outcome, Measurement):
                        rounds[config].append(outcome)
                    elif outcome is not None:
                        failures[config] = outcome
            survivors = [rounds[config] for config in configs if config not in failures]
            if not survivors or settled(survivors):
                break
        answer = [failures.get(config) or combined(config, rounds[config]) for config in configs]
        for outcome in answer:
            if isinstance(outcome, Measurement):  # a failure was reported in its round
                on_outcome(Reported(outcome=outcome))
        return answer

    def _run(
        self, request: Request, on_outcome: OnOutcome, number: int | None = None
    ) -> dict[Config, Outcome | None]:
        """Run the trials of a request, or of one round, until each has an outcome."""
        run = TrialRun(request, self._fault_counts, self._pace, on_outcome, number=number)
        try:
            while run.pending:
                run.attempt(self._supervisor, self._limits)
        finally:
            self._spent += Spent(verify_s=run.verify_s, conditions=tuple(run.conditions))
        return run.outcomes
