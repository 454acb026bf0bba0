"""A call of every operator with CPU tensors, and a model that is made of operators."""

from __future__ import annotations

from typing import Any

import torch

from aot_tune import kernels
from tests.kernels.cases import CASES
from tests.support.kernel_case import Call, normal

CALLS = [call for case in CASES.values() for call in case.calls()]
HOSTS = sorted({call.name for call in CALLS})


def copied(call: Call) -> Call:
    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    kwargs = {name: copy(value) for name, value in call.kwargs.items()}
    return Call(call.name, call.overload, tuple(map(copy, call.args)), kwargs)


def results(value: Any) -> list[torch.Tensor]:
    return [] if value is None else list(value) if isinstance(value, tuple) else [value]


class Layer(torch.nn.Module):
    """A layer of a language model and its loss: operators that return, that fill and that change in place."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        sizes = {"norm": (64,), "qkv": (192, 64), "out": (64, 64), "gate_up": (96, 64), "down": (48, 64)}
        self.weights = torch.nn.ParameterDict(
            {name: (normal(*shape) * 0.2).to(device) for name, shape in {**sizes, "head": (80, 64)}.items()}
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        w = self.weights
        qkv = kernels.linear(kernels.rms_norm(x, w["norm"]), w["qkv"]).view(-1, 3, 64)
        q, k = kernels.rope(qkv[:, :1], qkv[:, 1:2], cos, sin)
        attended, lse = kernels.attention(q[None], k[None], qkv[None, :, 2:], return_lse=True)
        h = torch.empty_like(x)
        kernels.linear(attended.view(x.shape), w["out"], out=h)
        h, x = kernels.fused_add_rms_norm(h, x.clone(), w["norm"])
        x = x + kernels.matmul(kernels.gate_up_swiglu(h, w["gate_up"]), w["down"])
        logits = kernels.linear(x, w["head"], activation="gelu")
        loss = kernels.cross_entropy(logits, target, grad_scale=0.125)
        return loss, logits, lse


def tokens(count: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    angles = normal(count, 32).float()
    target = torch.arange(count) % 80
    return tuple(t.to(device) for t in (normal(count, 64), angles.cos(), angles.sin(), target))
