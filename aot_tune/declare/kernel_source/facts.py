"""Facts of a kernel's source: what it loads, stores to, multiplies and reduces. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

What = Literal["load", "store", "add"]
"""What is done to an array; ``add`` is any atomic operation."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """One load from, store to or atomic operation on an array that a parameter holds."""

    parameter: str
    """The name of the kernel's parameter."""

    what: What
    """What is done to it."""

    rank: int | None
    """The number of axes that are indexed; None where the index is not written out."""


@dataclass(kw_only=True)
class Facts:
    """What a kernel's source does."""

    parameters: tuple[str, ...] = ()
    """The names of the kernel's parameters, in order."""

    constants: dict[str, str] = field(default_factory=dict)
    """The `ct.Constant` parameters, each with the name of its type; ``int`` where none is written."""

    accesses: list[Access] = field(default_factory=list)
    """All accesses to arrays, in the order of execution."""

    products: list[tuple[str, ...]] = field(default_factory=list)
    """The loops around each matrix product; of the products in two branches those of one that has most."""

    called: set[str] = field(default_factory=set)
    """The names of cuTile's functions that are called."""

    reduced: set[float | None] = field(default_factory=set)
    """The axes that tiles are reduced along; None is an axis that is not written out."""

    moving: set[str] = field(default_factory=set)
    """Constants that are sizes of tiles at places that move, by block or in a loop."""

    covering: set[str] = field(default_factory=set)
    """Constants that are sizes of tiles at a fixed place."""

    persistent: bool = False
    """Whether a block goes on to further tiles, in steps of the number of blocks."""

    chained: bool = False
    """Whether a product has an operand that exponentials of another product are in, as attention has."""

    placing: set[str] = field(default_factory=set)
    """Arrays whose values may decide where others are loaded or stored to."""

    bounding: set[str] = field(default_factory=set)
    """Arrays whose values decide how often a loop runs, or which part of an array is worked on."""

    lists: set[str] = field(default_factory=set)
    """Parameters that are lists of arrays."""

    shaped: set[str] = field(default_factory=set)
    """Parameters whose shape, strides or dtype is read: arrays."""

    escaped: set[str] = field(default_factory=set)
    """Parameters that a function is given whose source cannot be read."""

    readable: bool = True
    """Whether the kernel's source could be read and followed; if not, all parameters have escaped."""

    @property
    def loaded(self) -> set[str]:
        """Parameters that are loaded."""
        return self._with("load")

    @property
    def loaded_first(self) -> set[str]:
        """Parameters that are loaded, in the order of execution, before anything is stored to them."""
        first: dict[str, What] = {}
        for access in self.accesses:
            if access.what != "add":
                first.setdefault(access.parameter, access.what)
        return {name for name, what in first.items() if what == "load"}

    @property
    def stored(self) -> set[str]:
        """Parameters that are stored to."""
        return self._with("store")

    @property
    def added(self) -> set[str]:
        """Parameters that an atomic operation changes."""
        return self._with("add")

    def _with(self, what: What) -> set[str]:
        return {access.parameter for access in self.accesses if access.what == what}

    @property
    def index_arrays(self) -> set[str]:
        """Arrays whose values are places in others."""
        return self.placing | self.bounding

    @property
    def arrays(self) -> tuple[str, ...]:
        """The parameters that are arrays, or lists of such, in order."""
        known = {access.parameter for access in self.accesses} | self.lists | self.shaped
        return tuple(name for name in self.parameters if name in known and name not in self.constants)

    @property
    def tiles(self) -> tuple[str, ...]:
        """The constants that are sizes of tiles at places that move, and of no other tiles, in order."""
        return tuple(name for name in self.parameters if name in self.moving - self.covering)

    def rank(self, array: str) -> int | None:
        """The number of an array's axes, where each access to it indexes as many."""
        ranks = {access.rank for access in self.accesses if access.parameter == array}
        return ranks.pop() if len(ranks) == 1 else None
