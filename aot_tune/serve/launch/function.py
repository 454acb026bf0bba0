"""Write the function that launches: source made for one declaration and what is known of its calls. Pure.

As ``dataclasses`` and ``namedtuple`` do, because a loop over arguments would cost more than the launch may: a
key of exactly what is read, one look-up, one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType
from typing import Any, Literal

from aot_tune.errors import CompilerMissingError, DeclarationError
from aot_tune.serve.launch.reads import Read, What

Kind = Literal["tensor", "mixed", "plain"]
"""Whether an argument was a tensor in all calls, in some, or in none."""

_LOOKS: dict[What, tuple[str, Callable[[Any], Any]]] = {
    "shape": ("{}.shape", attrgetter("shape")),
    "dtype": ("{}.dtype", attrgetter("dtype")),
    "stride": ("{}.stride()", methodcaller("stride")),
    "device": ("{}.get_device()", methodcaller("get_device")),
    "value": ("{}", lambda arg: arg),
}
"""How an argument is looked at: as source, and as a function."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is known of a declaration's calls, from which its launch function is written."""

    kinds: tuple[Kind, ...]
    """Of each argument."""

    reads: frozenset[Read]
    """What `problem` and `args_fn` read: the key."""

    layout: tuple[int | None, ...] | None
    """Where each kernel argument comes from (`aot_tune.serve.launch.reads.Passed`); None: call `args_fn`."""

    several_devices: bool
    """Whether this process sees more than one GPU, so that the key tells them apart."""

    def looks(self) -> list[Read]:
        """What a key holds after the types of all arguments, in order."""
        tensors = (place for place, kind in enumerate(self.kinds) if kind != "plain")
        devices: set[Read] = {(place, "device") for place in tensors} if self.several_devices else set()
        return sorted(self.reads | devices)

    def key(self, index: int, args: Sequence[Any], tensor_types: Sequence[type]) -> tuple[Any, ...]:
        """The key that the launch function makes of arguments; not source too, which takes long to compile.

        Args:
            index: The GPU that the tensors lie on; they may only stand for some there.
            args: The launch arguments.
            tensor_types: The exact types of tensors.
        """
        parts: list[Any] = [type(arg) for arg in args]
        for place, what in self.looks():
            arg = args[place]
            if self.kinds[place] == "mixed" and (type(arg) in tensor_types) is (what == "value"):
                parts.append(None)
            elif what == "device":
                parts.append(index)
            else:
                parts.append(_LOOKS[what][1](arg))
        return tuple(parts)


class LaunchFunction:
    """One declaration's launch function; `become` rewrites it in place: who holds it holds the newest.

    Its globals are what the source below names: ``plans<generation>`` (the memo), ``slow``, ``missed``,
    ``ct_launch``, ``raw_stream``, ``current_device``, ``grad_enabled``, ``entered``, ``tensors``,
    ``args_fn``.

    Args:
        name: The declaration's name, for tracebacks.
        problem: Its `problem`, whose parameters the launch function takes, and a config after them.
        slow: Called with (args, config) where nothing was launched: the memo has no plan, or cuTile refuses
            the arguments or has no code for them. It knows what to do, or to say.
    """

    def __init__(self, name: str, problem: Callable[..., Any], slow: Callable[..., None]) -> None:
        self._file = f"<launch of {name}>"
        parameters = inspect.signature(problem).parameters.values()
        self.names = tuple(parameter.name for parameter in parameters)
        self._check(name, tuple(parameters))
        self._args = "".join(f"{one}, " for one in self.names)
        self.globals: dict[str, Any] = {"__name__": __name__, "slow": slow, "missed": _MISSED}
        self._generation = 0
        defaults = tuple(p.default for p in parameters if p.default is not p.empty)
        # Not by keyword alone: CPython has no quick path for a call of a function with such parameters.
        self.call = FunctionType(self._code([]), self.globals, "launch", (*defaults, None))
        self.call.__qualname__ = f"{name}.launch"

    def become(self, form: Form, names: dict[str, Any]) -> dict[Any, Any]:
        """Rewrite the function for what is known now.

        Returns:
            The new, empty memo, by `Form.key`. Old plans are not found again: their keys tell less apart than
            the new ones do.
        """
        self._generation += 1
        memo: dict[Any, Any] = {}
        self.globals.update(names)
        self.globals[f"plans{self._generation}"] = memo
        self.call.__code__ = self._code(self._hot_path(form))
        if self._generation > 1:  # a thread may still be inside the last one: it finds nothing, and goes slow
            self.globals[f"plans{self._generation - 1}"].clear()
        return memo

    # The source ---------------------------------------------------------------------------------------------

    def _hot_path(self, form: Form) -> list[str]:
        tensors = [(n, kind) for n, kind in zip(self.names, form.kinds, strict=True) if kind != "plain"]
        grad = " or ".join(
            f"{n}.requires_grad" if kind == "tensor" else f"getattr({n}, 'requires_grad', False)"
            for n, kind in tensors
        )
        unrecorded = f" and not (grad_enabled() and ({grad}))" if grad else ""
        if form.layout is None:
            constants, passed = ["chosen"], f"args_fn(chosen, {self._args})"
        else:
            constants = [f"c{i}" for i in range(form.layout.count(None))]
            rest = iter(constants)
            items = (next(rest) if place is None else self.names[place] for place in form.layout)
            passed = f"({''.join(f'{item}, ' for item in items)})"
        first = next((n for n, kind in tensors if kind == "tensor"), None)
        if form.several_devices and first is None:
            return []  # whether its only tensor is there differs from call to call, and so does the device
        firing = _ON_ITS_DEVICE if form.several_devices else _ON_THE_ONLY_DEVICE
        return [
            "try:",
            f" if config is None{unrecorded}:",
            f"  {', '.join(('grid', 'kernel', *constants))} = plans{self._generation}[{self._key(form)}]",
            *firing.format(first=first, passed=passed).splitlines(),
            "except missed:",
            " pass",
        ]

    def _key(self, form: Form) -> str:
        parts = [f"type({name})" for name in self.names]
        for place, what in form.looks():
            name = self.names[place]
            look = _LOOKS[what][0].format(name)
            if form.kinds[place] == "mixed":
                absent = "not " if what == "value" else ""
                look = f"({look} if type({name}) {absent}in tensors else None)"
            parts.append(look)
        return f"{', '.join(parts)},"

    def _code(self, hot_path: Sequence[str]) -> CodeType:
        """Compile the function. A first launch waits for it, so the source is as short as it can be."""
        lines = [f" {line}\n" for line in (*hot_path, f"slow(({self._args}), config)")]
        namespace: dict[str, Any] = {}
        source = f"def launch({self._args}config):\n{''.join(lines)}"
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
                    f"{name}: problem() calls an argument {parameter.name!r}, a name launch uses; rename it"
                )


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
"""cuTile asks the driver for the stream's context, and every default stream has the handle 0: the current
device's is meant, which must be the tensors'."""

_MISSED = (KeyError, AttributeError, TypeError, ValueError, CompilerMissingError)
"""No plan; another kind of argument than before, or without a hash; arguments that cuTile refuses; no cubin,
and no compiler. Nothing was launched then."""

_RESERVED = frozenset(
    {"config", "slow", "missed", "ct_launch", "raw_stream", "current_device", "grad_enabled", "entered",
     "tensors", "args_fn", "grid", "kernel", "index", "stream", "chosen", "getattr", "type"}
    | {f"c{i}" for i in range(64)}
)  # fmt: skip
