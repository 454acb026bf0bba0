"""Refuse a declaration that contradicts itself, with the text to write. Touches no GPU, reads no table.

`check_fields` runs at every construction, and so in every serving process. `check_calls` calls the functions
for one problem on one arch; a process that has a table for its GPUs leaves it out, since the sweep that made
the table checked more. `declaration_problems` checks all problems on one arch, for the tuner and the command
line.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from aot_tune.declare.blanks import blank_mistakes
from aot_tune.declare.declaration import check_name, is_name
from aot_tune.declare.mistakes import (
    NOTHING_WRITTEN,
    Mistake,
    axis_missing,
    config_mistakes,
    machine_mistakes,
    names,
    of_problems,
    place_mistakes,
    problem_mistakes,
    space_kind,
    space_mistakes,
    too_large,
    written_mistakes,
)
from aot_tune.declare.probe import NotFollowedError, returned
from aot_tune.errors import DeclarationError
from aot_tune.nvidia import cutile
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.problem import Problem
from aot_tune.values.text import described

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

_CALLABLES = (
    "problem",
    "search_space",
    "grid_fn",
    "args_fn",
    "make_args",
    "reference",
    "legal",
    "fits",
)
_OPTIONAL_CALLABLES = ("default", "tiles", "work", "invariant")
_CALLED_WITH = {
    "search_space": ("arch", "problem"),
    "default": ("arch", "problem"),
    "legal": ("config", "arch", "problem"),
    "fits": ("config", "device", "problem"),
    "grid_fn": ("config", "device", "problem"),
    "make_args": ("problem", "device", "seed"),
    "tiles": ("config", "problem"),
    "work": ("config", "problem"),
    "invariant": ("config", "problem"),
}
"""Arguments of each function of a declaration, except functions that take the launch arguments."""

_MUTATED = ("outputs", "inplace", "reset")

_FIRST_ARCHS = (Arch(9, 0), Arch(10, 0), Arch(12, 0))
"""Archs whose search spaces are tried first, because most kernels have one for them."""

# At construction ----------------------------------------------------------------------------------


def check_fields(tunable: Declaration) -> None:
    """Refuse the mistakes that are visible without calling the declaration's functions.

    Raises:
        DeclarationError: There is a mistake; names the kernel, the field, the value and what to write.
    """
    check_name(tunable.name)
    _check_place(tunable)
    _check_kernel(tunable)
    _check_axes(tunable)
    _check_functions(tunable)
    _check_arguments(tunable)
    _first_problem(tunable)


def check_calls(tunable: Declaration) -> None:
    """Refuse the mistakes that show on the first typical problem without torch; no blank may be left.

    Raises:
        DeclarationError: There is a mistake; names the kernel, the field, the value and what to write.
    """
    problem = _first_problem(tunable)
    for field in _CALLED_WITH:
        _check_called(tunable, field)
    for mistake in problem_mistakes(tunable, problem):
        _refuse(tunable, mistake.text)
    _check_returned(tunable)
    arch = _an_arch(tunable, problem)
    for mistake in config_mistakes(tunable, arch, problem):
        _refuse(tunable, mistake.text)


def _refuse(tunable: Declaration, mistake: str) -> NoReturn:
    raise DeclarationError(f"{tunable.name}: {mistake}")


def _check_place(tunable: Declaration) -> None:
    package, tables, distribution = tunable.package, tunable.tables, tunable.distribution
    if tables is not None and not isinstance(tables, Path):
        _refuse(tunable, f"tables is {tables!r:.80}; write Path({str(tables)!r:.80})")
    parts = package.split(".") if isinstance(package, str) else [""]
    if not all(part.isidentifier() for part in parts) and (package or tables is None):
        _refuse(
            tunable,
            f"package is {package!r:.80}; write package=__package__ in a module of a package, or name the "
            "folder of its tables: package='', tables=Path(__file__).parent / 'tuned_configs'",
        )
    if not isinstance(tunable.programmatic_dependent_launch, bool):
        found = f"{tunable.programmatic_dependent_launch!r:.80}"
        _refuse(tunable, f"programmatic_dependent_launch is {found}; write True or False")
    if distribution is not None and not isinstance(distribution, str):
        _refuse(tunable, f"distribution is {distribution!r:.80}; write the name that pip installs")


def _check_kernel(tunable: Declaration) -> None:
    if not isinstance(tunable.kernel, Mapping):
        if not cutile.is_kernel(tunable.kernel):
            _refuse(
                tunable,
                f"kernel is {tunable.kernel!r:.80}; pass the function decorated with @ct.kernel, or a dict "
                "of such by name",
            )
        return
    symbols: dict[str, str] = {}
    for name, kernel in tunable.kernel.items():
        if not is_name(name):
            _refuse(
                tunable,
                f"kernel has the name {name!r:.80}; write lower-case letters, digits and underscores",
            )
        if not cutile.is_kernel(kernel):
            _refuse(
                tunable, f"kernel[{name!r}] is {kernel!r:.80}; pass the function decorated with @ct.kernel"
            )
        symbol = cutile.symbol_of(kernel)
        if symbol in symbols:
            _refuse(
                tunable,
                f"the functions of kernel[{symbols[symbol]!r}] and [{name!r}] are both called {symbol}, so "
                "that their compiled code has one name; rename one of them",
            )
        symbols[symbol] = name
    if not symbols:
        _refuse(tunable, "kernel is an empty dict; write each kernel with a name that configs call it")


def _check_axes(tunable: Declaration) -> None:
    if not isinstance(tunable.axes, Mapping):
        listed = list(tunable.axes) if isinstance(tunable.axes, list | tuple | set | frozenset) else []
        first = listed[0] if listed and isinstance(listed[0], str) else "M"
        kind = "None" if tunable.axes is None else f"a {type(tunable.axes).__name__}"
        _refuse(tunable, f"axes is {kind}; write a dict: axes={{{first!r}: Pow2(), …}}")
    if not tunable.axes:
        _refuse(tunable, "axes is empty; name each size of a problem: axes={'M': Pow2(), 'N': Exact()}")
    for name, axis in tunable.axes.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            _refuse(tunable, f"an axis is called {name!r:.80}; write a Python name such as 'M'")
        if hasattr(Problem, name):
            _refuse(
                tunable, f"an axis is called {name!r}, which is a method of Problem; give it another name"
            )
        if not isinstance(axis, Pow2 | Exact):
            _refuse(tunable, f"axes[{name!r}] is {axis!r:.80}; write Pow2() or Exact()")
    _check_batch_axes(tunable)


def _check_batch_axes(tunable: Declaration) -> None:
    batch = tunable.batch_axes
    if isinstance(batch, str) or not isinstance(batch, Sequence):
        _refuse(tunable, f"batch_axes is {batch!r:.80}; write a tuple of axes: batch_axes=('M',)")
    pow2 = [name for name, axis in tunable.axes.items() if isinstance(axis, Pow2)]
    for name in batch:
        if name not in pow2:
            _refuse(
                tunable,
                f"batch_axes names {name!r:.80}; a batch may have any size, so write an axis that is Pow2(): "
                f"{names(pow2)}",
            )
    if tunable.invariant is not None and not batch:
        _refuse(tunable, "invariant says what a batch changes, but batch_axes is empty; name the axes there")


def _check_functions(tunable: Declaration) -> None:
    for field in (*_CALLABLES, *_OPTIONAL_CALLABLES):
        value = getattr(tunable, field)
        absent = value is None and field in _OPTIONAL_CALLABLES
        listed = field == "search_space" and isinstance(value, list | tuple)
        if not (callable(value) or absent or listed):
            _refuse(tunable, f"{field} is {value!r:.80}; write a function")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for parameter in inspect.signature(tunable.problem).parameters.values():
        if parameter.kind not in kinds:
            _refuse(
                tunable,
                f"problem() takes {parameter}; write out the launch arguments, each by name and by position",
            )


def _check_called(tunable: Declaration, field: str) -> None:
    """Refuse a function that cannot take its arguments, where its signature can be read."""
    called_with = _CALLED_WITH[field]
    try:
        signature = inspect.signature(getattr(tunable, field))
    except (TypeError, ValueError):  # None, or a list in place of a function, too
        return
    try:
        signature.bind(*called_with)
    except TypeError:
        given = ", ".join(called_with)
        _refuse(tunable, f"{field} is called with ({given}) and takes {signature}; take these, by position")


def _check_arguments(tunable: Declaration) -> None:
    known = tunable.parameters
    named = {field: getattr(tunable, field) for field in _MUTATED if getattr(tunable, field) is not None}
    for field, value in named.items():
        if isinstance(value, str):
            _refuse(tunable, f"{field} is the text {value!r:.80}; write {field}=({value!r:.80},)")
        for name in value:
            if name not in known:
                _refuse(
                    tunable,
                    f"{field} names {name!r}, which problem() does not take; it takes {names(known)}",
                )
    mutated = [name for value in named.values() for name in value]
    if not mutated and "outputs" in named:
        _refuse(tunable, NOTHING_WRITTEN)
    for name in mutated:
        if mutated.count(name) > 1:
            _refuse(tunable, f"{name!r} is named twice among outputs, inplace and reset; name it once")


def _first_problem(tunable: Declaration) -> Problem:
    typical = tunable.typical
    if not isinstance(typical, Sequence) or isinstance(typical, str):
        _refuse(tunable, f"typical is {typical!r:.80}; write a list of the problems to sweep")
    if not typical:
        _refuse(
            tunable, "typical is empty; list the problems to sweep: typical=[{'dtype': 'bfloat16', 'M': 16}]"
        )
    for i, shape in enumerate(typical):
        if not isinstance(shape, Mapping) or not shape:
            _refuse(
                tunable,
                f"typical[{i}] is {shape!r:.80}; write a dict such as {{'dtype': 'bfloat16', 'M': 16}}",
            )
        empty = [name for name, value in shape.items() if isinstance(value, list | tuple) and not value]
        if empty:
            _refuse(tunable, f"typical[{i}][{empty[0]!r}] lists no value; list at least one")
    first = {name: v[0] if isinstance(v, list | tuple) else v for name, v in typical[0].items()}
    try:
        return Problem(first)
    except DeclarationError as error:
        _refuse(tunable, f"typical[0]: {error}")


def _check_returned(tunable: Declaration) -> None:
    """Refuse a `problem` that does not return an axis, where this is visible without real tensors."""
    try:
        keys = returned(tunable.problem, len(tunable.parameters))
    except NotFollowedError:
        return  # `declaration_problems` finds it before a sweep, with tensors that have no storage
    if not isinstance(keys, Mapping):
        _refuse(tunable, f"problem() returned a {type(keys).__name__}; return a dict of sizes and dtypes")
    for axis in tunable.axes:
        if axis not in keys:
            _refuse(tunable, axis_missing(axis, f"it returns {names(map(str, keys))}"))


def _an_arch(tunable: Declaration, problem: Problem) -> Arch:
    """Return the first arch with a search space for this problem."""
    raised: Exception | None = None
    not_a_list: str | None = None
    for arch in dict.fromkeys((*_FIRST_ARCHS, *KNOWN_ARCHS)):
        try:
            space = tunable.declared_space(arch, problem)
        except Exception as error:  # the author's code need not support every arch: one is enough
            raised = raised or error
            continue
        kind = space_kind(space)
        if kind is None and (large := too_large(space)):
            _refuse(tunable, f"search_space({problem}) returned {large}")
        if kind is None and len(space) > 0:
            return arch
        not_a_list = not_a_list or kind
    if not_a_list is not None:
        _refuse(tunable, f"search_space({problem}) returned {not_a_list}")
    if raised is not None:
        in_words = described(raised, tunable.search_space)
        raise DeclarationError(f"{tunable.name}: search_space({problem}) raised {in_words}") from raised
    _refuse(tunable, f"search_space is empty for {problem} on every arch; return at least the default")


# Before a sweep -----------------------------------------------------------------------------------


def first_arch(tunable: Declaration) -> Arch:
    """Return the arch to check a declaration on where none is named: the first with a search space."""
    return _FIRST_ARCHS[0] if blank_mistakes(tunable) else _an_arch(tunable, _first_problem(tunable))


def declaration_problems(tunable: Declaration, arch: Arch) -> list[str]:
    """List all mistakes of a declaration on an arch, over every typical problem.

    Imports torch and makes every problem's arguments without storage. A mistake of several problems is listed
    once, for the first of them, with the number of further ones. While a blank is left, only blanks are
    listed.
    """
    if blank := blank_mistakes(tunable):
        return [f"{tunable.name}: {mistake.text}" for mistake in blank]
    try:
        check_calls(tunable)
    except DeclarationError as error:
        return [str(error)]
    from aot_tune.declare.argument_mistakes import argument_mistakes
    from aot_tune.declare.misnamed import misnamed_mistakes

    kinds = (place_mistakes, machine_mistakes, written_mistakes, misnamed_mistakes)
    whole = [mistake.text for mistakes in kinds for mistake in mistakes(tunable)]
    by_part: dict[str, list[tuple[str, Problem]]] = {}
    sound: list[Problem] = []
    for problem in tunable.typical_problems:
        mistakes = _without_arguments(tunable, arch, problem)
        if not mistakes:
            sound.append(problem)
            mistakes = list(argument_mistakes(tunable, arch, problem))
        for about, text in mistakes:
            by_part.setdefault(about, []).append((text, problem))
    shared = (of_problems(*having[0], len(having) - 1) for having in by_part.values())
    return [f"{tunable.name}: {text}" for text in (*whole, *shared, *space_mistakes(tunable, arch, sound))]


def uncounted(tunable: Declaration, arch: Arch) -> str | None:
    """Return why the default's code cannot be followed to count its products; None where it can."""
    from aot_tune.declare.remarks import uncounted

    return uncounted(tunable, arch)


def declaration_remarks(tunable: Declaration, arch: Arch) -> list[str]:
    """List probably unintended parts of a declaration without mistakes. Imports torch.

    Nothing is listed while a blank is left.
    """
    if blank_mistakes(tunable):
        return []
    from aot_tune.declare.remarks import declaration_remarks

    return declaration_remarks(tunable, arch)


def mistakes_on(tunable: Declaration, arch: Arch, problem: Problem) -> list[str]:
    """List all mistakes of a declaration on an arch for a problem. Imports torch."""
    from aot_tune.declare.argument_mistakes import argument_mistakes

    without = _without_arguments(tunable, arch, problem)
    return [mistake.text for mistake in without or argument_mistakes(tunable, arch, problem)]


def _without_arguments(tunable: Declaration, arch: Arch, problem: Problem) -> list[Mistake]:
    return list(problem_mistakes(tunable, problem)) or list(config_mistakes(tunable, arch, problem))
