"""Sketch a declaration from what a kernel's source says: arguments, axes, constants, and what is not known.

What a name suggests, such as ``eps`` or ``GROUP_SIZE_M``, is used for values alone, which the author sees and
can change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from aot_tune.declare.kernel_source.accesses import accesses_in
from aot_tune.declare.kernel_source.facts import Facts
from aot_tune.declare.kernel_source.kinds import PRODUCTS, kinds_of
from aot_tune.declare.kernel_source.layout import Layout, SizeAxis, layout_of
from aot_tune.values.problem import Problem

Role = Literal[
    "array",
    "list",
    "size",
    "count",
    "ratio",
    "tile",
    "cover",
    "setting",
    "blocks",
    "flag",
    "integer",
    "float",
    "unused",
]
"""What a parameter of a kernel is: an array, a list of arrays, the size of an axis, the number of its tiles,
the ratio of two sizes, a tile's size, the size of a tile that covers an axis, a constant that is tuned with
others, the number of blocks that run at a time, a bool, another int or float, or unused."""

_SETTINGS = {
    "group": (8,),
    "swizzle": (8,),
    "latency": (4,),
    "stages": (3,),
    "split": (1,),
}
"""Constants that are no sizes and are tuned, by a word of their names, each with values that are usual."""

_INTEGERS = re.compile(r"strides?(_|$)|_strides?|^ld[a-z]?$|pitch")
"""Names of a parameter that is a whole number, whatever it is multiplied with."""

_BLOCKS = re.compile(r"num_?sms?|sm_count|num_?(blocks|programs|ctas)$")
"""Names of a parameter that holds how many blocks run at a time, by which a persistent kernel goes on."""

_ALIASES = {
    "rows": ("m", "n_rows", "num_rows", "nrows", "tokens", "num_tokens", "n_tokens"),
    "cols": ("n", "n_cols", "num_cols", "ncols", "hidden", "hidden_size", "dim"),
    "batch": ("b", "batch_size", "num_batches", "bs", "q"),
    "heads": ("h", "num_heads", "n_heads", "n_head", "num_q_heads"),
    "kv_heads": ("num_kv_heads", "n_kv_heads", "num_head_kv"),
    "queries": ("s_qo", "seq_len", "q_len", "seqlen_q"),
    "kv_length": ("s_kv", "kv_len", "seqlen_k", "seq_len_kv"),
    "head_dim": ("d", "headdim", "tile_d"),
    "length": ("n", "n_elements", "numel", "size", "total"),
}
"""Other names of an axis, in lower case: a parameter of such a name holds its size."""


@dataclass(kw_only=True)
class Parameter:
    """One parameter of the kernel, and what the declaration hands on for it."""

    name: str
    """Its name."""

    role: Role
    """What it is."""

    constant: bool
    """Whether it is a `ct.Constant`."""

    axis: SizeAxis | None = None
    """Of a size, a tile or a cover, its axis, where it is known; of a ratio that of the larger size."""

    divisor: SizeAxis | None = None
    """Of a ratio, the axis of the smaller size."""

    values: tuple[int, ...] = ()
    """Of a setting the values that are tried."""

    guess: bool = False
    """Whether the values of a setting are those that are usual for its name, and nothing else says so."""

    @property
    def is_launched(self) -> bool:
        """Whether it is an argument of the launch."""
        return self.role in ("array", "list", "flag", "integer", "float")


@dataclass(kw_only=True)
class Sketch:
    """A declaration's content as far as the kernel's source tells it."""

    kinds: tuple[str, ...]
    """The kind of the kernel, as `kinds_of` has it."""

    parameters: list[Parameter]
    """The kernel's parameters, in order."""

    layout: Layout
    """The arrays, axes and grid."""

    names: dict[int, str] = field(default_factory=dict)
    """The names of the axes, by the identity of their `SizeAxis`."""

    outputs: tuple[str, ...] = ()
    """Arrays that are stored to and never loaded."""

    inplace: tuple[str, ...] = ()
    """Arrays that are loaded before they are stored to."""

    reset: tuple[str, ...] = ()
    """Arrays that are added to atomically."""

    unknown: tuple[str, ...] = ()
    """Arrays of which a size or the rank is not known."""

    indices: tuple[str, ...] = ()
    """Arrays whose values say where others are loaded."""

    fp8: str = ""
    """The name of the short dtype that a kernel of kind fp8 reads; empty for other kinds."""

    @property
    def launched(self) -> list[Parameter]:
        """The arguments of a launch."""
        return [one for one in self.parameters if one.is_launched]

    @property
    def mutated(self) -> tuple[str, ...]:
        """The arrays that the kernel writes, in the order of a launch's arguments."""
        written = {*self.outputs, *self.inplace, *self.reset}
        return tuple(one.name for one in self.launched if one.name in written)

    @property
    def used_axes(self) -> list[SizeAxis]:
        """The axes of the arrays that are launched."""
        arrays = {one.name for one in self.launched if one.role in ("array", "list")}
        return [axis for axis in self.layout.axes if any(array in arrays for array, _ in axis.sizes)]

    @property
    def typed(self) -> Parameter | None:
        """The array whose dtype is the problem's; None where no array is launched."""
        arrays = [one for one in self.launched if one.role in ("array", "list")]
        data = [one for one in arrays if one.name not in self.indices]
        return next(iter([one for one in data if one.name not in self.mutated] or data), None)

    def compiled_in(self, *roles: Role) -> list[Parameter]:
        """Scalars of a launch that are compiled into the kernel, so that the choice depends on them."""
        return [one for one in self.launched if one.role in roles and one.constant]

    def name_of(self, axis: SizeAxis) -> str:
        """The name of an axis."""
        return self.names[id(axis)]

    def shape_of(self, array: str) -> list[SizeAxis | int] | None:
        """The axes of an array, or the sizes that are fixed; None where they are not known."""
        rank = self.layout.ranks.get(array)
        if rank is None:
            return None
        sizes: list[SizeAxis | int] = []
        for axis in range(rank):
            found = self.layout.axis_of(array, axis)
            sizes.append(found if found is not None else self.layout.fixed.get((array, axis), 1))
        return sizes

    def is_pow2(self, axis: SizeAxis) -> bool:
        """Whether an axis is bucketed: its size varies from call to call, and no constant follows it."""
        follow = ("size", "count", "cover", "ratio")
        if axis.covers is not None:
            return False
        if any(one.constant and one.role in follow and one.axis is axis for one in self.parameters):
            return False
        name = self.name_of(axis)
        first = any(place == 0 for _, place in axis.sizes)
        return name in ("M", "rows", "length", "queries", "kv_length", "batch") or (
            first and name not in ("N", "K", "cols", "heads", "kv_heads", "head_dim")
        )


def sketch_of(facts: Facts) -> Sketch:
    """Sketch the declaration of the kernel that `facts` are of."""
    layout, kinds = layout_of(facts), kinds_of(facts)
    found = accesses_in(facts)
    sketch = Sketch(kinds=kinds, parameters=[], layout=layout)
    sketch.indices = tuple(name for name, dtype in layout.dtypes.items() if dtype == "int32")
    sketch.indices = tuple(name for name in sketch.indices if name not in found.stored)
    _name_axes(facts, sketch)
    sketch.parameters = [_parameter(name, facts, sketch) for name in facts.parameters]
    arrays = [one.name for one in sketch.parameters if one.role in ("array", "list")]
    sketch.reset = tuple(name for name in arrays if name in found.added - found.loaded_first)
    kept = found.loaded_first & (found.stored | found.added)
    sketch.inplace = tuple(name for name in arrays if name in kept)
    written = found.stored - kept - found.added
    sketch.outputs = tuple(name for name in arrays if name in written)
    sketch.unknown = tuple(name for name in arrays if _is_unknown(name, sketch))
    if "fp8" in kinds:
        short = sorted(name for name in facts.dtypes if name.startswith("float8"))
        sketch.fp8 = short[0] if short else "float8_e4m3fn"
    return sketch


def _is_unknown(array: str, sketch: Sketch) -> bool:
    shape = sketch.shape_of(array)
    if any(one.name == array and one.role == "list" for one in sketch.parameters):
        return True  # its members may differ
    return shape is None or any(
        isinstance(one, SizeAxis) and (one.indexed_by_data or not (one.indices or one.covers))
        for one in shape
    )


# Parameters -------------------------------------------------------------------------------------------------


def _parameter(name: str, facts: Facts, sketch: Sketch) -> Parameter:
    constant = name in facts.constants
    layout = sketch.layout
    if name in facts.lists:
        return Parameter(name=name, role="list", constant=constant)
    if not constant and (name in layout.ranks or _is_shaped(name, layout)):
        return Parameter(name=name, role="array", constant=constant)
    if name not in facts.used:
        return Parameter(name=name, role="unused", constant=constant)
    counts = name in facts.integers or _INTEGERS.search(name.lower()) is not None
    kind = facts.constants.get(name, "int" if counts else "float")
    if kind in ("bool", "float"):
        return Parameter(name=name, role="flag" if kind == "bool" else "float", constant=constant)
    for axis in layout.axes:
        if constant and axis.tile is not None and name in (axis.tile.key, *axis.tile.of_sources("parameter")):
            return Parameter(name=name, role="tile", constant=constant, axis=axis)
    for axis in layout.axes:
        if axis.covers is not None and axis.covers.key == name:
            return Parameter(name=name, role="cover", constant=constant, axis=axis)
        if name in axis.parameters and axis.sizes:
            return Parameter(name=name, role="size", constant=constant, axis=axis)
        if name in axis.counts and axis.sizes:
            return Parameter(name=name, role="count", constant=constant, axis=axis)
    if "persistent" in sketch.kinds and _BLOCKS.search(name.lower()):
        return Parameter(name=name, role="blocks", constant=constant)
    for key, (whole, by) in facts.divided.items():
        larger = next((one for one in layout.axes if whole in one.indices), None)
        smaller = next((one for one in layout.axes if key in one.indices), None)
        if by == name and larger is not None and smaller is not None and larger is not smaller:
            return Parameter(name=name, role="ratio", constant=constant, axis=larger, divisor=smaller)
    tiled = constant and re.search(r"tile|block", name.lower()) and not re.search(r"num|count", name.lower())
    if tiled:
        return Parameter(name=name, role="tile", constant=constant)
    if constant and name in facts.decides:
        return Parameter(name=name, role="setting", constant=constant, values=(facts.decides[name],))
    for word, values in _SETTINGS.items():
        if constant and word in name.lower():
            return Parameter(name=name, role="setting", constant=constant, values=values, guess=True)
    for axis in layout.axes:
        plain = name.lower().strip("_")
        if axis.sizes and plain in (sketch.name_of(axis).lower(), *_ALIASES.get(sketch.name_of(axis), ())):
            return Parameter(name=name, role="size", constant=constant, axis=axis)
    return Parameter(name=name, role="integer", constant=constant)


def _is_shaped(name: str, layout: Layout) -> bool:
    return any(array == name for axis in layout.axes for array, _ in axis.sizes)


# Names of axes ----------------------------------------------------------------------------------------------

_BY_RANK = {
    1: ("length",),
    2: ("rows", "cols"),
    3: ("batch", "rows", "cols"),
    4: ("batch", "heads", "rows", "cols"),
}


def _name_axes(facts: Facts, sketch: Sketch) -> None:
    layout, taken = sketch.layout, set[str]()
    suggested = dict(_suggested(facts, sketch))
    for axis in layout.axes:
        array, place = axis.sizes[0] if axis.sizes else ("size", 0)
        own = [name.strip("_") for name in axis.parameters if name.isidentifier() and axis.sizes]
        wanted = (suggested.get(id(axis)), *own, f"{array.strip('_')}_{place}".lower(), f"axis_{len(taken)}")
        if sketch.kinds[0] not in PRODUCTS and own and len(own[0]) > 1:
            wanted = (own[0].lower(), *wanted)
        name = next(one for one in wanted if one and one not in taken and not hasattr(Problem, one))
        taken.add(name)
        sketch.names[id(axis)] = name


def _suggested(facts: Facts, sketch: Sketch) -> Iterable[tuple[int, str]]:
    """The usual names of the axes of a kernel of this kind."""
    layout, kind = sketch.layout, sketch.kinds[0]
    written = [one.parameter for one in facts.accesses if one.what != "load"]
    ranked = [name for name in written if (layout.ranks.get(name) or 0) >= 2]
    if kind in PRODUCTS and ranked:
        rank = layout.ranks[ranked[0]] or 0
        last = {"attention": ("batch", "heads", "queries", "head_dim")}.get(
            kind, ("groups", "batch", "M", "N")
        )
        for place, name in zip(range(rank - 1, -1, -1), reversed(last), strict=False):
            axis = layout.axis_of(ranked[0], place)
            if axis is not None:
                yield id(axis), name
        inner = [
            axis
            for axis in layout.axes
            if all(array not in written for array, _ in axis.sizes)
            and len(axis.sizes) > 1
            and any(index.startswith("loop") for index in axis.indices)
        ]
        if inner:
            yield id(inner[0]), "kv_length" if kind == "attention" else "K"
        for axis in layout.axes:
            wholes = [facts.divided[key][0] for key in axis.indices if key in facts.divided]
            if kind == "attention" and any(whole in one.indices for whole in wholes for one in layout.axes):
                yield id(axis), "kv_heads"
        return
    arrays = [name for name in facts.parameters if layout.ranks.get(name)]
    widest = max((layout.ranks[name] or 0 for name in arrays), default=0)
    for array in arrays:
        if layout.ranks[array] == widest:
            for place, name in enumerate(_BY_RANK.get(widest, ())):
                axis = layout.axis_of(array, place)
                if axis is not None:
                    yield id(axis), name
            return
