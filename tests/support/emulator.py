"""An emulator of cuTile: it runs tile code on the CPU, one block or several at a time, on torch tensors.

Holds what the shipped kernels use of cuda.tile, with its rules: a tile's sizes are powers of two, what stands
outside of an array is zero or nothing that a result may depend on, and a load or store that its kernel calls
in bounds is. It shows that indexing and arithmetic are right; what the compiler makes of them is for the GPU
tests.
"""

from __future__ import annotations

import operator
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.nvidia import cutile
from aot_tune.tunable import Tunable
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from tests.support.samples import SM90

_PACKAGE = "aot_tune.kernels."
"""The modules whose `ct` is replaced while a kernel runs: a kernel may use what another file declares."""


class Array:
    """A kernel's array argument, or a slice of one; counts how often each element was written."""

    def __init__(self, values: torch.Tensor, written: torch.Tensor) -> None:
        self.values, self.written = values, written
        self.shape, self.dtype, self.ndim = tuple(values.shape), values.dtype, values.dim()
        self.strides = values.stride()

    def slice(self, axis: int, start: Any, stop: Any) -> Array:
        first, last = int(start), int(stop)
        assert 0 <= first <= last <= self.shape[axis], "a slice outside of its array"
        return Array(
            self.values.narrow(axis, first, last - first), self.written.narrow(axis, first, last - first)
        )

    def tiled_view(
        self, tile_shape: Sequence[int], *, padding_mode: Any = None, traversal_steps: Any = None
    ) -> TiledView:
        return TiledView(self, tuple(tile_shape), padding_mode, tuple(traversal_steps or tile_shape))

    def permuted(self, order: Any) -> Array:
        if order == "C":
            return self
        axes = tuple(reversed(range(self.ndim))) if order == "F" else tuple(order)
        return Array(self.values.permute(axes), self.written.permute(axes))


class TiledView:
    """A view of an array in tiles that may overlap: a tile begins at its index times the traversal steps."""

    def __init__(self, array: Array, shape: tuple[int, ...], padding_mode: Any, steps: Any) -> None:
        self.array, self.shape, self.padding_mode, self.steps = array, shape, padding_mode, steps

    def load(self, index: Sequence[Any], **hints: Any) -> Tile:
        first = (0,) * len(self.shape)
        _Race.turn()
        return _load(self._from(index), first, self.shape, padding_mode=self.padding_mode, **hints)

    def store(self, index: Sequence[Any], tile: Tile, **hints: Any) -> None:
        assert tile.shape == self.shape
        _Race.turn()
        _store(self._from(index), (0,) * len(self.shape), tile, **hints)

    def _from(self, index: Sequence[Any]) -> Array:
        """The array from the first element of a tile on: nothing, where the tile lies behind its end."""
        start = self.array
        for axis, (place, step) in enumerate(zip(index, self.steps, strict=True)):
            start = start.slice(axis, min(int(place) * step, start.shape[axis]), start.shape[axis])
        return start


class Tile:
    """A tile: fixed shape, arithmetic with tiles and scalars."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: torch.Tensor) -> None:
        assert all(size & (size - 1) == 0 and size > 0 for size in values.shape), "sizes are powers of two"
        self.values = values
        self.shape, self.dtype, self.ndim = tuple(values.shape), values.dtype, values.dim()

    def __index__(self) -> int:
        return int(self.values.item())

    def __bool__(self) -> bool:
        return bool(self.values.item())

    def __neg__(self) -> Tile:
        return Tile(-self.values)

    def __invert__(self) -> Tile:
        return Tile(~self.values)

    def __getitem__(self, index: Any) -> Tile:
        return Tile(self.values[index])

    def __matmul__(self, other: Tile) -> Tile:
        return Tile((self.values.float() @ other.values.float()).to(self.dtype))

    def item(self) -> Tile:
        return Tile(self.values.reshape(()))

    def astype(self, dtype: torch.dtype, *, rounding_mode: Any = None) -> Tile:
        if dtype == _TF32:
            return Tile(((self.values.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32))
        return Tile(self.values.to(dtype))

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.values.reshape(tuple(shape)))

    def permute(self, axes: Sequence[int]) -> Tile:
        return Tile(self.values.permute(tuple(axes)))

    def transpose(self, axis0: int | None = None, axis1: int | None = None) -> Tile:
        return Tile(self.values.transpose(0 if axis0 is None else axis0, 1 if axis1 is None else axis1))

    def extract(self, index: Sequence[int], shape: Sequence[int]) -> Tile:
        return Tile(self.values[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, shape, strict=True))])


_TF32: Any = "tfloat32"

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)


def _values(x: Any) -> Any:
    return x.values if isinstance(x, Tile) else x


def _binary(operation: Callable[[Any, Any], Any], *, swapped: bool = False) -> Callable[[Tile, Any], Tile]:
    if swapped:
        return lambda self, other: Tile(operation(_values(other), self.values))
    return lambda self, other: Tile(operation(self.values, _values(other)))


for _name in _OPERATORS:
    _plain = _name.rstrip("_")
    setattr(Tile, f"__{_plain}__", _binary(getattr(operator, _name)))
    if _plain not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Tile, f"__r{_plain}__", _binary(getattr(operator, _name), swapped=True))


def run(
    tunable: Tunable,
    args: Sequence[Any],
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    sms: int = 3,
    at_once: int = 1,
    disorder: random.Random | None = None,
    twice: int = 0,
    amended: int = 0,
) -> int:
    """Run a declaration's kernel on CPU tensors, as `launch` would on a GPU of `sms` multiprocessors.

    Asserts that every element of an output was written, and of all that are changed that each was once.
    So many blocks run `at_once`: as on a GPU they start in order, each when another has ended. With
    `disorder` what they store relaxed is seen late, in any order, and blocks that run one after another do so
    in any order, too. Of each tensor `twice` elements are written by two tiles, no more and no fewer, and
    up to `amended` more may be written a second time.

    Returns:
        The number of blocks.
    """
    function = cutile.python_function(tunable.kernel)
    device = Device.reference(SM90).with_sm_count("emulated", sms)
    grid = tunable.grid_fn(config, device, tunable.problem_of(*args))
    by_address: dict[int, torch.Tensor] = {}
    kernel_args = [_argument(arg, by_address) for arg in tunable.args_fn(config, *args)]
    modules = [
        m for name, m in list(sys.modules.items()) if name.startswith(_PACKAGE) and hasattr(m, "ct")
    ] or [sys.modules[function.__module__]]
    if sys.modules[function.__module__] not in modules:
        modules.append(sys.modules[function.__module__])
    sizes = (*grid, 1, 1)[:3]
    place = threading.local()
    functions = _tile_functions(place, sizes)
    late = _Late(disorder, alone=at_once == 1)
    if disorder is not None:
        functions.load = _in_turn(late.load, loads=True)
        functions.store, functions.atomic_add = _in_turn(late.store), _in_turn(late.add)
    for module in modules:
        monkeypatch.setattr(module, "ct", functions)
    ordered = [tuple(reversed(block)) for block in product(*map(range, reversed(sizes)))]
    if disorder is not None and at_once == 1:
        disorder.shuffle(ordered)
    blocks = iter(ordered)

    def worker() -> None:
        for block in blocks:
            place.block = block
            function(*kernel_args)

    _Race(worker, at_once).run()
    late.end()
    for name, arg in zip(tunable.parameters, args, strict=True):
        if name in tunable.output_names or name in tunable.inplace:
            count = by_address[arg.data_ptr()]
            found = f"{name} has elements written {count.min()} to {count.max()} times"
            assert bool((count >= 1).all()) or name in tunable.inplace, found
            assert twice <= int((count > 1).sum()) <= twice + amended, found
            assert int(count.max()) <= 2, found
    return sizes[0] * sizes[1] * sizes[2]


def of_two_tiles(rows: int, height: int, columns: int) -> int:
    """Elements that two tiles of so many rows store, where a last tile of fewer rows begins earlier."""
    return -rows % height * columns if rows >= height else 0


def answers(
    function: Callable[..., Any], args: Sequence[Any], monkeypatch: pytest.MonkeyPatch, *, blocks: int
) -> list[Any]:
    """What a function of tile code gives in each block of a launch."""
    place = threading.local()
    monkeypatch.setattr(sys.modules[function.__module__], "ct", _tile_functions(place, (blocks, 1, 1)))
    given = [_argument(arg, {}) for arg in args]
    found = []
    for block in range(blocks):
        place.block = (block, 0, 0)
        found.append(function(*given))
    return found


_PARTS = 4
"""Of what is stored or added relaxed, which arrive one by one."""


class _Late:
    """What is stored or added relaxed and not seen yet: with each relaxed load one arrives, whichever."""

    def __init__(self, disorder: random.Random | None, *, alone: bool) -> None:
        self.alone = alone  # otherwise another block may still be about to store, and `_Race` sets a limit
        self.disorder, self.stores, self.lock = disorder, list[Callable[[], None]](), threading.Lock()
        self.nothings = list[Callable[[], None]]()  # zeros that are added, which nobody waits for
        self.in_vain = 0

    def load(self, *args: Any, memory_order: Any = "weak", **hints: Any) -> Tile:
        tile = _load(*args, memory_order=memory_order, **hints)
        with self.lock:
            if memory_order != "weak" and self.stores and self.disorder is not None:
                self.stores.pop(self.disorder.randrange(len(self.stores)))()
                self.in_vain = 0
            if memory_order != "weak" and self.nothings and self.disorder is not None:
                arrived = self.disorder.sample(self.nothings, self.disorder.randrange(2))
                for nothing in arrived:
                    self.nothings.remove(nothing)
                    nothing()
            self.in_vain += memory_order != "weak"
            assert not self.alone or self.in_vain < 10_000, "what is waited for was never stored"
        return tile

    def store(self, *args: Any, memory_order: Any = "weak", **hints: Any) -> None:
        """Part after part, as the threads of a block store each their own."""
        if memory_order == "weak":
            _store(*args, **hints)
        else:
            with self.lock:
                self.stores.extend(partial(_store, *args, part=part, **hints) for part in range(_PARTS))

    def add(self, array: Array, index: Tile, update: Tile, **hints: Any) -> None:
        """Part after part; what was there before is not told, since nobody asks."""
        for part in range(_PARTS):
            some = Tile(index.values[part::_PARTS]), Tile(update.values[part::_PARTS])
            of_use = bool(some[1].values.any())
            with self.lock:
                (self.stores if of_use else self.nothings).append(partial(_atomic_add, array, *some, **hints))

    def end(self) -> None:
        """Let arrive what nobody waits for, after all; of the rest somebody should have."""
        assert not self.stores, "what was stored relaxed was never waited for"
        for nothing in self.nothings:
            nothing()


class _Race:
    """Blocks that are under way at the same time: each has a thread, and one thread runs at a time.

    Before each use of memory, which is all that blocks see of each other, lot decides which one goes on.
    """

    now: _Race | None = None
    limit_s = 60.0  # CPU time: on a loaded machine blocks that do not wait take long, too
    looks_again = 0.1
    """Share of the turns in which a block that waits may be drawn too, while others do not wait."""

    def __init__(self, worker: Callable[[], None], at_once: int) -> None:
        self.worker, self.at_once = worker, at_once
        self.failed: BaseException | None = None
        self.ends = 0.0
        self.chance = random.Random(0)
        # Each is held, but for that of the block that runs.
        self.going = {index: threading.Lock() for index in range(at_once)}
        self.waiting: set[int] = set()
        self.late: set[int] = set()
        self.running = 0

    def run(self) -> None:
        """Run `at_once` workers; what the first of them raised is raised."""
        if self.at_once == 1:
            self.worker()
            return
        _Race.now, self.ends = self, time.process_time() + self.limit_s
        threads = [threading.Thread(target=self._caught, args=(index,)) for index in self.going]
        for lock in self.going.values():
            lock.acquire()
        try:
            for thread in threads:
                thread.start()
            self._go_on()
            for thread in threads:
                thread.join()
        finally:
            _Race.now = None
        if self.failed is not None:
            raise self.failed

    def _caught(self, index: int) -> None:
        self.going[index].acquire()
        try:
            self.worker()
        except BaseException as error:  # an assertion, which the test is to see
            self.failed = self.failed or error
        del self.going[index]
        self.waiting.discard(index)
        if self.going:
            self._go_on()

    def _go_on(self) -> None:
        """Choose who runs next."""
        busy = [index for index in self.going if index not in self.waiting and index not in self.late]
        others = [index for index in self.going if index not in self.late]
        chosen = busy if busy and self.chance.random() >= self.looks_again else others or list(self.going)
        self.running = self.chance.choice(chosen)
        self.going[self.running].release()

    @classmethod
    def turn(cls, *, waits: bool = False) -> None:
        """Let other blocks run; `waits` where this one may be waiting for them."""
        race = cls.now
        if race is not None:
            index = race.running
            (race.waiting.add if waits else race.waiting.discard)(index)
            lock = race.going[index]
            race._go_on()
            lock.acquire()
            assert race.failed is None, "another block failed"
            assert time.process_time() < race.ends, "blocks wait for each other"


def come_last() -> None:
    """Let the blocks that are under way end before this one goes on: none of them may wait for it."""
    race = _Race.now
    if race is not None:
        index = race.running
        race.late.add(index)
        _Race.turn()
        race.late.discard(index)


def _in_turn(function: Callable[..., Any], *, loads: bool = False) -> Callable[..., Any]:
    """A use of memory before which other blocks may run; a load that is not weak may be waiting for them."""

    def used(*args: Any, memory_order: Any = "weak", **options: Any) -> Any:
        _Race.turn(waits=loads and memory_order != "weak")
        return function(*args, memory_order=memory_order, **options)

    return used


def _argument(arg: Any, by_address: dict[int, torch.Tensor]) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    return Array(arg, by_address.setdefault(arg.data_ptr(), torch.zeros(arg.shape, dtype=torch.int32)))


def _load(
    array: Array,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: Any = None,
    check_bounds: bool = True,
    **_hints: Any,
) -> Tile:
    array = array.permuted(order)
    shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    index = tuple(index) if isinstance(index, Sequence) else (index,)
    if shape == ():  # one element
        return _load(array, index, (1,) * len(index), check_bounds=check_bounds).item()
    padding = {"zero": 0.0, "neg_inf": -torch.inf}.get(padding_mode)
    tile = _nothing(array, shape) if padding is None else torch.full(shape, padding, dtype=torch.float32)
    tile = tile.to(array.dtype)
    part = array.values[_slices(array, index, shape, whole=not check_bounds)]
    tile[tuple(slice(size) for size in part.shape)] = part
    return Tile(tile)


def _nothing(array: Array, shape: tuple[int, ...]) -> torch.Tensor:
    """What a result may not depend on."""
    if array.dtype.is_floating_point:
        return torch.full(shape, torch.nan)
    return torch.full(shape, 101)


def _store(
    array: Array, index: Any, tile: Any, *, order: Any = "C", check_bounds: bool = True,
    part: int | None = None, **_hints: Any,
) -> None:  # fmt: skip
    array = array.permuted(order)
    index = tuple(index) if isinstance(index, Sequence) else (index,)
    values = _values(tile)
    if not isinstance(values, torch.Tensor):
        values = torch.full((1,) * array.ndim, values, dtype=array.dtype)
    assert values.dtype == array.dtype, f"{values.dtype} stored into {array.dtype}"
    values = values.reshape((1,) * (array.ndim - values.dim()) + tuple(values.shape))
    place = _slices(array, index, values.shape, whole=not check_bounds)
    target, written = array.values[place], array.written[place]
    stored, chosen = values[tuple(slice(size) for size in target.shape)], slice(None)
    if part is not None:
        chosen = (torch.arange(target.numel()) % _PARTS == part).reshape(target.shape)
        stored = stored[chosen]
    target[chosen] = stored
    written[chosen] += 1


def _slices(array: Array, index: Sequence[Any], shape: Sequence[int], *, whole: bool) -> tuple[slice, ...]:
    starts = [int(place) * size for place, size in zip(index, shape, strict=True)]
    assert all(start >= 0 for start in starts), "a tile before its array"
    if whole:
        for start, size, there in zip(starts, shape, array.shape, strict=True):
            assert start + size <= there, "a tile that is not checked leaves its array"
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))


def _places(array: Array, indices: Any, mask: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    indices = indices if isinstance(indices, tuple) else (indices,)
    each = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        *(torch.as_tensor(_values(i), dtype=torch.int64) for i in indices),
        torch.as_tensor(True if mask is None else _values(mask)).to(torch.int64),
    )
    inside = each[-1] != 0
    for places, size in zip(each[:-1], array.shape, strict=True):
        inside = inside & (places >= 0) & (places < size)
    return tuple(each[:-1]), inside


def _gather(array: Array, indices: Any, *, mask: Any = None, padding_value: Any = 0, **_hints: Any) -> Tile:
    places, inside = _places(array, indices, mask)
    found = torch.full(inside.shape, float(_values(padding_value))).to(array.dtype)
    found[inside] = array.values[tuple(p[inside] for p in places)]
    return Tile(found)


def _load_advanced_indexing(array: Array, indices: Any, *, padding_mode: Any = None, **_hints: Any) -> Tile:
    """One of the indices is a tile of places, the others are slices (first, length)."""
    rank = array.ndim
    places = []
    for axis, index in enumerate(indices):
        along = index.values if isinstance(index, Tile) else torch.arange(index[1]) + int(index[0])
        places.append(along.reshape([-1 if other == axis else 1 for other in range(rank)]))
    found, inside = _places(array, tuple(places), None)
    tile = _nothing(array, tuple(inside.shape)) if padding_mode is None else torch.zeros(inside.shape)
    tile = tile.to(array.dtype)
    tile[inside] = array.values[tuple(p[inside] for p in found)]
    return Tile(tile)


def _scatter(array: Array, indices: Any, value: Any, *, mask: Any = None, **_hints: Any) -> None:
    places, inside = _places(array, indices, mask)
    values = torch.as_tensor(_values(value)).to(array.dtype).broadcast_to(inside.shape)
    chosen = tuple(p[inside] for p in places)
    array.values[chosen] = values[inside]
    array.written[chosen] += 1


def _atomic_add(array: Array, indices: Any, update: Any, *, check_bounds: bool = True, **_hints: Any) -> Tile:
    places, inside = _places(array, indices, None)
    assert check_bounds or bool(inside.all()), "an atomic outside, of whose kernel nothing checks bounds"
    updates = torch.as_tensor(_values(update)).to(array.dtype).broadcast_to(inside.shape)
    chosen = tuple(p[inside] for p in places)
    before = torch.zeros(inside.shape, dtype=array.dtype)
    before[inside] = array.values[chosen]
    array.values.index_put_(chosen, updates[inside], accumulate=True)
    return Tile(before)


def _mma(x: Tile, y: Tile, acc: Tile, **_hints: Any) -> Tile:
    return Tile(acc.values + (x.values.float() @ y.values.float()).to(acc.dtype))


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda x, **_modes: Tile(function(torch.as_tensor(_values(x))))


def _pair(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def apply(x: Any, y: Any, **_modes: Any) -> Any:
        if not isinstance(x, Tile) and not isinstance(y, Tile):
            return function(torch.tensor(x), torch.tensor(y)).item()
        like = x.values if isinstance(x, Tile) else y.values
        x, y = (_values(v) if isinstance(v, Tile) else torch.as_tensor(v).to(_kind(v, like)) for v in (x, y))
        return Tile(function(x, y))

    return apply


def _kind(scalar: Any, like: torch.Tensor) -> torch.dtype:
    """The dtype of a Python number beside a tile: the tile's, but a float beside integers is float32."""
    return torch.float32 if isinstance(scalar, float) and not like.dtype.is_floating_point else like.dtype


def _reduction(function: Callable[..., torch.Tensor]) -> Callable[..., Tile]:
    def reduce(x: Tile, axis: Any = None, *, keepdims: bool = False, **_modes: Any) -> Tile:
        axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        return Tile(function(x.values, axes, keepdims))

    return reduce


def _where(condition: Any, x: Any, y: Any) -> Tile:
    chosen = torch.where(torch.as_tensor(_values(condition)), _values(x), _values(y))
    typed = next((v.dtype for v in (x, y) if isinstance(v, Tile)), chosen.dtype)
    return Tile(chosen.to(typed))


def _tile_functions(place: threading.local, grid: Sequence[int]) -> SimpleNamespace:
    return SimpleNamespace(
        bid=lambda axis: place.block[axis],
        num_blocks=lambda axis: grid[axis],
        num_tiles=lambda array, axis, shape, order="C": -(-array.permuted(order).shape[axis] // shape[axis]),
        **_FUNCTIONS,
    )


def _full(shape: Any, value: Any, dtype: torch.dtype) -> Tile:
    return Tile(
        torch.full(tuple(shape) if isinstance(shape, Sequence) else (shape,), _values(value), dtype=dtype)
    )


def _astile(value: Any, *, dtype: torch.dtype) -> Tile:
    return Tile(torch.as_tensor(_values(value)).to(dtype))


def _cdiv(x: Any, y: Any) -> Any:
    return -(-x // y) if not isinstance(x, Tile) else Tile(-(-x.values // _values(y)))


_FUNCTIONS: Mapping[str, Any] = {
    "load": _in_turn(_load, loads=True),
    "load_advanced_indexing": _in_turn(_load_advanced_indexing),
    "Slice": lambda start, length: (start, length),
    "store": _in_turn(_store),
    "gather": _in_turn(_gather),
    "scatter": _in_turn(_scatter),
    "atomic_add": _in_turn(_atomic_add),
    "mma": _mma,
    "cdiv": _cdiv,
    "full": _full,
    "zeros": lambda shape, dtype: _full(shape, 0, dtype),
    "ones": lambda shape, dtype: _full(shape, 1, dtype),
    "arange": lambda size, *, dtype, start=0, step=1: Tile(
        torch.arange(start, start + size * step, step, dtype=dtype)
    ),
    "astile": _astile,
    "astype": lambda x, dtype, **modes: Tile(torch.as_tensor(_values(x))).astype(dtype, **modes),
    "bitcast": lambda x, dtype: Tile(x.values.view(dtype)),
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, axes: x.permute(axes),
    "transpose": lambda x, axis0=None, axis1=None: x.transpose(axis0, axis1),
    "expand_dims": lambda x, axis: Tile(x.values.unsqueeze(axis)),
    "broadcast_to": lambda x, shape: Tile(x.values.broadcast_to(tuple(shape))),
    "cat": lambda tiles, axis: Tile(torch.cat([t.values for t in tiles], axis)),
    "extract": lambda x, index, shape: x.extract(index, shape),
    "where": _where,
    "isnan": _unary(torch.isnan),
    **{name: _unary(getattr(torch, name)) for name in (
        "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin", "cos", "abs", "floor", "ceil"
    )},
    "maximum": _pair(torch.maximum),
    "minimum": _pair(torch.minimum),
    **{name: _pair(getattr(torch, name)) for name in ("add", "sub", "mul", "floor_divide")},
    "truediv": _pair(torch.true_divide),
    **{name: _pair(getattr(torch, name)) for name in (
        "less", "less_equal", "greater", "greater_equal", "not_equal"
    )},
    "equal": _pair(torch.eq),
    "sum": _reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "max": _reduction(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "min": _reduction(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "argmax": _reduction(lambda x, axes, keep: x.argmax(axes[0], keepdim=keep).to(torch.int32)),
    "cumsum": lambda x, axis=0, **modes: Tile(x.values.cumsum(axis).to(x.dtype)),
    "static_assert": lambda condition, message=None: None,
    "static_iter": lambda values: values,
    "static_eval": lambda value: value,
    "PaddingMode": SimpleNamespace(ZERO="zero", NEG_INF="neg_inf", UNDETERMINED=None),
    "RoundingMode": SimpleNamespace(APPROX="approx", FULL="full", RN="rn"),
    "MemoryOrder": SimpleNamespace(
        WEAK="weak", RELAXED="relaxed", ACQUIRE="acquire", RELEASE="release", ACQ_REL="acq_rel"
    ),
    "MemoryScope": SimpleNamespace(NONE="none", BLOCK="block", DEVICE="device", SYS="sys"),
    "Constant": {int: int, bool: bool, float: float},
    **{name: getattr(torch, name) for name in (
        "float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8", "float8_e4m3fn"
    )},
    "bool_": torch.bool,
    "tfloat32": _TF32,
}  # fmt: skip
