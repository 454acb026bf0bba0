"""Read from a kernel's source which of its array parameters it loads, adds to and stores to. Runs nothing.

Only calls that name a parameter are seen, such as ``ct.load(x, ...)``; what other functions do with one is
not followed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from aot_tune.nvidia import cutile

_LOADS, _STORES = ("load", "gather"), ("store", "scatter")
_ADDS = "atomic_"


@dataclass(frozen=True, kw_only=True)
class Accesses:
    """The parameters of a kernel that its own calls name."""

    loaded_first: frozenset[str]
    """Parameters that are loaded, in the source's order, before anything is stored to them."""

    stored: frozenset[str]
    """Parameters that are stored to."""

    added: frozenset[str]
    """Parameters that an atomic operation changes."""


def accesses(kernel: Any) -> Accesses:
    """The accesses in a kernel's source; none where the source cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cutile.python_function(kernel))))
    except (OSError, TypeError, SyntaxError):
        return Accesses(loaded_first=frozenset(), stored=frozenset(), added=frozenset())
    parameters = {name for name, _ in cutile.parameters(kernel)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loaded_first: set[str] = set()
    stored: set[str] = set()
    added: set[str] = set()
    # An inner call comes first, since it is evaluated first: store(out, i, load(out, i) * 2).
    for call in sorted(calls, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0)):
        name, array = _called(call), _array(call)
        if array not in parameters:
            continue
        assert array is not None
        if name in _LOADS and array not in stored:
            loaded_first.add(array)
        elif name in _STORES:
            stored.add(array)
        elif name.startswith(_ADDS):
            added.add(array)
    return Accesses(loaded_first=frozenset(loaded_first), stored=frozenset(stored), added=frozenset(added))


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _array(call: ast.Call) -> str | None:
    """The name that a call is given as its array; None for any other expression."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "array"]
    first = next(iter((*call.args[:1], *named)), None)
    return first.id if isinstance(first, ast.Name) else None
