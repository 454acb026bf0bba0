"""Find mistakes in a declaration's arguments, on device "meta". Imports torch, uses no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aot_tune.declare.mistakes import Mistake, axis_missing, names
from aot_tune.declare.reference import closes_of
from aot_tune.errors import CutileError, DeclarationError
from aot_tune.nvidia import cutile, signature
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.parts import flat, named_parts
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted, described

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration


def argument_mistakes(tunable: Declaration, arch: Arch, problem: Problem) -> Iterator[Mistake]:
    """Yield mistakes in `make_args`, and in `problem`, `args_fn` and `reference` on its arguments."""
    try:
        args = tunable.make_args(problem, torch.device("meta"), 0)
    except Exception as error:
        raised = described(error, tunable.make_args)
        advice = "make them with aot_tune.inputs" if _of_the_machine(error) else "correct it"
        yield Mistake("make_args", f"make_args({problem}) on device 'meta' raised {raised}; {advice}")
        return
    if not isinstance(args, tuple) or len(args) != len(tunable.parameters):
        yield Mistake(
            "make_args",
            f"make_args returned {_size_in_words(args)}; return a tuple of {names(tunable.parameters)}",
        )
        return
    written = [arg for name, arg in zip(tunable.parameters, args, strict=True) if name in tunable.mutated]
    if written and all(arg is None for arg in written):
        yield Mistake(
            "make_args",
            f"make_args made {names(tunable.mutated)} None, so that the kernel would write nothing; make at "
            "least one of them a tensor",
        )
        return
    for name, arg in zip(tunable.parameters, args, strict=True):
        if name in tunable.mutated and not _is_written(arg):
            yield Mistake(
                name,
                f"{name} is written by the kernel; make_args made it a {type(arg).__name__}, not a tensor; "
                "make one, or take it out of outputs, inplace and reset",
            )
            return
    yield from _problem_mistakes(tunable, problem, args)
    yield from _kernel_argument_mistakes(tunable, arch, problem, args)
    if written:  # else another mistake is reported, and it is not known what the reference returns
        yield from _reference_mistakes(tunable, args)


def _is_written(arg: object) -> bool:
    """Whether a kernel can write an argument: a tensor, a list of tensors, or None."""
    listed = arg if isinstance(arg, list | tuple) and arg else [arg]
    return arg is None or all(isinstance(member, torch.Tensor) for member in listed)


def _size_in_words(value: object) -> str:
    return counted(len(value), "value") if isinstance(value, tuple) else f"a {type(value).__name__}"


def _problem_mistakes(tunable: Declaration, problem: Problem, args: tuple[Any, ...]) -> Iterator[Mistake]:
    try:
        stated = tunable.problem_of(*args)
    except Exception as error:
        yield Mistake(
            "problem",
            f"problem() of the arguments made for {problem} raised {described(error, tunable.problem)}",
        )
        return
    missing = [axis for axis in tunable.axes if axis not in stated]
    if missing:
        returns = f"of the arguments made for {problem} it returns {stated}"
        yield Mistake(f"axis {missing[0]}", axis_missing(missing[0], returns))
    elif on_device := [name for name, value in stated.items() if str(value).partition(":")[0] == "meta"]:
        yield Mistake(
            "problem",
            f"problem() returns the device as {on_device[0]}; leave it out: there is a table for each arch",
        )
    elif stated != problem:
        yield Mistake(
            "problem",
            f"problem() of the arguments made for {problem} is {stated}; make_args or problem() must change",
        )


def _kernel_argument_mistakes(
    tunable: Declaration, arch: Arch, problem: Problem, args: tuple[Any, ...]
) -> Iterator[Mistake]:
    default = tunable.default_config(arch, problem)
    for config in one_of_each_kernel(tunable, arch, problem, default):
        mistakes = list(_mistakes_of_kernel(tunable, (arch, problem), config, args))
        yield from mistakes
        if mistakes:
            return
    yield from _constant_mistakes(tunable, arch, problem, args)


def one_of_each_kernel(
    tunable: Declaration, arch: Arch, problem: Problem, default: Config
) -> Iterator[Config]:
    """Yield the default, and the first config of each other kernel."""
    first = {default.kernel: default}
    for config in tunable.candidates(arch, problem) if len(tunable.kernels) > 1 else ():
        first.setdefault(config.kernel, config)
    yield from first.values()


def _mistakes_of_kernel(
    tunable: Declaration, place: tuple[Arch, Problem], config: Config, args: tuple[Any, ...]
) -> Iterator[Mistake]:
    arch, problem = place
    where = f"the default, {config}," if config == tunable.default_config(arch, problem) else str(config)
    try:
        passed = tunable.args_fn_on(Device.reference(arch))(config, *args)
    except Exception as error:
        yield Mistake(
            "args_fn",
            f"args_fn for {where} and {problem} raised {described(error, tunable.args_fn)}",
        )
        return
    parameters = cutile.parameters(tunable.kernel_of(config))
    if not isinstance(passed, tuple) or len(passed) != len(parameters):
        taken = names(name for name, _ in parameters)
        yield Mistake(
            "args_fn",
            f"args_fn returned {_size_in_words(passed)}; return a tuple of what the kernel takes: {taken}",
        )
        return
    try:
        signature.check_arguments(parameters, passed)
    except CutileError as error:
        yield Mistake("args_fn", f"args_fn for {where} and {problem}: {error}")
        return
    yield from _copy_mistakes(tunable, args, passed)


def _copy_mistakes(
    tunable: Declaration, args: tuple[Any, ...], passed: Sequence[object]
) -> Iterator[Mistake]:
    """Yield mutated arguments whose memory the kernel does not get."""
    passed = flat(passed)
    named = dict(zip(tunable.parameters, args, strict=True))
    for name, arg in named_parts(tunable.mutated, [named[name] for name in tunable.mutated]).items():
        if not any(map(shares(arg), passed)):
            yield Mistake(
                f"copy of {name}",
                f"args_fn hands on no tensor that shares the memory of {name}, which the kernel should "
                f"write: a launch would leave the caller's {name} as it was; hand on {name} itself or a view "
                "of it, no clone",
            )


def shares(argument: object) -> Callable[[object], bool]:
    """Return a function that tests whether a tensor or a list of tensors has a storage of `argument`'s."""
    storages = _storages(argument)
    return lambda value: not storages.isdisjoint(_storages(value))


def _storages(value: object) -> frozenset[int]:
    tensors = (member for member in flat([value]) if isinstance(member, torch.Tensor))
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def _constant_mistakes(
    tunable: Declaration, arch: Arch, problem: Problem, args: tuple[Any, ...]
) -> Iterator[Mistake]:
    """Yield constants that arrive at other parameters of the kernel, in every config of the space."""
    space = tunable.space(arch, problem)
    for kernel in tunable.kernels:
        configs = [config for config in space if config.kernel == kernel][:_MOST_COMPARED]
        yield from _misplaced_constants(tunable, arch, configs, args)


def _misplaced_constants(
    tunable: Declaration, arch: Arch, configs: Sequence[Config], args: tuple[Any, ...]
) -> Iterator[Mistake]:
    """Yield misplaced constants of the configs of a kernel."""
    if not configs:
        return
    parameters = [name for name, _ in cutile.parameters(tunable.kernel_of(configs[0]))]
    args_fn = tunable.args_fn_on(Device.reference(arch))
    arrived: list[tuple[Config, Mapping[str, object]]] = []
    for config in configs:
        try:
            passed = args_fn(config, *args)
        except Exception:
            continue  # the default is accepted; `legal` decides which other configs may run
        arrived.append((config, dict(zip(parameters, passed, strict=False))))
    right = {
        name
        for name in configs[0].constants
        if all(_same(received[name], config[name]) for config, received in arrived)
    }
    for name in configs[0].constants:
        for other in parameters if name not in right else ():
            if other not in right and all(
                _same(received[other], config[name]) for config, received in arrived
            ):
                yield Mistake(
                    "args_fn",
                    f"args_fn hands on the config's {name} where the kernel takes {other}; "
                    f"return the arguments in the kernel's order: {names(parameters)}",
                )
                return


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


_MOST_COMPARED = 64
"""Most configs of a search space whose constants are compared with the arguments that args_fn returns."""

_MACHINE_WORDS = ("meta", "cuda", "nvidia", "driver", "triton")
"""Words in the text of an error that comes from a missing GPU or storage, not a mistake."""


def _of_the_machine(error: Exception) -> bool:
    return any(word in str(error).lower() for word in _MACHINE_WORDS)


def _reference_mistakes(tunable: Declaration, args: tuple[Any, ...]) -> Iterator[Mistake]:
    """Yield mistakes in the reference that are visible without computing, as a sweep does."""
    try:
        results = tunable.reference(*args)
    except DeclarationError as error:
        yield Mistake("reference", f"reference raised {described(error, tunable.reference)}")
        return
    except (NotImplementedError, AssertionError, ImportError):
        return  # torch has no kernel for "meta", the author checks the device, or a GPU library is missing
    except Exception as error:
        if not _of_the_machine(error):
            raised = described(error, tunable.reference)
            yield Mistake(
                "reference",
                f"reference raised {raised} for {names(tunable.parameters)} on device 'meta'; correct it",
            )
        return
    try:
        closes_of(tunable, results, dict(zip(tunable.parameters, args, strict=True)))
    except DeclarationError as error:
        yield Mistake("reference", str(error).removeprefix(f"{tunable.name}: "))
