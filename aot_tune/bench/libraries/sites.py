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

    more_prefilling: tuple[tuple[int, int], ...] = ()
    """Further `prefilling` where near lengths are served, and whether tiles divide one is compiled in."""

    rooms: tuple[int, ...] = ()
    """Tokens that a server's table of pages has room for in each sequence, beside all that its model has."""

    more_rooms: tuple[int, ...] = ()
    """Further `rooms` of decodes without latent attention."""


_SHORT = tuple((batch, length) for length in (2048, 512) for batch in (1, 256, 64, 16, 4))
_SPLIT = tuple((batch, length) for length in (8192, 32_768) for batch in (1, 4, 16, 64))

RECORDED = Steps(
    rows=(1, 256, 64, 16, 4, 128, 32, 8, 2),
    tokens=(1, 8192, 16, 1024, 64, 4096, 256, 4),
    decoding=_SHORT + _SPLIT,
    pages=(32_768,),
    prefilling=((1, 2048), (1, 8192), (4, 2048), (1, 512)),
    few=(2, 3, *range(5, 16)),
    more_prefilling=(
        *((1, length) for length in (2000, 128, 32, 8000, 500, 120, 30)),
        *((4, length) for length in (2000, 512)),
        *((16, length) for length in (512, 500)),
    ),
    rooms=(8192, 32_768),
    more_rooms=(128, 4096, 16_384, 65_536),
)
"""Recorded steps: all powers of two of `rows`, which are compiled in. Else every second one, which serves
more than a quarter of it to twice as many."""

_SERVED = 2048
"""Tokens of each sequence, at most, where the table of pages has room for them."""

_MOST_SAMPLED = 256
"""Rows that a language model's head has at most: of each sequence the last token."""

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

    vocabulary: int
    """Columns of the language model's head."""

    context: int
    """Most tokens of a sequence."""

    experts: int = 0

    shared: int = 0
    """`inner` of the experts that each token passes."""

    stretch: int = 1
    """YaRN's factor, where it changes the scale of attention."""


MODELS: dict[str, Model] = {
    "llama-3.1-8b": Model(4096, 14_336, 32, 8, 128, 128_256, 131_072),
    "llama-3.3-70b-tp4": Model(8192, 7168, 16, 2, 128, 32_064, 131_072),
    "qwen3-32b-tp2": Model(5120, 12_800, 32, 4, 128, 75_968, 40_960),
    "mistral-small-24b": Model(5120, 32_768, 32, 8, 128, 131_072, 32_768),
    "gpt-oss-120b": Model(2880, 2880, 64, 8, 64, 201_088, 131_072, 128),
    "deepseek-v3-tp8": Model(7168, 2304, 16, 0, 192, 16_160, 163_840, 256, 256, 40),
}
"""Recorded models, each with the number of GPUs that share a layer."""

HELD_OUT: dict[str, Model] = {
    "qwen2.5-7b": Model(3584, 18_944, 28, 4, 128, 152_064, 32_768),
    "llama-3.2-3b": Model(3072, 8192, 24, 8, 128, 128_256, 131_072),
    "kimi-k2-tp8": Model(7168, 2304, 8, 0, 192, 20_480, 131_072, 384, 256, 32),
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
    if not model.kv_heads:  # of the latent projections, the output, and the two of inner layers
        compressed = 1536 + LATENT + ROTATED
        inner = [pair for width in (model.inner, model.shared) for pair in _inner(model, width)]
        return [
            (compressed, model.hidden),
            (model.heads * model.head, 1536),
            (model.heads * 2 * UNROTATED, LATENT),
            (model.hidden, model.heads * UNROTATED),
            *inner,
        ]
    attention = [
        ((model.heads + 2 * model.kv_heads) * model.head, model.hidden),
        (model.hidden, model.heads * model.head),
    ]
    return attention if model.experts else [*attention, *_inner(model, model.inner)]


def _inner(model: Model, width: int) -> list[tuple[int, int]]:
    return [(2 * width, model.hidden), (model.hidden, width)]


def _products(field: str) -> Callable[[Model, Steps], list[Shape]]:
    """Return the function to M, from a field of the steps, N and K of layers, the router and the head."""

    def shapes(model: Model, steps: Steps) -> list[Shape]:
        router = [(model.experts, model.hidden)] if model.experts else []
        layers = [(rows, n, k) for rows in getattr(steps, field) for n, k in (*_layers(model), *router)]
        sampled = [rows for rows in getattr(steps, field) if rows <= _MOST_SAMPLED]
        return [*layers, *((rows, model.vocabulary, model.hidden) for rows in sampled)]

    return shapes


def _quantized_products(model: Model, steps: Steps) -> list[Shape]:
    """Return M, N and K of the products that are quantised in blocks of 128; router and head are not."""
    layers = [(n, k) for n, k in _layers(model) if n % 128 == k % 128 == 0]
    return [(rows, n, k) for rows in steps.rows for n, k in layers]


def _rows_too(steps: Steps) -> Steps:
    """Return the steps with the rows among the tokens, for a kernel that compiles in their number."""
    return steps._replace(tokens=tuple(dict.fromkeys((*steps.tokens, *steps.rows))))


def _latent_products(model: Model, steps: Steps) -> list[Shape]:
    """Return heads, tokens, N and K of the products with a compressed key and value."""
    if model.kv_heads:
        return []
    widths = ((LATENT, UNROTATED), (UNROTATED, LATENT))
    every = dict.fromkeys((*steps.tokens, *steps.few))
    return [(model.heads, tokens, n, k) for tokens in every for n, k in widths]


def _rooms(
    model: Model, steps: Steps, rooms: Sequence[int], page: int, pages: int
) -> list[tuple[int, int, int]]:
    """Return batch, pages of a sequence and pages that a sequence has room for, of what fits the cache."""
    exact = [(batch, length, length) for batch, length in steps.decoding]
    every = dict.fromkeys(room for room in (*rooms, model.context) if room <= model.context)
    roomy = [(batch, min(_SERVED, room), room) for room in every for batch in steps.rows]
    return [
        (batch, -(-length // page), -(-room // page))
        for batch, length, room in (*exact, *(roomy if rooms else ()))
        if batch * -(-length // page) <= pages
    ]


def _decoding(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, heads, KV heads, head, pages of a sequence, of the cache, and that one has room for."""
    if not model.kv_heads:
        return []
    heads, rooms = (model.heads, model.kv_heads, model.head), (*steps.rooms, *steps.more_rooms)
    return [
        (batch, *heads, length, pages, room)
        for pages in steps.pages
        for batch, length, room in _rooms(model, steps, rooms, PAGE, pages)
    ]


def _latent_decoding(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, heads, pages of a sequence, of the cache, that one has room for, and YaRN's factor."""
    if model.kv_heads:
        return []
    pages = steps.pages[0] // 2
    return [
        (batch, model.heads, length, pages, room, model.stretch)
        for batch, length, room in _rooms(model, steps, steps.rooms, MLA_PAGE, pages)
    ]


def _prefilling(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, tokens of a sequence, heads, KV heads and head."""
    if not model.kv_heads:
        return []
    return [(batch, length, model.heads, model.kv_heads, model.head) for batch, length in steps.prefilling]


def _ragged(model: Model, steps: Steps) -> list[Shape]:
    """Return `_prefilling`, the width of queries and keys, and YaRN's factor."""
    if model.kv_heads:
        return [(*shape, model.head, model.stretch) for shape in _prefilling(model, steps)]
    latent = model.heads, model.heads, UNROTATED, UNROTATED + ROTATED, model.stretch
    return [(batch, length, *latent) for batch, length in steps.prefilling]


def _attention(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, heads, KV heads, tokens of a sequence and head."""
    every = tuple(dict.fromkeys((*steps.prefilling, *steps.more_prefilling)))
    shapes = _prefilling(model, steps._replace(prefilling=every))
    return [(batch, heads, kv, length, head) for batch, length, heads, kv, head in shapes]


def _rotating(model: Model, steps: Steps) -> list[Shape]:
    """Return batch, heads, KV heads, tokens of a sequence, which are compiled in, and the rotated width."""
    heads = (model.kv_heads, 1, model.head) if model.kv_heads else (1, 1, ROTATED)
    return [(rows, model.heads, *heads) for rows in steps.rows]


def _rotating_quantized(model: Model, steps: Steps) -> list[Shape]:
    """Return tokens, heads, rows of the table of angles, and bits of a position."""
    if model.kv_heads:
        return []
    return [(rows, model.heads, model.context, bits) for bits in (64, 32) for rows in steps.rows]


def _activating(model: Model, steps: Steps) -> list[Shape]:
    """Return tokens and width of the inner layers."""
    return [(tokens, width) for width in (model.inner, model.shared) if width for tokens in steps.tokens]


SITES: dict[str, Site] = {
    "mm_bf16": Site("flashinfer", _products("rows")),
    "fp8_groupwise": Site("flashinfer", _quantized_products),
    "decode_paged": Site("flashinfer", _decoding),
    "decode_mla": Site("flashinfer", _latent_decoding),
    "prefill_ragged": Site("flashinfer", _ragged),
    "prefill_paged": Site("flashinfer", _prefilling),
    "bmm_bf16": Site("flashinfer", _latent_products),
    "rope_quantize_fp8": Site("flashinfer", _rotating_quantized),
    "matmul": Site("tilegym", _products("tokens")),
    "bmm": Site("tilegym", lambda model, steps: _latent_products(model, _rows_too(steps))),
    "attention": Site("tilegym", _attention),
    "rope": Site("tilegym", _rotating),
    "silu_and_mul": Site("tilegym", _activating),
    "softmax": Site(
        "tilegym",
        lambda model, steps: [(rows, model.experts) for rows in steps.rows] if model.experts else [],
    ),
    "persistent_layer_norm": Site(
        "tilegym", lambda model, steps: [(rows, model.hidden) for rows in _rows_too(steps).tokens]
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
