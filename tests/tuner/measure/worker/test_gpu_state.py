"""What NVML tells, told by a stand-in: which reasons spoil a sample, and that silence is no state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from aot_tune.tuner.measure.worker.gpu_state import GpuMonitor, GpuState, named


def refuses(*arguments: Any) -> Any:
    raise RuntimeError("not supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The answers of a GPU; a test changes them."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4,
        "nvmlDeviceGetApplicationsClock": lambda handle, clock: 1980,
        "nvmlDeviceGetDefaultApplicationsClock": lambda handle, clock: 1980,
        "nvmlDeviceGetClockInfo": lambda handle, clock: 1755 if clock == pynvml.NVML_CLOCK_SM else 3201,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=7),
            SimpleNamespace(pid=3),
        ],
    }
    for name in answers:
        monkeypatch.setattr(pynvml, name, lambda *arguments, name=name: answers[name](*arguments))
    return answers


def test_a_reading_names_the_reasons_and_the_clocks(nvml: dict[str, Any]) -> None:
    assert GpuMonitor("GPU-1").read() == GpuState(
        sm_clock_mhz=1755,
        memory_clock_mhz=3201,
        temperature_c=41,
        reasons=("power cap",),
        clocks_locked=False,
    )


def test_the_power_cap_spoils_nothing_and_heat_does(nvml: dict[str, Any]) -> None:
    monitor = GpuMonitor("GPU-1")
    assert monitor.throttled() is None
    nvml["nvmlDeviceGetCurrentClocksEventReasons"] = lambda handle: 0x4 | 0x40 | 0x80
    assert monitor.throttled() == "thermal (hardware), power brake"


@pytest.mark.parametrize(
    ("mask", "wanted", "locked"), [(0x2, 1980, True), (0x4, 1410, True), (0x4, 1980, False)]
)
def test_application_clocks_are_locked_clocks(
    nvml: dict[str, Any], mask: int, wanted: int, locked: bool
) -> None:
    nvml["nvmlDeviceGetCurrentClocksEventReasons"] = lambda handle: mask
    nvml["nvmlDeviceGetApplicationsClock"] = lambda handle, clock: wanted
    assert GpuMonitor("GPU-1").read().clocks_locked is locked


def test_an_old_driver_is_asked_by_the_older_name(
    nvml: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml["nvmlDeviceGetCurrentClocksEventReasons"] = refuses
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: 0x20)
    assert GpuMonitor("GPU-1").throttled() == "thermal (software)"


def test_each_question_that_goes_unanswered_is_none_and_the_others_stand(nvml: dict[str, Any]) -> None:
    nvml["nvmlDeviceGetComputeRunningProcesses"] = refuses
    nvml["nvmlDeviceGetTemperature"] = refuses
    monitor = GpuMonitor("GPU-1")
    assert monitor.processes() is None
    assert monitor.read().temperature_c is None
    assert monitor.read().sm_clock_mhz == 1755


def test_without_nvml_nothing_is_known_and_nothing_is_spoilt(nvml: dict[str, Any]) -> None:
    nvml["nvmlInit"] = refuses
    monitor = GpuMonitor("GPU-1")
    assert monitor.read() == GpuState()
    assert (monitor.throttled(), monitor.processes(), monitor.driver()) == (None, None, "")


def test_every_bit_has_a_name_of_its_own() -> None:
    assert len(set(named(0x1FF))) == 9
    assert named(0) == ()
