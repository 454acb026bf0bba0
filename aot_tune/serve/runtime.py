"""Ask torch about GPUs while serving: devices, streams and capture. Uses private names of torch.

Everything goes through `runtime()`, so that a test may replace it by a stand-in with `use`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import is_
from typing import Any, Protocol

from aot_tune.values.device import Device

_POOL_STREAMS = 32
"""Number of streams of each priority that torch hands out in turn (c10/cuda/CUDAStream.cpp)."""

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of the driver API."""


class Runtime(Protocol):
    """Queries of serving about the machine."""

    tensor_types: tuple[type, ...]
    """Exact types of tensors that a launch accepts."""

    raw_stream: Callable[[int], int]
    """Device index -> handle of the device's current stream; 0 is the default stream."""

    current_device: Callable[[], int]
    """Return the index of this thread's current device."""

    grad_enabled: Callable[[], bool]
    """Whether autograd records operations."""

    def device_count(self) -> int:
        """Return the number of GPUs that this process may use."""

    def view_of(self, array: Any) -> Any:
        """Return a tensor in the memory of another library's CUDA array; None where torch can make none."""

    def index_of(self, tensor: Any) -> int | None:
        """Return the index of the GPU that holds a tensor; None for a tensor on another device."""

    def has_memory(self, tensor: Any) -> bool:
        """Whether a tensor has an address, or no element that would need one."""

    def has_tangent(self, tensor: Any) -> bool:
        """Whether forward-mode autograd would compute tangents of results of a tensor."""

    def device(self, index: int) -> Device:
        """Return a GPU's arch, name and number of multiprocessors."""

    def entered(self, index: int) -> AbstractContextManager[Any]:
        """Return a context in which a GPU is the current one."""

    def synchronize(self, index: int) -> None:
        """Wait until all launches on a GPU have run."""

    def free_memory(self, index: int) -> int:
        """Return the bytes of a GPU that no process holds."""

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured into a graph."""

    def captures_elsewhere(self, index: int) -> bool:
        """Whether any thread is capturing one of torch's streams on this GPU."""

    def relaxed_capture(self) -> AbstractContextManager[None]:
        """Let this thread allocate and synchronise without invalidating another thread's capture."""


class TorchRuntime:
    """Runtime of torch.cuda: cheap private names where they exist, public ones otherwise."""

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
        """See `Runtime`, for this method and all below."""
        cuda: Any = self._torch.cuda
        # The public name asks NVML each time, 0.5 ms: needed only until CUDA is initialised.
        counted = getattr(self._torch._C, "_cuda_getDeviceCount", None) if cuda.is_initialized() else None
        return int((counted or cuda.device_count)())

    def view_of(self, array: Any) -> Any:
        """Take the array's memory by DLPack or else by ``__cuda_array_interface__``, and copy nothing."""
        with suppress(Exception):  # no GPU's memory, or a dtype that this protocol or library does not have
            # As `ct.launch` asks: no stream waits for another.
            return self._torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))
        with suppress(Exception):
            address = array.__cuda_array_interface__["data"][0]  # else torch would copy it from the host
            tensor = self._torch.as_tensor(array, device="cuda")
            if tensor.data_ptr() == address or not tensor.numel():
                return tensor  # else torch copied it from another GPU
        return None

    def index_of(self, tensor: Any) -> int | None:
        """Return the index of the GPU that holds a tensor."""
        return int(tensor.get_device()) if tensor.is_cuda else None

    def has_memory(self, tensor: Any) -> bool:
        """Read the address: it is 0 where the storage was freed, and for zero tensors of forward mode."""
        try:
            return bool(tensor.data_ptr() or not tensor.numel())
        except RuntimeError:  # a tensor without an address, for cuTile to judge
            return True

    def has_tangent(self, tensor: Any) -> bool:
        """Unpack the tensor, which is a dual tensor only inside ``forward_ad.dual_level()``."""
        forward_mode: Any = self._torch.autograd.forward_ad
        return forward_mode.unpack_dual(tensor).tangent is not None

    def device(self, index: int) -> Device:
        """Return the arch's reference device with this GPU's name and multiprocessors."""
        return Device.of(self._torch.cuda.get_device_properties(index))

    def entered(self, index: int) -> AbstractContextManager[Any]:
        """Use torch.cuda.device."""
        context: AbstractContextManager[Any] = self._torch.cuda.device(index)
        return context

    def synchronize(self, index: int) -> None:
        """Call torch.cuda.synchronize."""
        self._torch.cuda.synchronize(index)

    def free_memory(self, index: int) -> int:
        """Ask the driver; torch's own cache counts as held."""
        with self.relaxed_capture():
            return int(self._torch.cuda.mem_get_info(index)[0])

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured."""
        cuda = self._torch.cuda  # raises where it does not exist
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def captures_elsewhere(self, index: int) -> bool:
        """Whether a stream of torch's pool is being captured; takes about 0.5 ms."""
        # CUDA cannot report whether any stream is captured, so each stream of torch's pool is asked. Taking
        # as many streams as the pool holds brings its round robin back to where it was.
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
        """Put this thread in CUDA's relaxed mode, in which its calls break no other thread's capture."""
        exchange = _capture_mode_exchange()
        mode = ctypes.c_int(_RELAXED)
        if exchange is None or exchange(ctypes.byref(mode)):  # the call leaves the former mode in `mode`
            yield  # no driver, or CUDA is not initialised, so nothing is captured
            return
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))


def _capture_mode_exchange() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # without this library or name a capture cannot be protected
        return None


_NO_ARRAYS = frozenset((type(None), bool, int, float, str))
"""Types of launch arguments that are looked at no further, since they are frequent."""

_installed: list[Runtime] = []


def runtime() -> Runtime:
    """Return the runtime in use; the first call imports torch."""
    if not _installed:
        _installed.append(TorchRuntime())
    return _installed[0]


def use(other: Runtime | None) -> None:
    """Install another runtime for declarations not launched yet; None restores torch's."""
    _installed[:] = [] if other is None else [other]


def with_tensors(args: tuple[Any, ...], here: Runtime) -> tuple[Any, ...]:
    """Return launch arguments with other libraries' arrays, in lists too, as torch tensors of their memory.

    An array has ``__dlpack__`` or ``__cuda_array_interface__``. What torch cannot view is left as it is, and
    arguments without such arrays are returned as the same object.
    """
    viewed = [_viewed(arg, here) for arg in args]
    return args if all(map(is_, viewed, args)) else tuple(viewed)


def _viewed(arg: Any, here: Runtime) -> Any:
    if type(arg) in here.tensor_types or type(arg) in _NO_ARRAYS:
        return arg
    if type(arg) in (list, tuple):
        members = with_tensors(tuple(arg), here)
        return arg if all(map(is_, members, arg)) else type(arg)(members)
    is_array = hasattr(arg, "__dlpack__") or hasattr(arg, "__cuda_array_interface__")
    if not is_array or isinstance(arg, here.tensor_types):  # a subclass of torch.Tensor may use its own data
        return arg
    tensor = here.view_of(arg)
    return arg if tensor is None else tensor
