"""Layers of widely served models: the shipped tables answer each, so that no first request searches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.values.problem import Problem, Value
from tests.support.children.serving_scenarios import MISSES
from tests.support.samples import SM90
from tests.support.shipped import FOUND

TOKENS = (*(2**power for power in range(15)), 300)
"""Tokens of a step; 256 and 300 are the bench's client's."""


class Model(NamedTuple):
    """Sizes of a dense model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int


MODELS = {
    "Llama 3.1 8B": Model(4096, 32, 8, 128, 14336, 128256),
    "Llama 3.2 1B": Model(2048, 32, 8, 64, 8192, 128256),
    "Llama 3.2 3B": Model(3072, 24, 8, 128, 8192, 128256),
    "Qwen2.5 7B": Model(3584, 28, 4, 128, 18944, 152064),
    "Qwen3 8B": Model(4096, 32, 8, 128, 12288, 151936),
    "Qwen3 32B": Model(5120, 64, 8, 128, 25600, 151936),
    "Mistral Small 3": Model(5120, 32, 8, 128, 32768, 131072),
    "Phi-4": Model(5120, 40, 10, 128, 17920, 100352),
}


def layers(model: Model, tokens: int) -> Iterator[tuple[str, dict[str, Value]]]:
    """Kernels and problems of a step, with projections apart and merged; logits of at most 512 rows."""
    hidden, heads, kv_heads, head_dim, inner, vocabulary = model
    attended, merged = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    shapes = [
        *((merged, hidden), (attended, hidden), (kv_heads * head_dim, hidden)),
        *((hidden, attended), (2 * inner, hidden), (hidden, inner)),
    ]
    of_heads = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    few = tokens <= 512
    for n, k in [*shapes, *([(vocabulary, hidden)] if few else [])]:
        yield "linear", {"activation": "none", "M": tokens, "N": n, "K": k}
    for n, k in shapes:
        yield "matmul", {"M": tokens, "N": n, "K": k}
    for norm in ("rms_norm", "fused_add_rms_norm"):
        yield norm, {"rows": tokens, "cols": hidden}
    yield "gate_up_swiglu", {"tokens": tokens, "N": inner, "K": hidden}
    yield "gated_activation", {"activation": "silu", "rows": tokens, "cols": inner}
    yield "rope", {"interleaved": False, "tokens": tokens, **of_heads, "rotary_dim": head_dim}
    yield "attention", {"mask": "causal", "batch": 1, "tokens": tokens, **of_heads}
    if few:
        yield "softmax", {"dtype": "float32", "rows": tokens, "cols": vocabulary}
        for context in (300, 2000, 8000):
            paged = {"windowed": False, "batch": min(tokens, 256), "context": context, "page_size": 16}
            yield "attention_decode", {**paged, **of_heads}


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_of_a_model_is_a_miss(name: str) -> None:
    for tokens in TOKENS:
        for kernel, sizes in layers(MODELS[name], tokens):
            problem = Problem({"dtype": "bfloat16", **sizes})
            choice = dispatcher_of(FOUND[kernel].tunable).choice(SM90, problem, on_miss="nearest")
            assert not choice.missed, f"{kernel} {problem}"


def test_what_tests_and_bench_search_live_stays_a_miss() -> None:
    for sizes in MISSES:
        choice = dispatcher_of(FOUND["matmul"].tunable).choice(SM90, Problem(sizes), on_miss="nearest")
        assert choice.missed, sizes


def test_all_declared_shapes_are_swept_in_little_more_than_an_hour() -> None:
    counts = {name: len(kernel.tunable.typical_problems) for name, kernel in FOUND.items()}
    assert max(counts.values()) <= 250, counts
    assert sum(counts.values()) <= 1700, counts
