"""Record which parts of the launch arguments `problem` and `args_fn` read, the key of a plan. Pure.

A declaration's functions are run on probes that record each read. A function that gets equal answers takes
equal paths, so two calls that agree in everything that was ever read have the same plan. A probe cannot
notice ``a is b`` between two arguments. A function that reads more than metadata is not followed: each of its
launches takes the slow path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from aot_tune.declare.probe import OPERATORS, VALUE_METHODS
from aot_tune.values.problem import Problem

What = Literal["shape", "dtype", "stride", "device", "value", "arrays", "devices", "aligned"]
"""Part of an argument that is read.

Of a tensor: ``shape``, ``dtype``, ``stride``, ``device``, or ``aligned``, its address modulo 16. Of a scalar:
``value``. Of a list of tensors: ``arrays``, the shapes, dtypes and strides of all members, or ``devices``."""

Read = tuple[int, What]
"""Position of an argument and the part that was read. A key always holds the type of every argument too."""

_FOLLOWED: dict[str, tuple[What, ...]] = {
    "shape": ("shape",), "size": ("shape",), "ndim": ("shape",), "dim": ("shape",), "numel": ("shape",),
    "nelement": ("shape",), "dtype": ("dtype",), "itemsize": ("dtype",), "element_size": ("dtype",),
    "is_floating_point": ("dtype",), "is_complex": ("dtype",), "stride": ("stride",),
    "is_contiguous": ("shape", "stride"), "nbytes": ("shape", "dtype"),
    "device": ("device",), "get_device": ("device",), "is_cuda": ("device",),
}  # fmt: skip
"""Attributes of a tensor that may be read, and the parts that each value depends on."""

_OPERATORS = (
    *OPERATORS, *VALUE_METHODS, "complex", "str", "repr", "format", "divmod", "rdivmod", "round", "trunc",
    "floor", "ceil", "matmul", "rmatmul", "torch_function", "array",
)  # fmt: skip
"""Special methods by which Python uses a value other than by reading an attribute."""


class _UnfollowedError(Exception):
    """A probe cannot answer a read."""


class ProblemReads(NamedTuple):
    """Problem, and the parts of the arguments that `problem` read to state it."""

    problem: Problem
    """Problem that the arguments pose."""

    reads: frozenset[Read] | None
    """Parts that were read; None where the function could not be followed."""


class ArgumentReads(NamedTuple):
    """Origin of kernel arguments in launch arguments and constants, and the parts that `args_fn` read."""

    layout: tuple[int | None, ...]
    """Position of the launch argument passed as each kernel argument; None for a constant."""

    constants: tuple[Any, ...]
    """Constants, in the order of their places."""

    reads: frozenset[Read]
    """Parts of the launch arguments that were read to make the constants."""


class _Log:
    """Reads of the probes in a run."""

    def __init__(self) -> None:
        self.reads: set[Read] = set()
        self.touched: set[int] = set()
        self.lost = False


class _TensorProbe:
    """Answers with a tensor's metadata and records each read."""

    __slots__ = ("_probe",)

    def __init__(self, position: int, tensor: Any, log: _Log | _MemberLog) -> None:
        object.__setattr__(self, "_probe", (position, tensor, log))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() may be answered: the type is always in the key
        return type(self._probe[1])

    def __getattr__(self, name: str) -> Any:
        position, tensor, log = self._probe
        if name not in _FOLLOWED:
            log.lost = True
            raise _UnfollowedError(name)
        log.reads.update((position, what) for what in _FOLLOWED[name])
        return getattr(tensor, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._probe[2].lost = True
        raise _UnfollowedError(name)


class _ListProbe:
    """Replaces a list of tensors. On any use, all shapes, dtypes and strides count as read."""

    __slots__ = ("_probe",)

    def __init__(self, position: int, tensors: Sequence[Any], log: _Log) -> None:
        members = [_TensorProbe(position, tensor, _MemberLog(position, log)) for tensor in tensors]
        object.__setattr__(self, "_probe", (position, tensors, log, members))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._probe[1])

    def __len__(self) -> int:
        return len(self._members())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members())

    def __getitem__(self, place: Any) -> Any:
        return self._members()[place]

    def __getattr__(self, name: str) -> Any:
        self._probe[2].lost = True
        raise _UnfollowedError(name)

    def _members(self) -> list[_TensorProbe]:
        position, _, log, members = self._probe
        log.reads.add((position, "arrays"))
        return list(members)


class _MemberLog:
    """Log of a list's members, which differ from tensors that are arguments themselves."""

    _of: tuple[int, _Log]

    def __init__(self, position: int, log: _Log) -> None:
        object.__setattr__(self, "_of", (position, log))

    @property
    def reads(self) -> _MemberLog:
        return self

    def update(self, reads: Iterable[Read]) -> None:
        position, log = self._of
        log.reads.update((position, "devices" if what == "device" else "arrays") for _, what in reads)

    def __setattr__(self, name: str, value: object) -> None:  # `lost`
        setattr(self._of[1], name, value)


class _PlainProbe:
    """Replaces a scalar that is only passed on: every use of its value is refused and recorded."""

    __slots__ = ("_probe",)

    def __init__(self, position: int, log: _Log) -> None:
        object.__setattr__(self, "_probe", (position, None, log))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        refused: type = _touch(self)
        return refused

    def __getattr__(self, name: str) -> Any:
        _touch(self)


def _touch(probe: Any, *_: object) -> Any:
    position, tensor, log = object.__getattribute__(probe, "_probe")
    if tensor is None:
        log.touched.add(position)
    else:
        log.lost = True
    raise _UnfollowedError(position)


_PROBES = (_TensorProbe, _ListProbe, _PlainProbe)

for _operator in _OPERATORS:
    for _kind in (_TensorProbe, _PlainProbe):
        setattr(_kind, f"__{_operator}__", _touch)


def lists_tensors(arg: object, tensor_types: tuple[type, ...]) -> bool:
    """Whether a launch argument is a list or tuple of tensors."""
    if not isinstance(arg, list | tuple) or type(arg) not in (list, tuple):
        return False
    return bool(arg) and all(type(member) in tensor_types for member in arg)


def follow_problem(
    problem: Callable[..., Any], args: Sequence[Any], tensor_types: tuple[type, ...]
) -> ProblemReads:
    """State the problem of launch arguments and record the reads for it.

    Raises:
        Exception: Whatever `problem` raises on the arguments themselves.
    """
    real = Problem(problem(*args))
    by_value: set[int] = set()
    # Each round except the last finds at least one more argument that is used by its value.
    for _ in range(len(args) + 1):
        log = _Log()
        probes = _probes(args, tensor_types, by_value, log)
        try:
            answer = dict(problem(*probes))
        except Exception:
            answer = None
        if answer is not None:
            places = {id(probe): position for position, probe in enumerate(probes)}
            log.touched.update(
                places[id(value)]
                for value in answer.values()
                if type(value) is _PlainProbe and id(value) in places
            )
        if log.touched:
            by_value |= log.touched
            continue
        if answer is None or log.lost or not _same_problem(answer, real):
            break
        values: set[Read] = {(position, "value") for position in by_value}
        return ProblemReads(problem=real, reads=frozenset(log.reads | values))
    return ProblemReads(problem=real, reads=None)


def follow_args(
    args_fn: Callable[..., tuple[Any, ...]],
    config: Any,
    args: Sequence[Any],
    tensor_types: tuple[type, ...],
    keyed: frozenset[Read] | None = None,
) -> tuple[tuple[Any, ...], ArgumentReads | None]:
    """Return the kernel's arguments, and a way to make them without `args_fn`; None where not known.

    The way is None where `args_fn` uses the value of a scalar, because positions and seeds would fill the
    memo. A scalar whose value `problem` uses too is no obstacle: its value is in the plan's key.

    Args:
        args_fn: The declaration's `args_fn`.
        config: The config of the plan.
        args: The launch arguments.
        tensor_types: The exact types that count as tensors.
        keyed: The reads of `problem`; None where it could not be followed.
    """
    real = tuple(args_fn(config, *args))
    log = _Log()
    # A float is never made a constant: 0.0 and -0.0 are equal and so have one key.
    by_value = {at for at, what in keyed or () if what == "value" and type(args[at]) is not float}
    probes = _probes(args, tensor_types, by_value, log)
    try:
        answer = tuple(args_fn(config, *probes))
    except Exception:
        return real, None
    if log.lost or log.touched or len(answer) != len(real):
        return real, None
    places = {id(probe): position for position, probe in enumerate(probes)}
    layout: list[int | None] = []
    constants: list[Any] = []
    for item, truth in zip(answer, real, strict=True):
        if type(item) in _PROBES and id(item) in places and args[places[id(item)]] is truth:
            layout.append(places[id(item)])
        elif (
            type(item) is type(truth) and type(item) in (bool, int, float, str, type(None)) and item == truth
        ):
            layout.append(None)
            constants.append(item)
        else:
            return real, None
    return real, ArgumentReads(layout=tuple(layout), constants=tuple(constants), reads=frozenset(log.reads))


def _probes(args: Sequence[Any], tensor_types: tuple[type, ...], by_value: set[int], log: _Log) -> list[Any]:
    made: list[Any] = []
    for position, arg in enumerate(args):
        if type(arg) in tensor_types:
            made.append(_TensorProbe(position, arg, log))
        elif lists_tensors(arg, tensor_types):
            made.append(_ListProbe(position, arg, log))
        elif arg is None or position in by_value:  # None is recognised by its type, which every key holds
            made.append(arg)
        else:
            made.append(_PlainProbe(position, log))
    return made


def _same_problem(answer: dict[str, object], real: Problem) -> bool:
    try:
        stated = Problem(answer)
    except Exception:
        return False
    return stated == real and all(type(stated[name]) is type(real[name]) for name in real)
