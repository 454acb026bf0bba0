"""The sites that are recorded for shipping: each can be called, at shapes that its models have."""

from __future__ import annotations

import inspect

import pytest

from aot_tune.bench.children.library import OPERATIONS
from aot_tune.bench.libraries.sites import MODELS, PAGE, PAGES, SITES, label


@pytest.mark.parametrize("name", SITES)
def test_each_site_has_shapes_that_its_call_takes(name: str) -> None:
    site = SITES[name]
    shapes = [shape for model in MODELS.values() for shape in site.shapes(model)]
    numbers = len(inspect.signature(OPERATIONS[name].make).parameters) - 1
    assert shapes
    assert {len(shape) for shape in shapes} == {numbers}
    assert all(size > 0 for shape in shapes for size in shape)
    for model in MODELS.values():
        labels = [label(shape) for shape in site.shapes(model)]
        assert len(set(labels)) == len(labels)


def test_each_model_has_products_and_attention_of_some_kind() -> None:
    for model in MODELS.values():
        assert SITES["matmul"].shapes(model)
        assert bool(SITES["decode_paged"].shapes(model)) != bool(SITES["decode_mla"].shapes(model))


def test_a_batch_s_sequences_fit_into_the_cache() -> None:
    for model in MODELS.values():
        for batch, *_, length, pages in SITES["decode_paged"].shapes(model):
            assert batch * length <= pages
    assert PAGES[-1] * PAGE * 8 * 128 * 2 < 5e9  # bytes of the keys on one GPU
