"""A stand-in for NVML's binding that knows a few equal GPUs, as the scenario's plan describes them."""

from __future__ import annotations

import sys
import types

from tests.faults import injector

THROTTLED = 0x040  # thermal (hardware)


def install() -> None:
    """Let every later `import pynvml` of this process find the stand-in."""
    plan = injector.plan()

    def reasons(_: object) -> int:
        if plan.throttled and injector.tally("asked for throttling") < plan.throttled:
            injector.injected()
            return THROTTLED
        return 0

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: plan.gpus,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: 0,
        "nvmlDeviceGetUUID": lambda handle: plan.uuid if plan.gpus == 1 else f"{plan.uuid}-{handle}",
        "nvmlDeviceGetName": lambda handle: plan.gpu,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlSystemGetDriverVersion": lambda: plan.driver,
        "nvmlDeviceGetClockInfo": lambda handle, which: 1980,
        "nvmlDeviceGetApplicationsClock": lambda handle, which: 1980,
        "nvmlDeviceGetDefaultApplicationsClock": lambda handle, which: 1980,
        "nvmlDeviceGetTemperature": lambda handle, which: 40,
        "nvmlDeviceGetCurrentClocksEventReasons": reasons,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
    }
    module = types.ModuleType("pynvml")
    vars(module).update(answers, NVMLError=RuntimeError)
    vars(module).update(NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0)
    sys.modules["pynvml"] = module
