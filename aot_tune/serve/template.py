"""Write the function that launches: source made for one declaration and what is known of its calls. Pure.

As ``dataclasses`` and ``namedtuple`` do, because a loop over arguments would cost more than the launch may: a
key of exactly what is read, one look-up, one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

from aot_tune.errors import DeclarationError
from aot_tune.serve.reads import Read

KeyFunction = Callable[..., "tuple[Any, ...]"]
"""(the GPU's index, *launch arguments) -> their key in the memo."""

Kind = Literal["tensor", "mixed", "plain"]
"""Whether an argument was a tensor in all calls, in some, or in none."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is known of a declaration's calls, from which its launch function is written."""

    kinds: tuple[Kind, ...]
    """Of each argument."""

    reads: frozenset[Read]
    """What `problem` and `args_fn` read: the key."""

    layout: tuple[int | None, ...] | None
    """Where each kernel argument comes from (`aot_tune.serve.reads.Passed`); None: call `args_fn`."""

    several_devices: bool
    """Whether this process sees more than one GPU, so that the key tells them apart."""


class LaunchFunction:
    """One declaration's launch function; `become` rewrites it in place: who holds it holds the newest.

    Its globals are what the source below names: ``plans<generation>`` (the memo), ``slow``, ``explain``,
    ``ct_launch``, ``raw_stream``, ``current_device``, ``grad_enabled``, ``entered``, ``tensors``,
    ``args_fn``.

    Args:
        name: The declaration's name, for tracebacks.
        problem: Its `problem`, whose parameters the launch function takes.
        slow: Called with (args, config) where the memo has no plan.
    """

    def __init__(self, name: str, problem: Callable[..., Any], slow: Callable[..., None]) -> None:
        self._file = f"<launch of {name}>"
        parameters = inspect.signature(problem).parameters.values()
        self.names = tuple(parameter.name for parameter in parameters)
        self._check(name, tuple(parameters))
        self.globals: dict[str, Any] = {"__name__": __name__, "slow": slow}
        self._generation = 0
        defaults = tuple(p.default for p in parameters if p.default is not p.empty)
        (code,) = self._codes(launch=self._source_of_launch(_SLOW))
        self.call = FunctionType(code, self.globals, "launch", defaults)
        self.call.__kwdefaults__ = {"config": None}
        self.call.__qualname__ = f"{name}.launch"

    def become(self, form: Form, names: dict[str, Any]) -> tuple[KeyFunction, dict[Any, Any]]:
        """Rewrite the function for what is known now.

        Returns:
            The function that makes a key of a GPU's index and the launch arguments, and the new, empty memo.
            Old plans are not found again: their keys tell less apart than the new ones do.
        """
        self._generation += 1
        memo: dict[Any, Any] = {}
        self.globals.update(names)
        self.globals[f"plans{self._generation}"] = memo
        key = self._key_expression(form, "{}.get_device()")
        # Of arguments whose GPU is known already, or that only stand for some there.
        known = self._key_expression(form, "index")
        key_code, self.call.__code__ = self._codes(
            key=f"def key({', '.join(('index', *self.names))}):\n return {known}\n",
            launch=self._source_of_launch(self._hot_path(form, key)),
        )
        if self._generation > 1:  # a thread may still be inside the last one: it finds nothing, and goes slow
            self.globals[f"plans{self._generation - 1}"].clear()
        return FunctionType(key_code, self.globals, "key"), memo

    # The source ---------------------------------------------------------------------------------------------

    def _hot_path(self, form: Form, key: str) -> list[str]:
        tensors = [(n, kind) for n, kind in zip(self.names, form.kinds, strict=True) if kind != "plain"]
        grad = " or ".join(
            f"{n}.requires_grad" if kind == "tensor" else f"getattr({n}, 'requires_grad', False)"
            for n, kind in tensors
        )
        recorded = f" or grad_enabled() and ({grad})" if grad else ""
        constants = [f"c{i}" for i in range((form.layout or ()).count(None))]
        if form.layout is None:
            constants, passed = ["chosen"], "args_fn(chosen, {args})"
        else:
            rest = iter(constants)
            items = (next(rest) if place is None else self.names[place] for place in form.layout)
            passed = f"({''.join(f'{item}, ' for item in items)})"
        first = next((n for n, kind in tensors if kind == "tensor"), None)
        call = f"ct_launch(stream, grid, kernel, {passed})"
        if form.several_devices and first is None:
            return _SLOW  # whether its only tensor is there differs from call to call, and so does the device
        return [
            "try:",
            f" plan = None if config is not None{recorded} else plans{self._generation}.get({key})",
            "except (AttributeError, TypeError):",  # another kind of argument than before, or without a hash
            " plan = None",
            "if plan is None:",
            f" {_SLOW[0]}",
            f"grid, kernel, {''.join(f'{c}, ' for c in constants)}= plan",
            f"index = {first}.get_device()" if form.several_devices else "index = 0",
            "stream = raw_stream(index)",
            "try:",
            # cuTile asks the driver for the context of stream 0, which is the thread's current one.
            *(_ENTERING.format(call=call).splitlines() if form.several_devices else []),
            f" {call}",
            "except (TypeError, ValueError) as error:",
            " explain(error, ({args}))",
            " raise",
            "except no_compiler:",  # nothing was launched: the slow path has the default to fall back to
            f" {_SLOW[0]}",
        ]  # fmt: skip

    def _key_expression(self, form: Form, device: str) -> str:
        parts = [f"type({name})" for name in self.names]
        wanted = {(position, "device") for position, kind in enumerate(form.kinds) if kind != "plain"}
        reads = form.reads | (wanted if form.several_devices else set())
        for position, what in sorted(reads):
            name, kind = self.names[position], form.kinds[position]
            read = {"shape": f"{name}.shape", "dtype": f"{name}.dtype", "stride": f"{name}.stride()",
                    "device": device.format(name), "value": name}[what]  # fmt: skip
            if kind == "mixed":
                absent = "not " if what == "value" else ""
                read = f"({read} if type({name}) {absent}in tensors else None)"
            parts.append(read)
        return f"({', '.join(parts)},)"

    def _source_of_launch(self, body: Sequence[str]) -> str:
        args = "".join(f"{name}, " for name in self.names)
        lines = [f" {line.replace('{args}', args)}" for line in body]
        return "\n".join([f"def launch({args}*, config):", *lines, ""])

    def _codes(self, **sources: str) -> list[CodeType]:
        """Compile functions, by name; all at once, since a first launch waits for it (0.3 ms)."""
        namespace: dict[str, Any] = {}
        exec(compile("".join(sources.values()), self._file, "exec"), namespace)
        return [namespace[name].__code__ for name in sources]

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


_SLOW = ["return slow(({args}), config)"]

_ENTERING = """\
 if not stream and current_device() != index:
  with entered(index):
   {call}
  return
"""
"""Every default stream has the handle 0 and means the current device's: the tensors' must be current."""

_RESERVED = frozenset(
    {"config", "slow", "explain", "ct_launch", "raw_stream", "current_device", "grad_enabled", "entered",
     "tensors", "args_fn", "no_compiler", "plan", "grid", "kernel", "index", "stream", "error", "chosen",
     "getattr", "type"}
    | {f"c{i}" for i in range(64)}
)  # fmt: skip
