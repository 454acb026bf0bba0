"""Write a sketch of a declaration as the text of a Python module, with blanks for what is not known."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from aot_tune.cli.start.candidates import Choice, Space, space_of
from aot_tune.cli.start.layout import (
    WIDTH,
    Bracket,
    Code,
    Text,
    call,
    function,
    in_dict,
    in_tuple,
    laid_out,
    product,
)
from aot_tune.cli.start.recordings import Recordings
from aot_tune.cli.start.sketch import Parameter, Sketch
from aot_tune.declare.kernel_source.kinds import PRODUCTS
from aot_tune.declare.kernel_source.layout import SizeAxis

_SIZES = {
    "batch": 4, "heads": 16, "kv_heads": 4, "head_dim": 128, "groups": 8, "queries": 2048, "kv_length": 2048,
}  # fmt: skip
"""Sizes of an example, by the name of an axis; 4096 for others."""

_DEEP = 128
"""The size in an example of an axis that one tile covers, beside other such axes or in a matrix product."""

_SCALARS = {"eps": "1e-6", "epsilon": "1e-6", "scale": "0.125", "p": "0.1"}
"""Floats of an example, by the name of an argument; 0.5 for others."""


def module_text(sketch: Sketch, module: str, kernel: str, recorded: Recordings | None = None) -> str:
    """The text of a module that declares a kernel.

    Args:
        sketch: What is known of the kernel.
        module: The module that holds the kernel.
        kernel: The kernel's name there.
        recorded: What was recorded of it; None where nothing was.
    """
    name = name_of(kernel)
    variable = f"{name}_tunable" if name == kernel else name
    fields: list[Code] = [(f"{field}=", value) for field, value in _fields(sketch, name, kernel, recorded)]
    code = laid_out((f"{variable} = ", call("Tunable", *fields)), WIDTH) + "\n"
    imports = "".join(_imports(code, module, kernel))
    return f'"""{_docstring(sketch, module, kernel, recorded)}"""\n\n{imports}\n\n{code}'


def name_of(kernel: str) -> str:
    """The name of a declaration: that of the kernel in lower case, without ``_kernel`` at its end."""
    plain = re.sub(r"[^a-z0-9_]", "_", kernel.lower()).strip("_")
    short = plain.removesuffix("_kernel").removeprefix("kernel_").strip("_") or plain
    return short[:64] if short[:1].isalpha() else f"k_{short}"[:64]


def _docstring(sketch: Sketch, module: str, kernel: str, recorded: Recordings | None) -> str:
    first, *more = sketch.kinds
    article = "an" if first[0] in "aeiou" else "a"
    special = f" ({', '.join(more)})" if more else ""
    begun = (
        f"Begun by `aot-tune new {module}:{kernel}`. Write your own in place of each blank(...): what stands "
        "in it is an example, and may already be right. `aot-tune doctor` lists the blanks that are left."
    )
    if recorded is not None:
        begun += (
            f" search_space and typical are of {recorded.origin}. Of each search the winner alone "
            "is recorded: add the other configs that are worth a trial, and the problems without a search."
        )
    scalars = [one.name for one in sketch.launched if one.role == "float"]
    if scalars:
        begun += f" The values of {_and(scalars)} in make_args are guesses."
    flags = [one.name for one in sketch.compiled_in("flag")]
    if flags:
        begun += (
            f" {_and(flags)}, a bool that is compiled in, is taken from the caller: where sizes and tiles "
            "decide it, compute it in args_fn."
        )
    wrapped = textwrap.fill(begun, WIDTH - 1, break_long_words=False, break_on_hyphens=False)
    return f"The declaration of {kernel}, {article} {first} kernel{special}.\n\n{wrapped}\n"


def _imports(code: str, module: str, kernel: str) -> Iterator[str]:
    foreign = [
        line for word, line in (("ct.", "import cuda.tile as ct\n"), ("torch.", "import torch\n"))
        if re.search(rf"(?<!\w){re.escape(word)}", code)
    ]  # fmt: skip
    if foreign:
        yield "".join(foreign) + "\n"
    names = ("Arch", "Config", "Exact", "Pow2", "Tunable", "blank")
    yield f"from aot_tune import {', '.join(one for one in names if re.search(rf'{one}[(.]', code))}\n"
    makers = [one for one in ("empty", "randn", "zeros") if re.search(rf"(?<![.\w]){one}\(", code)]
    if makers:
        yield f"from aot_tune.inputs import {', '.join(makers)}\n"
    yield f"from {module} import {kernel}\n"


# The fields -------------------------------------------------------------------------------------------------


def _fields(
    sketch: Sketch, name: str, kernel: str, recorded: Recordings | None
) -> Iterator[tuple[str, Code]]:
    space = space_of(sketch)
    hints = space.hints if recorded is None else recorded.hints
    yield "name", f'"{name}"'
    yield "package", "__package__"
    yield "kernel", kernel
    yield "axes", in_dict([(one, "Pow2()" if pow2 else "Exact()") for one, pow2 in _named_axes(sketch)])
    yield "problem", _problem(sketch)
    yield "search_space", _search_space(space, sketch) if recorded is None else _winners(recorded)
    yield "grid_fn", _grid_fn(sketch, hints)
    if "persistent" in sketch.kinds and (tiles := _tiles_of_grid(sketch)) is not None:
        yield "tiles", function(["config", "problem"], tiles)
    yield "args_fn", _args_fn(sketch, hints)
    yield "make_args", _make_args(sketch)
    yield "reference", _reference(sketch)
    for field, names in (("outputs", sketch.outputs), ("inplace", sketch.inplace), ("reset", sketch.reset)):
        if names:
            yield field, in_tuple([f'"{one}"' for one in names])
    yield "typical", _typical(sketch) if recorded is None else _met(recorded)


def _blank(what: str, example: Code) -> Code:
    return call("blank", Text(what), example)


def _named_axes(sketch: Sketch) -> list[tuple[str, bool]]:
    """The names of the axes, and whether each is bucketed; ints that are compiled in are axes too."""
    axes = [(sketch.name_of(one), sketch.is_pow2(one)) for one in sketch.used_axes]
    return [*axes, *((one.name, False) for one in sketch.compiled_in("integer"))]


def _problem(sketch: Sketch) -> Code:
    typed = sketch.typed
    items: list[tuple[str, Code]] = [("dtype", f"{_element(typed)}.dtype")] if typed is not None else []
    items += [(sketch.name_of(axis), _size(axis, sketch)) for axis in sketch.used_axes]
    items += [(one.name, one.name) for one in sketch.compiled_in("flag", "integer")]
    return function(_launched(sketch), in_dict(items))


def _element(one: Parameter) -> str:
    return f"{one.name}[0]" if one.role == "list" else one.name


def _size(axis: SizeAxis, sketch: Sketch) -> str:
    """The size of an axis, as the arguments of a launch have it."""
    roles = {one.name: one for one in sketch.launched}
    array, place = next((array, place) for array, place in axis.sizes if array in roles)
    return f"{_element(roles[array])}.shape[{place}]"


def _launched(sketch: Sketch) -> list[str]:
    return [one.name for one in sketch.launched]


def _search_space(space: Space, sketch: Sketch) -> Code:
    guesses: dict[str, list[str]] = {}
    for one in sketch.parameters:
        if one.role == "setting" and one.guess:
            guesses.setdefault(" or ".join(map(str, one.values)), []).append(one.name)
    if not guesses:
        return _space(space)
    said = _and([f"{value} for {_and(names)}" for value, names in guesses.items()])
    what = (
        f"the configs to try; {said} is a guess by the name, and what callers decide is no part of a config "
        "but an argument of the launch"
    )
    return _blank(what, _space(space))


def _space(space: Space) -> Code:
    names = {name: _loop_name(name) for one in space.choices for name in one.constants}
    config = call(
        "Config",
        ("constants=", in_dict(list(names.items()))),
        ("hints=", in_dict([(one, one) for one in space.hints])),
    )
    loops: list[Code] = [_loop(one, names) for one in space.choices]
    if space.shares_tiles:
        loops.append("for num_ctas in ((1, 2) if arch >= Arch(10, 0) else (1,))")
    loops.append(("for occupancy in ", in_tuple([str(one) for one in space.occupancies])))
    return function(["arch", "problem"], Bracket("[", (config, *loops), "]", separator=""))


def _winners(recorded: Recordings) -> Code:
    """The configs that won a recorded search, the one that won most problems first."""
    configs = tuple(
        call(
            "Config",
            ("constants=", _literals(one.constants)),
            *([("hints=", _literals(one.hints))] if one.hints else []),
        )
        for one in recorded.configs
    )
    listed = Bracket("[", configs, "]")
    if not recorded.unsettled:
        return listed
    names = _and(recorded.unsettled)
    return _blank(f"the configs to try; {names} followed the problem in the recorded searches", listed)


def _met(recorded: Recordings) -> Code:
    """The problems of the recorded searches."""
    return Bracket("[", tuple(map(_literals, recorded.problems)), "]")


def _literals(values: Mapping[str, object]) -> Code:
    return in_dict(
        [(name, json.dumps(one) if isinstance(one, str) else repr(one)) for name, one in values.items()]
    )


def _loop_name(constant: str) -> str:
    name = constant.lower().strip("_")
    return f"{name}_" if name in ("arch", "problem", "num_ctas", "occupancy") else name


def _loop(choice: Choice, names: dict[str, str]) -> Code:
    targets = ", ".join(names[one] for one in choice.constants)
    rows: list[Code] = [
        in_tuple([str(number) for number in row]) if len(row) > 1 else str(row[0]) for row in choice.values
    ]
    return f"for {targets} in ", in_tuple(rows)


def _grid_fn(sketch: Sketch, hints: Sequence[str]) -> Code:
    counts = _counts(sketch)
    known = _is_known(counts)
    words: list[Code] = [product([one for one in part if one not in (None, "1")]) for part in counts] or ["1"]
    if "persistent" in sketch.kinds and len(words) == 1:
        resident = _resident(hints)
        at_once = any(one.role == "blocks" for one in sketch.parameters)  # the kernel goes on in steps of it
        words = [call("min", resident, words[0]) if known and not at_once else resident]
    grid = function(["config", "device", "problem"], in_tuple(words))
    if known and not {"grouped", "variable length"} & set(sketch.kinds):
        return grid
    return _blank("how many blocks are launched along each axis of the grid", grid)


def _resident(hints: Sequence[str]) -> str:
    """The number of blocks that a device runs at a time, by the hints that every config has."""
    blocks = 'device.sm_count // config.hints["num_ctas"]' if "num_ctas" in hints else "device.sm_count"
    return f'{blocks} * config.hints["occupancy"]' if "occupancy" in hints else blocks


def _counts(sketch: Sketch) -> list[list[str | None]]:
    """For each axis of the grid the numbers of tiles that it counts; None for one that is not known."""
    return [[_tiles(axis, sketch) for axis in part] for part in sketch.layout.grid]


def _is_known(counts: Sequence[Sequence[str | None]]) -> bool:
    return bool(counts) and all(one is not None for part in counts for one in part)


def _tiles_of_grid(sketch: Sketch) -> Code | None:
    """The blocks of work of a kernel whose blocks each do several."""
    counts = _counts(sketch)
    if not _is_known(counts) or {"grouped", "variable length"} & set(sketch.kinds):
        return None
    return product([one for part in counts for one in part if one not in (None, "1")])


def _tiles(axis: SizeAxis, sketch: Sketch) -> str | None:
    """The number of tiles along an axis, as `grid_fn` writes it."""
    size, tile = f"problem.{sketch.name_of(axis)}", axis.tile
    if tile is None:
        return "1" if axis.covers is not None else None
    if tile.number is not None:
        return size if tile.number == 1 else f"ct.cdiv({size}, {int(tile.number)})"
    roles = {one.name: one.role for one in sketch.parameters}
    if roles.get(tile.key) in ("tile", "setting"):
        return f'ct.cdiv({size}, config["{tile.key}"])'
    return None


def _args_fn(sketch: Sketch, hints: Sequence[str]) -> Code:
    roles = {one.role for one in sketch.parameters}
    handed = [_resident(hints) if one.role == "blocks" else _handed(one, sketch) for one in sketch.parameters]
    asks = ["*", "device"] if "blocks" in roles else []
    return function(["config", *_launched(sketch), *asks], in_tuple(handed))


def _handed(one: Parameter, sketch: Sketch) -> str:
    """What `args_fn` hands on for one of the kernel's parameters."""
    if one.is_launched:
        return one.name
    if one.role in ("tile", "setting"):
        return f'config["{one.name}"]'
    if one.role == "unused" or one.axis is None:
        return "1"
    size = _size(one.axis, sketch)
    if one.role == "ratio" and one.divisor is not None:
        return f"{size} // {_size(one.divisor, sketch)}"
    if one.role == "count":
        tile = one.axis.tile.key if one.axis.tile is not None else ""
        settled = any(other.name == tile and other.role == "tile" for other in sketch.parameters)
        return f'ct.cdiv({size}, config["{tile}"])' if settled else size
    return f"1 << ({size} - 1).bit_length()" if one.role == "cover" else size


def _make_args(sketch: Sketch) -> Code:
    made = [_made(one, number, sketch) for number, one in enumerate(sketch.launched)]
    making = function(["problem", "device", "seed"], in_tuple(made))
    what = []
    if sketch.unknown:
        what.append(f"the shapes of {_and(sketch.unknown)}")
    if sketch.indices:
        what.append(f"the values of {_and(sketch.indices)}, which say where others are loaded")
    integers = [one.name for one in sketch.launched if one.role == "integer" and not one.constant]
    if integers:
        what.append(f"the value of {_and(integers)}, where 1 is a guess")
    return _blank(f"arguments as your users pass them: {'; '.join(what)}", making) if what else making


def _made(one: Parameter, number: int, sketch: Sketch) -> Code:
    if one.role == "float":
        return _SCALARS.get(one.name.lower(), "0.5")
    if one.role in ("flag", "integer"):
        return f"problem.{one.name}" if one.constant else "1"
    if one.role == "list":
        return "[", _tensor(one, number, sketch), " for _ in range(2)]"
    return _tensor(one, number, sketch)


def _tensor(one: Parameter, number: int, sketch: Sketch) -> Code:
    sizes = sketch.shape_of(one.name) or []
    shape = in_tuple(
        [str(one) if isinstance(one, int) else f"problem.{sketch.name_of(one)}" for one in sizes]
    )
    named = sketch.layout.dtypes.get(one.name)
    if named is None and sketch.fp8 and one.name in (*sketch.outputs, *sketch.reset):
        named = "bfloat16"
    if named is None and sketch.fp8 and "scale" in one.name.lower():
        named = "float32"
    dtype = f'"{named}"' if named else "problem.dtype"
    if one.name in sketch.outputs:
        return call("empty", shape, dtype, "device")
    if one.name in sketch.reset or one.name in sketch.indices:
        return call("zeros", shape, dtype, "device")
    return call("randn", shape, dtype, "device", f"seed{f' + {number}' if number else ''}")


def _reference(sketch: Sketch) -> Code:
    mutated = sketch.mutated
    result = in_dict([(one, _result(one, sketch)) for one in mutated])
    if len(mutated) == 1:
        result = _result(mutated[0], sketch)
    what = f"what {_and(mutated) or 'the outputs'} must hold after a launch: plain torch, of higher precision"
    return _blank(what, function(_launched(sketch), result))


def _result(array: str, sketch: Sketch) -> Code:
    """An example of a reference's value: of the right shape, and where it is likely also right."""
    if any(one.name == array and one.role == "list" for one in sketch.launched):
        return f"[torch.zeros_like(one, dtype=torch.float64) for one in {array}]"
    shape = _identities(array, sketch)
    left_out = {*sketch.outputs, *sketch.reset, *sketch.indices}
    inputs = [one.name for one in sketch.launched if one.role == "array" and one.name not in left_out]
    if sketch.kinds[0] == "matmul" and len(inputs) >= 2 and (found := _product(inputs[:2], shape, sketch)):
        return found
    same = [one for one in inputs if shape and _identities(one, sketch) == shape]
    return f"{same[0]}.double()" if same else f"torch.zeros_like({array}, dtype=torch.float64)"


def _product(inputs: Sequence[str], shape: Sequence[int], sketch: Sketch) -> str | None:
    """The product of two inputs, where their axes are those of one."""
    one, other = (_identities(name, sketch) for name in inputs)
    if min(len(one), len(other), len(shape)) < 2 or one[:-1] != list(shape[:-1]):
        return None
    for axes, turned in ((other[-2:], ""), (other[:-3:-1], ".mT")):
        if axes == [one[-1], shape[-1]]:
            return f"{inputs[0]}.double() @ {inputs[1]}.double(){turned}"
    return None


def _identities(array: str, sketch: Sketch) -> list[int]:
    return [one if isinstance(one, int) else id(one) for one in sketch.shape_of(array) or []]


def _typical(sketch: Sketch) -> Code:
    typed = any(one.role in ("array", "list") for one in sketch.launched)
    items: list[tuple[str, Code]] = [("dtype", f'"{sketch.fp8 or "bfloat16"}"')] if typed else []
    integers = {one.name for one in sketch.compiled_in("integer")}
    covered = {sketch.name_of(one) for one in sketch.used_axes if one.covers is not None}
    small = covered if len(covered) > 1 or sketch.kinds[0] in PRODUCTS else set[str]()
    bucketed = False
    for name, pow2 in _named_axes(sketch):
        size = str(_SIZES.get(name, 1 if name in integers else _DEEP if name in small else 4096))
        if pow2 and not bucketed and name not in ("batch", "heads"):
            size = "Pow2.edges(1 << 16, 1 << 24)" if name == "length" else "Pow2.edges(16, 4096)"
            bucketed = True
        items.append((name, size))
    items += [(one.name, str(_is_guard(one.name))) for one in sketch.compiled_in("flag")]
    what = "the problems that your users pose, to sweep"
    if integers:
        what += f"; 1 for {_and(sorted(integers))} is a guess"
    return _blank(what, Bracket("[", (in_dict(items),), "]"))


def _is_guard(name: str) -> bool:
    """Whether a bool keeps a kernel inside of its arrays, by its name; such a one is not tried as False."""
    return re.search(r"check|bound|mask|pad", name.lower()) is not None


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1] if names else "")))
