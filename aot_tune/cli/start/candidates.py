"""The constants and hints that a kernel of some kind searches: at most thirty candidates a problem. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from aot_tune.cli.start.sketch import Parameter, Sketch
from aot_tune.declare.kernel_source.kinds import PRODUCTS
from aot_tune.declare.mistakes import CORE

MOST_CANDIDATES = 30
"""Candidates of one problem, at most, on any arch."""

_PRODUCT_TILES = (
    (128, 128, 64),
    (64, 64, 64),
    (64, 128, 64),
    (64, 64, 128),
    (128, 128, 32),
    (128, 256, 64),
    (256, 128, 64),
)
"""Tiles (M, N, K) of matrix products that win on one GPU or another; the default first."""

_SMALL_PRODUCT_TILES = ((128, 64, 64), (64, 64, 64), (64, 128, 64), (128, 128, 32), (128, 128, 64))
"""The same for two products at a time, whose accumulators take twice the registers."""

_ATTENTION_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (64, 32), (128, 32))
"""Tiles (queries, keys) of attention; the default first."""

_ONE_TILE = (1024, 256, 512, 2048, 4096)
"""Elements of a one-dimensional tile; the default first."""

_ROW_TILES = (1, 2, 4)
"""Rows of a tile of whole rows, or of long parts of them."""

_PART_TILES = (1024, 256, 4096)
"""Columns of a tile where its rows are searched too."""

_SQUARE_TILES = (32, 64, 128)
"""The sizes of a tile of two or more axes that is no part of a matrix product."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Constants that vary together, as one loop of the search space."""

    constants: tuple[str, ...]
    """Their names."""

    values: tuple[tuple[int, ...], ...]
    """Their values; the default's first."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """A search space as loops: the product of all choices and hints."""

    choices: tuple[Choice, ...]
    """The constants."""

    occupancies: tuple[int, ...]
    """Values of the hint ``occupancy``."""

    shares_tiles: bool
    """Whether blocks share tiles, so that ``num_ctas`` 2 is worth a trial from sm100 on."""

    @property
    def hints(self) -> tuple[str, ...]:
        """The hints of every config, in cuTile's order."""
        return ("num_ctas", "occupancy") if self.shares_tiles else ("occupancy",)

    @property
    def most(self) -> int:
        """The number of candidates on an arch with all of them."""
        clusters = 2 if self.shares_tiles else 1
        return prod(len(one.values) for one in self.choices) * len(self.occupancies) * clusters


def space_of(sketch: Sketch) -> Space:
    """The search space of a kernel."""
    kind = sketch.kinds[0]
    tiles = [one for one in sketch.parameters if one.role == "tile"]
    choices = list(_tile_choices(kind, tiles, sketch))
    for one in sketch.parameters:
        if one.role == "setting":
            choices.append(Choice(constants=(one.name,), values=tuple((value,) for value in one.values)))
    # Names of a product's tiles are taken for such by the check of a declaration too.
    varied = {name for one in choices if len(one.values) > 1 for name in one.constants}
    shares = kind in PRODUCTS or bool(varied & set(CORE))
    occupancies: tuple[int, ...] = (1, 2, 4) if choices else (1, 2, 4, 8)
    while True:
        space = Space(choices=tuple(choices), occupancies=occupancies, shares_tiles=shares)
        if space.most <= MOST_CANDIDATES or len(occupancies) == 1:
            return space
        occupancies = occupancies[:-1]


def _tile_choices(kind: str, tiles: list[Parameter], sketch: Sketch) -> list[Choice]:
    """How the sizes of tiles vary: those of a product together, all others by themselves."""
    left = list(tiles)
    choices: list[Choice] = []
    if kind in PRODUCTS:
        order = ("queries", "kv_length") if kind == "attention" else ("M", "N", "K")
        lists = {"attention": _ATTENTION_TILES, "dual matmul": _SMALL_PRODUCT_TILES}
        table = lists.get(kind, _PRODUCT_TILES)
        roles = [_product_role(one, sketch) for one in left]
        known = [(role, one) for role, one in zip(roles, left, strict=True) if role in order]
        known.sort(key=lambda pair: order.index(pair[0]))
        if known:
            places = [order.index(role) for role, _ in known]
            rows = dict.fromkeys(tuple(row[place] for place in places) for row in table)
            choices.append(Choice(constants=tuple(one.name for _, one in known), values=tuple(rows)))
            left = [one for one in left if all(one is not other for _, other in known)]
        choices += [Choice(constants=(one.name,), values=((64,),)) for one in left]
        return choices
    if len(left) == 1:
        rows_alone = _tiles_rows(left[0], sketch)
        values: tuple[int, ...] = (*_ROW_TILES, 8) if rows_alone else _ONE_TILE
        return [Choice(constants=(left[0].name,), values=tuple((value,) for value in values))]
    for number, one in enumerate(left):
        values = _ROW_TILES if _tiles_rows(one, sketch) else _PART_TILES
        if _is_square(left, sketch) or _runs_down(left, sketch):
            values = _SQUARE_TILES
        if number > 1:
            values = values[:1]
        choices.append(Choice(constants=(one.name,), values=tuple((value,) for value in values)))
    return choices


def _product_role(one: Parameter, sketch: Sketch) -> str:
    """The axis of a product that a constant tiles, by the axis that it was seen on or else by its name."""
    if one.axis is not None:
        name = sketch.name_of(one.axis)
        if name in ("M", "N", "K", "queries", "kv_length"):
            return name
    word = one.name.lower().rstrip("0123456789_")
    by_name = {"m": "M", "n": "N", "k": "K"}
    if sketch.kinds[0] == "attention":
        by_name = {"m": "queries", "n": "kv_length", "q": "queries", "kv": "kv_length", "k": "kv_length"}
    last = word.rpartition("_")[2].removeprefix("tile").removeprefix("block").removeprefix("t")
    return by_name.get(last, "")


def _tiles_rows(one: Parameter, sketch: Sketch) -> bool:
    """Whether a constant is the number of rows in a tile, each of which is long."""
    if one.axis is None:
        return False
    arrays = {array for array, _ in one.axis.sizes}
    beside = [axis for axis in sketch.layout.axes if arrays & {array for array, _ in axis.sizes}]
    others = [axis for axis in beside if axis is not one.axis]
    if any(axis.covers is not None for axis in others):
        return True
    return sketch.name_of(one.axis) in ("rows", "batch") and any(
        axis.tile is not None and axis.tile.number is None for axis in others
    )


def _runs_down(tiles: list[Parameter], sketch: Sketch) -> bool:
    """Whether each block goes through the rows of its columns, so that a tile has many rows."""
    if "persistent" in sketch.kinds:
        return False
    rows = [one.axis for one in tiles if one.axis is not None and sketch.name_of(one.axis) == "rows"]
    return any(all(index.startswith(("loop", "//(loop")) for index in axis.indices) for axis in rows)


def _is_square(tiles: list[Parameter], sketch: Sketch) -> bool:
    """Whether two tiles lie across each other, as in a transposition: neither array has them in one order."""
    axes = [one.axis for one in tiles if one.axis is not None]
    places = {
        tuple(next((place for name, place in axis.sizes if name == array), -1) for axis in axes)
        for axis_ in axes
        for array, _ in axis_.sizes
    }
    full = {one for one in places if -1 not in one}
    return len(full) > 1
