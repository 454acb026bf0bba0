"""Count what a kernel's blocks multiply, load and store, by running their code on tiles without values.

A few blocks of the grid are run as plain Python, with functions that know shapes in place of cuTile's. Known
is what a launch knows: the constants, the arrays' sizes, the scalars and the block's place in the grid. Where
a loop, a branch or the shape of a tile depends on what was loaded, nothing is counted.
"""

from __future__ import annotations

import builtins
import inspect
import math
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from aot_tune.declare.fingerprint.source import counts_by_name
from aot_tune.nvidia import cutile

BLOCKS = 3
"""Blocks of a grid that are run: the first, the last, and those between at even distances."""

MOST_CALLS = 100_000
"""Calls of cuTile's functions in these blocks, at most: about a second."""


class NotCountedError(Exception):
    """A kernel's code needs something that is known at its launch alone; the message says what."""


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """What one block does, in the mean over the blocks that were run."""

    steps: float
    """How often the product that is computed most often is computed; 1 without products."""

    flops: float
    """Operations of all products, where a multiply-add counts two."""

    load_bytes: float
    """Bytes loaded."""

    store_bytes: float
    """Bytes stored, those of atomic operations among them."""

    axes: frozenset[int]
    """The axes of the grid along which a block asked for its place or for the number of blocks."""


def count_blocks(
    kernel: Any, args: Sequence[Any], grid: Sequence[int], most_calls: int = MOST_CALLS
) -> BlockCounts:
    """Count what the blocks of a launch do.

    Args:
        kernel: The ``@ct.kernel``.
        args: The kernel's arguments; tensors need no storage.
        grid: The number of blocks along each axis, one to three numbers.
        most_calls: Calls of cuTile's functions in these blocks, at most.

    Raises:
        NotCountedError: The code needs what is known at a launch alone, or does what is not followed here.
    """
    x, y, z, *_ = (*grid, 1, 1)
    sizes = (x, y, z)
    total = math.prod(sizes)
    numbers = sorted({round(at * (total - 1) / max(BLOCKS - 1, 1)) for at in range(BLOCKS)})
    tally = _Tally(sizes=sizes, most_calls=most_calls)
    function = _Rebuilt(_functions(tally)).function(cutile.python_function(kernel))
    given = [_argument(arg, tally) for arg in args]
    for number in numbers:
        tally.block = (number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1]))
        tally.products.append(Counter())
        try:
            function(*given)
        except NotCountedError as error:
            raise NotCountedError(f"{error}{_place(error)}") from error
        except Exception as error:  # whatever the code does that these functions do not know
            raise NotCountedError(f"{type(error).__name__}: {error}{_place(error)}") from error
    runs = len(numbers)
    return BlockCounts(
        steps=sum(max(calls.values(), default=1) for calls in tally.products) / runs,
        flops=tally.flops / runs,
        load_bytes=tally.load_bytes / runs,
        store_bytes=tally.store_bytes / runs,
        axes=frozenset(tally.axes),
    )


def _place(error: Exception) -> str:
    """The line of the kernel's code at which an error was raised, in words."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


@dataclass(kw_only=True)
class _Tally:
    """What all blocks did so far."""

    sizes: tuple[int, int, int]
    most_calls: int
    block: tuple[int, int, int] = (0, 0, 0)
    flops: float = 0.0
    load_bytes: float = 0.0
    store_bytes: float = 0.0
    products: list[Counter[tuple[types.CodeType, int]]] = field(default_factory=list)
    """For each block, how often the product at a place of the code was computed."""

    axes: set[int] = field(default_factory=set)
    calls: int = 0

    def along(self, numbers: tuple[int, int, int], axis: int) -> int:
        """The number of an axis, which the code has asked for."""
        self.axes.add(axis)
        return numbers[axis]

    def call(self) -> None:
        """Count a call of one of cuTile's functions."""
        self.calls += 1
        if self.calls > self.most_calls:
            raise NotCountedError(f"the blocks call cuTile's functions more than {self.most_calls} times")

    def product(self, left: _Tile, right: _Tile, place: tuple[types.CodeType, int]) -> None:
        """Count a matrix product."""
        (rows, inner), columns = left.shape[-2:], right.shape[-1]
        batch = math.prod(_broadcast([left.shape[:-2], right.shape[:-2]]))
        self.flops += 2.0 * batch * rows * inner * columns
        self.products[-1][place] += 1


# What has no values -----------------------------------------------------------------------------------------


class _Tile:
    """A tile of some shape and dtype; of shape () a number that is not known."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Iterable[int], dtype: Any = None) -> None:
        self.shape, self.dtype = _plain(shape), dtype
        self.ndim = len(self.shape)

    def astype(self, dtype: Any, **_: Any) -> _Tile:
        return _Tile(self.shape, dtype)

    def item(self) -> _Tile:
        return _Tile((), self.dtype)

    def reshape(self, shape: Any) -> _Tile:
        return _Tile(_filled_in(_tuple(shape), math.prod(self.shape)), self.dtype)

    def permute(self, axes: Any) -> _Tile:
        return _Tile([self.shape[axis] for axis in _tuple(axes)], self.dtype)

    def transpose(self, axis0: int | None = None, axis1: int | None = None) -> _Tile:
        first = 0 if axis0 is None else axis0
        second = 1 if axis1 is None else axis1
        shape = list(self.shape)
        shape[first], shape[second] = shape[second], shape[first]
        return _Tile(shape, self.dtype)

    def extract(self, index: Any, shape: Any) -> _Tile:
        return _Tile(_tuple(shape), self.dtype)

    def insert(self, *_: Any, **__: Any) -> _Tile:
        return self

    def __getitem__(self, index: Any) -> _Tile:
        shape: list[int] = []
        left = list(self.shape)
        for one in index if isinstance(index, tuple) else (index,):
            if one is None:
                shape.append(1)
            elif one == slice(None):
                shape.append(left.pop(0))
            else:
                raise NotCountedError(f"it indexes a tile with {one!r:.40}")
        return _Tile([*shape, *left], self.dtype)

    def __matmul__(self, other: _Tile) -> _Tile:
        raise NotCountedError("it multiplies by @; only ct.mma, ct.mma_scaled and ct.matmul are counted")

    def _known(self) -> Any:
        raise NotCountedError("a loop, a branch, a size or a place depends on what was loaded")

    __bool__ = __index__ = __int__ = __float__ = __iter__ = __len__ = _known


def _combined(*parts: Any, **_: Any) -> _Tile:
    """What an operation makes of tiles and numbers, element by element."""
    tiles = [one for one in parts if isinstance(one, _Tile)]
    largest = max(tiles, key=lambda one: one.ndim, default=_Tile(()))
    return _Tile(_broadcast([one.shape for one in tiles]), largest.dtype)


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    setattr(_Tile, f"__{_name}__", _combined)
    setattr(_Tile, f"__r{_name}__", _combined)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "invert", "abs"):
    setattr(_Tile, f"__{_name}__", _combined)


class _DType:
    """A dtype of cuTile, which converts a number where it is called; outside of a kernel it cannot be."""

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def __call__(self, value: Any) -> Any:
        return value.astype(self) if isinstance(value, _Tile) else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dtype, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._dtype == getattr(other, "_dtype", other))

    def __hash__(self) -> int:
        return hash(self._dtype)


def _callable(value: Any) -> Any:
    return _DType(value) if isinstance(value, cutile.public_object("DType")) else value


class _Array:
    """A kernel's array argument, or a part of one."""

    def __init__(self, shape: Iterable[Any], dtype: Any, element_bytes: int, tally: _Tally) -> None:
        self.shape, self.dtype, self.element_bytes = tuple(shape), dtype, element_bytes
        self.ndim = len(self.shape)
        self.strides = (_Tile(()),) * self.ndim
        self._tally = tally

    def slice(self, axis: int, start: Any, stop: Any) -> _Array:
        shape = list(self.shape)
        known = isinstance(start, int) and isinstance(stop, int)
        shape[axis] = stop - start if known else _Tile(())
        return _Array(shape, self.dtype, self.element_bytes, self._tally)

    def tiled_view(self, tile_shape: Any, *, traversal_steps: Any = None, **_: Any) -> _View:
        return _View(self, tile_shape, self._tally, traversal_steps)


class _View:
    """A view of an array in tiles."""

    def __init__(self, array: _Array, shape: Any, tally: _Tally, steps: Any) -> None:
        self.array, self.tile_shape, self.dtype = array, _plain(_tuple(shape)), array.dtype
        self.traversal_steps = _plain(_tuple(steps)) if steps is not None else self.tile_shape
        self._tally = tally

    def num_tiles(self, axis: int) -> Any:
        return _cdiv(self.array.shape[axis], self.traversal_steps[axis])

    def load(self, *_: Any, **__: Any) -> _Tile:
        self._tally.call()
        self._tally.load_bytes += math.prod(self.tile_shape) * self.array.element_bytes
        return _Tile(self.tile_shape, self.dtype)

    def store(self, *_: Any, **__: Any) -> None:
        self._tally.call()
        self._tally.store_bytes += math.prod(self.tile_shape) * self.array.element_bytes

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("atomic_"):
            raise NotCountedError(f"it uses {name} of a tiled view")
        return self.store


def _argument(arg: Any, tally: _Tally) -> Any:
    if isinstance(arg, list | tuple):
        return [_argument(one, tally) for one in arg]
    if not hasattr(arg, "element_size"):
        return arg
    named = str(arg.dtype).rpartition(".")[2].replace("float8_e4m3fnuz", "float8_e4m3fn")
    dtype = _DType(cutile.public_object("bool_" if named == "bool" else named))
    return _Array((int(size) for size in arg.shape), dtype, arg.element_size(), tally)


# cuTile's functions -----------------------------------------------------------------------------------------

_REDUCING = ("sum", "max", "min", "prod", "argmax", "argmin")
_SAME = ("static_iter", "static_eval", "ensure_constant", "assume_divisible_by", "cumsum", "cumprod", "scan")
_SILENT = (
    "static_assert", "assert_", "print", "printf", "grid_dependency_control_wait",
    "grid_dependency_control_launch_dependents",
)  # fmt: skip
_ON_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b, "truediv": lambda a, b: a / b, "mod": lambda a, b: a % b,
    "minimum": min, "maximum": max, "min": min, "max": max, "negative": lambda a: -a, "abs": abs,
    "less": lambda a, b: a < b, "less_equal": lambda a, b: a <= b, "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b, "equal": lambda a, b: a == b, "not_equal": lambda a, b: a != b,
    "pow": pow, "exp2": lambda a: 2.0**a, "exp": math.exp, "log": math.log, "log2": math.log2,
    "sqrt": math.sqrt, "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip
_NOT_FOLLOWED = ("load_advanced_indexing", "store_advanced_indexing", "pack_to_bytes", "unpack_from_bytes")


def _functions(tally: _Tally) -> dict[str, Any]:
    """A probe for each public function of cuTile, by name."""

    def load(array: _Array, index: Any = None, shape: Any = None, **_: Any) -> _Tile:
        tile = _Tile(_tuple(shape), array.dtype)
        tally.load_bytes += math.prod(tile.shape) * array.element_bytes
        return tile

    def store(array: _Array, index: Any = None, tile: Any = None, **_: Any) -> None:
        tally.store_bytes += math.prod(getattr(tile, "shape", ())) * array.element_bytes

    def gather(array: _Array, indices: Any, **_: Any) -> _Tile:
        tile = _Tile(_combined(*_tuple(indices)).shape, array.dtype)
        tally.load_bytes += math.prod(tile.shape) * array.element_bytes
        return tile

    def scatter(array: _Array, indices: Any, *values: Any, **_: Any) -> _Tile:
        tile = _Tile(_combined(*_tuple(indices), *values).shape, array.dtype)
        tally.store_bytes += math.prod(tile.shape) * array.element_bytes
        return tile

    def product(left: _Tile, right: _Tile, acc: Any = None, **_: Any) -> _Tile:
        return multiplied(left, right, acc)

    def scaled(left: _Tile, _left: Any, right: _Tile, _right: Any, acc: Any = None, **_: Any) -> _Tile:
        return multiplied(left, right, acc)

    def multiplied(left: _Tile, right: _Tile, acc: Any) -> _Tile:
        caller = sys._getframe(3)  # past these two, and `followed`
        tally.product(left, right, (caller.f_code, caller.f_lineno))
        shape = (*_broadcast([left.shape[:-2], right.shape[:-2]]), left.shape[-2], right.shape[-1])
        return _Tile(shape, getattr(acc, "dtype", left.dtype))

    def cat(tiles: Sequence[_Tile], axis: int) -> _Tile:
        shape = list(tiles[0].shape)
        shape[axis] = sum(one.shape[axis] for one in tiles)
        return _Tile(shape, tiles[0].dtype)

    def expand_dims(tile: _Tile, axis: int) -> _Tile:
        shape = list(tile.shape)
        shape.insert(axis if axis >= 0 else axis + tile.ndim + 1, 1)
        return _Tile(shape, tile.dtype)

    def reduced_by(tiles: Any, axis: Any = None, *_: Any, **named: Any) -> Any:
        if isinstance(tiles, tuple):
            return tuple(_reduced(one, axis, **named) for one in tiles)
        return _reduced(tiles, axis, **named)

    known: dict[str, Callable[..., Any]] = {
        "bid": lambda axis=0: tally.along(tally.block, axis),
        "num_blocks": lambda axis=0: tally.along(tally.sizes, axis),
        "cdiv": _cdiv,
        "num_tiles": lambda array, axis=0, shape=None, **_: _cdiv(array.shape[axis], _tuple(shape)[axis]),
        "load": load,
        "store": store,
        "gather": gather,
        "scatter": scatter,
        "mma": product,
        "matmul": product,
        "mma_scaled": scaled,
        "arange": lambda size, *, dtype=None, **_: _Tile((size,), dtype),
        "full": lambda shape, fill_value=0, dtype=None: _Tile(_tuple(shape), dtype),
        "zeros": lambda shape, dtype=None: _Tile(_tuple(shape), dtype),
        "ones": lambda shape, dtype=None: _Tile(_tuple(shape), dtype),
        "astype": lambda tile, dtype, **_: _of(tile).astype(dtype),
        "bitcast": lambda tile, dtype: _of(tile).astype(dtype),
        "astile": lambda value, *_, **__: _of(value),
        "reshape": lambda tile, shape: _of(tile).reshape(shape),
        "broadcast_to": lambda tile, shape: _Tile(_tuple(shape), _of(tile).dtype),
        "permute": lambda tile, axes: tile.permute(axes),
        "transpose": lambda tile, axis0=None, axis1=None: tile.transpose(axis0, axis1),
        "extract": lambda tile, index, shape: tile.extract(index, shape),
        "insert": lambda tile, *_, **__: tile,
        "expand_dims": expand_dims,
        "cat": cat,
        "reduce": reduced_by,
        **dict.fromkeys(_REDUCING, reduced_by),
        **{name: lambda value, *_, **__: value for name in _SAME},
        **{name: lambda *_, **__: None for name in _SILENT},
    }

    def followed(name: str) -> Callable[..., Any]:
        inside = known.get(name) or (scatter if name.startswith("atomic_") else _combined)
        on_numbers = _ON_NUMBERS.get(name)

        def function(*args: Any, **named: Any) -> Any:
            tally.call()
            if name in _NOT_FOLLOWED:
                raise NotCountedError(f"it calls ct.{name}")
            if on_numbers is not None and args and all(isinstance(one, int | float) for one in args):
                return on_numbers(*args)
            return inside(*args, **named)

        return function

    names = cutile.public_names().values()
    return {name: followed(name) for name in names if inspect.isfunction(cutile.public_object(name))}


def _of(value: Any) -> _Tile:
    return value if isinstance(value, _Tile) else _Tile(())


def _reduced(tile: _Tile, axis: Any = None, *, keepdims: bool = False, **_: Any) -> _Tile:
    axes = range(tile.ndim) if axis is None else [one % tile.ndim for one in _tuple(axis)]
    sizes = [1 if at in axes else size for at, size in enumerate(tile.shape)]
    kept = [size for at, size in enumerate(sizes) if keepdims or at not in axes]
    return _Tile(kept, tile.dtype)


def _cdiv(size: Any, by: Any) -> Any:
    if isinstance(size, _Tile) or isinstance(by, _Tile):
        return _combined(size, by)
    return -(-size // by)


# Shapes -----------------------------------------------------------------------------------------------------


def _tuple(shape: Any) -> tuple[Any, ...]:
    return tuple(shape) if isinstance(shape, tuple | list) else (shape,)


def _plain(shape: Iterable[Any]) -> tuple[int, ...]:
    """A shape of plain numbers.

    Raises:
        NotCountedError: A size is not known.
    """
    return tuple(int(size) for size in shape)


def _filled_in(shape: tuple[Any, ...], elements: int) -> tuple[int, ...]:
    """A shape whose size of -1 is the one that is left."""
    rest = math.prod(size for size in shape if size != -1)
    return tuple(elements // rest if size == -1 else size for size in shape)


def _broadcast(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    found: list[int] = []
    for shape in shapes:
        found = [1] * (len(shape) - len(found)) + found
        for at, size in enumerate(reversed(shape), 1):
            found[-at] = max(found[-at], size)
    return tuple(found)


# The kernel's code ------------------------------------------------------------------------------------------


class _Names:
    """cuTile's module, of which a function is a probe and everything else as it is."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or _callable(cutile.public_object(name))


class _Module:
    """A module of the author's, whose functions are rebuilt when they are read."""

    def __init__(self, module: types.ModuleType, rebuilt: _Rebuilt) -> None:
        self._module, self._rebuilt = module, rebuilt

    def __getattr__(self, name: str) -> Any:
        return self._rebuilt.value(getattr(self._module, name))


class _Rebuilt:
    """Makes functions whose names of cuTile mean its probes; the author's own are not touched."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        names = cutile.public_names()
        self._probes = {key: functions[name] for key, name in names.items() if name in functions}
        self._names = _Names(functions)
        self._done: dict[int, Any] = {}

    def function(self, function: types.FunctionType) -> Callable[..., Any]:
        """The same function over probes."""
        function = cast("types.FunctionType", inspect.unwrap(function))
        if id(function) not in self._done:
            scope: dict[str, Any] = {"__builtins__": builtins}
            cells = tuple(types.CellType() for _ in function.__closure__ or ())
            made = types.FunctionType(
                function.__code__, scope, function.__name__, function.__defaults__, cells
            )
            made.__kwdefaults__ = function.__kwdefaults__
            self._done[id(function)] = made  # first: functions may call each other
            for name in _names_read(function.__code__):
                if name in function.__globals__:
                    scope[name] = self.value(function.__globals__[name])
            for cell, there in zip(cells, function.__closure__ or (), strict=True):
                try:
                    cell.cell_contents = self.value(there.cell_contents)
                except ValueError:  # a variable without a value
                    continue
        return cast("Callable[..., Any]", self._done[id(function)])

    def value(self, value: Any) -> Any:
        """What a name of the kernel's module stands for."""
        if id(value) in self._probes:
            return self._probes[id(value)]
        if isinstance(value, types.ModuleType):
            if value.__name__ == "cuda.tile":
                return self._names
            return value if counts_by_name(value.__name__) else _Module(value, self)
        if isinstance(value, types.FunctionType) and not counts_by_name(value.__module__):
            return self.function(value)
        return _callable(value)


def _names_read(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code reads, with those of the functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_read(inner)
