"""Which of its array parameters a kernel loads, adds to and stores to, as its source says. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aot_tune.declare.kernel_source.facts import Facts
from aot_tune.declare.kernel_source.walk import facts_of


@dataclass(frozen=True, kw_only=True)
class Accesses:
    """The parameters of a kernel by what it, or a helper that it calls, does to them."""

    loaded: frozenset[str]
    """Parameters that are loaded."""

    loaded_first: frozenset[str]
    """Parameters that are loaded, in the order of execution, before anything is stored to them."""

    stored: frozenset[str]
    """Parameters that are stored to."""

    added: frozenset[str]
    """Parameters that an atomic operation changes."""

    escaped: frozenset[str]
    """Parameters that a function is given whose source cannot be read."""


def accesses(kernel: Any) -> Accesses:
    """The accesses in a kernel's source; none where the source cannot be read."""
    return accesses_in(facts_of(kernel))


def accesses_in(facts: Facts) -> Accesses:
    """The accesses among what is known of a kernel."""
    loaded: set[str] = set()
    loaded_first: set[str] = set()
    stored: set[str] = set()
    added: set[str] = set()
    for access in facts.accesses:
        if access.what == "load":
            loaded.add(access.parameter)
            if access.parameter not in stored:
                loaded_first.add(access.parameter)
        elif access.what == "store":
            stored.add(access.parameter)
        else:
            added.add(access.parameter)
    return Accesses(
        loaded=frozenset(loaded),
        loaded_first=frozenset(loaded_first),
        stored=frozenset(stored),
        added=frozenset(added),
        escaped=frozenset(facts.escaped),
    )
