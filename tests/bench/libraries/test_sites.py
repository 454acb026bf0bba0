"""The sites that are recorded for shipping: each can be called, at shapes that its models have."""

from __future__ import annotations

import inspect

import pytest

from aot_tune.bench.children.operations import OPERATIONS
from aot_tune.bench.libraries.sites import HELD_OUT, MODELS, PAGE, RECORDED, SITES, label, shapes_of


@pytest.mark.parametrize("name", SITES)
def test_each_site_has_shapes_that_its_call_takes(name: str) -> None:
    models = [*MODELS, *HELD_OUT]
    shapes = [shape for model in models for shape in shapes_of(name, model)]
    numbers = len(inspect.signature(OPERATIONS[name].make).parameters) - 1
    assert shapes
    assert {len(shape) for shape in shapes} == {numbers}
    assert all(size > 0 for shape in shapes for size in shape)
    for model in models:
        labels = [label(shape) for shape in shapes_of(name, model)]
        assert len(set(labels)) == len(labels)


def test_each_model_has_products_and_attention_of_some_kind() -> None:
    for model in (*MODELS, *HELD_OUT):
        assert shapes_of("matmul", model)
        assert bool(shapes_of("decode_paged", model)) != bool(shapes_of("decode_mla", model))


def test_a_batch_s_sequences_fit_into_the_cache() -> None:
    for model in (*MODELS, *HELD_OUT):
        for site in ("decode_paged", "decode_mla"):
            for batch, *_, length, pages in shapes_of(site, model):
                assert batch * length <= pages
    assert max(RECORDED.pages) * PAGE * 8 * 128 * 2 < 5e9  # bytes of the keys on one GPU


def test_models_that_are_held_out_are_not_recorded() -> None:
    assert not HELD_OUT.keys() & MODELS.keys()
    recorded = {shape for name in SITES for model in MODELS for shape in shapes_of(name, model)}
    runtime = ("matmul", "bmm_bf16", "silu_and_mul", "decode_paged")
    assert not recorded & {
        shape for name in runtime for model in HELD_OUT for shape in shapes_of(name, model)
    }
