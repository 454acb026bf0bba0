"""Define host functions as PyTorch operators, for torch.compile and other tracers, without importing them.

An eager call goes straight to the host function. While torch.compile, torch.export or a fake tensor mode
traces, the same call becomes the operator: one node of the graph. Its schema lists the arguments that it
changes, and its fake implementation returns the result's shape after the host function's own checks have
passed. When the graph runs, the node calls the host function; a CUDA graph captures what that launches. An
operator imports its kernel's module when it is first traced or run.

Operators are defined by their schemas (``torch.library.Library``): ``torch.library.custom_op`` makes the
same operators and costs 20 us more a call. No operator has a gradient: tracing one where gradients are
recorded is refused, as a launch is.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from aot_tune.errors import LaunchError

_LIBRARY: Any = torch.library.Library("aot_tune", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Library of the operators, kept for the life of the process: they would be removed with it."""

_defined: set[str] = set()
"""Schemas of the operators."""

_importing = threading.RLock()
"""Held while a kernel's module is imported, and while the process forks: a child that is forked during
another thread's import would wait for that thread, which it does not have."""

_PATIENCE_S = 10.0
"""Seconds that a fork waits for an import in another thread, which may itself wait for the forking thread."""

_forking: set[int] = set()
"""Thread that holds the lock while it forks; none after `_PATIENCE_S`."""


def _before_fork() -> None:
    if _importing.acquire(timeout=_PATIENCE_S):
        _forking.add(threading.get_ident())


def _after_fork() -> None:
    if threading.get_ident() in _forking:
        _forking.clear()
        _importing.release()


def _renew() -> None:
    """Renew the lock in a forked child: a thread that still imports stays in the parent."""
    global _importing
    _forking.clear()
    _importing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_renew)


class Shipped(NamedTuple):
    """Shipped kernel, by its place."""

    place: str
    """Its module below `aot_tune.kernels`; the last part is the name of the kernel and its host function."""

    traced: Callable[..., Any] | None = None
    """Calls the operators instead of the host function; None where another kernel's function launches it."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.place.rpartition(".")[2]

    def imported(self, name: str) -> Any:
        """Import the kernel's module and return its `name`.

        Raises:
            ImportError: It cannot be imported. An AttributeError would say that the package has no such name.
        """
        try:
            with _importing:
                return getattr(import_module(f"aot_tune.kernels.{self.place}"), name)
        except AttributeError as error:
            raise ImportError(f"aot_tune.kernels.{self.place} cannot be imported: {error}") from error

    def later(self, prefix: str = "") -> Callable[..., Any]:
        """Return a function that calls the host function, or its `prefix`, and imports it then."""
        found = functools.cache(lambda: self.imported(prefix + self.name))
        return lambda *args, **kwargs: found()(*args, **kwargs)

    def public(self) -> Callable[..., Any]:
        """Return the host function for users: it becomes the operator while a tracer traces."""
        host, traced = self.imported(self.name), self.traced
        assert traced is not None

        @functools.wraps(host)
        def call(*args: Any, **kwargs: Any) -> Any:
            return traced(*args, **kwargs) if traces() else host(*args, **kwargs)

        call.__module__ = "aot_tune.kernels"  # where pickles find it
        return call


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

    if schema not in _defined:  # `importlib.reload` defines all again
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        full = f"{name}.{overload}" if overload else name
        _LIBRARY.impl(full, run, "CompositeExplicitAutograd")
        _LIBRARY.impl(full, traced, "Meta")
        _defined.add(schema)
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


def returning(place: str, arguments: str, fake: Callable[..., Any]) -> Shipped:
    """Define operators for a function that returns a new tensor or fills the one passed as `out`.

    Args:
        place: Module of the function below `aot_tune.kernels`; it has the name of the module, and beside it
            is a ``check_`` of that name, which raises what every run of a call would raise.
        arguments: Its parameters in the syntax of a schema, without `out`.
        fake: Takes these arguments and returns an empty tensor of the result's shape and dtype.
    """
    kernel = Shipped(place)
    name, host, check = kernel.name, kernel.later(), kernel.later("check_")
    new = define(f"{name}({arguments}) -> Tensor", host, fake, check)
    fill = define(f"{name}.out({_with_out(arguments)}) -> ()", _discarding(host), _nothing, check)

    def traced(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if out is None:
            return new(*args, **kwargs)
        fill(*args, **kwargs, out=out)
        return out

    return Shipped(place, traced)


def attending(place: str, arguments: str, fake: Callable[..., Any]) -> Shipped:
    """Like `returning`, for a function that also returns log-sum-exps if `return_lse` is set.

    `fake` returns both tensors; `arguments` omits `return_lse` too.
    """
    kernel = returning(place, arguments, lambda *args, **kwargs: fake(*args, **kwargs)[0])
    name, check, plain = kernel.name, kernel.later("check_"), kernel.traced
    both = functools.partial(kernel.later(), return_lse=True)
    new = define(f"{name}.lse({arguments}) -> (Tensor, Tensor)", both, fake, check)
    fill = define(
        f"{name}.lse_out({_with_out(arguments)}) -> Tensor",
        lambda *args, **kwargs: both(*args, **kwargs)[1],
        lambda *args, out, **kwargs: fake(*args, **kwargs)[1],
        check,
    )

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.pop("return_lse", False):
            return plain(*args, **kwargs)  # type: ignore[misc]
        out = kwargs.pop("out", None)
        if out is None:
            return new(*args, **kwargs)
        return out, fill(*args, **kwargs, out=out)

    return Shipped(place, traced)


def changing(place: str, arguments: str) -> Shipped:
    """Define the operator of a function that changes and returns its first arguments, ``Tensor(a!)``."""
    kernel = Shipped(place)
    run, check = _discarding(kernel.later()), kernel.later("check_")
    change = define(f"{kernel.name}({arguments}) -> ()", run, _nothing, check)
    changed = [argument.split()[1] for argument in arguments.split(", ") if "!" in argument]

    def traced(*args: Any, **kwargs: Any) -> Any:
        change(*args, **kwargs)
        named = {**dict(zip(changed, args)), **kwargs}  # noqa: B905 (more args than changed ones)
        return tuple(named[name] for name in changed)

    return Shipped(place, traced)


def _with_out(arguments: str) -> str:
    return f"{arguments}, {'' if '*' in arguments else '*, '}Tensor(a!) out"


def _discarding(host: Callable[..., Any]) -> Callable[..., None]:
    """Wrap `host` to drop its result: an operator must not return its own arguments."""

    def run(*args: Any, **kwargs: Any) -> None:
        host(*args, **kwargs)

    return run


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the fake implementation of an operator that only changes its arguments."""
