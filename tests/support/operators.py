"""A call of every operator with CPU tensors, and a model that is made of operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from aot_tune.kernels import ops

BF16 = torch.bfloat16


def normal(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    seed = sum(place * size for place, size in enumerate(sizes, 1))
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Call:
    """An operator's overload with arguments for it."""

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> Any:
        return getattr(getattr(torch.ops.aot_tune, self.name), self.overload)

    def __str__(self) -> str:
        return f"{self.name}.{self.overload}"


def fp8(*sizes: int) -> torch.Tensor:
    return normal(*sizes, dtype=torch.float32).to(torch.float8_e4m3fn)


def returning(name: str, *args: Any, out: torch.Tensor, **kwargs: Any) -> list[Call]:
    return [Call(name, "default", args, kwargs), Call(name, "out", args, {**kwargs, "out": out})]


def attending(name: str, *args: Any, **kwargs: Any) -> list[Call]:
    calls = returning(name, *args, out=torch.empty_like(args[0]), **kwargs)
    return [
        *calls,
        *(Call(name, {"default": "lse", "out": "lse_out"}[c.overload], c.args, c.kwargs) for c in calls),
    ]


def calls() -> list[Call]:
    x, weight, bias = normal(2, 3, 64)[:, :, :48], normal(48), normal(48)
    q, kv = normal(1, 6, 4, 64), normal(1, 6, 2, 64)
    logits, target = normal(5, 40), torch.tensor([1, 39, -100, 0, 7])
    cache, pages = normal(5, 16, 2, 64), torch.tensor([[0, 3], [4, 1]], dtype=torch.int32)
    sequences = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    return [
        *returning("rms_norm", x, weight, 1e-5, out=normal(2, 3, 48)),
        Call("fused_add_rms_norm", "default", (normal(4, 48), normal(4, 48).neg(), weight)),
        *returning("layer_norm", x, weight, bias, out=normal(2, 3, 48)),
        *returning("softmax", x, out=normal(2, 3, 48)),
        *returning("gated_activation", x, activation="gelu", out=normal(2, 3, 24)),
        Call("rope", "default", (normal(5, 4, 16), normal(5, 2, 16), *(normal(5, 8).float() for _ in "cs"))),
        Call("cross_entropy", "default", (logits, target)),
        Call("cross_entropy", "gradient", (logits, target), {"grad_scale": 0.5}),
        *returning("matmul", normal(5, 32), normal(24, 32).t(), out=normal(5, 24)),
        *returning("linear", x, normal(24, 48), normal(24), activation="silu", out=normal(2, 3, 24)),
        *returning(
            "matmul_fp8", fp8(16, 32), fp8(24, 32).t(), torch.ones(1), torch.ones(1),
            out_dtype=torch.float16, out=normal(16, 24, dtype=torch.float16),
        ),
        *returning("grouped_matmul", normal(6, 16), normal(3, 16, 24), sequences[1:], out=normal(6, 24)),
        *returning("gate_up_swiglu", normal(5, 32), normal(48, 32), out=normal(5, 24)),
        *attending("attention", q, kv, kv.neg(), window=3),
        *attending("attention_varlen", q[0], kv[0], kv[0].neg(), sequences, sequences, 4, 4, causal=False),
        *attending("attention_decode", normal(2, 8, 64), cache, cache.neg(), pages, pages[0] + 17),
    ]  # fmt: skip


CALLS = calls()
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
        qkv = ops.linear(ops.rms_norm(x, w["norm"]), w["qkv"]).view(-1, 3, 64)
        q, k = ops.rope(qkv[:, :1], qkv[:, 1:2], cos, sin)
        attended, lse = ops.attention(q[None], k[None], qkv[None, :, 2:], return_lse=True)
        h = torch.empty_like(x)
        ops.linear(attended.view(x.shape), w["out"], out=h)
        h, x = ops.fused_add_rms_norm(h, x.clone(), w["norm"])
        x = x + ops.matmul(ops.gate_up_swiglu(h, w["gate_up"]), w["down"])
        logits = ops.linear(x, w["head"], activation="gelu")
        loss = ops.cross_entropy(logits, target, grad_scale=0.125)
        return loss, logits, lse


def tokens(count: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    angles = normal(count, 32).float()
    target = torch.arange(count) % 80
    return tuple(t.to(device) for t in (normal(count, 64), angles.cos(), angles.sin(), target))
