"""Find out what `problem` and `args_fn` read of the launch arguments: a plan is keyed by just that. Pure.

A declaration's functions are run on stand-ins that write down what is asked of them. A function that is given
equal answers takes equal paths, so two calls that agree in all that was ever read have the same plan. A
stand-in cannot see ``a is b`` between two arguments, and a function that asks for anything but metadata is
not followed: its plan is then asked for at each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aot_tune.declare.stand_in import OPERATORS, VALUE_METHODS
from aot_tune.values.problem import Problem

What = Literal["shape", "dtype", "stride", "device", "value"]
Read = tuple[int, What]
"""The argument's position, and what of it was read. The type of every argument is always part of a key."""

_FOLLOWED: dict[str, tuple[What, ...]] = {
    "shape": ("shape",), "size": ("shape",), "ndim": ("shape",), "dim": ("shape",), "numel": ("shape",),
    "nelement": ("shape",), "dtype": ("dtype",), "itemsize": ("dtype",), "element_size": ("dtype",),
    "is_floating_point": ("dtype",), "is_complex": ("dtype",), "stride": ("stride",),
    "is_contiguous": ("shape", "stride"), "nbytes": ("shape", "dtype"),
    "device": ("device",), "get_device": ("device",), "is_cuda": ("device",),
}  # fmt: skip
"""What may be asked of a tensor, and what its answer depends on."""

_OPERATORS = (
    *OPERATORS, *VALUE_METHODS, "complex", "str", "repr", "format", "divmod", "rdivmod", "round", "trunc",
    "floor", "ceil", "matmul", "rmatmul", "torch_function", "array",
)  # fmt: skip
"""All that Python may ask of a value besides its attributes."""


class _UnfollowedError(Exception):
    """A stand-in was asked something that it cannot answer."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A problem and what was read to state it."""

    problem: Problem
    """The problem these arguments pose."""

    reads: frozenset[Read] | None
    """What was read; None when the function could not be followed."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """How kernel arguments are made of launch arguments and constants of the plan."""

    layout: tuple[int | None, ...]
    """By place: the launch argument that goes there, or None for a constant."""

    constants: tuple[Any, ...]
    """The constants in order."""

    reads: frozenset[Read]
    """What was read of the arguments to make the constants."""


class _Log:
    """What was asked of the stand-ins of one run."""

    def __init__(self) -> None:
        self.reads: set[Read] = set()
        self.touched: set[int] = set()
        self.lost = False


class _TensorStandIn:
    """Answers for a tensor's metadata and writes down what was asked."""

    __slots__ = ("_stand_in",)

    def __init__(self, position: int, tensor: Any, log: _Log) -> None:
        object.__setattr__(self, "_stand_in", (position, tensor, log))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() is answered: the type is always in the key
        return type(self._stand_in[1])

    def __getattr__(self, name: str) -> Any:
        position, tensor, log = self._stand_in
        if name not in _FOLLOWED:
            log.lost = True
            raise _UnfollowedError(name)
        log.reads.update((position, what) for what in _FOLLOWED[name])
        return getattr(tensor, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._stand_in[2].lost = True
        raise _UnfollowedError(name)


class _PlainStandIn:
    """Stands for a scalar that is only passed on: any look at its value is refused and noted."""

    __slots__ = ("_stand_in",)

    def __init__(self, position: int, log: _Log) -> None:
        object.__setattr__(self, "_stand_in", (position, None, log))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        refused: type = _touch(self)
        return refused

    def __getattr__(self, name: str) -> Any:
        _touch(self)


def _touch(stand_in: Any, *_: object) -> Any:
    position, tensor, log = object.__getattribute__(stand_in, "_stand_in")
    if tensor is None:
        log.touched.add(position)
    else:
        log.lost = True
    raise _UnfollowedError(position)


for _operator in _OPERATORS:
    for _kind in (_TensorStandIn, _PlainStandIn):
        setattr(_kind, f"__{_operator}__", _touch)


def follow_problem(
    problem: Callable[..., Any], args: Sequence[Any], tensor_types: tuple[type, ...]
) -> Followed:
    """State the problem of launch arguments and find what was read for it.

    Raises:
        Exception: Whatever `problem` raises on the arguments themselves.
    """
    real = Problem(problem(*args))
    by_value: set[int] = set()
    for _ in range(
        len(args) + 1
    ):  # each round but the last finds one more argument that is used by its value
        log = _Log()
        stand_ins = _stand_ins(args, tensor_types, by_value, log)
        try:
            answer = dict(problem(*stand_ins))
        except Exception:
            answer = None
        if answer is not None:
            places = {id(stand_in): position for position, stand_in in enumerate(stand_ins)}
            log.touched.update(
                places[id(value)]
                for value in answer.values()
                if type(value) is _PlainStandIn and id(value) in places
            )
        if log.touched:
            by_value |= log.touched
            continue
        if answer is None or log.lost or not _same_problem(answer, real):
            break
        values: set[Read] = {(position, "value") for position in by_value}
        return Followed(problem=real, reads=frozenset(log.reads | values))
    return Followed(problem=real, reads=None)


def follow_args(
    args_fn: Callable[..., tuple[Any, ...]],
    config: Any,
    args: Sequence[Any],
    tensor_types: tuple[type, ...],
    keyed: frozenset[Read] | None = None,
) -> tuple[tuple[Any, ...], Passed | None]:
    """The kernel's arguments, and how to make them without calling `args_fn`; None where that is not known.

    A scalar whose value is looked at makes the answer None, since positions and seeds would fill the memo;
    but not one that stating the problem looked at, whose value is in the plan's key.

    Args:
        args_fn: The declaration's.
        config: The plan's.
        args: Of the launch.
        tensor_types: What counts as a tensor.
        keyed: What was read to state the problem.
    """
    real = tuple(args_fn(config, *args))
    log = _Log()
    # A float is no constant: 0.0 and -0.0 have one key.
    by_value = {at for at, what in keyed or () if what == "value" and type(args[at]) is not float}
    stand_ins = _stand_ins(args, tensor_types, by_value, log)
    try:
        answer = tuple(args_fn(config, *stand_ins))
    except Exception:
        return real, None
    if log.lost or log.touched or len(answer) != len(real):
        return real, None
    places = {id(stand_in): position for position, stand_in in enumerate(stand_ins)}
    layout: list[int | None] = []
    constants: list[Any] = []
    for item, truth in zip(answer, real, strict=True):
        if type(item) in (_TensorStandIn, _PlainStandIn) and args[places[id(item)]] is truth:
            layout.append(places[id(item)])
        elif (
            type(item) is type(truth) and type(item) in (bool, int, float, str, type(None)) and item == truth
        ):
            layout.append(None)
            constants.append(item)
        else:
            return real, None
    return real, Passed(layout=tuple(layout), constants=tuple(constants), reads=frozenset(log.reads))


def _stand_ins(
    args: Sequence[Any], tensor_types: tuple[type, ...], by_value: set[int], log: _Log
) -> list[Any]:
    made: list[Any] = []
    for position, arg in enumerate(args):
        if type(arg) in tensor_types:
            made.append(_TensorStandIn(position, arg, log))
        elif arg is None or position in by_value:  # None is told apart by its type, which every key holds
            made.append(arg)
        else:
            made.append(_PlainStandIn(position, log))
    return made


def _same_problem(answer: dict[str, object], real: Problem) -> bool:
    try:
        stated = Problem(answer)
    except Exception:
        return False
    return stated == real and all(type(stated[name]) is type(real[name]) for name in real)
