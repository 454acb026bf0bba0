"""Resolve words of a command line to archs, kernels and problems; errors list the options. Prints nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from aot_tune.errors import TuneError, UsageError
from aot_tune.nvidia.nvml import Gpu, visible_gpus
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Pow2, edge
from aot_tune.values.problem import Problem, Value
from aot_tune.values.text import described

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration
    from aot_tune.declare.discovery import FoundKernel

FALLBACK_ARCH = Arch(10, 0)
"""Arch where none is named and this machine has no GPU that cuTile compiles for."""

_MOST_LISTED = 12
"""Most values that a message lists before an ellipsis, so that it stays one line."""


def chosen_arch(name: str | None) -> Arch:
    """Return the arch called `name`; without a name, of this machine's first GPU, else `FALLBACK_ARCH`.

    Raises:
        ArchError: `name` is not an arch.
    """
    if name is not None:
        return Arch.parse(name)
    archs = [gpu.arch for gpu in visible_gpus() or () if gpu.arch is not None]
    return archs[0] if archs else FALLBACK_ARCH


def arch_remarks(name: str | None) -> Iterator[str]:
    """Yield a line where `chosen_arch` takes `FALLBACK_ARCH` for want of a name and of a GPU."""
    if name is None and all(gpu.arch is None for gpu in visible_gpus() or ()):
        yield f"no GPU is visible, so this is for {FALLBACK_ARCH}; --arch names another, such as sm90"


def chosen_gpus(arch: Arch, indexes: str | None, *, require_measured: bool = False) -> tuple[Gpu, ...]:
    """Return the GPUs to measure on: the named ones, else all of `arch`; none where a sweep must predict.

    Args:
        arch: The arch to tune for.
        indexes: The value of --gpus, places among the GPUs that this process may use as ``0,1``, or ``all``,
            or None.
        require_measured: Whether a missing GPU is an error instead of a reason to predict.

    Raises:
        UsageError: A named GPU is missing or of another arch, or the GPUs are of several models.
        TuneError: There is no GPU of `arch`, and --require measured asks for one.
    """
    gpus = visible_gpus() or ()
    here = ", ".join(
        f"{gpu.index}: {gpu.name} {gpu.arch or 'of an arch cuTile does not know'}" for gpu in gpus
    )
    named = _indexes(indexes)
    chosen = tuple(gpu for gpu in gpus if gpu.arch == arch and (not named or gpu.index in named))
    for index in named:
        if index not in {gpu.index for gpu in chosen}:
            raise UsageError(f"--gpus {index} is not an {arch} GPU; this process may use {here or 'none'}")
    if not chosen and indexes is not None:
        raise UsageError(
            f"--gpus all: none is an {arch} GPU; this process may use {here or 'none'}; leave --gpus out to "
            "predict"
        )
    if not chosen and require_measured:
        usable = f"no {arch} GPU ({here})" if here else "no GPU"
        raise TuneError(
            f"--require measured: this measures, and this process may use {usable}; run it on a machine with "
            "a GPU of the arch, or leave the option out to predict"
        )
    models: dict[str, list[str]] = {}
    for gpu in chosen:
        models.setdefault(gpu.name, []).append(str(gpu.index))
    if len(models) > 1:
        options = " or ".join(f"--gpus {','.join(places)} for {name}" for name, places in models.items())
        raise UsageError(
            f"the {arch} GPUs are of several models ({here}), whose times cannot be compared; choose those "
            f"of one: {options}"
        )
    return chosen


def _indexes(text: str | None) -> list[int]:
    """Return the places that --gpus names; none where it names all."""
    if text is None or text.strip() == "all":
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"--gpus {text!r}: write places separated by commas, as 0,1, or all")
    return list(dict.fromkeys(map(int, words)))


def chosen_kernels(found: Mapping[str, FoundKernel], names: Sequence[str]) -> tuple[FoundKernel, ...]:
    """Return the kernels called `names`, without repetitions; all where none is named.

    Raises:
        UsageError: A named kernel does not exist, or no kernel is declared at all.
    """
    if not found:
        raise UsageError(
            "no kernel is declared here; install a package with the entry-point group aot_tune.tunables, "
            "or name its module: --module mylib.kernels"
        )
    for name in names:
        if name not in found:
            near = difflib.get_close_matches(name, found, n=1)
            raise UsageError(
                f"no kernel is called {name!r}; there is {_listed(list(found))}"
                + "".join(f"; the nearest is {match}" for match in near)
                + "; where a module of yours declares it, name the module: --module mylib.kernels"
            )
    return tuple(found[name] for name in dict.fromkeys(names or found))


def parse_problem(text: str) -> dict[str, Value]:
    """Read ``M=300,N=4096,dtype=bfloat16``: digits are a size, true and false a flag, other words a class.

    Flags may be written as Python prints them, and spaces take the place of commas, as in printed buckets.

    Raises:
        UsageError: The text does not have that form.
    """
    values: dict[str, Value] = {}
    for part in re.split(r",\s*|\s+(?=\w+\s*=)", text.strip()):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise UsageError(
                f"--problem {text!r}: {part!r} is not name=value; write for example M=300,dtype=bfloat16"
            )
        if name in values:
            raise UsageError(f"--problem {text!r}: {name} is given twice")
        if value.isascii() and value.isdigit():
            values[name] = int(value)
        else:
            values[name] = {"true": True, "false": False}.get(value.lower(), value)
    return values


def chosen_problems(tunable: Declaration, wanted: Mapping[str, Value]) -> tuple[Problem, ...]:
    """Return the problems of a kernel that have the `wanted` values.

    If all values of a problem are given, it is this problem, declared or not. If some are given, they are the
    declared problems with these values; a size on a Pow2 axis takes the place of all declared sizes of its
    bucket.

    Raises:
        UsageError: The kernel's problems have no such name or another type of value, or none agrees.
    """
    pattern = tunable.typical_problems[0]
    for name, value in wanted.items():
        if name not in pattern:
            raise UsageError(f"a problem of {tunable.name} has no {name}; it has {' '.join(pattern)}")
        if type(value) is not type(pattern[name]):
            raise UsageError(f"{tunable.name}: {name}={value} is of another type than {name}={pattern[name]}")
        if name in tunable.axes and value == 0:
            raise UsageError(f"{tunable.name}: {name}=0 is never launched; give a size of 1 or more")
    if len(wanted) == len(pattern):
        # An unknown dtype looks like any class: only the kernel can refuse it, by making such arguments.
        problem = Problem({name: wanted[name] for name in pattern})
        check_callable(tunable, problem)
        return (problem,)
    agreeing = tuple(problem for problem in tunable.typical_problems if _agrees(tunable, problem, wanted))
    if not agreeing:
        raise UsageError(_none_agrees(tunable, wanted))
    problems = tuple(dict.fromkeys(problem.replaced(**wanted) for problem in agreeing))
    for problem in problems:
        check_callable(tunable, problem)
    return problems


def problems_by_kernel(
    kernels: Sequence[FoundKernel], texts: Sequence[str]
) -> dict[str, tuple[Problem, ...]]:
    """Return the problems of the options --problem, by kernel; a kernel that fits none is left out.

    Args:
        kernels: The chosen kernels.
        texts: The options' values, in the form of `parse_problem`; empty where no problem was chosen.

    Raises:
        UsageError: A text fits none of the kernels.
    """
    chosen: dict[str, tuple[Problem, ...]] = {}
    for text in texts:
        wanted, refusals = parse_problem(text), []
        for kernel in kernels:
            name = kernel.tunable.name
            try:
                problems = chosen_problems(kernel.tunable, wanted)
            except UsageError as error:
                refusals.append(str(error))
            else:
                chosen[name] = tuple(dict.fromkeys((*chosen.get(name, ()), *problems)))
        if len(refusals) == len(kernels):
            raise UsageError(f"--problem {text}: {'; '.join(refusals)}")
    return chosen


def check_callable(tunable: Declaration, problem: Problem) -> None:
    """Refuse a problem that no call of the kernel can have.

    Raises:
        UsageError: `make_args` or `problem` refuses it, or they state another problem.
    """
    try:
        stated = tunable.problem_of(*tunable.make_args(problem, "meta", 0))
    # This is the author's code on the user's input: whatever it raises, no call has this problem.
    except Exception as error:
        raise UsageError(f"{tunable.name} cannot make arguments for {problem}: {described(error)}") from error
    if stated != problem:
        raise UsageError(f"{tunable.name}: no call has the problem {problem}; the nearest has {stated}")


def _agrees(tunable: Declaration, problem: Problem, wanted: Mapping[str, Value]) -> bool:
    return all(
        edge(problem.size(name)) == edge(value)
        if isinstance(tunable.axes.get(name), Pow2) and isinstance(value, int)
        else problem[name] == value
        for name, value in wanted.items()
    )


def _none_agrees(tunable: Declaration, wanted: Mapping[str, Value]) -> str:
    given = " ".join(f"{name}={value}" for name, value in wanted.items())
    missing = [name for name in tunable.typical_problems[0] if name not in wanted]
    declared = {name: {str(problem[name]) for problem in tunable.typical_problems} for name in wanted}
    listed = "; ".join(f"{name}={_listed(sorted(values, key=_natural))}" for name, values in declared.items())
    return (
        f"no declared problem of {tunable.name} has {given}; declared are {listed}; "
        f"add {' '.join(missing)} to name any other problem in full"
    )


def _natural(text: str) -> tuple[int, str]:
    return (int(text) if text.isdigit() else 0, text)


def _listed(names: Sequence[str]) -> str:
    more = " …" if len(names) > _MOST_LISTED else ""
    return " ".join(names[:_MOST_LISTED]) + more
