"""The problem of a search: what is read of the arguments that a library would launch its kernel with.

An argument that varies with the config is not read: its value belongs to the config. A number that the kernel
compiles in, and every text or truth value, counts by value; a whole number too, since loops and grids depend
on it; other numbers by type. Of a tensor count dtype, shape, layout and alignment, never its contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aot_tune.errors import NotRecordableError
from aot_tune.replay.spelling import spelled, text_of

ALIGNMENT = 16
"""cuTile compiles faster code for addresses and strides that are multiples of this number of bytes."""

CONTIGUOUS = "contiguous"
"""The layout of a tensor whose elements lie one after another, the last dimension innermost."""

MOST_ITEMS = 4096
"""The longest list of tensors that is read; a grouped product has at most a few hundred."""


class Array(NamedTuple):
    """A tensor."""

    dtype: str
    """``bfloat16``."""

    shape: tuple[int, ...]
    """Its size in each dimension."""

    layout: str
    """`CONTIGUOUS`, or for each dimension the class of its stride: ``0``, ``1``, ``16`` where the stride is a
    multiple of `ALIGNMENT` bytes, else ``-``; joined by commas."""

    aligned: bool
    """Whether it starts at a multiple of `ALIGNMENT` bytes."""


class Whole(NamedTuple):
    """A whole number that is passed at launch."""

    value: int


class Fixed(NamedTuple):
    """A value that is compiled in, or a text, a truth value or None."""

    text: str
    """The value as `aot_tune.replay.spelling.text_of` spells it."""


class Real(NamedTuple):
    """A floating-point number that is passed at launch."""


class Items(NamedTuple):
    """A list or tuple of arguments."""

    items: tuple[Argument, ...]


class Varying(NamedTuple):
    """An argument that varies with the config."""


Argument = Array | Whole | Fixed | Real | Items | Varying


class Problem(NamedTuple):
    """What a search is for: two searches of one kernel and space with equal problems have one answer."""

    names: tuple[str, ...]
    """The kernel's parameters."""

    arguments: tuple[Argument, ...]
    """What is read of the argument of each."""

    sm_count: int
    """The GPU's multiprocessors: libraries compute grids and spaces from it."""

    @property
    def varying(self) -> tuple[int, ...]:
        """The positions of the arguments that vary with the config."""
        return tuple(at for at, one in enumerate(self.arguments) if isinstance(one, Varying))


def read_problem(
    parameters: Sequence[tuple[str, bool]], args: Sequence[Any], varying: Sequence[int], sm_count: int
) -> Problem:
    """Read the problem of a search off the arguments for one of its configs.

    Args:
        parameters: The kernel's parameters, each with its name and whether it is compiled in.
        args: The kernel's arguments for any config.
        varying: The positions of the arguments that vary with the config.
        sm_count: The GPU's multiprocessors.

    Raises:
        NotRecordableError: The number of arguments is wrong, or one is of a kind that cannot be told.
    """
    if len(args) != len(parameters):
        raise NotRecordableError(f"args_fn gives {len(args)} arguments, the kernel takes {len(parameters)}")
    return Problem(
        names=tuple(name for name, _ in parameters),
        arguments=tuple(
            Varying() if at in varying else read_argument(name, arg, compiled_in=compiled_in)
            for at, (arg, (name, compiled_in)) in enumerate(zip(args, parameters, strict=True))
        ),
        sm_count=sm_count,
    )


def read_argument(name: str, arg: Any, *, compiled_in: bool) -> Argument:
    """What is read of one argument.

    Raises:
        NotRecordableError: The argument is of a kind that cannot be told.
    """
    if hasattr(arg, "shape") and hasattr(arg, "dtype") and hasattr(arg, "stride"):
        return _array(arg)
    if compiled_in or arg is None or isinstance(arg, bool | str):
        return Fixed(text_of(spelled(arg)))
    if isinstance(arg, int):
        return Whole(int(arg))
    if isinstance(arg, float):
        return Real()
    if isinstance(arg, list | tuple):
        if len(arg) > MOST_ITEMS:
            raise NotRecordableError(f"argument {name} has {len(arg)} items, more than {MOST_ITEMS}")
        return Items(tuple(read_argument(name, one, compiled_in=False) for one in arg))
    raise NotRecordableError(f"argument {name} is a {type(arg).__name__}, which cannot be told from others")


def _array(tensor: Any) -> Array:
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    dtype = str(tensor.dtype).removeprefix("torch.")
    width = int(tensor.dtype.itemsize)
    start = 0 if getattr(tensor, "is_meta", False) else int(tensor.data_ptr())
    return Array(
        dtype=dtype,
        shape=shape,
        layout=CONTIGUOUS if _is_contiguous(shape, strides) else _classes(strides, width),
        aligned=start % ALIGNMENT == 0,
    )


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _classes(strides: Sequence[int], width: int) -> str:
    def of(stride: int) -> str:
        if stride in (0, 1):
            return str(stride)
        return str(ALIGNMENT) if stride * width % ALIGNMENT == 0 else "-"

    return ",".join(map(of, strides))
