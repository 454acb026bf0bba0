"""What a measuring backend without a GPU says of it: an H200 that nothing disturbs. Imports no torch."""

from __future__ import annotations

from aot_tune.tuner.measure.worker.backend import Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Stage
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device


class IdleGpu:
    """The part of a `Backend` that tells of the GPU."""

    def device(self) -> Device:
        return Device.reference(Arch.parse("sm90"))

    def state(self) -> GpuState:
        return GpuState()

    def disturbance(self) -> str | None:
        return None

    def canary(self) -> None:
        pass

    def turn_to(self, **arguments: object) -> None:
        pass


class RightBackend(IdleGpu):
    """The part of a `Backend` that finds everything right."""

    def again(self, trial: Trial, number: int) -> str | None:
        return None

    def prepare(self) -> None:
        pass

    def check(self) -> str | None:
        return None

    def damage(self) -> str | None:
        return None

    def busy(self, seconds: float) -> None:
        pass

    def healthy(self) -> bool:
        return True

    def stage(self, error: Exception) -> Stage:
        return "launch"
