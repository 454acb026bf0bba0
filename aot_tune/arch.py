"""GPU architectures: parse, order and print them; which GPUs this machine has. Creates no CUDA context."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from aot_tune.errors import ArchError

_NAME = re.compile(r"(?:sm_?|compute_?)?([1-9][0-9]{1,2})[af]?", re.IGNORECASE)
_DOTTED = re.compile(r"([1-9][0-9]?)\.([0-9])")


@dataclass(frozen=True, order=True)
class Arch:
    """A GPU architecture such as ``sm90``. Ordered by compute capability."""

    major: int
    """Compute capability, major."""

    minor: int
    """Compute capability, minor."""

    @classmethod
    def parse(cls, name: str | Sequence[int] | Arch) -> Arch:
        """Read ``sm90``, ``sm_90``, ``90``, ``90a``, ``9.0`` or ``(9, 0)``.

        Raises:
            ArchError: It names no architecture that cuTile compiles for.
        """
        if isinstance(name, Arch):
            return name
        arch: Arch | None = None
        if isinstance(name, str):
            if dotted := _DOTTED.fullmatch(name.strip()):
                arch = cls(int(dotted[1]), int(dotted[2]))
            elif found := _NAME.fullmatch(name.strip()):
                arch = cls(int(found[1][:-1]), int(found[1][-1]))
        elif (
            isinstance(name, tuple | list) and len(name) == 2 and all(type(number) is int for number in name)
        ):
            arch = cls(*name)
        if arch is None:
            raise ArchError(f"no GPU architecture is called {name!r:.80}; write one of {_known_names()}")
        if arch not in KNOWN_ARCHS:
            raise ArchError(f"cuTile does not compile for {name!r:.80}; write one of {_known_names()}")
        return arch

    def __str__(self) -> str:
        return f"sm{self.major}{self.minor}"

    @property
    def cutile_name(self) -> str:
        """The name cuTile and its compiler use, ``sm_90``."""
        return f"sm_{self.major}{self.minor}"


KNOWN_ARCHS: tuple[Arch, ...] = tuple(
    Arch(*capability)
    for capability in (
        (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1),
    )
)  # fmt: skip
"""What tileiras 13.4 compiles for, oldest first."""


def _known_names() -> str:
    return " ".join(str(arch) for arch in KNOWN_ARCHS)


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
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML's errors are many and of its own types; each means the same here
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        gpus: list[Gpu] = []
        for place in _visible_places(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids):
            capability = Arch(*pynvml.nvmlDeviceGetCudaComputeCapability(handles[place]))
            gpus.append(
                Gpu(
                    index=len(gpus),
                    name=_text(pynvml.nvmlDeviceGetName(handles[place])),
                    arch=capability if capability in KNOWN_ARCHS else None,
                    uuid=uuids[place],
                )
            )
        return tuple(gpus)
    except Exception:  # a MIG slice or a container may forbid some of these questions
        return None
    finally:
        pynvml.nvmlShutdown()


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


def gpus_asked_for() -> tuple[Gpu, ...] | None:
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
