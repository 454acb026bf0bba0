"""Draw problems that nobody declared: other models' sizes, at batches that are no powers of two. Pure.

The seed and the shapes were written down before any table was tuned for them. They must never be declared:
none may enter a kernel's `typical` or the points of a table. A test holds this, and that the draw stays as it
is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, TypeVar

from aot_tune.values.bucket import edge
from aot_tune.values.problem import Problem

SEED = 20261125
"""Seed of the draw."""

FACTOR = 16
"""Divisor by which signatures distinguish sizes: in every second problem it divides the batch."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One problem, and how thoroughly it is measured."""

    problem: Problem
    """Problem."""

    whole: bool = False
    """Whether it is measured against the whole search space, and not the portfolio alone."""

    capped: bool = False
    """Whether it is measured at the GPU's power cap too."""


class Model(NamedTuple):
    """Sizes of a dense model's layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of its feed-forward layer."""

    def projections(self) -> tuple[tuple[int, int], ...]:
        """Return (N, K) of queries, keys and values; of attention's output; of gate and up; and of down."""
        attended = self.heads * self.head_dim
        merged = (self.heads + 2 * self.kv_heads) * self.head_dim
        return (
            (merged, self.hidden), (self.hidden, attended), (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )  # fmt: skip


MODELS: Mapping[str, Model] = {
    "Mistral Small 3 24B": Model(5120, 32, 8, 128, 32768),
    "Gemma 3 27B": Model(5376, 32, 16, 128, 21504),
    "Qwen2.5 7B": Model(3584, 28, 4, 128, 18944),
    "Phi-4 14B": Model(5120, 40, 10, 128, 17920),
    "Yi 34B": Model(7168, 56, 8, 128, 20480),
    "InternLM2.5 20B": Model(6144, 48, 8, 128, 16384),
    "OLMo 2 13B": Model(5120, 40, 40, 128, 13824),
    "Gemma 3 12B": Model(3840, 16, 8, 256, 15360),
}
"""Dense models of which no kernel of products has declared a shape; from their published configurations."""

_EXPERTS: Sequence[tuple[int, int, int]] = (
    *((64, 2048, 2048), (64, 2048, 1024)),  # OLMoE 1B-7B: experts, N, K of gate and up, then of down
    *((16, 12800, 4096), (16, 4096, 6400)),  # Phi-3.5-MoE
    *((64, 2816, 2048), (64, 2048, 1408)),  # DeepSeek-V2-Lite
    *((16, 21504, 6144), (16, 6144, 10752)),  # DBRX
    *((16, 16384, 5120), (16, 5120, 8192)),  # Llama 4 Scout
    *((16, 28672, 4096), (16, 4096, 14336)),  # Jamba 1.5 Mini
)

_HEADS: Sequence[tuple[int, int, int]] = (
    (28, 4, 128),  # Qwen2.5 7B: heads, KV heads, head_dim
    (32, 16, 128),  # Gemma 3 27B
    (40, 10, 128),  # Phi-4 14B
    (48, 8, 128),  # InternLM2.5 20B
    (56, 8, 128),  # Yi 34B
    (24, 8, 128),  # Llama 3.2 3B
    (32, 8, 64),  # Llama 3.2 1B
)

_NORMED = (1536, 3072, 3584, 3840, 5376, 6144, 12288)
"""Columns of RMS norms: hidden sizes of the models above, and of others between the declared ones."""

_LAYER_NORMED = (2048, 2560, 3072, 4096, 5120, 7168, 9216)
"""Columns of layer norms with a bias: OPT 1.3B, Phi-2, StarCoder2 3B, and OPT 6.7B, 13B, 30B and 66B."""

_SOFTMAXED = (
    ("float32", 60), ("float32", 64), ("float32", 160),  # routers: Qwen1.5-MoE, OLMoE, DeepSeek-V2
    ("bfloat16", 1500), ("bfloat16", 3000), ("bfloat16", 4096),  # attention scores
    ("float32", 50257), ("float32", 100352), ("float32", 151936), ("float32", 256000),  # vocabularies
)  # fmt: skip


_T = TypeVar("_T")


class _Draw:
    """Draws by `random.random` alone, whose numbers are the same in every release of Python."""

    def __init__(self, kernel: str) -> None:
        self._random = random.Random(f"{SEED} {kernel}")

    def one_of(self, choices: Sequence[_T]) -> _T:
        return choices[int(self._random.random() * len(choices))]

    def size(self, least: int, most: int, *, whole: bool) -> int:
        """Draw a size that is not a power of two, evenly on a logarithmic scale.

        Args:
            least: The smallest size.
            most: The largest size.
            whole: Whether it is a multiple of `FACTOR`.
        """
        while True:
            size = round(least * math.pow(most / least, self._random.random()))
            if whole:
                size = max(round(size / FACTOR), 3) * FACTOR
            if size <= most and edge(size) != size and (size % FACTOR == 0) is whole:
                return size

    def shuffled(self, count: int) -> list[int]:
        """Return the places from 0 to before `count`, in random order."""
        return sorted(range(count), key=lambda _: self._random.random())


def _product(draw: _Draw, *, whole: bool) -> Problem:
    n, k = draw.one_of([shape for model in MODELS.values() for shape in model.projections()])
    dtype = draw.one_of(("bfloat16", "bfloat16", "bfloat16", "float16"))
    return Problem({"dtype": dtype, "M": draw.size(3, 12000, whole=whole), "N": n, "K": k})


def _attention(draw: _Draw, *, whole: bool) -> Problem:
    heads, kv_heads, head_dim = draw.one_of(_HEADS)
    batch = draw.one_of((1, 1, 1, 3, 6, 7))
    most = 14000 if batch == 1 else 3000
    return Problem({
        "dtype": "bfloat16", "mask": "causal", "batch": batch, "tokens": draw.size(100, most, whole=whole),
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
    })  # fmt: skip


_PAGE, _MOST_CACHE_BYTES = 16, 2**33
"""Keys of a page, and bytes of the keys and values of a problem, at most."""


def _decoding(draw: _Draw, *, whole: bool) -> Problem:
    """Draw a problem with a batch that 16 divides or not; a block table is a multiple of the page wide."""
    while True:
        heads, kv_heads, head_dim = draw.one_of(_HEADS)
        batch, context = draw.size(3, 300, whole=whole), draw.size(300, 40000, whole=True)
        if 4 * batch * context * kv_heads * head_dim <= _MOST_CACHE_BYTES:
            return Problem({
                "dtype": "bfloat16", "windowed": False, "batch": batch, "context": context, "heads": heads,
                "kv_heads": kv_heads, "head_dim": head_dim, "page_size": _PAGE,
            })  # fmt: skip


def _rms_norm(draw: _Draw, *, whole: bool) -> Problem:
    rows, cols = draw.size(3, 14000, whole=whole), draw.one_of(_NORMED)
    return Problem({"dtype": "bfloat16", "rows": rows, "cols": cols})


def _layer_norm(draw: _Draw, *, whole: bool) -> Problem:
    rows, cols = draw.size(3, 14000, whole=whole), draw.one_of(_LAYER_NORMED)
    return Problem({"dtype": "bfloat16", "bias": True, "rows": rows, "cols": cols})


def _softmax(draw: _Draw, *, whole: bool) -> Problem:
    dtype, cols = draw.one_of(_SOFTMAXED)
    most = 1000 if cols > 8192 else 14000
    return Problem({"dtype": dtype, "rows": draw.size(3, most, whole=whole), "cols": cols})


def _grouped(draw: _Draw, *, whole: bool) -> Problem:
    experts, n, k = draw.one_of(_EXPERTS)
    tokens = draw.size(5, 24000, whole=whole)
    return Problem({"dtype": "bfloat16", "tokens": tokens, "experts": experts, "N": n, "K": k})


class _Set(NamedTuple):
    """Numbers of a kernel's problems that are drawn, and that are measured more thoroughly."""

    draw: Callable[..., Problem]
    batch: str
    """Axis on which every second problem has a multiple of 16."""
    problems: int = 60
    whole: int = 2
    capped: int = 0


_SETS: Mapping[str, _Set] = {
    "matmul": _Set(_product, "M", 200, whole=8, capped=28),
    "attention": _Set(_attention, "tokens", capped=6),
    "attention_decode": _Set(_decoding, "batch"),
    "rms_norm": _Set(_rms_norm, "rows"),
    "layer_norm": _Set(_layer_norm, "rows"),
    "softmax": _Set(_softmax, "rows"),
    "grouped_matmul": _Set(_grouped, "tokens", capped=6),
}

KERNELS = (*list(_SETS)[:1], "linear", *list(_SETS)[1:])
"""Kernels of which problems are drawn, in the order in which they are measured."""

_LINEAR_COUNT = 60
"""Problems of linear: the first of matmul's, so that both are seen at the same sizes."""

BATCH: Mapping[str, str] = {**{name: drawn_set.batch for name, drawn_set in _SETS.items()}, "linear": "M"}
"""Axis of each kernel on which every second problem has a multiple of 16, and the others have none."""


@cache
def drawn(kernel: str) -> tuple[Drawn, ...]:
    """Draw the problems of one of `KERNELS`, each once; the same in every run."""
    if kernel == "linear":
        return tuple(map(_as_linear, drawn("matmul")[:_LINEAR_COUNT]))
    wanted, draw = _SETS[kernel], _Draw(kernel)
    problems: dict[Problem, None] = {}
    while len(problems) < wanted.problems:
        problems[wanted.draw(draw, whole=len(problems) % 2 == 1)] = None
    whole = set(draw.shuffled(wanted.problems)[: wanted.whole])
    capped = set(draw.shuffled(wanted.problems)[: wanted.capped])
    make = partial(_drawn, whole, capped)
    return tuple(make(place, problem) for place, problem in enumerate(problems))


def _drawn(whole: set[int], capped: set[int], place: int, problem: Problem) -> Drawn:
    return Drawn(problem=problem, whole=place in whole, capped=place in capped)


def _as_linear(product: Drawn) -> Drawn:
    sizes = {name: product.problem[name] for name in ("M", "N", "K")}
    return Drawn(problem=Problem({"dtype": product.problem["dtype"], "activation": "none", **sizes}))
