"""Generate the launch function of a declaration, from the pattern of its calls. Pure.

Its source is written and compiled, as ``dataclasses`` and ``namedtuple`` do, because a loop over the
arguments would take longer than a launch may. The function makes a key of exactly the parts of the arguments
that are read, looks the plan up once and calls ``ct.launch`` once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple

from aot_tune.errors import CompilerMissingError, DeclarationError
from aot_tune.nvidia.cutile import UNCHECKED
from aot_tune.serve.launch.reads import Read, What
from aot_tune.values.config import Config

Kind = Literal["tensor", "mixed", "plain", "list"]
"""Kind of an argument: a tensor in all calls, in some, or in none; or, in any call, a list of tensors."""


def arrays_of(value: Any) -> tuple[Any, ...] | None:
    """Return types, shapes, dtypes and strides of the tensors of a list; None for other values."""
    if type(value) is not list and type(value) is not tuple:
        return None
    return tuple([(type(tensor), tensor.shape, tensor.dtype, tensor.stride()) for tensor in value])


def devices_of(value: Any) -> tuple[int, ...] | None:
    """Return the devices of the tensors of a list; None for other values."""
    if type(value) is not list and type(value) is not tuple:
        return None
    return tuple([tensor.get_device() for tensor in value])


def misaligned(value: Any) -> int:
    """Return a tensor's address modulo 16, in bytes."""
    return int(value.data_ptr()) & 15


def needs_grad(value: Any) -> bool:
    """Whether a tensor, or a tensor of a list, requires grad."""
    members = value if type(value) is list or type(value) is tuple else (value,)
    return any(getattr(member, "requires_grad", False) for member in members)


_READERS: dict[What, tuple[str, Callable[[Any], Any]]] = {
    "shape": ("{}.shape", attrgetter("shape")),
    "dtype": ("{}.dtype", attrgetter("dtype")),
    "stride": ("{}.stride()", methodcaller("stride")),
    "device": ("{}.get_device()", methodcaller("get_device")),
    "value": ("{}", lambda arg: arg),
    "arrays": ("arrays_of({})", arrays_of),
    "devices": ("devices_of({})", devices_of),
    "aligned": ("misaligned({})", misaligned),
}
"""Readers of each part of a key from an argument: source text and function."""


class CallPattern(NamedTuple):
    """Pattern of a declaration's calls; its launch function is written from it."""

    kinds: tuple[Kind, ...]
    """Kind of each argument."""

    reads: frozenset[Read]
    """Parts of the arguments that `problem` and `args_fn` read; the key is made of them."""

    layout: tuple[int | None, ...] | None
    """Origin of each kernel argument (`ArgumentReads.layout`); None where `args_fn` must be called."""

    several_devices: bool
    """Whether this process sees more than one GPU, so that the key distinguishes them."""

    given: bool = False
    """Whether a call has given its config, so that such calls are looked up too."""

    def key_parts(self) -> list[Read]:
        """Return the reads that a key holds after the types of all arguments, in order."""
        if not self.several_devices:
            return sorted(self.reads)
        devices: set[Read] = set()
        for place, kind in enumerate(self.kinds):
            if kind == "list":
                devices |= {(place, "devices")}
            if kind != "plain":
                devices |= {(place, "device")}
        return sorted(self.reads | devices)

    def is_guarded(self, place: int, what: What) -> bool:
        """Whether a part is read only where the argument is a tensor, or only where it is none."""
        return self.kinds[place] in ("mixed", "list") and what not in ("arrays", "devices")

    def key(
        self, index: int, args: Sequence[Any], tensor_types: Sequence[type], config: Config | None = None
    ) -> tuple[Any, ...]:
        """Return the launch function's key of arguments without compiling source, which is slow.

        Args:
            index: The index of the GPU that holds the tensors, or that replaces device "meta".
            args: The launch arguments.
            tensor_types: The exact types that count as tensors.
            config: The config that the call gives, or None.
        """
        parts: list[Any] = [type(arg) for arg in args]
        for place, what in self.key_parts():
            arg = args[place]
            if self.is_guarded(place, what) and (type(arg) in tensor_types) is (what == "value"):
                parts.append(None)
            elif what == "device":
                parts.append(index)
            elif what == "devices":
                parts.append((index,) * len(arg) if type(arg) in (list, tuple) else None)
            else:
                parts.append(_READERS[what][1](arg))
        return tuple(parts) if config is None else (*parts, config)


@cache
def argument_maker(names: Sequence[str], layout: Sequence[int | None]) -> Callable[..., Any]:
    """Return a function from a kernel's constants to a maker of its arguments from a launch's.

    Args:
        names: The names of the launch arguments.
        layout: `ArgumentReads.layout` of the kernel.
    """
    constants = [f"c{i}" for i in range(sum(place is None for place in layout))]
    rest = iter(constants)
    items = "".join(f"{next(rest) if place is None else names[place]}, " for place in layout)
    source = f"lambda {', '.join(constants)}: lambda {', '.join(names)}: ({items})"
    maker: Callable[..., Any] = eval(source, {})
    return maker


class LaunchFunction:
    """Launch function of a declaration. `rewrite` replaces its code in place, for all holders.

    Its globals are the names that the source below uses: ``plans<generation>`` (the memo), ``slow``,
    ``missed``, ``ct_launch``, ``raw_stream``, ``current_device``, ``grad_enabled``, ``entered``, ``tensors``,
    ``arrays_of``, ``devices_of``, ``misaligned``, ``needs_grad`` and ``args_fn``.

    Args:
        name: The declaration's name, for tracebacks.
        problem: The declaration's `problem`; the launch function takes the object whose method it is, these
            parameters, then a config and `batch_invariant`.
        slow: Called with (args, config, batch_invariant) where nothing was launched: the memo has no plan, or
            cuTile refuses the arguments or has no code for them. It launches them or raises a clear error.
    """

    def __init__(self, name: str, problem: Callable[..., Any], slow: Callable[..., None]) -> None:
        self._file = f"<launch of {name}>"
        parameters = inspect.signature(problem).parameters.values()
        self.names = tuple(parameter.name for parameter in parameters)
        self._check(name, tuple(parameters))
        self._args = "".join(f"{name}, " for name in self.names)
        self.globals: dict[str, Any] = {
            "__name__": __name__,
            "slow": slow,
            "missed": MISSED,
            "arrays_of": arrays_of,
            "devices_of": devices_of,
            "misaligned": misaligned,
            "needs_grad": needs_grad,
            UNCHECKED: True,
        }
        self._generation = 0
        defaults = tuple(p.default for p in parameters if p.default is not p.empty)
        # Not keyword-only: CPython calls functions with keyword-only parameters on a slower path.
        self.call = FunctionType(self._code([]), self.globals, "launch", (*defaults, None, None))
        self.call.__qualname__ = f"{name}.launch"

    def rewrite(self, pattern: CallPattern, names: dict[str, Any]) -> dict[Any, Any]:
        """Rewrite the function for a new call pattern.

        Returns:
            The new, empty memo, keyed by `CallPattern.key`. Old plans are not carried over: their keys
            distinguish less than the new ones do.
        """
        self._generation += 1
        memo: dict[Any, Any] = {}
        self.globals.update(names)
        self.globals[f"plans{self._generation}"] = memo
        self.call.__code__ = self._code(self._hot_path(pattern))
        if self._generation > 1:  # a thread that still runs the old code finds no plan and goes slow
            self.globals[f"plans{self._generation - 1}"].clear()
        return memo

    # The source ---------------------------------------------------------------------------------------------

    def _hot_path(self, pattern: CallPattern) -> list[str]:
        tensors = [(n, kind) for n, kind in zip(self.names, pattern.kinds, strict=True) if kind != "plain"]
        grad = " or ".join(_REQUIRES_GRAD[kind].format(n) for n, kind in tensors)
        unrecorded = f" and not (grad_enabled() and ({grad}))" if grad else ""
        if pattern.layout is None:
            constants, passed = ["chosen"], f"args_fn(chosen, {self._args})"
        else:
            constants = [f"c{i}" for i in range(pattern.layout.count(None))]
            rest = iter(constants)
            items = (next(rest) if place is None else self.names[place] for place in pattern.layout)
            passed = f"({''.join(f'{item}, ' for item in items)})"
        named = [n for n, kind in tensors if kind == "tensor"]
        named += [f"{n}[0]" for n, kind in tensors if kind == "list"]
        first = next(iter(named), None)
        if pattern.several_devices and first is None:
            return []  # no argument is a tensor in every call, so none can name the device
        firing = _ON_ITS_DEVICE if pattern.several_devices else _ON_THE_ONLY_DEVICE
        row, fired = ", ".join(("grid", "kernel", *constants)), firing.format(first=first, passed=passed)
        # One test for both: they are the same object only where both are None.
        cases = [("config is batch_invariant", "")] + [("config is not None", "config")] * pattern.given
        hot_path = ["try:"]
        for test, given in cases:
            hot_path += [
                f" if {test}{unrecorded}:",
                f"  {row} = plans{self._generation}[{self._key(pattern)}{given}]",
                *fired.splitlines(),
            ]
        return [*hot_path, "except missed:", " pass"]

    def _key(self, pattern: CallPattern) -> str:
        parts = [f"type({name})" for name in self.names]
        for place, what in pattern.key_parts():
            name = self.names[place]
            part = _READERS[what][0].format(name)
            if pattern.is_guarded(place, what):
                absent = "not " if what == "value" else ""
                part = f"({part} if type({name}) {absent}in tensors else None)"
            parts.append(part)
        return f"{', '.join(parts)},"

    def _code(self, hot_path: Sequence[str]) -> CodeType:
        """Compile the function. The first launch waits for this, so the source is as short as possible."""
        lines = [f" {line}\n" for line in (*hot_path, f"slow(({self._args}), config, batch_invariant)")]
        namespace: dict[str, Any] = {}
        source = f"def launch(self, {self._args}config, batch_invariant):\n{''.join(lines)}"
        exec(compile(source, self._file, "exec"), namespace)
        code: CodeType = namespace["launch"].__code__
        return code

    def _check(self, name: str, parameters: Sequence[inspect.Parameter]) -> None:
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise DeclarationError(
                    f"{name}: problem() takes {parameter}; write each launch argument as a named parameter"
                )
            if parameter.name in _RESERVED:
                raise DeclarationError(
                    f"{name}: problem() has a parameter {parameter.name!r}, which launch uses; rename it"
                )


_REQUIRES_GRAD = {
    "tensor": "{}.requires_grad", "mixed": "getattr({}, 'requires_grad', False)", "list": "needs_grad({})",
}  # fmt: skip
"""Source of the requires-grad test, by kind of argument."""

_ON_THE_ONLY_DEVICE = """\
  return ct_launch(raw_stream(0), grid, kernel, {passed})
"""

_ON_ITS_DEVICE = """\
  index = {first}.get_device()
  stream = raw_stream(index)
  if stream or current_device() == index:
   return ct_launch(stream, grid, kernel, {passed})
  with entered(index):
   return ct_launch(stream, grid, kernel, {passed})
"""
"""Source of a launch where the process has several GPUs.

cuTile asks the driver for the stream's context. Every default stream has the handle 0, which means the
default stream of the current device, so the device of the tensors must be the current one."""

MISSED = (KeyError, AttributeError, TypeError, ValueError, CompilerMissingError)
"""Errors after which the slow path is taken, since nothing was launched.

The call has no plan; an argument is of another kind than before or has no hash; cuTile refuses the arguments;
they must be checked before code for them is loaded (`aot_tune.nvidia.cutile.with_hints`); or there is neither
cubin nor compiler."""

_RESERVED = frozenset(
    {"self", "config", "batch_invariant", "slow", "missed", "ct_launch", "raw_stream", "current_device",
     "grad_enabled", "entered", "tensors", "arrays_of", "devices_of", "misaligned", "needs_grad", "args_fn",
     "grid", "kernel", "index", "stream", "chosen", "getattr", "type"}
    | {f"c{i}" for i in range(64)}
)  # fmt: skip
"""Names that the generated source uses; no launch argument may have them."""
