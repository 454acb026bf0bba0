"""How a kernel's tiles lie in its arrays: which sizes are one axis, what tiles it, and the grid. Pure.

Two sizes are one axis where arrays are indexed by the same block, loop or offsets along them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from aot_tune.declare.kernel_source.facts import Access, Bound, Facts
from aot_tune.declare.kernel_source.kinds import index_arrays
from aot_tune.declare.kernel_source.values import Value

Node = tuple[str, str, int]
"""The size of an array ("size", name, axis), an index ("index", key, 0), a parameter ("parameter", name, 0)
or a tile that covers an axis ("covers", key, 0)."""


@dataclass(kw_only=True)
class SizeAxis:
    """Sizes that are equal, of one axis of the problem."""

    sizes: list[tuple[str, int]] = field(default_factory=list)
    """Array and axis of each of the sizes."""

    parameters: list[str] = field(default_factory=list)
    """The kernel's parameters that hold the size."""

    counts: list[str] = field(default_factory=list)
    """The kernel's parameters that hold the number of its tiles."""

    indices: list[str] = field(default_factory=list)
    """The keys of what it is indexed by."""

    tile: Value | None = None
    """The size of its tiles; None where a whole axis is one tile, or where none is known."""

    covers: Value | None = None
    """The size of the one tile that covers the whole axis."""

    indexed_by_data: bool = False
    """Whether values that are loaded say where it is indexed."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The arrays, axes and grid of a kernel."""

    ranks: dict[str, int | None]
    """The number of axes of each array; None where it is not known."""

    axes: list[SizeAxis]
    """The axes, those of the first arrays first."""

    fixed: dict[tuple[str, int], int]
    """Sizes that are written in the kernel."""

    grid: tuple[tuple[SizeAxis, ...], ...]
    """For each axis of the grid the axes of the problem whose tiles it counts; empty where it is unknown."""

    dtypes: dict[str, str]
    """Dtypes of arrays that the kernel casts to by name, and of those whose values are indices."""

    def axis_of(self, array: str, axis: int) -> SizeAxis | None:
        """The axis of the problem that an array's size belongs to."""
        return next((one for one in self.axes if (array, axis) in one.sizes), None)


def layout_of(facts: Facts) -> Layout:
    """Derive the layout from what is known of a kernel."""
    ranks: dict[str, int | None] = {}
    for access in facts.accesses:
        rank = None if access.index is None else len(access.index)
        ranks[access.parameter] = ranks.get(access.parameter) or rank
    tiles = (tile for one in facts.accesses for tile in one.extents or ())
    lanes = (index.lanes for one in facts.accesses for index in one.index or ())
    joined = _Joined(frozenset(one.key for one in (*tiles, *lanes) if one is not None and one.number is None))
    fixed: dict[tuple[str, int], int] = {}
    for access in _telling(facts):
        _join_access(access, joined, fixed)
    for bound in facts.bounds:
        _join_bound(bound, joined)
    _join_whole(facts, ranks, joined, fixed)
    axes = _axes(facts, ranks, joined, fixed)
    _name_counted(facts, axes)
    return Layout(ranks=ranks, axes=axes, fixed=fixed, grid=_grid(facts, axes), dtypes=_dtypes(facts))


class _Joined:
    """Nodes that were joined with others, each under one root; roots carry what is known of tiles."""

    def __init__(self, extents: frozenset[str]) -> None:
        self.extents = extents
        self.parent: dict[Node, Node] = {}
        self.tiles: dict[Node, Value] = {}
        self.covers: dict[Node, Value] = {}
        self.by_data: set[Node] = set()
        self.counts: set[str] = set()
        self.whole: list[Node] = []

    def root(self, node: Node) -> Node:
        while self.parent.setdefault(node, node) != node:
            node = self.parent[node]
        return node

    def join(self, one: Node, other: Node) -> None:
        this, that = self.root(one), self.root(other)
        if this == that:
            return
        self.parent[that] = this
        for known in (self.tiles, self.covers):
            if that in known:
                known.setdefault(this, known.pop(that))


def _join_access(access: Access, joined: _Joined, fixed: dict[tuple[str, int], int]) -> None:
    indices = access.index or ()
    known = access.extents is not None and len(access.extents) == len(indices)
    extents = access.extents if known and access.extents is not None else (None,) * len(indices)
    for axis, (index, extent) in enumerate(zip(indices, extents, strict=True)):
        size: Node = ("size", access.parameter, axis)
        joined.root(size)
        if axis in access.sliced or index.of_sources("load"):
            joined.by_data.add(size)
            if extent is not None and index.number is None:
                joined.tiles.setdefault(joined.root(size), extent)
            continue
        tile = index.lanes or extent
        at = index.at if index.lanes else _tile_of(index, joined.extents)
        if at is None:
            joined.by_data.add(size)
        elif at.number is not None and tile is not None and tile.number is None:
            joined.join(("covers", tile.key, 0), size)
            joined.covers.setdefault(joined.root(size), tile)
        elif at.number is not None and tile is None:
            joined.whole.append(size)
        elif at.number is not None:
            length = int((at.number + 1) * (tile.number if tile is not None and tile.number else 1))
            fixed[access.parameter, axis] = max(length, fixed.get((access.parameter, axis), 0))
        else:
            joined.join(("index", at.key, 0), size)
            if tile is not None:
                joined.tiles.setdefault(joined.root(size), tile)


def _join_whole(
    facts: Facts, ranks: dict[str, int | None], joined: _Joined, fixed: dict[tuple[str, int], int]
) -> None:
    """An axis that is stored to as a whole is that of the array that agrees with it in all other axes."""
    for node in joined.whole:
        _, array, axis = node
        rank = ranks[array] or 0
        if joined.root(node) != node or (array, axis) in fixed:
            continue
        for other in facts.parameters:
            others = [joined.root(("size", other, place)) for place in range(rank)]
            agree = [
                others[place] == joined.root(("size", array, place)) for place in range(rank) if place != axis
            ]
            if other != array and ranks.get(other) == rank and agree and all(agree):
                if (other, axis) in fixed:
                    fixed[array, axis] = fixed[other, axis]
                else:
                    joined.join(("size", other, axis), node)
                break


def _tile_of(index: Value, extents: frozenset[str]) -> Value:
    """The index of a tile, also where its first element is given: the index times the size of some tile."""
    if index.factors is not None and index.key.startswith("*("):
        for one, other in (index.factors, index.factors[::-1]):
            if other.key in extents:
                return one
    return index


def _join_bound(bound: Bound, joined: _Joined) -> None:
    """An index runs up to a size, or up to the number of its tiles."""
    index, stop = bound.index, bound.stop
    of, tile = stop.tiles_of or (stop, index.step)
    if index.of_sources("load") or stop.of_sources("load"):
        return
    at: Node = ("index", index.key, 0)
    if index.lanes is not None and index.at is not None:
        at = ("index", index.at.key, 0) if index.at.number is None else ("covers", index.lanes.key, 0)
    if of.dimension is not None:
        joined.join(("size", *of.dimension), at)
    elif of.parameter is not None:
        joined.join(("parameter", of.parameter, 0), at)
        if bound.counts_tiles and stop.tiles_of is None:
            joined.counts.add(of.parameter)
    else:
        return
    if tile is not None and tile.number != 1 and "num_blocks" not in tile.key:
        joined.tiles.setdefault(joined.root(at), tile)


def _axes(
    facts: Facts, ranks: dict[str, int | None], joined: _Joined, fixed: dict[tuple[str, int], int]
) -> list[SizeAxis]:
    """The joined nodes as axes, in the order of the arrays that the kernel takes."""
    found: dict[Node, SizeAxis] = {}
    for array in facts.parameters:
        for axis in range(ranks.get(array) or 0):
            node: Node = ("size", array, axis)
            if (array, axis) in fixed and joined.root(node) == node:
                continue
            one = found.setdefault(joined.root(node), SizeAxis())
            one.sizes.append((array, axis))
            one.indexed_by_data |= node in joined.by_data
    for node in list(joined.parent):
        if node[0] == "parameter":
            one = found.setdefault(joined.root(node), SizeAxis())
            tile = joined.tiles.get(joined.root(node))
            in_tiles = node[1] in joined.counts and tile is not None and tile.number != 1
            (one.counts if in_tiles else one.parameters).append(node[1])
        elif node[0] == "index" and joined.root(node) in found:
            found[joined.root(node)].indices.append(node[1])
    for root, one in found.items():
        one.tile, one.covers = joined.tiles.get(root), joined.covers.get(root)
        if one.tile is not None and one.covers is not None and one.tile.key == one.covers.key:
            one.covers = None
    return [one for one in found.values() if one.sizes]


def _name_counted(facts: Facts, axes: list[SizeAxis]) -> None:
    """Parameters that are divided by the tiles of one axis alone hold its size."""
    named = {name for one in axes for name in one.parameters}
    for size, tile in facts.counts:
        tiled = [one for one in axes if one.tile is not None and one.tile.key == tile.key and one.sizes]
        if size.parameter is not None and size.parameter not in named and len(tiled) == 1:
            named.add(size.parameter)
            tiled[0].parameters.append(size.parameter)


def _grid(facts: Facts, axes: list[SizeAxis]) -> tuple[tuple[SizeAxis, ...], ...]:
    """What each axis of the grid counts; nothing where one of them is not known."""
    used = sorted({int(number) for one in _indices(facts) for number in one.of_sources("bid")})
    if "bid" not in facts.called or used != list(range(len(used))) or not used:
        return ()
    grid = []
    for number in used:
        block = f"bid {number}"
        is_index = any(block in (index.key, index.at.key if index.at else "") for index in _indices(facts))
        direct = [one for one in axes if block in one.indices] if is_index else []
        derived = {
            key
            for index in _indices(facts)
            if str(number) in index.of_sources("bid") and not index.of_sources("load")
            for key in (index.key, *(one.key for one in (index.at, *(index.factors or ())) if one))
        }
        counted = direct or _of_one_array(facts, [one for one in axes if derived & set(one.indices)])
        if not counted:
            return ()
        grid.append(tuple(counted))
    return tuple(grid)


def _of_one_array(facts: Facts, axes: list[SizeAxis]) -> list[SizeAxis]:
    """Those of the axes that an array has which is stored to: of the array that has most of them."""
    stored = dict.fromkeys(one.parameter for one in facts.accesses if one.what != "load")
    each = ([one for one in axes if any(array == name for array, _ in one.sizes)] for name in stored)
    return max(each, key=len, default=[]) or axes


def _indices(facts: Facts) -> Iterator[Value]:
    """The indices of all accesses that sizes are derived from."""
    telling = _telling(facts)
    for access in [one for one in telling if one.tells_sizes] or telling:
        yield from access.index or ()


def _telling(facts: Facts) -> list[Access]:
    """The accesses that sizes are derived from; of untaken branches those to arrays that no other names."""
    arrays = {access.parameter for access in facts.accesses if access.tells_sizes}
    return [one for one in facts.accesses if one.tells_sizes or one.parameter not in arrays]


def _dtypes(facts: Facts) -> dict[str, str]:
    found = {one.parameter: one.dtype for one in facts.accesses if one.what != "load" and one.dtype}
    return {**found, **dict.fromkeys(index_arrays(facts), "int32")}
