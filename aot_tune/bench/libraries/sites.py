"""Sites of FlashInfer and TileGym that search on a first call, and the shapes of six models there. Pure.

A shape holds the numbers that `aot_tune.bench.children.library` makes a call from. Sites that compile in a
number of rows are recorded for decoding alone; at other sites the nearest recorded size serves those between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]

ROWS = (1, 256, 64, 16, 4, 128, 32, 8, 2)
"""Rows of a decode step where their number is compiled in; most wanted first."""

TOKENS = (1, 8192, 16, 1024, 128, 4096, 4, 64, 512, 2048, 256, 32, 8, 2)
"""Tokens of a step where their number is passed at launch: every power of two."""

PAGE = 16
"""Tokens in a page of the cache of keys and values."""

PAGES = (16_384, 131_072)
"""Pages of that cache. Each serves caches from a quarter of it, exclusively, to twice as many pages."""

MLA_PAGE = 64
"""Tokens in a page of the cache of multi-head latent attention."""

LATENT, ROTATED, UNROTATED = 512, 64, 128
"""Widths of multi-head latent attention: compressed, rotated, and unrotated before compression."""


class Model(NamedTuple):
    """Sizes of a model on one of its GPUs."""

    hidden: int
    inner: int
    """Width between the two products of a layer; of the dense layers or the shared expert."""

    heads: int
    kv_heads: int
    """0 with multi-head latent attention."""

    head: int
    """Width of a head."""

    experts: int = 0


MODELS: dict[str, Model] = {
    "llama-3.1-8b": Model(4096, 14_336, 32, 8, 128),
    "llama-3.3-70b-tp4": Model(8192, 7168, 16, 2, 128),
    "qwen3-32b-tp2": Model(5120, 12_800, 32, 4, 128),
    "mistral-small-24b": Model(5120, 32_768, 32, 8, 128),
    "gpt-oss-120b": Model(2880, 2880, 64, 8, 64, 128),
    "deepseek-v3-tp8": Model(7168, 2304, 16, 0, 192, 256),
}
"""The models, each with the number of GPUs that share a layer."""


class Site(NamedTuple):
    """A place of a library that searches on a first call."""

    library: str
    """The library's package."""

    shapes: Callable[[Model], Sequence[Shape]]
    """Shapes of a model's layers, most wanted first; none where the model has no such layer."""


def _layers(model: Model) -> list[tuple[int, int]]:
    """Return N and K of the products of a layer."""
    if not model.kv_heads:  # of the latent projections, the output, and the two of the inner layer
        compressed = 1536 + LATENT + ROTATED
        return [
            (compressed, model.hidden),
            (model.heads * model.head, 1536),
            (model.hidden, model.heads * UNROTATED),
            (2 * model.inner, model.hidden),
            (model.hidden, model.inner),
        ]
    attention = [
        ((model.heads + 2 * model.kv_heads) * model.head, model.hidden),
        (model.hidden, model.heads * model.head),
    ]
    return attention if model.experts else [
        *attention,
        (2 * model.inner, model.hidden),
        (model.hidden, model.inner),
    ]  # fmt: skip


def _products(sizes: Sequence[int], multiple: int = 1) -> Callable[[Model], list[Shape]]:
    """Return the function from a model to M, N and K, of layers whose N and K are multiples."""

    def shapes(model: Model) -> list[Shape]:
        layers = [(n, k) for n, k in _layers(model) if n % multiple == k % multiple == 0]
        return [(rows, n, k) for rows in sizes for n, k in layers]

    return shapes


def _latent_products(model: Model) -> list[Shape]:
    """Return heads, tokens, N and K of the products with a compressed key and value."""
    if model.kv_heads:
        return []
    widths = ((LATENT, UNROTATED), (UNROTATED, LATENT))
    return [(model.heads, tokens, n, k) for tokens in TOKENS for n, k in widths]


def _decoding(model: Model) -> list[Shape]:
    """Return batch, heads, KV heads, head, pages of a sequence, and pages of the cache."""
    if not model.kv_heads:
        return []
    heads = model.heads, model.kv_heads, model.head
    short = [(batch, length) for length in (2048, 512) for batch in (1, 256, 64, 16, 4)]
    split = [(batch, length) for length in (8192, 32_768, 4096, 16_384) for batch in (1, 4, 16, 64)]
    return [
        (batch, *heads, length // PAGE, pages)
        for pages in PAGES
        for batch, length in (*short, *split)
        if batch * length <= pages * PAGE
    ]


def _latent_decoding(model: Model) -> list[Shape]:
    """Return batch, heads, pages of a sequence, and pages of the cache."""
    if model.kv_heads:
        return []
    pages = 8192
    return [
        (batch, model.heads, length // MLA_PAGE, pages)
        for length in (2048, 8192, 32_768, 512)
        for batch in (1, 64, 16, 4, 256)
        if batch * length <= pages * MLA_PAGE
    ]


def _prefilling(model: Model) -> list[Shape]:
    """Return batch, tokens of a sequence, heads, KV heads and head."""
    if not model.kv_heads:
        return []
    sizes = [(1, 2048), (1, 8192), (4, 2048), (1, 512), (1, 4096), (1, 1024), (16, 512), (8, 1024), (1, 128)]
    return [(batch, length, model.heads, model.kv_heads, model.head) for batch, length in sizes]


def _attention(model: Model) -> list[Shape]:
    """Return batch, heads, KV heads, tokens of a sequence and head."""
    return [(b, heads, kv, length, head) for b, length, heads, kv, head in _prefilling(model)]


def _rotating(model: Model) -> list[Shape]:
    """Return batch, heads, KV heads, tokens of a sequence, which are compiled in, and head."""
    if not model.kv_heads:
        return []
    return [(rows, model.heads, model.kv_heads, 1, model.head) for rows in ROWS]


SITES: dict[str, Site] = {
    "mm_bf16": Site("flashinfer", _products(ROWS)),
    "fp8_groupwise": Site("flashinfer", _products(ROWS, 128)),
    "decode_paged": Site("flashinfer", _decoding),
    "decode_mla": Site("flashinfer", _latent_decoding),
    "prefill_ragged": Site("flashinfer", _prefilling),
    "prefill_paged": Site("flashinfer", _prefilling),
    "bmm_bf16": Site("flashinfer", _latent_products),
    "rope_quantize_fp8": Site(
        "flashinfer", lambda model: [] if model.kv_heads else [(rows, model.heads) for rows in ROWS]
    ),
    "matmul": Site("tilegym", _products(TOKENS)),
    "bmm": Site("tilegym", _latent_products),
    "attention": Site("tilegym", _attention),
    "rope": Site("tilegym", _rotating),
    "silu_and_mul": Site("tilegym", lambda model: [(rows, model.inner) for rows in TOKENS]),
    "softmax": Site(
        "tilegym", lambda model: [(rows, model.experts) for rows in ROWS] if model.experts else []
    ),
    "persistent_layer_norm": Site("tilegym", lambda model: [(rows, model.hidden) for rows in TOKENS]),
}
"""The sites by name."""


def label(shape: Shape) -> str:
    """Return a shape as one word: ``64x4096x4096``."""
    return "x".join(map(str, shape))
