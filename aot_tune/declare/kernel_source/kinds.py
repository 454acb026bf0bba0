"""What kind of kernel a source describes, by what it calls and how it loops. Pure."""

from __future__ import annotations

from collections import Counter

from aot_tune.declare.kernel_source.accesses import accesses_in
from aot_tune.declare.kernel_source.facts import Facts

_REDUCTIONS = frozenset(
    {"sum", "max", "min", "prod", "argmax", "argmin", "reduce", "scan", "cumsum", "cumprod"}
)
_EXPONENTIALS = frozenset({"exp", "exp2"})
_MAXIMA = frozenset({"max", "maximum", "argmax"})

PRODUCTS = frozenset({"matmul", "dual matmul", "attention"})
"""The kinds whose blocks can share tiles in a cluster."""


def kinds_of(facts: Facts) -> tuple[str, ...]:
    """The kind of a kernel, and what is special about it, in words.

    The first word is ``attention``, ``dual matmul``, ``matmul``, ``reduction`` or ``elementwise``. Then come
    those that apply of ``fp8``, ``grouped``, ``variable length``, ``persistent``, ``in place``, ``atomic``.
    """
    found = accesses_in(facts)
    first = _first(facts)
    special = {
        "fp8": any(name.startswith(("float8", "float4")) for name in facts.dtypes)
        or "mma_scaled" in facts.called
        or (first in PRODUCTS and _is_scaled(facts)),
        "grouped": bool(facts.lists) or (first in ("matmul", "dual matmul") and bool(index_arrays(facts))),
        "variable length": first not in ("matmul", "dual matmul") and bool(index_arrays(facts)),
        "persistent": facts.persistent,
        "in place": bool(found.loaded_first & found.stored),
        "atomic": bool(found.added),
    }
    return first, *(word for word, applies in special.items() if applies)


def index_arrays(facts: Facts) -> frozenset[str]:
    """The arrays whose values decide where others are loaded, or how often a loop runs."""
    words = (name.partition(" ") for name in facts.integers)
    return frozenset(rest for word, blank, rest in words if word == "load" and blank)


def _first(facts: Facts) -> str:
    taken = Counter(loops for loops, is_taken in facts.products if is_taken)
    products = max(taken.values(), default=0)
    if products >= 2 and facts.called & _EXPONENTIALS and facts.called & _MAXIMA:
        return "attention"
    if products >= 2:
        return "dual matmul"
    if products:
        return "matmul"
    return "reduction" if facts.called & _REDUCTIONS else "elementwise"


def _is_scaled(facts: Facts) -> bool:
    """Whether arrays of scales are loaded, by their names, as products of short dtypes need them."""
    return any(
        "scale" in access.parameter.lower() and access.what == "load" and len(access.index or ()) > 0
        for access in facts.accesses
    )
