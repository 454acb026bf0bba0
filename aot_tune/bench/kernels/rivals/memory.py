"""Rivals of the kernels that memory bounds: torch.compile, and torch's own kernels.

The functions take a kernel's launch arguments, compute in float32 and write where the kernel writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from aot_tune.bench.kernels.standard import ACTIVATIONS, COMPILED, MEMORY_BOUND, Rival, Standard, compiled
from aot_tune.kernels import activations
from aot_tune.values.problem import Problem

_T = torch.Tensor


def _rms_norm(x: _T, weight: _T, out: _T, eps: float) -> None:
    out.copy_(F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps))


def _fused_add_rms_norm(x: _T, residual: _T, weight: _T, eps: float) -> None:
    total = x + residual
    residual.copy_(total)
    x.copy_(F.rms_norm(total.float(), x.shape[-1:], weight.float(), eps))


def _layer_norm(x: _T, weight: _T, bias: _T | None, out: _T, eps: float) -> None:
    shift = None if bias is None else bias.float()
    out.copy_(F.layer_norm(x.float(), x.shape[-1:], weight.float(), shift, eps))


def _softmax(x: _T, out: _T, slots: _T) -> None:
    out.copy_(torch.softmax(x.float(), dim=-1))


def _softmax_moved(problem: Problem, x: _T, out: _T, slots: _T) -> float:
    return float(x.nbytes + out.nbytes)


def _gated_activation(x: _T, out: _T, activation: int) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(ACTIVATIONS[activations.NAMES[activation]](gate) * up)


def _cross_entropy(
    logits: _T, target: _T, loss: _T, slots: _T, ignore_index: int, grad_scale: float | None
) -> None:
    kept = target != ignore_index
    columns = target.where(kept, 0)[:, None]
    logs = torch.log_softmax(logits.float(), dim=1)
    loss.copy_(-logs.gather(1, columns)[:, 0] * kept)
    if grad_scale is not None:
        here = torch.arange(logits.shape[1], device=logits.device) == columns
        logits.copy_((logs.exp() - here.float()) * (kept * grad_scale)[:, None])


def _cross_entropy_moved(problem: Problem, logits: _T, *_: Any) -> float:
    return float(logits.nbytes * (2 if problem["gradient"] else 1))


def _rope(q: _T, k: _T, cos: _T, sin: _T, interleaved: bool) -> None:
    c, s = cos[:, None], sin[:, None]
    for x in (q[..., : 2 * cos.shape[1]], k[..., : 2 * cos.shape[1]]):
        low, high = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        low, high = low.float(), high.float()
        pairs = (low * c - high * s, high * c + low * s)
        x.copy_(torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1))


def _rope_moved(problem: Problem, q: _T, k: _T, cos: _T, sin: _T, interleaved: bool) -> float:
    """Count the bytes of the rotated part of each head, read and written, and of the angles."""
    rotated = (q.nbytes + k.nbytes) * problem.size("rotary_dim") // problem.size("head_dim")
    return float(2 * rotated + cos.nbytes + sin.nbytes)


def _torch(function: Callable[..., object]) -> Rival:
    """Make a rival: one call of PyTorch's own kernel."""
    return lambda *args: partial(function, *args)


STANDARDS = {
    "rms_norm": Standard(
        rivals={
            COMPILED: compiled(_rms_norm),
            "F.rms_norm": _torch(lambda x, weight, out, eps: F.rms_norm(x, x.shape[-1:], weight, eps)),
        },
        demands=MEMORY_BOUND,
    ),
    "fused_add_rms_norm": Standard(rivals={COMPILED: compiled(_fused_add_rms_norm)}, demands=MEMORY_BOUND),
    "layer_norm": Standard(
        rivals={
            COMPILED: compiled(_layer_norm),
            "F.layer_norm": _torch(
                lambda x, weight, bias, out, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps)
            ),
        },
        demands=MEMORY_BOUND,
    ),
    "softmax": Standard(
        rivals={
            COMPILED: compiled(_softmax),
            "torch.softmax": _torch(lambda x, out, slots: torch.softmax(x, dim=-1, out=out)),
        },
        demands=MEMORY_BOUND,
        moved=_softmax_moved,
    ),
    "gated_activation": Standard(rivals={COMPILED: compiled(_gated_activation)}, demands=MEMORY_BOUND),
    "cross_entropy": Standard(
        rivals={COMPILED: compiled(_cross_entropy)}, demands=MEMORY_BOUND, moved=_cross_entropy_moved
    ),
    "rope": Standard(rivals={COMPILED: compiled(_rope)}, demands=MEMORY_BOUND, moved=_rope_moved),
}
"""Kernel name to its standard."""
