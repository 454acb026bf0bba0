"""What is wrong with the arguments a declaration makes, asked for on device "meta". Imports torch, no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from aot_tune.declare.mistakes import Mistake, axis_missing, names
from aot_tune.declare.reference import closes_of
from aot_tune.errors import CutileError, DeclarationError
from aot_tune.nvidia import cutile, signature
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from aot_tune.values.text import described

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration


def argument_mistakes(tunable: Declaration, arch: Arch, problem: Problem) -> Iterator[Mistake]:
    """What is wrong with the arguments made for a problem, and with what is made of them."""
    try:
        args = tunable.make_args(problem, torch.device("meta"), 0)
    except Exception as error:
        raised = described(error, tunable.make_args)
        yield Mistake(
            "make_args",
            f"make_args({problem}) on device 'meta' raised {raised}; make them with aot_tune.inputs",
        )
        return
    if not isinstance(args, tuple) or len(args) != len(tunable.parameters):
        yield Mistake(
            "make_args", f"make_args returned {_made(args)}; return a tuple of {names(tunable.parameters)}"
        )
        return
    for name, arg in zip(tunable.parameters, args, strict=True):
        if name in tunable.mutated and not isinstance(arg, torch.Tensor):
            yield Mistake(
                name,
                f"{name} is written by the kernel; make_args made it a {type(arg).__name__}, not a tensor; "
                "make one, or take it out of outputs, inplace and reset",
            )
            return
    yield from _posed_mistakes(tunable, problem, args)
    yield from _kernel_argument_mistakes(tunable, arch, problem, args)
    yield from _reference_mistakes(tunable, args)


def _made(value: object) -> str:
    return str(len(value)) if isinstance(value, tuple) else f"a {type(value).__name__}"


def _posed_mistakes(tunable: Declaration, problem: Problem, args: tuple[Any, ...]) -> Iterator[Mistake]:
    try:
        posed = tunable.problem_of(*args)
    except Exception as error:
        yield Mistake(
            "problem",
            f"problem() of the arguments made for {problem} raised {described(error, tunable.problem)}",
        )
        return
    missing = [axis for axis in tunable.axes if axis not in posed]
    if missing:
        returns = f"of the arguments made for {problem} it returns {posed}"
        yield Mistake(f"axis {missing[0]}", axis_missing(missing[0], returns))
    elif posed != problem:
        yield Mistake(
            "problem",
            f"problem() of the arguments made for {problem} is {posed}; make_args or problem() must change",
        )


def _kernel_argument_mistakes(
    tunable: Declaration, arch: Arch, problem: Problem, args: tuple[Any, ...]
) -> Iterator[Mistake]:
    config = tunable.default_config(arch, problem)
    try:
        passed = tunable.args_fn(config, *args)
    except Exception as error:
        yield Mistake(
            "args_fn",
            f"args_fn for the default, {config}, and {problem} raised {described(error, tunable.args_fn)}",
        )
        return
    parameters = cutile.parameters(tunable.kernel)
    if not isinstance(passed, tuple) or len(passed) != len(parameters):
        taken = names(name for name, _ in parameters)
        yield Mistake(
            "args_fn", f"args_fn returned {_made(passed)}; return a tuple of what the kernel takes: {taken}"
        )
        return
    try:
        signature.check_arguments(parameters, passed)
    except CutileError as error:
        yield Mistake("args_fn", f"args_fn for the default, {config}, and {problem}: {error}")


_OF_THE_MACHINE = ("meta", "cuda", "nvidia", "driver", "triton")
"""An error that speaks of these is raised for want of storage or of a GPU, not by the reference itself."""


def _reference_mistakes(tunable: Declaration, args: tuple[Any, ...]) -> Iterator[Mistake]:
    """What can be told of the reference without computing; a sweep calls it on real tensors."""
    try:
        found = tunable.reference(*args)
    except DeclarationError as error:
        yield Mistake("reference", f"reference raised {described(error, tunable.reference)}")
        return
    except (NotImplementedError, AssertionError, ImportError):
        return  # no kernel for "meta", the author's own check of the device, or a library of a GPU's machine
    except Exception as error:
        if not any(word in str(error).lower() for word in _OF_THE_MACHINE):
            raised = described(error, tunable.reference)
            yield Mistake(
                "reference",
                f"reference raised {raised} for {names(tunable.parameters)} on device 'meta'; correct it",
            )
        return
    try:
        closes_of(tunable, found, dict(zip(tunable.parameters, args, strict=True)))
    except DeclarationError as error:
        yield Mistake("reference", str(error).removeprefix(f"{tunable.name}: "))
