"""What is known of a kernel from its source: what it calls, loads and stores, what loops run over. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from aot_tune.declare.kernel_source.values import Value


@dataclass(frozen=True, kw_only=True)
class Access:
    """One load from, store to or atomic operation on an array that a parameter holds."""

    parameter: str
    """The name of the kernel's parameter."""

    what: str
    """``load``, ``store`` or ``add``, which is any atomic operation."""

    index: tuple[Value, ...] | None
    """The index along each axis of the array; None where it is not known."""

    extents: tuple[Value | None, ...] | None
    """The size of the tile along each axis; None where it is that of the stored tile."""

    dtype: str | None
    """The dtype that a stored tile was cast to, where it is written out."""

    sliced: frozenset[int]
    """Axes along which the access is to a part of the array."""

    tells_sizes: bool
    """Whether the arrays' sizes may be derived from it."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What an index or consecutive offsets run up to."""

    index: Value
    """A loop's variable, the index of a tile, or consecutive offsets."""

    stop: Value
    """The size of the axis, or the count of its tiles."""

    counts_tiles: bool = False
    """Whether `stop` counts what the index counts, as of a loop in steps of one."""


@dataclass(kw_only=True)
class Facts:
    """What a kernel's source does."""

    parameters: tuple[str, ...] = ()
    """The names of the kernel's parameters, in order."""

    constants: dict[str, str] = field(default_factory=dict)
    """The `ct.Constant` parameters, each with the name of its type; ``int`` where none is written."""

    accesses: list[Access] = field(default_factory=list)
    """All accesses to arrays, in the order of execution."""

    products: list[tuple[tuple[str, ...], bool]] = field(default_factory=list)
    """Of each matrix product the loops around it, and whether it is in a branch that is taken."""

    called: set[str] = field(default_factory=set)
    """The names of cuTile's functions that are called."""

    dtypes: set[str] = field(default_factory=set)
    """The names of cuTile's dtypes that are used."""

    bounds: list[Bound] = field(default_factory=list)
    """What indices run up to."""

    counts: list[tuple[Value, Value]] = field(default_factory=list)
    """Pairs of a size and the size of the tiles that it is divided into."""

    divided: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of an index that is another one divided by a parameter, the key of that one, and the parameter."""

    decides: dict[str, int] = field(default_factory=dict)
    """Constants of type int that decide a branch, each with a value for which it is not taken."""

    persistent: bool = False
    """Whether a block goes on to further tiles, in steps of the number of blocks."""

    loops: int = 0
    """The number of loops."""

    integers: set[str] = field(default_factory=set)
    """Parameters that an index, a bound of a loop or a size is made of."""

    lists: set[str] = field(default_factory=set)
    """Parameters that are lists of arrays."""

    used: set[str] = field(default_factory=set)
    """Parameters that the source reads."""

    escaped: set[str] = field(default_factory=set)
    """Parameters that a function is given whose source cannot be read."""

    readable: bool = True
    """Whether the kernel's source could be read and followed; if not, all parameters have escaped."""
