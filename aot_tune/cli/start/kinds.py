"""The nine kinds of kernels that `aot-tune new` has a template for, and what proves each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from aot_tune.declare.kernel_source.facts import Facts

TEMPLATES: Mapping[str, str] = {
    "elementwise": """
        axes: {"rows": Pow2(), "cols": Exact()}
        problem: {"dtype": $x.dtype, "rows": $x.shape[0], "cols": $x.shape[1]}
        typical: {"dtype": "bfloat16", "rows": Pow2.edges(16, 4096), "cols": 4096}
        space: (1024,), (256,), (4096,)
        grid: (problem.rows, ct.cdiv(problem.cols, $t0))
        blocks: one block for each tile
        shapes: (problem.rows, problem.cols)
        value: $x.double() * 2
    """,
    "in-place": """
        like: elementwise
        blocks: one block for each tile, which no other block may change
    """,
    "row-reduction": """
        like: elementwise
        space: (1, 1024), (2, 1024), (4, 1024)
        grid: (ct.cdiv(problem.rows, $t0),)
        blocks: one block for each tile of rows
        value: $x.double().mean(1)
    """,
    "product": """
        axes: {"M": Pow2(), "N": Exact(), "K": Exact()}
        problem: {"dtype": $x.dtype, "M": $x.shape[0], "N": $y.shape[1], "K": $x.shape[1]}
        typical: {"dtype": "bfloat16", "M": Pow2.edges(16, 4096), "N": 4096, "K": 4096}
        space: (128, 128, 64), (64, 64, 64), (64, 128, 64), (128, 256, 64)
        grid: (ct.cdiv(problem.M, $t0), ct.cdiv(problem.N, $t1))
        blocks: one block for each tile of the product
        shapes: (problem.M, problem.K) (problem.K, problem.N)
        value: $x.double() @ $y.double()
    """,
    "persistent-product": """
        like: product
        grid: (device.sm_count * config.hints["occupancy"],)
        blocks: as many blocks as run at a time, each going on to further tiles
        tiles: ct.cdiv(problem.M, $t0) * ct.cdiv(problem.N, $t1)
    """,
    "attention": """
        axes: {"batch": Pow2(), "heads": Exact(), "queries": Pow2(), "kv_length": Pow2(), "head_dim": Exact()}
        problem: {
            "dtype": $x.dtype, "batch": $x.shape[0], "heads": $x.shape[1], "queries": $x.shape[2],
            "kv_length": $y.shape[2], "head_dim": $x.shape[3],
        }
        typical: {
            "dtype": "bfloat16", "batch": 4, "heads": 16, "queries": [512, 2048], "kv_length": 2048,
            "head_dim": 128,
        }
        space: (64, 64), (128, 64), (64, 128), (128, 128)
        grid: (ct.cdiv(problem.queries, $t0), problem.batch * problem.heads)
        blocks: one block for each tile of queries of each head
        shapes: (problem.batch, problem.heads, problem.queries, problem.head_dim)
            (problem.batch, problem.heads, problem.kv_length, problem.head_dim)
            (problem.batch, problem.heads, problem.kv_length, problem.head_dim)
        value: torch.nn.functional.scaled_dot_product_attention($x.double(), $y.double(), $z.double())
    """,
    "varlen-attention": """
        axes: {"tokens": Pow2(), "heads": Exact(), "longest": Pow2(), "head_dim": Exact()}
        problem: {
            "dtype": $x.dtype, "tokens": $x.shape[0], "heads": $x.shape[1], "longest": ...,
            "head_dim": $x.shape[2],
        }
        typical: {
            "dtype": "bfloat16", "tokens": Pow2.edges(512, 8192), "heads": 16, "longest": 2048,
            "head_dim": 128,
        }
        space: (64, 64), (128, 64), (64, 128), (128, 128)
        grid: (ct.cdiv(problem.longest, $t0), problem.heads, ...)
        blocks: blocks for the longest sequence, whose length is an argument, for each head and sequence
        shapes: (problem.tokens, problem.heads, problem.head_dim)
        value: ...
    """,
    "grouped-product": """
        axes: {"rows": Pow2(), "N": Exact(), "K": Exact(), "groups": Exact()}
        problem: {
            "dtype": $x.dtype, "rows": $x.shape[0], "N": $y.shape[2], "K": $x.shape[1], "groups": $y.shape[0],
        }
        typical: {"dtype": "bfloat16", "rows": Pow2.edges(16, 4096), "N": 4096, "K": 4096, "groups": 8}
        space: (128, 128, 64), (64, 64, 64), (64, 128, 64)
        grid: (ct.cdiv(problem.rows, $t0), ct.cdiv(problem.N, $t1), problem.groups)
        blocks: blocks for the most tiles that one group may have, for each group
        shapes: (problem.rows, problem.K) (problem.groups, problem.K, problem.N)
        value: ...
    """,
    "dual-product": """
        like: product
        space: (128, 64, 64), (64, 64, 64), (64, 128, 64)
        blocks: one block for each tile of the result
        shapes: (problem.M, problem.K) (problem.K, problem.N) (problem.K, problem.N)
        value: torch.nn.functional.silu($x.double() @ $y.double()) * ($x.double() @ $z.double())
    """,
}  # fmt: skip
"""Examples of each kind.

``$x``, ``$y`` and ``$z`` are the first inputs, ``$t0`` and ``$t1`` the first sizes of tiles. ``space`` lists
values of all sizes of tiles, ``shapes`` the shapes of the inputs, ``like`` the kind of all other examples.
"""

KINDS = tuple(TEMPLATES)
"""The kinds by the names that --kind takes."""


def proven_kind(facts: Facts) -> str | None:
    """Return the kind that loads, stores and products prove; None where they do not."""
    products = max(Counter(facts.products).values(), default=0)
    if facts.escaped or facts.added or not facts.stored or facts.placing:
        return None
    if facts.chained:
        return None if facts.lists else "varlen-attention" if facts.bounding else "attention"
    if products == 1 and (facts.lists or facts.bounding):
        return "grouped-product"
    if facts.lists or facts.bounding or products > 2:
        return None
    if products:
        return "dual-product" if products == 2 else "persistent-product" if facts.persistent else "product"
    if facts.persistent or 0 in facts.reduced:
        return None
    if facts.reduced:
        return "row-reduction"
    return "in-place" if facts.loaded_first & facts.stored else "elementwise"


def template(kind: str) -> dict[str, str]:
    """Return the examples of a kind's template by their names."""
    parts: dict[str, str] = {}
    name = ""
    for line in map(str.strip, TEMPLATES[kind].strip().splitlines()):
        first, colon, rest = line.partition(": ")
        name, text = (first, rest) if colon and first.isidentifier() else (name, line)
        parts[name] = f"{parts[name]}\n{text}" if name in parts else text
    like = parts.pop("like", None)
    return parts if like is None else template(like) | parts
