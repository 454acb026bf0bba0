"""Read the problem of a search from the arguments that a library would launch its kernel with.

An argument that varies with the config is not read: its value belongs to the config. A number that the kernel
compiles in, and every text or truth value, counts by value; a whole number too, since loops and grids depend
on it. Other numbers count by type, tensors by dtype, shape, layout and alignment, never by contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aot_tune.errors import NotRecordableError
from aot_tune.nvidia import cutile
from aot_tune.replay.spelling import spelled, text_of

ALIGNMENT = 16
"""Bytes. CuTile compiles faster code for addresses and strides that are multiples of it."""

CONTIGUOUS = "contiguous"
"""Layout of a tensor whose elements lie one after another, the last dimension innermost."""

MOST_ITEMS = 4096
"""Longest list of tensors that is read. A grouped product has at most a few hundred."""


class Array(NamedTuple):
    """Tensor."""

    dtype: str
    """``bfloat16``."""

    shape: tuple[int, ...]
    """Size in each dimension."""

    layout: str
    """`CONTIGUOUS`, or the class of each stride, joined by commas: ``0``, ``1``, ``16`` where the stride is a
    multiple of `ALIGNMENT` bytes, else ``-``."""

    aligned: bool
    """Whether it starts at a multiple of `ALIGNMENT` bytes."""


class Whole(NamedTuple):
    """Whole number that is passed at launch."""

    value: int


class Fixed(NamedTuple):
    """Value that is compiled in, or a text, a truth value or None."""

    text: str
    """Value as `aot_tune.replay.spelling.text_of` spells it."""


class Real(NamedTuple):
    """Floating-point number that is passed at launch."""


class Items(NamedTuple):
    """List or tuple of arguments."""

    items: tuple[Argument, ...]


class Varying(NamedTuple):
    """Argument that varies with the config."""


Argument = Array | Whole | Fixed | Real | Items | Varying


class Problem(NamedTuple):
    """Problem of a search. Searches of one kernel and space with equal problems have one answer."""

    names: tuple[str, ...]
    """Kernel's parameters."""

    arguments: tuple[Argument, ...]
    """Argument of each parameter."""

    sm_count: int
    """GPU's multiprocessors. Libraries compute grids and spaces from their number."""

    @property
    def varying(self) -> tuple[int, ...]:
        """Return the positions of the arguments that vary with the config."""
        return tuple(at for at, argument in enumerate(self.arguments) if isinstance(argument, Varying))


def parameters_of(kernel: Any) -> list[tuple[str, bool]]:
    """Return a kernel's parameters, each with its name and whether it is compiled in."""
    constants = set(cutile.constant_parameters(kernel))
    return [(name, name in constants) for name, _ in cutile.parameters(kernel)]


def read_problem(
    parameters: Sequence[tuple[str, bool]], args: Sequence[Any], varying: Sequence[int], sm_count: int
) -> Problem:
    """Read the problem of a search from the arguments for one of its configs.

    Args:
        parameters: The kernel's parameters, each with its name and whether it is compiled in.
        args: The kernel's arguments for any config.
        varying: The positions of the arguments that vary with the config.
        sm_count: The GPU's multiprocessors.

    Raises:
        NotRecordableError: The number of arguments is wrong, or an argument cannot be identified.
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
    """Read one argument.

    Raises:
        NotRecordableError: The argument cannot be identified.
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
        return Items(tuple(read_argument(name, item, compiled_in=False) for item in arg))
    raise NotRecordableError(
        f"argument {name} is a {type(arg).__name__}, which cannot be identified; pass tensors, numbers, "
        "texts or lists of these"
    )


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
    """Return the layout of strides; `width` is an element's bytes."""

    def class_of(stride: int) -> str:
        if stride in (0, 1):
            return str(stride)
        return str(ALIGNMENT) if stride * width % ALIGNMENT == 0 else "-"

    return ",".join(map(class_of, strides))
