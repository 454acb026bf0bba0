"""The host functions as PyTorch operators, ``torch.ops.aot_tune.rms_norm`` and so on, for what traces calls.

The functions here are what a user imports. An eager call goes straight to the host function. While
torch.compile or torch.export traces, the same call becomes the operator: one node of the graph, whose
schema says what it changes and whose fake implementation tells the result's shape. When the graph runs, the
node calls the host function; a CUDA graph captures what that launches.

Operators are defined by their schemas (``torch.library.Library``): ``torch.library.custom_op`` makes the
same and costs 20 us more a call. None has a gradient: tracing one where gradients are recorded is refused,
as a launch is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_compiling

from aot_tune.errors import LaunchError
from aot_tune.kernels.attention import attention as _attention
from aot_tune.kernels.attention_decode import attention_decode as _attention_decode
from aot_tune.kernels.attention_varlen import attention_varlen as _attention_varlen
from aot_tune.kernels.cross_entropy import cross_entropy as _cross_entropy
from aot_tune.kernels.fused_add_rms_norm import fused_add_rms_norm as _fused_add_rms_norm
from aot_tune.kernels.gate_up_swiglu import gate_up_swiglu as _gate_up_swiglu
from aot_tune.kernels.gated_activation import gated_activation as _gated_activation
from aot_tune.kernels.grouped_matmul import grouped_matmul as _grouped_matmul
from aot_tune.kernels.layer_norm import layer_norm as _layer_norm
from aot_tune.kernels.linear import linear as _linear
from aot_tune.kernels.matmul import matmul as _matmul
from aot_tune.kernels.matmul_fp8 import matmul_fp8 as _matmul_fp8
from aot_tune.kernels.rms_norm import rms_norm as _rms_norm
from aot_tune.kernels.rope import rope as _rope
from aot_tune.kernels.softmax import softmax as _softmax

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY: Any = torch.library.Library("aot_tune", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Kept as long as the process: what it registered would go with it."""


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator that runs `run` on any device, and return it."""
    name, _, overload = schema.partition("(")[0].partition(".")

    def without_gradients(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise LaunchError(
                        f"{name}: an argument requires grad, and no gradient would be recorded; trace it "
                        "under torch.no_grad(), or call it from a torch.autograd.Function"
                    )
        return fake(*args, **kwargs)

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    full = f"{name}.{overload}" if overload else name
    _LIBRARY.impl(full, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(full, without_gradients, "Meta")
    operator: Callable[..., Any] = getattr(getattr(torch.ops.aot_tune, name), overload or "default")
    return operator


def _returning(host: Callable[P, R], arguments: str, fake: Callable[..., Any]) -> Callable[P, R]:
    """The operators of a function that returns a new tensor, or fills the one that it is given as `out`.

    Args:
        host: The function; its name is the operator's.
        arguments: Its parameters in a schema's words, without `out`.
        fake: Takes these arguments and returns an empty tensor like the result.
    """
    name = host.__name__
    new = _define(f"{name}({arguments}) -> Tensor", host, fake)
    fill = _define(f"{name}.out({_with_out(arguments)}) -> ()", _discarding(host), _nothing)

    @functools.wraps(host)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_compiling():
            return host(*args, **kwargs)
        out: Any = kwargs.pop("out", None)
        if out is None:
            return new(*args, **kwargs)  # type: ignore[no-any-return]
        fill(*args, **kwargs, out=out)
        return out  # type: ignore[no-any-return]

    return call


def _attending(host: Callable[P, R], arguments: str, fake: Callable[..., Any]) -> Callable[P, R]:
    """As `_returning`, of a function that returns log-sum-exps too where `return_lse` asks for them.

    `fake` returns both; `arguments` leaves `return_lse` out as well.
    """
    name, both = host.__name__, functools.partial(cast(Callable[..., Any], host), return_lse=True)
    plain = _returning(host, arguments, lambda *args, **kwargs: fake(*args, **kwargs)[0])
    new = _define(f"{name}.lse({arguments}) -> (Tensor, Tensor)", both, fake)
    fill = _define(
        f"{name}.lse_out({_with_out(arguments)}) -> Tensor",
        lambda *args, **kwargs: both(*args, **kwargs)[1],
        lambda *args, out, **kwargs: fake(*args, **kwargs)[1],
    )

    @functools.wraps(host)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_compiling():
            return host(*args, **kwargs)
        if not kwargs.pop("return_lse", False):
            return plain(*args, **kwargs)
        out: Any = kwargs.pop("out", None)
        if out is None:
            return new(*args, **kwargs)  # type: ignore[no-any-return]
        return out, fill(*args, **kwargs, out=out)  # type: ignore[return-value]

    return call


def _changing(host: Callable[P, R], arguments: str) -> Callable[P, R]:
    """The operator of a function that changes its first arguments, ``Tensor(a!)``, and returns them."""
    change = _define(f"{host.__name__}({arguments}) -> ()", _discarding(host), _nothing)
    changed = [argument.split()[1] for argument in arguments.split(", ") if "!" in argument]

    @functools.wraps(host)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_compiling():
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


def _like_first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# Reductions and elementwise ---------------------------------------------------------------------

rms_norm = _returning(_rms_norm, "Tensor x, Tensor weight, float eps=1e-6", _like_first)

fused_add_rms_norm = _changing(
    _fused_add_rms_norm, "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-6"
)

layer_norm = _returning(
    _layer_norm, "Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5", _like_first
)

softmax = _returning(_softmax, "Tensor x", _like_first)

gated_activation = _returning(
    _gated_activation,
    "Tensor x, *, str activation='silu'",
    lambda x, *, activation="silu": x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
)

rope = _changing(_rope, "Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, *, bool interleaved=False")


def _losses(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.float32)


_loss = _define(
    "cross_entropy(Tensor logits, Tensor target, *, int ignore_index=-100) -> Tensor", _cross_entropy, _losses
)
_loss_and_gradient = _define(
    "cross_entropy.gradient(Tensor(a!) logits, Tensor target, *, int ignore_index=-100, float grad_scale)"
    " -> Tensor",
    _cross_entropy,
    _losses,
)


@functools.wraps(_cross_entropy)
def cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: D103 (the host function's)
    if not is_compiling():
        return _cross_entropy(*args, **kwargs)
    if kwargs.get("grad_scale") is not None:
        return _loss_and_gradient(*args, **kwargs)  # type: ignore[no-any-return]
    kwargs.pop("grad_scale", None)
    return _loss(*args, **kwargs)  # type: ignore[no-any-return]


# Products ---------------------------------------------------------------------------------------

matmul = _returning(_matmul, "Tensor a, Tensor b", lambda a, b: a.new_empty((a.shape[0], b.shape[1])))

linear = _returning(
    _linear,
    "Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None",
    lambda x, weight, bias=None, *, activation=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
)

matmul_fp8 = _returning(
    _matmul_fp8,
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, *, ScalarType out_dtype=bfloat16",
    lambda a, b, scale_a, scale_b, *, out_dtype=torch.bfloat16: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    ),
)

grouped_matmul = _returning(
    _grouped_matmul,
    "Tensor a, Tensor b, Tensor offsets",
    lambda a, b, offsets: a.new_empty((a.shape[0], b.shape[2])),
)

gate_up_swiglu = _returning(
    _gate_up_swiglu,
    "Tensor x, Tensor weight",
    lambda x, weight: x.new_empty((x.shape[0], weight.shape[0] // 2)),
)

# Attention --------------------------------------------------------------------------------------


def _attended(q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((*batch, heads, tokens), dtype=torch.float32)


_MASK = "*, bool causal=True, float? scale=None, int? window=None"

attention = _attending(_attention, f"Tensor q, Tensor k, Tensor v, {_MASK}", _attended)

attention_varlen = _attending(
    _attention_varlen,
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_MASK}",
    _attended,
)

attention_decode = _attending(
    _attention_decode,
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "*, float? scale=None, int? window=None",
    lambda q, *args, **kwargs: (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)),
)
