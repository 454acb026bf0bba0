"""Check the arguments and the grid of a problem's first launch; each mistake has its own error.

A mistake of a later launch of the same problem changes the key of its plan, or is refused by the launch
function or by cuTile. Two mistakes are not checked again, since the checks would take 60 ns for each tensor:
a tensor without memory, and a dual tensor of forward-mode autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.errors import LaunchError
from aot_tune.serve.runtime import Runtime
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.parts import flat, named_parts
from aot_tune.values.problem import Problem
from aot_tune.values.text import value_in_words

_MOST_BLOCKS = (2**24 - 1, 2**16 - 1, 2**16 - 1)
"""Most blocks along each dimension of a grid: cuTile holds a block's x index in 24 bits (cuda-tile 1.7),
CUDA holds y and z in 16."""


_MOST_MEMBERS = 4
"""Most members of a list of tensors that an error describes."""


def check_arguments(
    tunable: Declaration, args: Sequence[Any], here: Runtime, *, config: object = None
) -> int:
    """Refuse arguments that cannot be launched; return the GPU to launch on.

    Returns:
        The index of the GPU that holds all tensors.

    Raises:
        LaunchError: An argument cannot be launched; the message names it and what to pass instead.
    """
    if config is not None and not isinstance(config, Config):
        raise LaunchError(
            f"{tunable.name}.launch takes {', '.join(tunable.parameters)}, and config= to replace the tuned "
            f"config; pass an aot_tune.Config, not {value_in_words(config)}"
        )
    if len(args) != len(tunable.parameters):
        raise LaunchError(
            f"{tunable.name}.config_for takes {', '.join(tunable.parameters)}; pass as many arguments, not "
            f"{len(args)}"
        )
    index: int | None = None
    first = ""
    recording, mutated = here.grad_enabled(), tunable.mutated
    kinds = {*map(type, args)}
    listed = list in kinds or tuple in kinds
    parts = (
        named_parts(tunable.parameters, args).items()
        if listed
        else zip(tunable.parameters, args, strict=True)
    )
    for name, arg in parts:
        place = f"{tunable.name}.launch: argument {name}"
        if type(arg) not in here.tensor_types:
            _check_no_array(place, arg, here)
            continue
        if recording and arg.requires_grad:
            raise LaunchError(
                f"{place} requires grad while grad is enabled, but autograd does not record a launch; launch "
                "under torch.no_grad(), pass .detach(), or launch in the forward of a torch.autograd.Function"
            )
        if here.has_tangent(arg):
            raise LaunchError(
                f"{place} is a dual tensor of forward-mode autograd, which does not see a launch; pass its "
                "primal, or launch in the forward of a torch.autograd.Function that has a jvp"
            )
        device = here.index_of(arg)
        if device is None:
            raise LaunchError(f"{place} is on device {arg.device}; pass a CUDA tensor, such as {name}.cuda()")
        if index is not None and device != index:
            raise LaunchError(
                f"{place} is on cuda:{device}, argument {first} on cuda:{index}; pass tensors on one device"
            )
        if not here.has_memory(arg):
            raise LaunchError(
                f"{place} has no memory: its storage was freed, or it is a zero tensor of forward-mode "
                f"autograd; pass a tensor that holds its elements, such as torch.zeros_like({name})"
            )
        if name in mutated or (listed and name.partition("[")[0] in mutated):
            _check_writable(place, arg)
        if index is None:
            index, first = device, name
    if index is None:
        raise LaunchError(
            f"{tunable.name}.launch: no argument is a tensor; pass CUDA tensors, as problem() takes"
        )
    return index


def check_problem(tunable: Declaration, problem: Problem, args: Sequence[Any]) -> bool:
    """Whether a problem has anything to launch: False where a size is 0 and the outputs are empty.

    Raises:
        LaunchError: `problem` does not give an axis a size, or a sum over an axis of size 0 is to be written.
    """
    for axis in tunable.axes:
        size = problem.get(axis)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise LaunchError(
                f"{tunable.name}.launch: problem() gives {size!r} for the axis {axis}; "
                "return its size, an int of 0 or more"
            )
    empty = [axis for axis in tunable.axes if not problem.size(axis)]
    if not empty:
        return True
    for name, arg in zip(tunable.parameters, args, strict=True):
        written = name in tunable.output_names or name in tunable.inplace
        if written and any(0 not in part.shape for part in flat([arg]) if hasattr(part, "shape")):
            raise LaunchError(
                f"{tunable.name}.launch: the size of {' and '.join(empty)} is 0, so nothing is summed, but "
                f"{name} is not empty and would keep what it holds; write the result of an empty sum to it, "
                f"such as {name}.zero_(), without a launch"
            )
    return False


def explain(tunable: Declaration, error: Exception, args: Sequence[Any], here: Runtime) -> None:
    """Raise a clearer error than cuTile's for arguments that it refused; return where none is known.

    Raises:
        LaunchError: As `check_arguments`.
    """
    try:
        check_arguments(tunable, args, here)
    except LaunchError as clearer:
        raise clearer from error


def refused(
    tunable: Declaration, problem: Problem, config: Config, args: Sequence[Any], error: Exception
) -> LaunchError:
    """Return the error of a launch that cuTile refuses: problem, reason and arguments."""
    reason = ", ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    given = ", ".join(f"{name} {_in_words(arg)}" for name, arg in zip(tunable.parameters, args, strict=True))
    return LaunchError(
        f"{tunable.name}.launch: cuTile refuses {problem} with {config}: {type(error).__name__}: {reason}; "
        f"the arguments are {given}; pass arguments that the kernel takes, or correct the kernel"
    )


def _in_words(arg: Any) -> str:
    """Describe an argument without its values, since reading them would wait for the GPU."""
    if isinstance(arg, list | tuple):
        more = ["..."] if len(arg) > _MOST_MEMBERS else []
        return f"[{', '.join([*map(_in_words, arg[:_MOST_MEMBERS]), *more])}]"
    if not hasattr(arg, "stride"):
        return value_in_words(arg)
    shape, strides = tuple(arg.shape), tuple(arg.stride())
    laid_out = "" if arg.is_contiguous() else f" with strides {strides}"
    return f"{str(arg.dtype).removeprefix('torch.')} {shape}{laid_out}"


def _check_no_array(place: str, arg: Any, here: Runtime) -> None:
    if isinstance(arg, here.tensor_types):
        kind = type(arg)
        raise LaunchError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, and how a subclass of torch.Tensor uses "
            "its data is not known; pass its plain data, such as .as_subclass(torch.Tensor)"
        )
    if hasattr(arg, "__cuda_array_interface__") or hasattr(arg, "__dlpack__"):
        kind = type(arg)
        raise LaunchError(
            f"{place} is a {kind.__module__}.{kind.__qualname__} that torch cannot view as a CUDA tensor: by "
            "its memory, its dtype, or because another GPU is the current one; pass a CUDA tensor"
        )


def _check_writable(place: str, arg: Any) -> None:
    if any(size > 1 and stride == 0 for size, stride in zip(arg.shape, arg.stride(), strict=True)):
        raise LaunchError(
            f"{place} is written by the kernel and is an expanded view, whose elements share memory; "
            "pass a tensor with memory of its own, such as .contiguous()"
        )


def checked_grid(tunable: Declaration, config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    """Return the grid that the declaration's `grid_fn` gives.

    Raises:
        LaunchError: The value is not a grid, or the config cannot run on this particular GPU.
    """
    grid = tunable.grid(config, device, problem)
    if not 1 <= len(grid) <= 3 or not all(isinstance(blocks, int) and blocks > 0 for blocks in grid):
        raise LaunchError(
            f"{tunable.name}: grid_fn gives {grid!r} for {problem} with {config}; "
            "return one to three counts of blocks, ints of 1 or more"
        )
    if any(blocks > most for blocks, most in zip(grid, _MOST_BLOCKS, strict=False)):
        raise LaunchError(
            f"{tunable.name}: {problem} with {config} takes a grid of {grid}, but {_MOST_BLOCKS} blocks can "
            "be launched at most; pass fewer rows or sequences per call"
        )
    return grid


def unfit(tunable: Declaration, config: Config, device: Device, problem: Problem) -> str | None:
    """Return why a config cannot run on this particular GPU; None where it can."""
    try:
        checked_grid(tunable, config, device, problem)
    except LaunchError as error:
        return str(error)
    return None
