"""Write the module of a declaration that is begun: what the source proves, and blanks. Pure."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template

from aot_tune.cli.start.kinds import template
from aot_tune.cli.start.recordings import Recordings
from aot_tune.declare.kernel_source.facts import Facts

_WIDTH = 100
"""Columns of a line of text, at most."""

_BLANKS = {
    "axes": "each size that the choice of a config depends on: Pow2() of one that varies from call to call, "
    "Exact() of one that is compiled in, or of which few values are met",
    "problem": "the sizes of axes, and each dtype, bool or text that the choice depends on, from the "
    "arguments of a launch",
    "search_space": "the configs to try, thirty at most: the constants that are tuned, and hints",
    "grid_fn": "the number of blocks along each axis of the grid",
    "tiles": "the number of tiles that all blocks work through",
    "make_args": "arguments as your users pass them, each with its own shape, dtype and values",
    "typical": "the problems that your users pose, to sweep",
}
"""What belongs into each blank that every kind has."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is known of a kernel when its declaration is begun."""

    facts: Facts
    """The facts of its source."""

    kind: str
    """The kind whose template is taken."""

    module: str
    """The module that holds the kernel."""

    kernel: str
    """The kernel's name there."""

    tuned: tuple[str, ...]
    """The constants of its configs, as far as the source or recorded searches prove them."""

    recorded: Recordings | None = None
    """What was recorded of it; None where nothing was."""

    tiles: tuple[tuple[int, ...], ...] = ()
    """Values of `tuned` to try, from Triton configs; empty where none were given."""

    @property
    def name(self) -> str:
        """The name of the declaration."""
        return name_of(self.kernel)

    @property
    def launched(self) -> tuple[str, ...]:
        """The arguments of a launch: all parameters that are no constants."""
        return tuple(name for name in self.facts.parameters if name not in self.facts.constants)

    @property
    def written(self) -> dict[str, tuple[str, ...]]:
        """What the kernel writes, as the declaration's fields name it."""
        found, arrays = self.facts, self.facts.arrays
        kept = found.loaded_first & (found.stored | found.added)
        fields = {
            "outputs": found.stored - kept - found.added,
            "inplace": kept,
            "reset": found.added - kept,
        }
        return {field: tuple(name for name in arrays if name in names) for field, names in fields.items()}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arrays that hold data before a launch, and no indices."""
        left_out = {*self.written["outputs"], *self.written["reset"], *self.facts.index_arrays}
        return tuple(name for name in self.facts.arrays if name not in left_out)

    def filled(self, example: str) -> str:
        """An example of the template with the kernel's own names."""
        tiles = [f'config["{name}"]' for name in self.tuned]
        indices = [name for name in self.facts.arrays if name in self.facts.index_arrays]
        names = {
            **dict(zip("xyz", [*(self.inputs or indices), "...", "...", "..."], strict=False)),
            **{f"t{place}": one for place, one in enumerate([*tiles, "...", "..."][:2])},
        }
        return Template(example).substitute(names)

    def problem_code(self) -> str:
        """The example of the field `problem`."""
        return f"lambda {', '.join(self.launched)}: {self.filled(template(self.kind)['problem'])}"


def name_of(kernel: str) -> str:
    """Return the name of a declaration: the kernel's in lower case, without ``_kernel`` at its end."""
    plain = re.sub(r"[^a-z0-9_]", "_", kernel.lower()).strip("_")
    short = plain.removesuffix("_kernel").removeprefix("kernel_").strip("_") or plain
    return short[:64] if short[:1].isalpha() else f"k_{short}"[:64]


def module_text(start: Start) -> str:
    """Return the text of a module that declares the kernel."""
    variable = f"{start.name}_tunable" if start.name == start.kernel else start.name
    code = (
        f"{variable} = Tunable(\n" + "".join(f"    {one}={code},\n" for one, code in _fields(start)) + ")\n"
    )
    return f'"""{_docstring(start)}"""\n\n{"".join(_imports(code, start))}\n\n{code}'


def _docstring(start: Start) -> str:
    begun = (
        f"Begun by `aot-tune new {start.module}:{start.kernel} --kind {start.kind}`. Write your own in place "
        "of each blank(...): what is in it is an example of a kernel of this kind, and an ellipsis what no "
        "example can say. `aot-tune doctor` lists the blanks that are left."
    )
    if start.recorded is not None:
        begun += (
            f" search_space and typical are of {start.recorded.origin}. Of each search the winner alone is "
            "recorded: add the other configs that are worth a trial, and the problems without a search."
        )
    wrapped = textwrap.fill(begun, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"Declaration of {start.kernel}.\n\n{wrapped}\n"


def _imports(code: str, start: Start) -> Iterator[str]:
    foreign = [
        line for word, line in (("ct", "import cuda.tile as ct\n"), ("torch", "import torch\n"))
        if re.search(rf"(?<!\w){word}\.", code)
    ]  # fmt: skip
    if foreign:
        yield "".join(foreign) + "\n"
    names = ("Arch", "Close", "Config", "Exact", "Pow2", "Tunable", "blank")
    yield f"from aot_tune import {', '.join(one for one in names if re.search(rf'{one}[(.]', code))}\n"
    makers = [one for one in ("empty", "randn", "zeros") if re.search(rf"(?<![.\w]){one}\(", code)]
    if makers:
        yield f"from aot_tune.inputs import {', '.join(makers)}\n"
    yield f"from {start.module} import {start.kernel}\n"


def _fields(start: Start) -> Iterator[tuple[str, str]]:
    parts, recorded = template(start.kind), start.recorded
    yield "name", f'"{start.name}"'
    yield "package", "__package__"
    yield "kernel", start.kernel
    yield "axes", _blank(_BLANKS["axes"], parts["axes"])
    yield "problem", _blank(_BLANKS["problem"], start.problem_code())
    yield "search_space", _search_space(start) if recorded is None else _winners(recorded)
    grid = f"lambda config, device, problem: {start.filled(parts['grid'])}"
    yield "grid_fn", _blank(f"{_BLANKS['grid_fn']}: {parts['blocks']}", grid)
    if "tiles" in parts:
        yield "tiles", _blank(_BLANKS["tiles"], f"lambda config, problem: {start.filled(parts['tiles'])}")
    yield "args_fn", _args_fn(start)
    yield "make_args", _blank(_BLANKS["make_args"], _make_args(start))
    yield "reference", _reference(start)
    yield from _written(start)
    typical = [start.filled(parts["typical"])]
    what = _BLANKS["typical"]
    if recorded is not None and recorded.problems:
        typical = list(map(_literals, recorded.problems))
        what = f"{what}: those of the recorded searches, by the example of problem"
    yield "typical", _blank(what, _group("[", typical, "]"))


def _blank(what: str, example: str) -> str:
    """A blank whose example begins a line of its own."""
    lines = textwrap.wrap(what, _WIDTH - 12, break_long_words=False)
    words = "\n        ".join(json.dumps(one if one is lines[-1] else f"{one} ") for one in lines)
    return f"blank(\n        {words},\n        {_indented(example, 8)},\n    )"


def _indented(code: str, indent: int) -> str:
    """Code whose first line is in place, and whose last one closes the bracket that it opens."""
    first, *inner = code.splitlines()
    lines = [f"{' ' * (indent + 4)}{line}" for line in inner[:-1]]
    return "\n".join([first, *lines, *(f"{' ' * indent}{line}" for line in inner[-1:])])


def _group(start: str, items: Sequence[str], end: str) -> str:
    """Items in brackets, each on a line of its own where they do not fit on one."""
    line = f"{start}{', '.join(items)}{',' if end == ')' and len(items) == 1 else ''}{end}"
    return line if len(line) < _WIDTH - 8 else "\n".join([start, *(f"{one}," for one in items), end])


def _search_space(start: Start) -> str:
    """A blank with the values that kernels of this kind try."""
    names = {name: f"{name.lower().strip('_')}_" for name in start.tuned}
    constants = ", ".join(f'"{name}": {variable}' for name, variable in names.items())
    config = f'Config(constants={{{constants}}}, hints={{"occupancy": occupancy}})'
    loops = ["for occupancy in (1, 2, 4)"]
    if start.tiles:
        tiles = (f"    {_group('(', [*map(str, row)], ')')}," for row in start.tiles)
        hints = '{"occupancy": occupancy, "num_ctas": num_ctas}'
        lines = [
            "lambda arch, problem: [",
            "Config(", f"    constants={{{constants}}},", f"    hints={hints},", ")",
            f"for {', '.join(names.values())}{',' if len(names) == 1 else ''} in (", *tiles, ")",
            "for occupancy in (1, 2)",
            "for num_ctas in ((1, 2) if arch >= Arch(10, 0) else (1,))",
            "]",
        ]  # fmt: skip
        return _indented("\n".join(lines), 4)
    if names:
        rows = re.findall(r"\(([\d, ]+)\)", template(start.kind)["space"])
        each = [re.findall(r"\d+", row) for row in rows]
        fitting = [_group("(", [*row, *row[-1:] * len(names)][: len(names)], ")") for row in each]
        loops.insert(0, f"for {_group('(', [*names.values()], ')')} in {_group('(', fitting, ')')}")
    return _blank(_BLANKS["search_space"], "\n".join(["lambda arch, problem: [", config, *loops, "]"]))


def _winners(recorded: Recordings) -> str:
    """The configs that won a recorded search, the one that won most problems first."""
    configs = [
        f"Config(constants={_literals(one.constants)}, hints={_literals(one.hints)}),"
        for one in recorded.configs
    ]
    code = "\n".join(["[", *configs, "]"])
    if not recorded.unsettled:
        return _indented(code, 4)
    names = _and(recorded.unsettled)
    return _blank(f"{_BLANKS['search_space']}; {names} followed the problem in the recorded searches", code)


def _literals(values: Mapping[str, object]) -> str:
    texts = {name: json.dumps(one) if isinstance(one, str) else repr(one) for name, one in values.items()}
    return _group("{", [f'"{name}": {text}' for name, text in texts.items()], "}")


def _args_fn(start: Start) -> str:
    """What the kernel gets; a blank where a constant is not known to be tuned."""
    unknown = [name for name in start.facts.constants if name not in start.tuned]
    handed = [
        f'config["{name}"]' if name in start.tuned else "..." if name in unknown else name
        for name in start.facts.parameters
    ]
    code = _group(f"lambda {', '.join(('config', *start.launched))}: (", handed, ")")
    if not unknown:
        return _indented(code, 4)
    return _blank(
        f"the kernel's arguments; {_and(unknown)}: config[...] of one that is tuned, a size of one that "
        "follows the arguments, else an argument of the launch, which problem, make_args and reference take "
        "too",
        code,
    )


def _make_args(start: Start) -> str:
    shapes = dict(zip(start.inputs, re.findall(r"\(.*?\)", template(start.kind)["shapes"]), strict=False))
    made = [_made(name, number, shapes.get(name, "..."), start) for number, name in enumerate(start.launched)]
    return _group("lambda problem, device, seed: (", made, ")")


def _made(name: str, number: int, shape: str, start: Start) -> str:
    """An argument; what nothing proves is an ellipsis, so that it is never left as it is."""
    if name in start.written["outputs"]:
        return "empty(..., ..., device)"
    if name in start.written["reset"]:
        return "zeros(..., ..., device)"
    axes = len([one for one in shape.strip("()").split(",") if one.strip()])
    if name not in start.inputs or name in start.facts.lists or start.facts.rank(name) != axes:
        return "..."
    return f"randn({shape}, problem.dtype, device, seed{f' + {number}' if number else ''})"


def _reference(start: Start) -> str:
    mutated = [name for names in start.written.values() for name in names]
    values = [start.filled(template(start.kind)["value"]), *["..."] * len(mutated)]
    closes = [f"Close(value={value}, rtol=1e-2, atol=1e-3)" for value in values]
    function = f"lambda {', '.join(start.launched)}: "
    if len(mutated) > 1:
        pairs = [f'"{name}": {close}' for name, close in zip(mutated, closes, strict=False)]
        function = _group(function + "{", pairs, "}")
    else:
        function = _group(function + "Close(", [f"value={values[0]}", "rtol=1e-2", "atol=1e-3"], ")")
    names = _and(mutated) or "each output"
    return _blank(f"what {names} must hold after a launch, in plain torch and higher precision", function)


def _written(start: Start) -> Iterator[tuple[str, str]]:
    """The arguments that are written; a blank where a function without source is given some."""
    escaped = [name for name in start.launched if name in start.facts.escaped]
    if escaped or not any(start.written.values()):
        why = f"; {_and(escaped)}: given to a function whose source cannot be read" if escaped else ""
        example = _names(start.written["outputs"] or start.launched[-1:])
        yield "outputs", _blank(f"the arguments that the kernel writes whole{why}", example)
    elif start.written["outputs"]:
        yield "outputs", _names(start.written["outputs"])
    for field in ("inplace", "reset"):
        if start.written[field]:
            yield field, _names(start.written[field])


def _names(names: Sequence[str]) -> str:
    return _group("(", [f'"{name}"' for name in names], ")")


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1] if names else "")))
