"""Draw problems that nobody declared: other models' sizes, at batches that are no powers of two. Pure.

The seed and the shapes were written down before the rule between measured sizes and the lists of declared
shapes were made anew. They must never be declared: none may enter a kernel's `typical` or the points of a
table. A test holds this, and that the draw stays as it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

from aot_tune.values.bucket import edge
from aot_tune.values.problem import Problem, Value

SEED = 20261128
"""Seed of the draw."""

PROBLEMS = 40
"""Problems of each kernel."""

FACTOR = 16
"""Divisor by which signatures distinguish sizes: in every third problem it divides the batch."""

SMALL = 64
"""Size below which the batch of every third problem lies."""


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

    is_gated: bool = True
    """Whether the feed-forward layer has a gate."""

    def projections(self) -> tuple[tuple[int, int], ...]:
        """Return (N, K) of queries, keys and values; of attention's output; of gate and up; and of down."""
        attended = self.heads * self.head_dim
        merged = (self.heads + 2 * self.kv_heads) * self.head_dim
        up = 2 * self.inner if self.is_gated else self.inner
        return ((merged, self.hidden), (self.hidden, attended), (up, self.hidden), (self.hidden, self.inner))


MODELS: Mapping[str, Model] = {
    "Nemotron Nano 9B v2": Model(4480, 40, 8, 128, 15680, is_gated=False),
    "Hunyuan-Large": Model(6400, 80, 8, 128, 18304),
    "Pangu Pro MoE": Model(4800, 40, 8, 128, 5376),
    "Falcon-H1 34B": Model(5120, 20, 4, 128, 21504),
    "Skywork 13B": Model(4608, 36, 36, 128, 12288),
    "InternViT 6B": Model(3200, 25, 25, 128, 12800, is_gated=False),
    "Gemma 2 2B": Model(2304, 8, 4, 256, 9216),
    "Gemma 3 1B": Model(1152, 4, 1, 256, 6912),
    "Hymba 1.5B": Model(1600, 25, 5, 64, 5504),
    "SmolLM2 360M": Model(960, 15, 5, 64, 2560),
}
"""Models whose layers no kernel declares; from their published configurations."""

_PROJECTIONS = tuple(dict.fromkeys(shape for model in MODELS.values() for shape in model.projections()))

_EXPERTS: Sequence[tuple[int, int, int]] = (
    *((16, 36608, 6400), (16, 6400, 18304)),  # Hunyuan-Large: experts, N, K of gate and up, then of down
    *((64, 2688, 4800), (64, 4800, 1344)),  # Pangu Pro MoE
    *((64, 3072, 2560), (64, 2560, 1536)),  # ERNIE 4.5 21B-A3B
    *((128, 9728, 7168), (128, 7168, 4864)),  # Snowflake Arctic
    *((16, 24576, 4608), (16, 4608, 12288)),  # Skywork-MoE
    *((40, 1024, 1536), (40, 1536, 512)),  # Granite 3 3B-A800M
    *((32, 18432, 6144), (32, 6144, 9216)),  # MiniMax-M1
)

_HEADS: Sequence[tuple[int, int, int]] = (
    (20, 4, 128),  # Falcon-H1 34B: heads, KV heads, head_dim
    (36, 4, 128),  # StarCoder2 7B
    (24, 2, 128),  # StarCoder2 3B
    (36, 36, 128),  # Skywork 13B
    (15, 5, 64),  # SmolLM2 360M
    (25, 5, 64),  # Hymba 1.5B
)

_WIDE_HEADS: Sequence[tuple[int, int, int]] = ((8, 4, 256), (4, 1, 256))  # Gemma 2 2B, Gemma 3 1B

_NORMED = (576, 960, 1600, 2304, 3200, 4480, 6400, 18432)
"""Columns of norms: hidden sizes of the models above, of SmolLM2 135M and of Nemotron-4 340B."""

_LAYER_NORMED = (896, 1536, 1600, 1792, 2432, 11264, 14848)
"""Columns of layer norms: small models, DINOv2 g, GPT-2 XL, EVA-CLIP E, Stable Diffusion 3.5; Falcon 180B."""

_ROUTED = (16, 40, 72)
"""Experts of Hunyuan-Large, Granite 3 3B-A800M and Granite 4 Small, over which routers take a softmax."""

_SCORED = (577, 1370, 2500, 5000)
"""Columns of attention scores: patches of CLIP's and DINOv2's images, and two lengths of text."""

_VOCABULARIES = (49152, 51865, 73448, 84608, 125696, 128167, 153376, 250880)
"""StarCoder2, Whisper, MiniCPM 4, Orion, Baichuan 2, Hunyuan-A13B, Pangu Pro MoE, BLOOM."""

_SILU = (1344, 2560, 4864, 5504, 15360, 18304)
"""Inner widths of Pangu Pro MoE, SmolLM2 360M, Arctic, Hymba 1.5B, Orion 14B and Hunyuan-Large."""

_GELU = (6912, 9216)
"""Inner widths of Gemma 3 1B and Gemma 2 2B."""

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


class _Set(NamedTuple):
    """Distribution of a kernel's problems."""

    axis: str
    """Axis of the batch."""

    most: int
    """Largest batch."""

    names: str
    """Axes of `sizes`."""

    sizes: Sequence[Sequence[int]]
    """Sizes on the Exact axes, of which each problem has one."""

    classes: Sequence[Mapping[str, Value]] = ({"dtype": "bfloat16"},)
    """Dtypes and flags, of which each problem has one."""

    other: tuple[str, Sequence[int]] | None = None
    """Another Pow2 axis, and the sizes of which each problem has one."""

    capped: int = 0
    """Problems that are measured at the power cap too."""

    most_cells: float = math.inf
    """Largest product of all sizes, which bounds the memory of the arguments."""


def _each(sizes: Sequence[int]) -> Sequence[Sequence[int]]:
    return tuple((size,) for size in sizes)


_ATTENDED = "heads kv_heads head_dim"
_CAUSAL = ({"dtype": "bfloat16", "mask": "causal"},)
_DENSE = _Set("M", 12000, "N K", _PROJECTIONS, capped=4)
_SETS: Mapping[str, _Set] = {
    "matmul": _DENSE._replace(classes=(*[{"dtype": "bfloat16"}] * 3, {"dtype": "float16"})),
    "linear": _DENSE._replace(classes=({"dtype": "bfloat16", "activation": "none"},)),
    "matmul_fp8": _DENSE,
    "matmul_fp8_block": _DENSE,
    "gate_up_swiglu": _Set(
        "tokens", 12000, "N K", [(model.inner, model.hidden) for model in MODELS.values()], capped=4
    ),
    "grouped_matmul": _Set("tokens", 24000, "experts N K", _EXPERTS, capped=4),
    "attention": _Set("tokens", 3000, _ATTENDED, _HEADS, _CAUSAL, ("batch", (1, 1, 1, 3, 6, 7)), capped=4),
    "attention_varlen": _Set("tokens", 3000, _ATTENDED, _HEADS, _CAUSAL, ("batch", (3, 6, 12, 24, 40))),
    "attention_decode": _Set(
        "batch", 300, f"{_ATTENDED} page_size", [(*heads, 16) for heads in _HEADS],
        ({"dtype": "bfloat16", "windowed": False},),
        ("context", (48, 112, 208, 400, 608, 1552, 3008, 6000, 12000, 30000)),
    ),
    "rope": _Set(
        "tokens", 14000, f"{_ATTENDED} rotary_dim",
        [(*heads, heads[-1]) for heads in (*_HEADS, *_WIDE_HEADS)],
        ({"dtype": "bfloat16", "interleaved": False},),
    ),
    "rms_norm": _Set("rows", 14000, "cols", _each(_NORMED)),
    "fused_add_rms_norm": _Set("rows", 14000, "cols", _each(_NORMED)),
    "layer_norm": _Set("rows", 14000, "cols", _each(_LAYER_NORMED), ({"dtype": "bfloat16", "bias": True},)),
    "gated_activation": _Set(
        "rows", 14000, "cols", _each((*_SILU, *_GELU)),
        ({"dtype": "bfloat16", "activation": "silu"}, {"dtype": "bfloat16", "activation": "gelu_tanh"}),
    ),
    "softmax": _Set(
        "rows", 14000, "cols", _each((*_ROUTED, *_SCORED, *_VOCABULARIES)),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}), most_cells=2**28,
    ),
    "cross_entropy": _Set(
        "rows", 6000, "vocabulary", _each(_VOCABULARIES),
        [{"dtype": dtype, "gradient": of} for dtype in ("bfloat16", "float32") for of in (False, True)],
        most_cells=2**29,
    ),
}  # fmt: skip

KERNELS = tuple(_SETS)
"""Kernels of which problems are drawn, in the order in which they are measured: all."""

BATCH: Mapping[str, str] = {name: drawn_set.axis for name, drawn_set in _SETS.items()}
"""Axis of each kernel on which the problems vary most."""


@cache
def drawn(kernel: str) -> tuple[Drawn, ...]:
    """Draw the problems of one of `KERNELS`, each once; the same in every run."""
    wanted, draw = _SETS[kernel], _Draw(kernel)
    problems: dict[Problem, None] = {}
    while len(problems) < PROBLEMS:
        problem = _problem(wanted, draw, place=len(problems) % 3)
        if math.prod(value for value in problem.values() if type(value) is int) <= wanted.most_cells:
            problems[problem] = None
    [whole, *_], capped = draw.shuffled(PROBLEMS), draw.shuffled(PROBLEMS)[: wanted.capped]
    return tuple(
        Drawn(problem=problem, whole=place == whole, capped=place in capped)
        for place, problem in enumerate(problems)
    )


def _problem(wanted: _Set, draw: _Draw, *, place: int) -> Problem:
    """Draw one: of three in a row the first is small, and the second a multiple of `FACTOR`."""
    classes, sizes = draw.one_of(wanted.classes), draw.one_of(wanted.sizes)
    batch = draw.size(3, SMALL - 1 if place == 0 else wanted.most, whole=place == 1)
    other = {} if wanted.other is None else {wanted.other[0]: draw.one_of(wanted.other[1])}
    exact = dict(zip(wanted.names.split(), sizes, strict=True))
    return Problem({**classes, **other, wanted.axis: batch, **exact})
