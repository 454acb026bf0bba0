"""Read one GPU's clocks, their limits and its processes through NVML. Creates no CUDA context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aot_tune.nvidia.nvml import started, visible_gpus

REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (software)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}
"""Names of NVML's clock event reasons (``nvmlClocksEventReason*``) by their bits."""

THROTTLED = ("hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake")
"""The reasons that spoil a sample. The software power cap does not: a large matmul reaches it whenever it
runs, in a server as in a sweep, and would reach it again. It is recorded."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One reading of the GPU's state. A field is None where NVML gives no answer."""

    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors, MHz."""

    memory_clock_mhz: int | None = None
    """Clock of the memory, MHz."""

    temperature_c: int | None = None
    """Temperature, degrees Celsius."""

    reasons: tuple[str, ...] | None = None
    """The reasons why the clocks are not higher, from `REASONS`."""

    clocks_locked: bool | None = None
    """Whether application clocks are set. NVML does not report a range set by ``nvidia-smi -lgc``."""

    def as_record(self) -> dict[str, object]:
        """Return the reading as plain values for a journal."""
        return {**vars(self), "reasons": None if self.reasons is None else list(self.reasons)}


class GpuMonitor:
    """Reads one GPU's state. NVML stays initialised until the process ends: a start costs 10 ms and more.

    Args:
        uuid: NVML's identifier, ``GPU-…``. With an identifier unknown to NVML each answer is None.
    """

    def __init__(self, uuid: str) -> None:
        nvml = started()
        self._handle = None if nvml is None else _ask(lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
        self._nvml = None if self._handle is None else nvml

    def read(self) -> GpuState:
        """Read the present state."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return GpuState()
        mask = self._mask()
        sm, memory = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        wanted = _ask(lambda: int(nvml.nvmlDeviceGetApplicationsClock(handle, sm)))
        normal = _ask(lambda: int(nvml.nvmlDeviceGetDefaultApplicationsClock(handle, sm)))
        return GpuState(
            sm_clock_mhz=_ask(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, sm))),
            memory_clock_mhz=_ask(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, memory))),
            temperature_c=_ask(lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            reasons=None if mask is None else named(mask),
            clocks_locked=_locked(mask, wanted, normal),
        )

    def throttled(self) -> str | None:
        """Return the reasons of `THROTTLED` that hold now, separated by commas; None without any."""
        held_back = [reason for reason in named(self._mask() or 0) if reason in THROTTLED]
        return ", ".join(held_back) or None

    def processes(self) -> frozenset[int] | None:
        """Return ids of the processes that compute on the GPU, ours included.

        In a container NVML may report none, or ids of another namespace.
        """
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return None
        running = _ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return None if running is None else frozenset(int(process.pid) for process in running)

    def driver(self) -> str:
        """Return the driver's version; empty where NVML gives no answer."""
        if self._nvml is None:
            return ""
        version = _ask(self._nvml.nvmlSystemGetDriverVersion)
        return version.decode() if isinstance(version, bytes) else version or ""

    def _mask(self) -> int | None:
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return None
        mask: int | None = _ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
        if mask is None:  # drivers before 535 have only the older name
            mask = _ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        return mask


def named(mask: int) -> tuple[str, ...]:
    """Return the names of the reasons in NVML's bit mask."""
    return tuple(name for bit, name in REASONS.items() if mask & bit)


def _locked(mask: int | None, wanted: int | None, normal: int | None) -> bool | None:
    if mask is not None and "application clocks" in named(mask):
        return True
    if wanted is None or normal is None:
        return None if mask is None else False
    return wanted != normal


def identity(gpu_index: int) -> dict[str, str]:
    """Return the GPU's name and UUID and the driver's version, on which times depend.

    Args:
        gpu_index: As torch counts: ``cuda:<index>``.
    """
    gpus = visible_gpus() or ()
    if gpu_index >= len(gpus):
        return {"gpu": "", "uuid": "", "driver": ""}
    gpu = gpus[gpu_index]
    return {"gpu": gpu.name, "uuid": gpu.uuid, "driver": GpuMonitor(gpu.uuid).driver()}


def _ask(question: Callable[[], Any]) -> Any:
    """Return NVML's answer, or None: containers, MIG slices and consumer boards lack many."""
    try:
        return question()
    except Exception:
        return None
