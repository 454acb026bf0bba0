"""Turn host functions into PyTorch operators, for torch.compile and other tracers. Imports no kernel.

An eager call goes straight to the host function. While torch.compile, torch.export or a fake tensor mode
traces, the same call becomes the operator: one node of the graph. Its schema lists the arguments that it
changes, and its fake implementation returns the result's shape after the host function's own checks have
passed. When the graph runs, the node calls the host function; a CUDA graph captures what that launches.

Operators are defined by their schemas (``torch.library.Library``): ``torch.library.custom_op`` makes the
same operators and costs 20 us more a call. No operator has a gradient: tracing one where gradients are
recorded is refused, as a launch is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_compiling

from aot_tune.errors import LaunchError

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY: Any = torch.library.Library("aot_tune", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Library of the operators, kept for the life of the process: they would be removed with it."""


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], check: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an operator and return it.

    Args:
        schema: The operator's name, arguments and results.
        run: Its implementation for any device.
        fake: Takes the same arguments and returns empty tensors of the results' shapes and dtypes.
        check: Takes the same arguments and raises what every run of such a call would raise.
    """
    name, _, overload = schema.partition("(")[0].partition(".")

    def traced(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise LaunchError(
                        f"{name}: an argument requires grad, and no gradient would be recorded; trace it "
                        "under torch.no_grad(), or call it from a torch.autograd.Function"
                    )
        with suppress(_OnlyRunsKnow):
            check(*map(_as_traced, args), **{key: _as_traced(value) for key, value in kwargs.items()})
        return fake(*args, **kwargs)

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    full = f"{name}.{overload}" if overload else name
    _LIBRARY.impl(full, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(full, traced, "Meta")
    operator: Callable[..., Any] = getattr(getattr(torch.ops.aot_tune, name), overload or "default")
    return operator


class _OnlyRunsKnow(Exception):
    """A size that depends on data; only a run can check it."""


def _as_traced(value: Any) -> Any:
    """Return an argument for `check`: each symbolic size is replaced by its value in the traced call.

    So no check leaves a guard on a size, which may differ in other runs. Strides are left to the run, since a
    compiler may choose others.
    """
    if isinstance(value, torch.SymInt):
        known = getattr(value.node, "hint", None)
        if not isinstance(known, int):
            raise _OnlyRunsKnow
        return known
    if isinstance(value, torch.Tensor):
        return torch.empty([_as_traced(size) for size in value.shape], dtype=value.dtype, device="meta")
    return value


def traces() -> bool:
    """Whether a call becomes an operator: under torch.compile or torch.export, or with fake tensors."""
    return is_compiling() or bool(_modes() and any(_mode(key) is not None for key in _TRACING))


_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def named_as(host: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the public function of `host`: pickles find it in `aot_tune.kernels`."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        functools.update_wrapper(call, host)
        call.__module__ = "aot_tune.kernels"
        return call

    return decorate


def returning(
    host: Callable[P, R], arguments: str, fake: Callable[..., Any], check: Callable[..., Any]
) -> Callable[P, R]:
    """Define operators for a function that returns a new tensor or fills the one passed as `out`.

    Args:
        host: The host function; the operator takes its name.
        arguments: Its parameters in the syntax of a schema, without `out`.
        fake: Takes these arguments and returns an empty tensor of the result's shape and dtype.
        check: Takes these arguments and `out`, and raises what every run of such a call would raise.

    Returns:
        A function of the same parameters: it runs `host`, or becomes the operator while a tracer traces.
    """
    name = host.__name__
    new = define(f"{name}({arguments}) -> Tensor", host, fake, check)
    fill = define(f"{name}.out({_with_out(arguments)}) -> ()", _discarding(host), _nothing, check)

    @named_as(host)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not traces():
            return host(*args, **kwargs)
        out: Any = kwargs.pop("out", None)
        if out is None:
            return new(*args, **kwargs)  # type: ignore[no-any-return]
        fill(*args, **kwargs, out=out)
        return out  # type: ignore[no-any-return]

    return call


def attending(
    host: Callable[P, R], arguments: str, fake: Callable[..., Any], check: Callable[..., Any]
) -> Callable[P, R]:
    """Like `returning`, for a function that also returns log-sum-exps if `return_lse` is set.

    `fake` returns both tensors; `arguments` omits `return_lse` too.
    """
    name, both = host.__name__, functools.partial(cast(Callable[..., Any], host), return_lse=True)
    plain = returning(host, arguments, lambda *args, **kwargs: fake(*args, **kwargs)[0], check)
    new = define(f"{name}.lse({arguments}) -> (Tensor, Tensor)", both, fake, check)
    fill = define(
        f"{name}.lse_out({_with_out(arguments)}) -> Tensor",
        lambda *args, **kwargs: both(*args, **kwargs)[1],
        lambda *args, out, **kwargs: fake(*args, **kwargs)[1],
        check,
    )

    @named_as(host)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not traces():
            return host(*args, **kwargs)
        if not kwargs.pop("return_lse", False):
            return plain(*args, **kwargs)
        out: Any = kwargs.pop("out", None)
        if out is None:
            return new(*args, **kwargs)  # type: ignore[no-any-return]
        return out, fill(*args, **kwargs, out=out)  # type: ignore[return-value]

    return call


def changing(host: Callable[P, R], arguments: str, check: Callable[..., Any]) -> Callable[P, R]:
    """Define the operator of a function that changes and returns its first arguments, ``Tensor(a!)``."""
    change = define(f"{host.__name__}({arguments}) -> ()", _discarding(host), _nothing, check)
    changed = [argument.split()[1] for argument in arguments.split(", ") if "!" in argument]

    @named_as(host)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not traces():
            return host(*args, **kwargs)
        change(*args, **kwargs)
        named: dict[str, Any] = {**dict(zip(changed, args)), **kwargs}  # noqa: B905 (more args than changed ones)
        return tuple(named[name] for name in changed)  # type: ignore[return-value]

    return call


def _with_out(arguments: str) -> str:
    return f"{arguments}, {'' if '*' in arguments else '*, '}Tensor(a!) out"


def _discarding(host: Callable[..., Any]) -> Callable[..., None]:
    """Wrap `host` to drop its result: an operator must not return its own arguments."""

    def run(*args: Any, **kwargs: Any) -> None:
        host(*args, **kwargs)

    return run


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the fake implementation of an operator that only changes its arguments."""
