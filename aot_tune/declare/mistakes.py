"""Find mistakes in a declaration's typical problems, each with the text to write. Touches no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted, described

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

MOST_CONFIGS = 100_000
"""Most configs of a search space. Compiling so many for one problem takes hours on any machine."""

_CLUSTERS_SINCE = Arch(10, 0)
"""First arch on which two blocks can share a matrix product, so that num_ctas 2 is always worth a trial."""


class Mistake(NamedTuple):
    """Mistake of a declaration for a problem."""

    about: str
    """Part of the declaration that is wrong; problems share a mistake about the same part."""

    text: str
    """Sentence that describes the mistake, and what to write instead."""


def of_problems(text: str, first: Problem, more: int) -> str:
    """Return a mistake's text with its first problem, unless named, and the number of further problems."""
    where = "" if str(first) in text else f"for {first}"
    others = f"and for {counted(more, 'more problem')}" if more else ""
    place = " ".join(filter(None, (where, others)))
    return f"{text} ({place})" if place else text


def place_mistakes(tunable: Declaration) -> Iterator[Mistake]:
    """Yield a mistake for a package that cannot be found, so that its tables have no folder."""
    top = tunable.package.partition(".")[0]
    if tunable.tables is None and top not in sys.modules and find_spec(top) is None:
        yield Mistake(
            "package",
            f"package is {tunable.package!r}, and there is no package {top!r} here or on the Python path; "
            "write package=__package__, or tables=Path(__file__).parent / 'tuned_configs'",
        )


NOTHING_WRITTEN = (
    "no argument is written; name the arguments the kernel writes in outputs, those it changes in inplace "
    "and those it adds to in reset"
)
"""Mistake of a declaration whose kernel would write nothing."""


def written_mistakes(tunable: Declaration) -> Iterator[Mistake]:
    """Yield written arguments that are neither inferred nor named, where outputs are left out."""
    if tunable.outputs is not None:
        return
    for name in tunable.written.changed:
        if name not in tunable.mutated:
            yield Mistake(
                name,
                f"the kernel loads {name} and stores to it; name it in inplace, or in outputs where the "
                "kernel stores to all of it before it loads any",
            )
    for name in tunable.written.added:
        if name not in tunable.mutated:
            yield Mistake(
                name,
                f"the kernel adds to {name}; name it in reset, or in inplace where what it held before the "
                "launch counts",
            )
    if not (tunable.mutated or tunable.written.changed or tunable.written.added):
        yield Mistake("outputs", f"as far as the kernel's source tells, {NOTHING_WRITTEN}")


_MACHINE = {
    "get_device_properties": "{sm_count}",
    "multi_processor_count": "{sm_count}",
    "max_shared_memory_per_block": "device.shared_memory_per_block",
    "get_device_capability": "{arch}",
    "get_device_name": "device.name",
}
"""Names of torch by which a function queries the machine, each with the replacement that it is given."""

_PURE = {
    "search_space": False, "default": False, "legal": False, "tiles": False, "work": False,
    "fits": True, "grid_fn": True,
}  # fmt: skip
"""Functions of a declaration that must not query the machine, and whether each gets a `device`."""


def machine_mistakes(tunable: Declaration) -> Iterator[Mistake]:
    """Yield functions that query this machine's GPU, which may differ from the GPU of the table."""
    for field, has_device in _PURE.items():
        asked = next((name for name in _names_in(getattr(tunable, field)) if name in _MACHINE), None)
        if asked is not None:
            yield Mistake(field, _asks_the_machine(field, asked, has_device=has_device))
    asked = next((name for name in _names_in(tunable.args_fn) if name in _MACHINE), None)
    if asked is not None:
        how = "" if tunable.takes_device else "; give it a keyword-only parameter device for that"
        yield Mistake("args_fn", _asks_the_machine("args_fn", asked, has_device=True) + how)


def _asks_the_machine(field: str, asked: str, *, has_device: bool) -> str:
    given = _MACHINE[asked].format(
        sm_count="device.sm_count" if has_device else "arch",
        arch="device.arch" if has_device else "arch",
    )
    return (
        f"{field} asks this machine's GPU ({asked}), and tables are made for other GPUs too; "
        f"use {given} of what it is given"
    )


def _names_in(function: object, depth: int = 2) -> Iterator[str]:
    """Yield the names that a function's code uses, and those of the global functions that it calls."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for part in _codes(code):
        for name in part.co_names:
            yield name
            called = getattr(function, "__globals__", {}).get(name)
            if depth and isinstance(called, FunctionType):
                yield from _names_in(called, depth - 1)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def problem_mistakes(tunable: Declaration, problem: Problem) -> Iterator[Mistake]:
    """Yield mistakes in the sizes and classes of a typical problem."""
    for name in tunable.axes:
        if name not in problem:
            yield Mistake(
                f"axis {name}",
                f"the typical problem {problem} lacks the axis {name}; add it, or remove it from axes",
            )
        else:
            size = problem[name]
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                yield Mistake(
                    f"axis {name}",
                    f"the typical problem {problem} has {name}={size!r}; write a size of 1 or more",
                )
    for name, value in problem.items():
        if name not in tunable.axes and isinstance(value, int) and not isinstance(value, bool):
            yield Mistake(
                f"size {name}",
                f"the typical problem {problem} has the size {name}, which is not an axis; "
                f"add {name!r}: Exact() to axes",
            )


def config_mistakes(tunable: Declaration, arch: Arch, problem: Problem) -> Iterator[Mistake]:
    """Yield mistakes in the search space, the default and its results, for a problem on an arch."""
    where = f"({arch}, {problem})"
    try:
        space: Any = tunable.declared_space(arch, problem)
    except Exception as error:
        raised = described(error, tunable.search_space)
        yield Mistake("search_space", f"search_space{where} raised {raised}")
        return
    if not_a_list := space_kind(space):
        yield Mistake("search_space", f"search_space{where} returned {not_a_list}")
        return
    if len(space) == 0:
        yield Mistake("search_space", f"search_space{where} is empty; return at least the default")
        return
    if large := too_large(space):
        yield Mistake("search_space", f"search_space{where} returned {large}")
        return
    try:
        default: Any = tunable.declared_default(arch, problem)
        again: Any = tunable.declared_default(arch, problem)
    except Exception as error:
        yield Mistake("default", f"default{where} raised {described(error, tunable.default)}")
        return
    of_kernel: dict[str | None, Config] = {}
    known = {name: frozenset(tunable.constants_of(name)) for name in tunable.kernels}
    for config in (default, *space):
        if not isinstance(config, Config):
            yield Mistake(
                "search_space",
                f"search_space or default {where} returned {config!r:.80}; return Config(...) objects",
            )
            return
        if config.kernel not in known:
            yield Mistake("kernel", str(tunable.kernel_missing(config)))
            return
        # args_fn may compute a constant that no config names; a constant that the kernel lacks is a mistake.
        if not config.constants.keys() <= known[config.kernel]:
            yield Mistake(
                "constants",
                f"the config {config} {where} has the constants {names(config.constants)}; the kernel's "
                f"ct.Constant parameters are {names(tunable.constants_of(config.kernel))}: use their names",
            )
            return
        first = of_kernel.setdefault(config.kernel, config)
        if config.constants.keys() != first.constants.keys():
            kind = "the default" if config.kernel == default.kernel else str(first)
            yield Mistake(
                "constants",
                f"the config {config} {where} has the constants {names(config.constants)}, {kind} has "
                f"{names(first.constants)}; name the same ones in all",
            )
            return
    if len(set(space)) < len(space):
        twice = next(config for i, config in enumerate(space) if config in space[:i])
        yield Mistake("twice", f"search_space{where} holds {twice} twice; list it once")
    if again != default:
        yield Mistake(
            "default", f"default{where} is {default}, and {again} when called again; return the same config"
        )
        return
    if default not in space:
        yield Mistake(
            "default", f"default{where} is {default}, which search_space lacks{_outside(default, space)}"
        )
    yield from _evaluation_mistakes(tunable, arch, problem, default)


def space_kind(space: object) -> str | None:
    """Return the type of a search space that is no list, and the advice; None for a list or tuple."""
    if isinstance(space, Sequence) and not isinstance(space, str):
        return None
    if isinstance(space, Set):
        return f"a {type(space).__name__}, whose order is not fixed; return a list of Config"
    kind = "None" if space is None else f"a {type(space).__name__}"
    return f"{kind}; return a list of Config"


def too_large(space: Sequence[object]) -> str | None:
    """Return the size of a search space that no sweep could compile, and the advice; None for others."""
    if len(space) <= MOST_CONFIGS:
        return None
    return f"{len(space)} configs; return at most {MOST_CONFIGS}, those that may win"


def _outside(default: Config, space: Iterable[Config]) -> str:
    """Return advice for a default outside its search space; if it prints like a member, name the type."""
    for config in space:
        if config.kernel != default.kernel:
            continue
        pairs = [(name, value, default.constants[name]) for name, value in config.constants.items()]
        alike = all(member == own or str(member) == str(own) for _, member, own in pairs)
        if alike and config.hints == default.hints:
            name, member, own = next(pair for pair in pairs if type(pair[1]) is not type(pair[2]))
            return (
                f": {name} is {member!r} there, of type {type(member).__name__}, and {own!r} in the default, "
                f"of type {type(own).__name__}; write the same in both"
            )
    return "; add it there, or choose a member"


def _evaluation_mistakes(
    tunable: Declaration, arch: Arch, problem: Problem, default: Config
) -> Iterator[Mistake]:
    where = f"for the default, {default}, {problem} on {arch}"
    checks: list[tuple[str, Callable[[], object], Callable[[Any], bool], str]] = [
        (
            "legal",
            lambda: tunable.legal(default, arch, problem),
            lambda verdict: verdict is True,
            "return True for it, or choose a default that is allowed",
        ),
        (
            "fits",
            lambda: tunable.fits(default, Device.reference(arch), problem),
            lambda verdict: verdict is True,
            "return True for it, or choose a default that runs on the arch's reference device",
        ),
        (
            "grid_fn",
            lambda: tunable.grid_fn(default, Device.reference(arch), problem),
            is_grid,
            "return a tuple of one to three block counts, each 1 or more",
        ),
    ]
    if tunable.tiles is not None:
        tiles = tunable.tiles
        checks.append(
            ("tiles", lambda: tiles(default, problem), _is_count, "return a number of blocks, an int above 0")
        )
    if tunable.work is not None:
        work = tunable.work
        checks.append(
            ("work", lambda: work(default, problem), _is_work, "return Work(steps=..., load_bytes=..., ...)")
        )
    if tunable.invariant is not None:
        invariant = tunable.invariant
        advice = "return True where a row keeps its bits, and the reason as a text where it does not"
        checks.append(("invariant", lambda: invariant(default, problem), _is_verdict, advice))
    for name, ask, fits, advice in checks:
        try:
            answer = ask()
        except Exception as error:
            asked = next((mistake for mistake in machine_mistakes(tunable) if mistake.about == name), None)
            raised = f"{name} {where} raised {described(error, getattr(tunable, name))}"
            yield Mistake(name, f"{raised}: {asked.text}" if asked else raised)
        else:
            if not fits(answer):
                yield Mistake(name, f"{name} {where} returned {answer!r:.200}; {advice}")


def _is_verdict(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value != "")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_work(value: object) -> bool:
    from aot_tune.declare.declaration import Work

    return isinstance(value, Work)


def is_grid(value: object) -> bool:
    """Whether a value is a grid: one to three block counts, each 1 or more."""
    return isinstance(value, tuple | list) and 1 <= len(value) <= 3 and all(map(_is_count, value))


def names(texts: Iterable[str]) -> str:
    """Join names for a sentence; ``none`` where there are none."""
    return ", ".join(texts) or "none"


def axis_missing(axis: str, found: str) -> str:
    """Return a sentence about a `problem` that does not return an axis."""
    return f"problem() does not return the axis {axis}: {found}; add {axis!r} there, or remove it from axes"


CORE = ("tile_m", "tile_n", "tile_k")
"""Usual names of the three dimensions of a matrix product's tiles."""


def space_mistakes(tunable: Declaration, arch: Arch, problems: Iterable[Problem]) -> Iterator[str]:
    """Yield mistakes in a full search on sm100 or later, over all problems together.

    A search over constants is full. On these archs the best tile sizes differ from sm90's, and so do a matrix
    product's best clusters; a search space written for sm90 would never find them.
    """
    if arch < _CLUSTERS_SINCE:
        return
    candidates = [config for problem in problems for config in tunable.candidates(arch, problem)]
    values: dict[str, set[object]] = {name: set() for name in tunable.constant_names}
    for config in candidates:
        for name, value in config.constants.items():
            values[name].add(value)
    if all(len(searched) < 2 for searched in values.values()):
        return
    if any(len(values.get(name, ())) > 1 for name in CORE):
        clusters = {config.hints.get("num_ctas") for config in candidates}
        for count in (1, 2):
            if count not in clusters:
                yield (
                    f"no candidate on {arch} has num_ctas {count}; from {_CLUSTERS_SINCE} on, search 1 and 2"
                )
    for name, searched in values.items():
        if name.startswith("tile_") and len(searched) == 1:  # without a value, args_fn computes it
            yield f"all candidates on {arch} have {name}={next(iter(searched))}; search two values or more"
