"""Sites of FlashInfer and TileGym that search on a first call, and the shapes of six models there. Pure.

A shape holds the numbers that `aot_tune.bench.children.library` makes a call from. Sites that compile in a
number of rows are recorded for decoding alone; at other sites the nearest recorded size serves those between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]

PAGE = 16
"""Tokens in a page of the cache of keys and values."""

MLA_PAGE = 64
"""Tokens in a page of the cache of multi-head latent attention."""

LATENT, ROTATED, UNROTATED = 512, 64, 128
"""Widths of multi-head latent attention: compressed, rotated, and unrotated before compression."""


class Steps(NamedTuple):
    """Sizes of the steps of a server, most wanted first."""

    rows: tuple[int, ...]
    """Rows of a decode step where their number is compiled in."""

    tokens: tuple[int, ...]
    """Tokens of a step where their number is passed at launch."""

    decoding: tuple[tuple[int, int], ...]
    """Sequences, and tokens of each."""

    pages: tuple[int, ...]
    """Pages of the cache of keys and values."""

    prefilling: tuple[tuple[int, int], ...]
    """Sequences, and tokens of each."""

    few: tuple[int, ...] = ()
    """Further numbers of tokens below 16, of products that are answered at equal ones alone there."""

    uneven: tuple[tuple[int, int], ...] = ()
    """Further `prefilling` of a kernel that compiles in whether tiles divide the length."""


_SHORT = tuple((batch, length) for length in (2048, 512) for batch in (1, 256, 64, 16, 4))
_SPLIT = tuple((batch, length) for length in (8192, 32_768) for batch in (1, 4, 16, 64))

RECORDED = Steps(
    rows=(1, 256, 64, 16, 4, 128, 32, 8, 2),
    tokens=(1, 8192, 16, 1024, 64, 4096, 256, 4),
    decoding=_SHORT + _SPLIT,
    pages=(32_768,),
    prefilling=((1, 2048), (1, 8192), (4, 2048), (1, 512)),
    few=(2, 3, *range(5, 16)),
    uneven=((1, 2000), (4, 2000)),
)
"""Recorded steps: all powers of two of `rows`, which are compiled in. Else every second one, which serves
more than a quarter of it to twice as many."""

ODD = Steps(
    rows=(1, 8, 64, 256),
    tokens=(3, 11, 100, 300, 900, 1777, 5000),
    decoding=((3, 1000), (23, 1900), (100, 700), (200, 1200)),
    pages=(20_000,),
    prefilling=((1, 1500), (3, 700), (1, 2048)),
)
"""Steps of models that are not recorded, which show what the recorded ones serve."""


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
"""Recorded models, each with the number of GPUs that share a layer."""

HELD_OUT: dict[str, Model] = {
    "qwen2.5-7b": Model(3584, 18_944, 28, 4, 128),
    "llama-3.2-3b": Model(3072, 8192, 24, 8, 128),
    "kimi-k2-tp8": Model(7168, 2304, 8, 0, 192, 384),
}
"""Models that are never recorded."""


class Site(NamedTuple):
    """A place of a library that searches on a first call."""

    library: str
    """The library's package."""

    shapes: Callable[[Model, Steps], Sequence[Shape]]
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


def _products(field: str, multiple: int = 1) -> Callable[[Model, Steps], list[Shape]]:
    """Return the function to M, from a field of the steps, N and K; N and K are multiples of `multiple`."""

    def shapes(model: Model, steps: Steps) -> list[Shape]:
        layers = [(n, k) for n, k in _layers(model) if n % multiple == k % multiple == 0]
        return [(rows, n, k) for rows in getattr(steps, field) for n, k in layers]

    return shapes


def _latent_products(model: Model, steps: Steps) -> list[Shape]:
    """Return heads, tokens, N and K of the products with a compressed key and value."""
    if model.kv_heads:
        return []
    widths = ((LATENT, UNROTATED), (UNROTATED, LATENT))
    return [(model.heads, tokens, n, k) for tokens in (*steps.tokens, *steps.few) for n, k in widths]


def _decoding(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, heads, KV heads, head, pages of a sequence, and pages of the cache."""
    if not model.kv_heads:
        return []
    heads = model.heads, model.kv_heads, model.head
    return [
        (batch, *heads, -(-length // PAGE), pages)
        for pages in steps.pages
        for batch, length in steps.decoding
        if batch * -(-length // PAGE) <= pages
    ]


def _latent_decoding(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, heads, pages of a sequence, and pages of the cache."""
    if model.kv_heads:
        return []
    pages = steps.pages[0] // 2
    return [
        (batch, model.heads, -(-length // MLA_PAGE), pages)
        for batch, length in steps.decoding
        if batch * -(-length // MLA_PAGE) <= pages
    ]


def _prefilling(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, tokens of a sequence, heads, KV heads and head."""
    if not model.kv_heads:
        return []
    return [(batch, length, model.heads, model.kv_heads, model.head) for batch, length in steps.prefilling]


def _attention(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, heads, KV heads, tokens of a sequence and head."""
    steps = steps._replace(prefilling=(*steps.prefilling, *steps.uneven))
    return [(b, heads, kv, length, head) for b, length, heads, kv, head in _prefilling(model, steps)]


def _rotating(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, heads, KV heads, tokens of a sequence, which are compiled in, and head."""
    if not model.kv_heads:
        return []
    return [(rows, model.heads, model.kv_heads, 1, model.head) for rows in steps.rows]


SITES: dict[str, Site] = {
    "mm_bf16": Site("flashinfer", _products("rows")),
    "fp8_groupwise": Site("flashinfer", _products("rows", 128)),
    "decode_paged": Site("flashinfer", _decoding),
    "decode_mla": Site("flashinfer", _latent_decoding),
    "prefill_ragged": Site("flashinfer", _prefilling),
    "prefill_paged": Site("flashinfer", _prefilling),
    "bmm_bf16": Site("flashinfer", _latent_products),
    "rope_quantize_fp8": Site(
        "flashinfer",
        lambda model, steps: [] if model.kv_heads else [(rows, model.heads) for rows in steps.rows],
    ),
    "matmul": Site("tilegym", _products("tokens")),
    "bmm": Site("tilegym", _latent_products),
    "attention": Site("tilegym", _attention),
    "rope": Site("tilegym", _rotating),
    "silu_and_mul": Site("tilegym", lambda model, steps: [(rows, model.inner) for rows in steps.tokens]),
    "softmax": Site(
        "tilegym",
        lambda model, steps: [(rows, model.experts) for rows in steps.rows] if model.experts else [],
    ),
    "persistent_layer_norm": Site(
        "tilegym", lambda model, steps: [(rows, model.hidden) for rows in steps.tokens]
    ),
}
"""The sites by name."""


def shapes_of(site: str, model: str) -> Sequence[Shape]:
    """Return the shapes at a site of a model: at recorded steps, or odd ones where it is held out."""
    if model in HELD_OUT:
        return SITES[site].shapes(HELD_OUT[model], ODD)
    return SITES[site].shapes(MODELS[model], RECORDED)


def label(shape: Shape) -> str:
    """Return a shape as one word: ``64x4096x4096``."""
    return "x".join(map(str, shape))
