"""Ask NVML about this machine's GPUs and driver, without creating a CUDA context.

The only module that imports NVML's binding. The functions return None where NVML cannot answer, because its
library or the driver is missing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aot_tune.values.arch import KNOWN_ARCHS, Arch


def started() -> Any:
    """Import and initialise NVML's binding; None where that fails. The caller shuts it down."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML has many error types of its own; each means that it cannot be used
        return None
    return pynvml


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of this machine, as NVML describes it."""

    index: int
    """Place among the devices this process may use, as torch counts them (``cuda:<index>``)."""

    name: str
    """Product name, ``NVIDIA H200``."""

    arch: Arch | None
    """Architecture; None where cuTile does not compile for it."""

    uuid: str
    """NVML's identifier of the GPU, ``GPU-…``, or of the MIG device, ``MIG-…``."""


def visible_gpus() -> tuple[Gpu, ...] | None:
    """List the GPUs that this process may use, without a CUDA context. Takes 58 ms on an H200 host.

    CUDA_VISIBLE_DEVICES is honoured, by index and by UUID, of a MIG device too. NVML counts GPUs by PCI bus,
    but CUDA counts them by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID: on a host with several kinds of GPU an
    index may differ.

    Returns:
        The GPUs in torch's order; None where NVML cannot answer.
    """
    nvml = started()
    if nvml is None:
        return None
    try:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        whole = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        devices = [(gpu, gpu) for gpu in whole]
        if variable is not None and _MIG in variable:
            devices += [(device, gpu) for gpu in whole for device in _mig_devices(nvml, gpu)]
        uuids = [_text(nvml.nvmlDeviceGetUUID(device)) for device, _ in devices]
        gpus: list[Gpu] = []
        for place in _visible_places(variable, uuids, len(whole)):
            device, gpu = devices[place]
            capability = Arch(*nvml.nvmlDeviceGetCudaComputeCapability(gpu))
            gpus.append(
                Gpu(
                    index=len(gpus),
                    name=_text(nvml.nvmlDeviceGetName(device)),
                    arch=capability if capability in KNOWN_ARCHS else None,
                    uuid=uuids[place],
                )
            )
        return tuple(gpus)
    except Exception:  # a MIG slice or a container may forbid some of these queries
        return None
    finally:
        _shut_down(nvml)


def driver_version() -> str | None:
    """Return the GPU driver's version, without a CUDA context; None where NVML cannot answer."""
    nvml = started()
    if nvml is None:
        return None
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # as in `visible_gpus`
        return None
    finally:
        _shut_down(nvml)


def _shut_down(nvml: Any) -> None:
    with suppress(Exception):  # the answers are known already
        nvml.nvmlShutdown()


_PATIENCE_S = 5.0
"""Seconds that all imports and forks together wait for NVML. It answers in 58 ms on an H200 host, and in a
few seconds where the driver must first wake the GPUs up."""


class _Question:
    """The process's query of `visible_gpus` in the background, and its answer."""

    thread: threading.Thread | None = None
    asked_at_s: float = 0.0
    gpus: tuple[Gpu, ...] | None = None

    @classmethod
    def ask(cls) -> None:
        cls.gpus = visible_gpus()

    @classmethod
    def wait(cls) -> None:
        """Wait for the answer, until `_PATIENCE_S` after the question at the latest."""
        if cls.thread is not None:
            cls.thread.join(max(0.0, cls.asked_at_s + _PATIENCE_S - time.monotonic()))


def ask_for_gpus() -> None:
    """Start `visible_gpus` in the background while imports go on: it takes 58 ms on an H200 host."""
    if _Question.thread is None:
        _Question.asked_at_s = time.monotonic()
        _Question.thread = threading.Thread(target=_Question.ask, name="aot_tune asks NVML", daemon=True)
        _Question.thread.start()


def known_gpus() -> tuple[Gpu, ...] | None:
    """Return the answer of `visible_gpus`, which runs once in a process; None where NVML is not in time."""
    ask_for_gpus()
    _Question.wait()
    return _Question.gpus


if hasattr(os, "register_at_fork"):
    # A child forked in the middle of the query would inherit NVML's locks with no thread to release them.
    # A child forked while NVML hangs does not ask again, and reads its tables at the first launch.
    os.register_at_fork(before=_Question.wait)


_MIG = "MIG-"
"""Beginning of the UUID of a MIG device, a part of a GPU."""


def _mig_devices(nvml: Any, gpu: Any) -> list[Any]:
    """Return the handles of a GPU's MIG devices; none where it has no such devices."""
    devices = []
    with suppress(Exception):  # a GPU or a driver without MIG
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with suppress(Exception):  # no device is made at this place
                devices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place))
    return devices


def _visible_places(variable: str | None, uuids: Sequence[str], whole: int) -> list[int]:
    """Return the places in `uuids` of the devices that CUDA_VISIBLE_DEVICES admits, in its order.

    The first `whole` are GPUs in NVML's order, the others MIG devices. As in CUDA, the list ends at the first
    token that names no device, and with a MIG device; naming a device twice hides all.
    """
    if variable is None:
        return list(range(whole))
    places: list[int] = []
    for token in (part.strip() for part in variable.split(",")):
        if token.isdigit():
            matching = [int(token)] if int(token) < whole else []
        else:
            matching = [i for i, uuid in enumerate(uuids) if token and uuid.startswith(token)]
        if len(matching) != 1:
            break
        if matching[0] in places:
            return []
        places.append(matching[0])
        if matching[0] >= whole:
            break
    return places


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
