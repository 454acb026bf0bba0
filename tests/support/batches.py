"""Parts of a batch for every shipped kernel: the arguments of some of its rows, and the results of these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aot_tune.kernels.decode import attention_decode
from aot_tune.kernels.products import split_k
from aot_tune.kernels.softmax_and_loss import cross_entropy, softmax
from aot_tune.values.problem import Problem

Args = Sequence[Any]


@dataclass(frozen=True)
class Batch:
    """How a kernel's arguments are cut into parts of their batch."""

    of: Callable[[Args, int, int], tuple[Any, ...]]
    """(arguments, first, last) -> arguments of the rows from the first to before the last, with outputs of
    their own."""

    results: Callable[[Args, int, int], list[torch.Tensor]]
    """(arguments, first, last) -> what the kernel has written for these rows."""


def _rows(rows: Sequence[int], out: Sequence[int], changed: Sequence[int] = ()) -> Batch:
    """Arguments at `rows` are cut along their first dimension; those at `out` are written, `changed` too."""

    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        parts = list(args)
        for place in (*rows, *out, *changed):
            if place in out:
                parts[place] = torch.empty_like(args[place][first:last])
            else:
                parts[place] = (
                    args[place][first:last].clone() if place in changed else args[place][first:last]
                )
        return tuple(parts)

    def results(args: Args, first: int, last: int) -> list[torch.Tensor]:
        return [args[place][first:last] for place in (*out, *changed)]

    return Batch(of, results)


def _with(batch: Batch, place: int, value: Callable[[Args], Any]) -> Batch:
    """The same, with an argument that is made of the others."""

    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        parts = list(batch.of(args, first, last))
        parts[place] = value(parts)
        return tuple(parts)

    return Batch(of, batch.results)


def _grouped() -> Batch:
    plain = _rows((0,), (3,))

    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        a, b, offsets, out = plain.of(args, first, last)
        return a, b, offsets.clamp(first, last) - first, out

    return Batch(of, plain.results)


def _padded_scales(args: Args) -> torch.Tensor:
    """The scales of rows in the layout that they have for any number of rows: stride 1 along the rows."""
    scale: torch.Tensor = args[2]
    rows, blocks = scale.shape
    made = torch.empty((blocks, -(-rows // 4) * 4), dtype=scale.dtype, device=scale.device).t()[:rows]
    return made.copy_(scale)


def _varlen() -> Batch:
    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        q, k, v, _, lse, starts_q, starts_k, _, *rest = args
        queries, keys = (starts[first : last + 1].tolist() for starts in (starts_q, starts_k))
        q, k, v = (tensor[spans[0] : spans[-1]] for tensor, spans in ((q, queries), (k, keys), (v, keys)))
        longest = max(after - before for before, after in itertools.pairwise(queries))
        lse = lse[:, queries[0] : queries[-1]]
        starts = (made[first : last + 1] - made[first] for made in (starts_q, starts_k))
        return q, k, v, torch.empty_like(q), torch.empty_like(lse), *starts, longest, *rest

    def results(args: Args, first: int, last: int) -> list[torch.Tensor]:
        span = slice(int(args[5][first]), int(args[5][last]))
        return [args[3][span], args[4][:, span]]

    return Batch(of, results)


def _decode() -> Batch:
    plain = _rows((0, 3, 4), (5, 6))

    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        q, k, v, pages, lengths, out, lse, _, *rest = plain.of(args, first, last)
        width = max(-(-int(lengths.max()) // k.shape[1]), 1)  # as wide as its longest sequence needs
        scratch = attention_decode._scratch(q, k.shape[2])
        return q, k, v, pages[:, :width].contiguous(), lengths.clone(), out, lse, scratch, *rest

    return Batch(of, plain.results)


_PRODUCT = _with(_rows((0,), (2,)), 3, lambda args: split_k.scratch(args[0], args[1].shape[1]))
_LINEAR = _with(_rows((0,), (2,)), 4, lambda args: split_k.scratch(args[0], args[1].shape[0]))
_LOSS = _rows((1,), (2,), changed=(0,))

BATCHES: Mapping[str, Batch] = {
    "attention": _rows((0, 1, 2), (3, 4)),
    "attention_decode": _decode(),
    "attention_varlen": _varlen(),
    "cross_entropy": _with(_LOSS, 3, lambda args: cross_entropy._slots(args[0], args[5] is not None)),
    "fused_add_rms_norm": _rows((), (), changed=(0, 1)),
    "gate_up_swiglu": _rows((0,), (2,)),
    "gated_activation": _rows((0,), (1,)),
    "grouped_matmul": _grouped(),
    "layer_norm": _rows((0,), (3,)),
    "linear": _LINEAR,
    "matmul": _PRODUCT,
    "matmul_fp8": _rows((0,), (4,)),
    "matmul_fp8_block": _with(_rows((0, 2), (4,)), 2, _padded_scales),
    "rms_norm": _rows((0,), (2,)),
    "rope": _rows((2, 3), (), changed=(0, 1)),
    "softmax": _with(_rows((0,), (1,)), 2, lambda args: softmax._slots(args[0])),
}
"""By the name of a kernel. The first dimension of what is cut is the batch."""


def problem(**values: object) -> Problem:
    """A problem, stated by its values."""
    return Problem(values)


def _attention(batch: int, tokens: int, mask: str = "causal", head_dim: int = 128) -> Problem:
    return problem(
        dtype="bfloat16", mask=mask, batch=batch, tokens=tokens, heads=32, kv_heads=8, head_dim=head_dim
    )


def _decoding(batch: int, context: int, **more: object) -> Problem:
    rest = {"dtype": "bfloat16", "windowed": False, "heads": 32, "kv_heads": 8, "head_dim": 128, **more}
    return problem(batch=batch, context=context, page_size=16, **rest)


LARGE: Mapping[str, tuple[Problem, ...]] = {
    "attention": (_attention(9, 700), _attention(5, 300, "causal_127", 64)),
    "attention_decode": (_decoding(37, 3000), _decoding(300, 500), _decoding(9, 128, windowed=True)),
    "attention_varlen": (_attention(21, 600), _attention(5, 3000)),
    "cross_entropy": tuple(
        problem(dtype="bfloat16", gradient=gradient, rows=rows, vocabulary=columns)
        for gradient, rows, columns in ((False, 300, 128256), (True, 300, 128256), (False, 70, 32000))
    ),
    "fused_add_rms_norm": tuple(
        problem(dtype="bfloat16", rows=700, cols=columns) for columns in (128, 2880, 4096)
    ),
    "gate_up_swiglu": (problem(dtype="bfloat16", tokens=1100, N=14336, K=4096),),
    "gated_activation": tuple(
        problem(dtype="bfloat16", activation="silu", rows=700, cols=columns) for columns in (768, 14336)
    ),
    "grouped_matmul": tuple(
        problem(dtype="bfloat16", tokens=900, experts=experts, N=4096, K=1536) for experts in (8, 128)
    ),
    "layer_norm": tuple(
        problem(dtype="bfloat16", bias=True, rows=700, cols=columns) for columns in (768, 1152, 6144)
    ),
    "linear": tuple(
        problem(dtype=dtype, activation="none", M=1337, N=4096, K=14336) for dtype in ("bfloat16", "float32")
    ),
    "matmul": (
        problem(dtype="bfloat16", M=1337, N=4096, K=14336),
        problem(dtype="float16", M=300, N=6144, K=4096),
    ),
    "matmul_fp8": (problem(dtype="bfloat16", M=1337, N=4096, K=14336),),
    "matmul_fp8_block": (problem(dtype="bfloat16", M=1337, N=7168, K=2048),),
    "rms_norm": tuple(problem(dtype="bfloat16", rows=700, cols=columns) for columns in (128, 2880, 8192)),
    "rope": (
        problem(
            dtype="bfloat16", interleaved=False, tokens=700, heads=40, kv_heads=8, head_dim=128,
            rotary_dim=128,
        ),
    ),
    "softmax": tuple(
        problem(dtype="float32", rows=300, cols=columns) for columns in (8, 128, 2048, 32000, 128256)
    ),
}  # fmt: skip
"""Problems of a served size, by kernel."""


def batch_size(tunable: Any, args: Args) -> int:
    """The rows, or sequences, that these arguments hold."""
    return tunable.problem_of(*args).size(tunable.batch_axes[0])  # type: ignore[no-any-return]


def parts(size: int) -> list[tuple[int, int]]:
    """Parts of a batch: rows alone, a few, some that fill no tile, and all but one."""
    alone = [(0, 1), (size // 2, size // 2 + 1), (size - 1, size)]
    some = [(1, 4), (3, 19), (2, 67), (5, 205), (1, size)]
    return [(first, last) for first, last in (*alone, *some) if first < last <= size]
