"""What torch says of GPUs while serving: devices, streams, capture. Knows its private names; no kernel.

Everything is asked through `runtime()`, so that a test may put a stand-in in its place with `use`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from aot_tune.values.device import Device

_POOL_STREAMS = 32
"""torch hands out so many streams of each priority, round robin, and no others (c10/cuda/CUDAStream.cpp)."""

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of the driver API."""


class Runtime(Protocol):
    """What the serve side asks of the machine."""

    tensor_types: tuple[type, ...]
    """The exact types that may be launched with."""

    raw_stream: Callable[[int], int]
    """Device index -> the handle of its current stream; 0 is its default stream."""

    current_device: Callable[[], int]
    """The index of this thread's current device."""

    grad_enabled: Callable[[], bool]
    """Whether autograd records."""

    def device_count(self) -> int:
        """How many GPUs this process may use."""

    def index_of(self, tensor: Any) -> int | None:
        """The GPU a tensor lies on; None for any other device."""

    def device(self, index: int) -> Device:
        """A GPU's arch, name and number of multiprocessors."""

    def entered(self, index: int) -> AbstractContextManager[Any]:
        """Make a GPU the current one for a while."""

    def synchronize(self, index: int) -> None:
        """Wait until all that was launched on a GPU has run."""

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured into a graph."""

    def captures_elsewhere(self, index: int) -> bool:
        """Whether any stream of torch on this GPU is being captured, whichever thread captures."""

    def relaxed_capture(self) -> AbstractContextManager[None]:
        """Let this thread allocate and synchronise without invalidating another thread's capture."""


class TorchRuntime:
    """torch.cuda, by its cheap private names where they exist and by the public ones otherwise."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.tensor_types: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
        self.grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        private: Any = torch._C
        # 0.06 us instead of the 3.3 us of torch.cuda.current_stream (measured, H200 host).
        self.raw_stream: Callable[[int], int] = getattr(
            private, "_cuda_getCurrentRawStream", self._public_raw_stream
        )
        self.current_device: Callable[[], int] = getattr(
            private, "_cuda_getDevice", torch.cuda.current_device
        )

    def _public_raw_stream(self, index: int) -> int:
        handle: int = self._torch.cuda.current_stream(index).cuda_stream
        return handle

    def device_count(self) -> int:
        """See `Runtime`, here and below."""
        cuda: Any = self._torch.cuda
        # torch asks NVML anew, 0.5 ms, which is right only as long as CUDA is not initialised.
        counted = getattr(self._torch._C, "_cuda_getDeviceCount", None) if cuda.is_initialized() else None
        return int((counted or cuda.device_count)())

    def index_of(self, tensor: Any) -> int | None:
        """The GPU a tensor lies on."""
        return int(tensor.get_device()) if tensor.is_cuda else None

    def device(self, index: int) -> Device:
        """The limits of the arch's reference device with this GPU's name and multiprocessors."""
        return Device.of(self._torch.cuda.get_device_properties(index))

    def entered(self, index: int) -> AbstractContextManager[Any]:
        """torch.cuda.device."""
        context: AbstractContextManager[Any] = self._torch.cuda.device(index)
        return context

    def synchronize(self, index: int) -> None:
        """torch.cuda.synchronize."""
        self._torch.cuda.synchronize(index)

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured."""
        return self._torch.cuda.is_current_stream_capturing()

    def captures_elsewhere(self, index: int) -> bool:
        """Whether a stream of torch's pool is being captured; takes some 0.5 ms."""
        # CUDA has no question "does anybody capture", so each stream of torch's pool is asked. Taking as many
        # as the pool holds brings its round robin back to where it was.
        cuda = self._torch.cuda
        with self.relaxed_capture():
            for priority in (0, -1):
                for _ in range(_POOL_STREAMS):
                    with cuda.stream(cuda.Stream(index, priority=priority)):
                        if cuda.is_current_stream_capturing():
                            return True
        return self.capturing()

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """CUDA's relaxed mode for this thread; in the usual one its calls would break another's capture."""
        exchange = _capture_mode_exchange()
        mode = ctypes.c_int(_RELAXED)
        if exchange is None or exchange(ctypes.byref(mode)):  # it leaves the former mode in `mode`
            yield  # there is no driver, or CUDA was not initialised, and nobody captures
            return
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))


def _capture_mode_exchange() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no such library or name here: nothing to protect a capture with
        return None


_installed: list[Runtime] = []


def runtime() -> Runtime:
    """The runtime in use; imports torch on first call."""
    if not _installed:
        _installed.append(TorchRuntime())
    return _installed[0]


def use(other: Runtime | None) -> None:
    """Put another runtime in place, for declarations not launched yet; None brings torch's back."""
    _installed[:] = [] if other is None else [other]
