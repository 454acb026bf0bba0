"""Cases of the weakest cubins with tensors of more than 2^31 elements and odd strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from aot_tune import inputs
from aot_tune.declare.comparison import compare
from aot_tune.declare.declaration import Close
from aot_tune.kernels import attention_decode_tunable, rms_norm_tunable
from aot_tune.tunable import Tunable
from aot_tune.values.problem import Problem
from tests.support.weakest.cases import SEED

_ROWS, _COLUMNS, _BESIDE = 1_048_100, 2049, 2
_PAGES, _PAGE = 131_100, (16, 8, 128)
_CHUNK = 1 << 15
"""Rows that are compared at a time, in float64 half a GiB."""

Run = Callable[[Tunable, Problem, tuple[Any, ...]], None]
Args = tuple[Any, ...]


def rms_norm_args(device: str, rows: int = _ROWS) -> Args:
    """Input and output of 4.3 GB each, a row every 2051 elements."""
    x, out = (inputs.empty((rows, _COLUMNS + _BESIDE), "bfloat16", device)[:, :_COLUMNS] for _ in "xo")
    weight = inputs.randn((_COLUMNS,), "bfloat16", device, SEED)
    if device != "meta":
        x.normal_(generator=torch.Generator(device).manual_seed(SEED))
    return x, weight, out, 1e-6


def rms_norm_verdict(args: Args, run: Run) -> str:
    """ "right", or what is wrong."""
    x, weight, out, eps = args
    out.fill_(torch.nan)
    run(rms_norm_tunable, Problem(rms_norm_tunable.problem(*args)), args)
    for first in range(0, len(x), _CHUNK):
        part = slice(first, first + _CHUNK)
        close = rms_norm_tunable.reference(x[part], weight, out[part], eps)
        assert isinstance(close, Close)
        if wrong := compare(f"out[{first}:]", out[part], close):
            return wrong
    return "right"


def attention_decode_args(device: str, pages: int = _PAGES) -> Args:
    """Caches of 4.3 GB each, a head's keys every 129 elements; the sequences lie on pages from all over."""
    problem = Problem(
        {
            "dtype": "bfloat16", "windowed": False, "batch": 4, "context": 2048, "heads": 32, "kv_heads": 8,
            "head_dim": 128, "page_size": 16,
        }
    )  # fmt: skip
    q, _, _, table, *others = attention_decode_tunable.make_args(problem, torch.device(device), SEED)
    page, heads, head_dim = _PAGE
    caches = [
        inputs.empty((pages, page, heads, head_dim + 1), "bfloat16", device)[..., :head_dim] for _ in "kv"
    ]
    if device != "meta":
        generator = torch.Generator(device).manual_seed(SEED)
        used = torch.linspace(0, pages - 1, table.numel(), dtype=torch.float64, device=device).round().long()
        for cache in caches:
            drawn = torch.randn((table.numel(), *_PAGE), dtype=q.dtype, device=device, generator=generator)
            cache[used] = drawn
        table.copy_(used[table.long().flatten()].view(table.shape))
    return q, *caches, table, *others


def attention_decode_verdict(args: Args, run: Run) -> str:
    """ "right", or what is wrong."""
    expected = attention_decode_tunable.reference(*args)
    assert not isinstance(expected, Close)
    named = dict(zip(attention_decode_tunable.parameters, args, strict=True))
    for name in attention_decode_tunable.output_names:
        named[name].fill_(torch.nan)
    run(attention_decode_tunable, Problem(attention_decode_tunable.problem(*args)), args)
    return next((text for name in expected if (text := compare(name, named[name], expected[name]))), "right")


LARGE: Mapping[str, tuple[Tunable, Callable[..., Args], Callable[[Args, Run], str]]] = {
    "rms_norm": (rms_norm_tunable, rms_norm_args, rms_norm_verdict),
    "attention_decode": (attention_decode_tunable, attention_decode_args, attention_decode_verdict),
}
"""By kernel: its declaration, what makes its arguments on a device, and what launches and compares."""
