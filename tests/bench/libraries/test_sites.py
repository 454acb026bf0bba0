"""The sites that are recorded for shipping: each can be called, at shapes that its models have."""

from __future__ import annotations

import inspect

import pytest

from aot_tune.bench.children import operations
from aot_tune.bench.libraries.sites import (
    HELD_OUT,
    MLA_PAGE,
    MODELS,
    PAGE,
    RECORDED,
    SITES,
    label,
    shapes_of,
)


@pytest.mark.parametrize("name", SITES)
def test_each_site_has_shapes_that_its_call_takes(name: str) -> None:
    models = [*MODELS, *HELD_OUT]
    shapes = [shape for model in models for shape in shapes_of(name, model)]
    numbers = len(inspect.signature(operations.OPERATIONS[name].make).parameters) - 1
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


def test_a_batch_s_sequences_fit_into_the_cache_and_their_table_of_pages() -> None:
    for model in (*MODELS, *HELD_OUT):
        for batch, _, _, _, length, pages, room in shapes_of("decode_paged", model):
            assert batch * length <= pages
            assert length <= room
        for batch, _, length, pages, room, _ in shapes_of("decode_mla", model):
            assert batch * length <= pages
            assert length <= room
    assert max(RECORDED.pages) * PAGE * 8 * 128 * 2 < 5e9  # bytes of the keys on one GPU


def test_each_batch_is_recorded_with_a_table_of_pages_for_all_that_its_model_has() -> None:
    for model, sizes in MODELS.items():
        site, place, page = ("decode_paged", 6, PAGE) if sizes.kv_heads else ("decode_mla", 4, MLA_PAGE)
        for tokens in (8192, 32_768, sizes.context):
            batches = {shape[0] for shape in shapes_of(site, model) if shape[place] == tokens // page}
            assert batches >= set(RECORDED.rows)


def test_the_scale_of_latent_attention_is_that_of_servers() -> None:
    """It is compiled in, to the last digit: DeepSeek-V3's own code gives this one."""
    (stretch,) = {shape[-1] for shape in shapes_of("decode_mla", "deepseek-v3-tp8")}
    assert operations.scale_of(192, stretch) == 0.1352337788608801
    assert {shape[-1] for shape in shapes_of("prefill_ragged", "deepseek-v3-tp8")} == {stretch}
    assert operations.scale_of(128, 1) == 128**-0.5


@pytest.mark.parametrize("site", ["mm_bf16", "matmul"])
def test_routers_heads_and_latent_projections_are_among_the_products(site: str) -> None:
    of_deepseek = {shape[1:] for shape in shapes_of(site, "deepseek-v3-tp8")}
    assert of_deepseek >= {(256, 7168), (129_280 // 8, 7168), (16 * 256, 512)}
    assert (128, 2880) in {shape[1:] for shape in shapes_of(site, "gpt-oss-120b")}
    assert max(rows for rows, n, _ in shapes_of(site, "llama-3.1-8b") if n == 128_256) == 256


def test_models_that_are_held_out_are_not_recorded() -> None:
    assert not HELD_OUT.keys() & MODELS.keys()
    recorded = {shape for name in SITES for model in MODELS for shape in shapes_of(name, model)}
    runtime = ("matmul", "bmm_bf16", "silu_and_mul", "decode_paged")
    assert not recorded & {
        shape for name in runtime for model in HELD_OUT for shape in shapes_of(name, model)
    }
