"""A stand-in CUDA driver and runtime: `ct.launch` runs whole on any machine, compiling for real.

Nothing runs on a GPU: grids, symbols, streams and devices are recorded. `install` before the first driver
call of the process; two devices are always there, `DRIVER.devices` says how many are shown. Written for
cuda-tile 1.6 and 1.7.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p, cast
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from aot_tune.serve import runtime
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device

_CONTEXT = 0xC0DE00  # + device
_LIBRARY = 0x1000  # a multiple of 128: see cuLibraryUnload
_REFUSED = 0x2000  # the library of code that is refused
_MEMORY = 0x7F00_0000_0000  # + device << 36


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch that reached the driver."""

    grid: tuple[int, int, int]
    symbol: str
    stream: int
    device: int
    dependent: bool = False  # it need not wait for the launch before it


@dataclass(kw_only=True)
class Driver:
    """What the stand-in plays, and what it saw."""

    capability: tuple[int, int] = (9, 0)
    capability_of: dict[int, tuple[int, int]] = field(default_factory=dict)  # of GPUs that differ
    devices: int = 1
    launches: list[Launch] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)  # symbols of kernels loaded, in order
    elapsed_ms: Callable[[str], float] = lambda symbol: 0.02  # symbol -> what events measure
    last_kernel: int = 0  # the number of kernels that were loaded before the one launched last
    refuses: Callable[[bytes], int] = lambda head: 0  # first bytes of code -> the error of loading it
    lazy: bool = False  # loading succeeds, and code that is refused has no kernels
    free_memory: int = 0  # so that no miss without a table starts a process, but where a test says so
    capturing: bool = False
    captures_elsewhere: bool = False
    synchronized: list[int] = field(default_factory=list)
    runtime: Any = None  # the FakeRuntime in use

    def reset(self) -> None:
        """Forget what was seen; back to one idle sm90."""
        fresh = Driver()
        vars(self).update(vars(fresh))


DRIVER = Driver()
_current = threading.local()
_symbols: dict[int, str] = {}
_functions: dict[str, Any] = {}
_last_symbol = [""]
_FIRST_KERNEL = 0xCE0001


def current_device() -> int:
    return getattr(_current, "device", 0)


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "smem")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint),
    ]


def _plays(name: str, *argument_types: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def keep(function: Callable[..., int]) -> Callable[..., int]:
        _functions[name] = CFUNCTYPE(c_int, *argument_types)(function)
        return function

    return keep


def _device_of_stream(stream: int | None) -> int:
    return (stream >> 16) - 1 if stream else current_device()


@_plays("cuInit", c_uint)
def _init(flags: int) -> int:
    return 0


@_plays("cuDriverGetVersion", POINTER(c_int))
def _version(out: Any) -> int:
    out[0] = 13040
    return 0


@_plays("cuGetErrorString", c_int, POINTER(c_char_p))
def _error_string(code: int, out: Any) -> int:
    out[0] = b"an error of the stand-in driver"
    return 0


@_plays("cuPointerGetAttribute", c_void_p, c_int, c_uint64)
def _pointer(out: int, attribute: int, pointer: int) -> int:
    cast(out, POINTER(c_uint64))[0] = _CONTEXT + ((pointer - _MEMORY) >> 36 if pointer >= _MEMORY else 0)
    return 0


@_plays("cuStreamGetCtx", c_void_p, POINTER(c_void_p))
def _stream_context(stream: int | None, out: Any) -> int:
    out[0] = _CONTEXT + _device_of_stream(stream)
    return 0


@_plays("cuStreamGetId", c_void_p, POINTER(c_uint64))
def _stream_id(stream: int | None, out: Any) -> int:
    out[0] = 1 + (stream or 0)
    return 0


@_plays("cuCtxGetDevice", POINTER(c_int))
def _context_device(out: Any) -> int:
    out[0] = current_device()
    return 0


@_plays("cuCtxGetDevice_v2", POINTER(c_int), c_void_p)
def _context_device_of(out: Any, context: int | None) -> int:
    out[0] = context - _CONTEXT if context else current_device()
    return 0


@_plays("cuCtxGetCurrent", POINTER(c_void_p))
def _context(out: Any) -> int:
    out[0] = _CONTEXT + current_device()
    return 0


@_plays("cuCtxGetId", c_void_p, POINTER(c_uint64))
def _context_id(context: int | None, out: Any) -> int:
    out[0] = context or _CONTEXT + current_device()
    return 0


@_plays("cuCtxSetCurrent", c_void_p)
def _set_context(context: int | None) -> int:
    _current.device = (context or _CONTEXT) - _CONTEXT
    return 0


@_plays("cuCtxPushCurrent", c_void_p)
def _push_context(context: int) -> int:
    _current.pushed = [*getattr(_current, "pushed", []), current_device()]
    return _set_context(context)


@_plays("cuCtxPopCurrent", POINTER(c_void_p))
def _pop_context(out: Any) -> int:
    _current.device = _current.pushed.pop()
    return 0


@_plays("cuDeviceGetCount", POINTER(c_int))
def _device_count(out: Any) -> int:
    out[0] = 2  # cuTile asks once: what is shown of them is up to `Driver.devices`
    return 0


@_plays("cuDeviceGet", POINTER(c_int), c_int)
def _device(out: Any, index: int) -> int:
    out[0] = index
    return 0


@_plays("cuDeviceGetAttribute", POINTER(c_int), c_int, c_int)
def _attribute(out: Any, attribute: int, device: int) -> int:
    major, minor = DRIVER.capability_of.get(device, DRIVER.capability)
    out[0] = {75: major, 76: minor}.get(attribute, 1 << 30)
    return 0


@_plays(
    "cuLibraryLoadData", POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint
)
def _load(library: Any, code: int, *rest: Any) -> int:
    error = DRIVER.refuses(ctypes.string_at(code, 4))
    library[0] = _REFUSED if error else _LIBRARY
    return 0 if DRIVER.lazy else error


@_plays("cuLibraryGetKernelCount", POINTER(c_uint), c_void_p)
def _kernel_count(count: Any, library: int) -> int:
    count[0] = int(library != _REFUSED)
    return 0


@_plays("cuLibraryGetKernel", POINTER(c_void_p), c_void_p, c_char_p)
def _kernel(out: Any, library: Any, name: bytes) -> int:
    if library == _REFUSED:
        return 500  # CUDA_ERROR_NOT_FOUND
    handle = _FIRST_KERNEL + len(_symbols)
    _symbols[handle] = name.decode()
    DRIVER.compiled.append(name.decode())
    out[0] = handle
    return 0


_ATTRIBUTE_BYTES = 72
_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def _attributes_of(config: _LaunchConfig) -> set[int]:
    """The ids of a launch's attributes that are not 0."""
    memory = [cast(config.attributes + _ATTRIBUTE_BYTES * i, POINTER(c_uint)) for i in range(config.count)]
    return {int(words[0]) for words in memory if words[2]}


@_plays("cuLaunchKernelEx", POINTER(_LaunchConfig), c_void_p, c_void_p, c_void_p)
def _launch(config: Any, kernel: int, parameters: Any, extra: Any) -> int:
    one = config[0]
    DRIVER.launches.append(
        Launch(
            grid=(one.gx, one.gy, one.gz),
            symbol=_symbols[kernel],
            stream=one.stream or 0,
            device=_device_of_stream(one.stream),
            dependent=_DEPENDENT in _attributes_of(one),
        )
    )
    _last_symbol[0] = _symbols[kernel]
    DRIVER.last_kernel = kernel - _FIRST_KERNEL
    return 0


@_plays("cuStreamIsCapturing", c_void_p, POINTER(c_int))
def _is_capturing(stream: int | None, out: Any) -> int:
    out[0] = int(DRIVER.capturing)
    return 0


# What the search times with
# -----------------------------------------------------------------------------------------


@_plays("cuMemAlloc", POINTER(c_void_p), c_size_t)
def _allocate(out: Any, size: int) -> int:
    out[0] = _MEMORY
    return 0


@_plays("cuMemAllocHost", POINTER(c_void_p), c_size_t)
def _allocate_host(out: Any, size: int) -> int:
    buffer = ctypes.create_string_buffer(size)
    _host_memory.append(buffer)
    out[0] = ctypes.addressof(buffer)
    return 0


_host_memory: list[Any] = []


@_plays("cuEventElapsedTime", POINTER(c_float), c_void_p, c_void_p)
def _elapsed(out: Any, start: Any, end: Any) -> int:
    out[0] = DRIVER.elapsed_ms(_last_symbol[0])
    return 0


@_plays("cuGraphAddKernelNode", POINTER(c_void_p), c_void_p, c_void_p, c_size_t, c_void_p)
def _kernel_node(node: Any, graph: Any, dependencies: Any, count: int, parameters: int) -> int:
    # CUDA_KERNEL_NODE_PARAMS_v2 names a function, its first field, or a kernel, its eighth pointer-sized one.
    fields = cast(parameters, POINTER(c_void_p))
    handle = fields[0] or fields[7]
    _last_symbol[0] = _symbols.get(handle or 0, "")
    DRIVER.last_kernel = (handle or 0) - _FIRST_KERNEL
    node[0] = 0x90DE
    return 0


def _plays_handle(name: str, *more: Any) -> None:
    @_plays(name, POINTER(c_void_p), *more)
    def give(out: Any, *rest: Any) -> int:
        out[0] = 0xE1
        return 0


for _name, _more in {
    "cuEventCreate": (c_uint,),
    "cuStreamCreate": (c_uint,),
    "cuGraphCreate": (c_uint,),
    "cuGraphInstantiateWithFlags": (c_void_p, c_uint64),
    "cuGraphAddEventRecordNode": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuGraphAddMemsetNode": (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p),
    "cuGraphAddMemAllocNode": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuGraphAddMemFreeNode": (c_void_p, c_void_p, c_size_t, c_uint64),
    "cuKernelGetFunction": (c_void_p,),
    "cuDevicePrimaryCtxRetain": (c_int,),
}.items():
    _plays_handle(_name, *_more)

_NOTHING_TO_DO = (
    "cuMemFree", "cuMemFreeHost", "cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuCtxSynchronize",
    "cuEventRecord", "cuEventQuery", "cuEventDestroy", "cuGraphLaunch", "cuGraphDestroy",
    "cuGraphExecDestroy", "cuStreamDestroy", "cuStreamWaitEvent", "cuKernelSetAttribute",
    "cuLaunchKernel",
)  # fmt: skip


@CFUNCTYPE(c_int)
def _succeeds() -> int:
    return 0


@CFUNCTYPE(c_int)
def _fails() -> int:
    return 999  # CUDA_ERROR_UNKNOWN: cuTile called a function that is not played


def _library_unload() -> int:
    """The C function that plays cuLibraryUnload: the interpreter may be gone when the last library goes.

    toascii() keeps seven bits of its argument: 0, success, for the handle `_LIBRARY`.
    """
    return cast(ctypes.CDLL(None).toascii, c_void_p).value or 0


@CFUNCTYPE(c_int, c_char_p, POINTER(c_void_p), c_int, c_uint64, c_void_p)
def _find(name: bytes, out: Any, version: int, flags: int, status: Any) -> int:
    wanted = name.decode()
    if wanted == "cuCtxGetDevice" and version >= 13000:
        wanted = "cuCtxGetDevice_v2"
    if wanted == "cuLibraryUnload":
        out[0] = _library_unload()
    else:
        played = _functions.get(wanted, _succeeds if wanted in _NOTHING_TO_DO else _fails)
        out[0] = cast(played, c_void_p).value
    return 0


_find_pointer = c_void_p(cast(_find, c_void_p).value)


wanted = True
"""Whether `install` takes the driver's place: False in a run on a real GPU, which imports all tests."""


def install() -> None:
    """Put the stand-in in the driver's place for this process; before cuTile's first call of the driver."""
    if not wanted:
        return
    module = types.ModuleType("cuda.tile._load_libcuda")
    module.cuGetProcAddress_v2_ptrptr = ctypes.addressof(_find_pointer)  # type: ignore[attr-defined]
    sys.modules["cuda.tile._load_libcuda"] = module


class FakeTensor:
    """A CUDA tensor's outside without memory; unlike a meta tensor it lies on a device that is told apart."""

    requires_grad = False
    is_cuda = True
    is_meta = False

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: int = 0,
        *,
        strides: Sequence[int] | None = None,
    ) -> None:
        self._meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        if strides is not None:
            self._meta = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
        self._index = device

    @property
    def shape(self) -> torch.Size:
        return self._meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._meta.dtype

    @property
    def device(self) -> str:
        return f"cuda:{self._index}"

    def stride(self) -> tuple[int, ...]:
        return self._meta.stride()

    def get_device(self) -> int:
        return self._index

    def data_ptr(self) -> int:
        return _MEMORY + (self._index << 36)

    def clone(self) -> FakeTensor:
        return FakeTensor(self.shape, self.dtype, self._index)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        size = self.dtype.itemsize
        kind = {torch.bfloat16: "V", torch.int32: "i", torch.int64: "i"}.get(self.dtype, "f")
        return {
            "typestr": f"<{kind}{size}",
            "shape": tuple(self.shape),
            "strides": tuple(stride * size for stride in self.stride()),
            "data": (self.data_ptr(), False),
            "version": 3,
        }


class ForeignArray:
    """Another library's CUDA array: it has one of the two protocols and nothing of a tensor's methods."""

    def __init__(self, tensor: FakeTensor, protocol: str = "__cuda_array_interface__") -> None:
        self.tensor = tensor
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype)
        setattr(self, protocol, tensor.__cuda_array_interface__)


class FakeRuntime:
    """`aot_tune.serve.runtime.Runtime` on the stand-in: meta tensors count as lying on GPU 0."""

    def __init__(self, *, arch: str = "sm90", name: str = "NVIDIA H200", grad: bool = False) -> None:
        self.tensor_types: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, FakeTensor)
        self.raw_stream: Callable[[int], int] = lambda index: self.streams.get(index, 0)
        self.current_device: Callable[[], int] = current_device
        self.grad = grad
        self.grad_enabled: Callable[[], bool] = lambda: self.grad
        self.streams: dict[int, int] = {}
        self.entries: list[int] = []
        self.freed: set[int] = set()  # ids of tensors without memory
        self._device = Device.reference(Arch.parse(arch)).with_sm_count(name, 132)
        DRIVER.capability = (self._device.arch.major, self._device.arch.minor)

    def device_count(self) -> int:
        return DRIVER.devices

    def view_of(self, array: Any) -> Any:
        return array.tensor if isinstance(array, ForeignArray) else None

    def index_of(self, tensor: Any) -> int | None:
        if isinstance(tensor, FakeTensor):
            return tensor.get_device()
        return 0 if tensor.is_meta else None

    def has_memory(self, tensor: Any) -> bool:
        return id(tensor) not in self.freed

    def has_tangent(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None

    def device(self, index: int) -> Device:
        other = DRIVER.capability_of.get(index)
        return Device.reference(Arch(*other)) if other else self._device

    @contextlib.contextmanager
    def entered(self, index: int) -> Iterator[None]:
        self.entries.append(index)
        before, _current.device = current_device(), index
        try:
            yield
        finally:
            _current.device = before

    def synchronize(self, index: int) -> None:
        DRIVER.synchronized.append(index)

    def free_memory(self, index: int) -> int:
        return DRIVER.free_memory

    def capturing(self) -> bool:
        return DRIVER.capturing

    def captures_elsewhere(self, index: int) -> bool:
        return DRIVER.capturing or DRIVER.captures_elsewhere

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        yield


def stream_on(device: int) -> int:
    """The handle of a stream that is not the default one."""
    return (device + 1) << 16


@contextlib.contextmanager
def stand_in() -> Iterator[Driver]:
    """One idle H200, on the stand-in driver and runtime; nothing runs on it."""
    install()
    DRIVER.reset()
    here = FakeRuntime()
    runtime.use(here)
    DRIVER.runtime = here
    try:
        yield DRIVER
    finally:
        runtime.use(None)
        DRIVER.reset()
