"""What NVML tells of this machine: its GPUs and its driver. Creates no CUDA context.

The only module that imports NVML's binding. Where NVML cannot tell (no driver, no library), answers are None.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aot_tune.values.arch import KNOWN_ARCHS, Arch


def started() -> Any:
    """NVML's binding, initialised, for the caller to shut down; None where it cannot be had."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML's errors are many and of its own types; each means the same here
        return None
    return pynvml


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of this machine, as NVML tells it."""

    index: int
    """Its place among the devices this process may use, as torch counts them (``cuda:<index>``)."""

    name: str
    """The product's name, ``NVIDIA H200``."""

    arch: Arch | None
    """Its architecture; None where cuTile does not compile for it."""

    uuid: str
    """NVML's identifier, ``GPU-…``."""


def visible_gpus() -> tuple[Gpu, ...] | None:
    """The GPUs this process may use, without creating a CUDA context (58 ms, measured on an H200 host).

    Honours CUDA_VISIBLE_DEVICES by index and by UUID. NVML counts by PCI bus, and CUDA by speed unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID says otherwise: where a host has several kinds of GPU, an index may differ.

    Returns:
        The GPUs in torch's order, or None where NVML cannot tell (no driver, no library).
    """
    nvml = started()
    if nvml is None:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        gpus: list[Gpu] = []
        for place in _visible_places(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids):
            capability = Arch(*nvml.nvmlDeviceGetCudaComputeCapability(handles[place]))
            gpus.append(
                Gpu(
                    index=len(gpus),
                    name=_text(nvml.nvmlDeviceGetName(handles[place])),
                    arch=capability if capability in KNOWN_ARCHS else None,
                    uuid=uuids[place],
                )
            )
        return tuple(gpus)
    except Exception:  # a MIG slice or a container may forbid some of these questions
        return None
    finally:
        nvml.nvmlShutdown()


def driver_version() -> str | None:
    """The GPU driver's version, without a CUDA context; None where NVML cannot tell."""
    nvml = started()
    if nvml is None:
        return None
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # as above
        return None
    finally:
        nvml.nvmlShutdown()


class _Question:
    """NVML's answer, asked for in the background once."""

    thread: threading.Thread | None = None
    gpus: tuple[Gpu, ...] | None = None

    @classmethod
    def ask(cls) -> None:
        cls.gpus = visible_gpus()


def ask_for_gpus() -> None:
    """Begin to ask NVML, which takes 58 ms on an H200 host, while imports go on."""
    if _Question.thread is None:
        _Question.thread = threading.Thread(target=_Question.ask, name="aot_tune asks NVML", daemon=True)
        _Question.thread.start()


def known_gpus() -> tuple[Gpu, ...] | None:
    """`visible_gpus`, asked once in a process; waits for the answer."""
    ask_for_gpus()
    if _Question.thread is not None:
        _Question.thread.join()
    return _Question.gpus


if hasattr(os, "register_at_fork"):
    # A child forked in the middle of the question would inherit NVML's locks, and nobody to release them.
    os.register_at_fork(before=lambda: _Question.thread.join() if _Question.thread else None)


def _visible_places(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """Places in NVML's order that CUDA_VISIBLE_DEVICES admits, in its order.

    As CUDA reads it, the list ends at the first token that names no device, and naming one twice admits none.
    """
    if variable is None:
        return list(range(len(uuids)))
    places: list[int] = []
    for token in (part.strip() for part in variable.split(",")):
        if token.isdigit():
            matching = [int(token)] if int(token) < len(uuids) else []
        else:
            matching = [i for i, uuid in enumerate(uuids) if token and uuid.startswith(token)]
        if len(matching) != 1:
            break
        if matching[0] in places:
            return []
        places.append(matching[0])
    return places


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
