"""How a host function becomes PyTorch operators, for what traces calls. Knows no kernel.

An eager call goes straight to the host function. While torch.compile, torch.export or a mode of fake tensors
traces, the same call becomes the operator: one node of the graph, whose schema says what it changes and whose
fake implementation tells the result's shape, once the host function's own checks have passed. When the graph
runs, the node calls the host function; a CUDA graph captures what that launches.

Operators are defined by their schemas (``torch.library.Library``): ``torch.library.custom_op`` makes the
same and costs 20 us more a call. None has a gradient: tracing one where gradients are recorded is refused,
as a launch is.
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
"""Kept as long as the process: what it registered would go with it."""


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], check: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an operator, and return it.

    Args:
        schema: Its name, arguments and results.
        run: What it does on any device.
        fake: Takes the same arguments, and returns empty tensors like the results.
        check: Takes the same arguments, and refuses what every run would.
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
    """A size depends on data."""


def _as_traced(value: Any) -> Any:
    """An argument as `check` takes it, its symbolic sizes those of the call that is traced.

    So no check leaves a guard on a size, which other runs may have another of. Strides are left to the run: a
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
    """Whether a call is to become an operator: what compiles says so, or a mode that makes fake tensors."""
    return is_compiling() or bool(_modes() and any(_mode(key) is not None for key in _TRACING))


_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def returning(
    host: Callable[P, R], arguments: str, fake: Callable[..., Any], check: Callable[..., Any]
) -> Callable[P, R]:
    """The operators of a function that returns a new tensor, or fills the one that it is given as `out`.

    Args:
        host: The function; its name is the operator's.
        arguments: Its parameters in a schema's words, without `out`.
        fake: Takes these arguments and returns an empty tensor like the result.
        check: Takes these arguments and `out`, and refuses what every run would.
    """
    name = host.__name__
    new = define(f"{name}({arguments}) -> Tensor", host, fake, check)
    fill = define(f"{name}.out({_with_out(arguments)}) -> ()", _discarding(host), _nothing, check)

    @functools.wraps(host)
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
    """As `returning`, of a function that returns log-sum-exps too where `return_lse` asks for them.

    `fake` returns both; `arguments` leaves `return_lse` out as well.
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

    @functools.wraps(host)
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
    """The operator of a function that changes its first arguments, ``Tensor(a!)``, and returns them."""
    change = define(f"{host.__name__}({arguments}) -> ()", _discarding(host), _nothing, check)
    changed = [argument.split()[1] for argument in arguments.split(", ") if "!" in argument]

    @functools.wraps(host)
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
    """A function without its result: an operator must not return what it was given."""

    def run(*args: Any, **kwargs: Any) -> None:
        host(*args, **kwargs)

    return run


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of what only changes its arguments."""
