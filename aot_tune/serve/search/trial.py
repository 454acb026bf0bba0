"""Time a few configs in this process, on clones of mutated arguments. Caches nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.nvidia import cutile
from aot_tune.serve.runtime import Runtime
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.parts import flat
from aot_tune.values.problem import Problem

Winner = tuple[Config, float]
"""Fastest config, and its mean time in microseconds."""


class _LateError(Exception):
    """The search has used up its time."""


def fastest(
    tunable: Declaration,
    problem: Problem,
    args: Sequence[Any],
    configs: Sequence[Config],
    kernel_of: Callable[[Config], Any],
    *,
    device: Device,
    device_index: int,
    runtime: Runtime,
    limit_s: float,
) -> Winner | None:
    """Run cuTile's search over configs with correct results.

    Args:
        tunable: The declaration.
        problem: The problem that is launched.
        args: The launch arguments; none of them is changed.
        configs: The configs to time.
        kernel_of: Config -> the kernel with its hints, which the caller keeps.
        device: The GPU.
        device_index: The GPU's index.
        runtime: The runtime in use.
        limit_s: Seconds after which no further run is started.

    Returns:
        The winner; None where no config ran, memory ran out, or the time ended before all were timed.
    """
    end, args_fn = time.monotonic() + limit_s, tunable.args_fn_on(device)
    late = False

    def args_of(config: Config) -> tuple[Any, ...]:
        nonlocal late
        if time.monotonic() > end:
            late = True
            raise _LateError  # cuTile's search counts this as the config's failure and goes on to the next
        return args_fn(config, *clones)

    try:
        # Another thread may begin a capture while this one allocates and synchronises; in relaxed mode its
        # graph is not broken.
        with runtime.entered(device_index), runtime.relaxed_capture():
            clones = cloned(tunable, args)
            result = cutile.search(
                list(configs),
                runtime.raw_stream(device_index),
                kernel=kernel_of,
                grid_of=lambda config: tunable.grid(config, device, problem),
                args_of=args_of,
            )
    except Exception:  # out of memory, or every config failed: the next step of `resolve` chooses
        return None
    return None if late else (result.best.config, float(result.best.mean_us))


def cloned(tunable: Declaration, args: Sequence[Any]) -> list[Any]:
    """Return the arguments with clones of mutated ones; a tensor passed twice is cloned once."""
    written = [arg for name, arg in zip(tunable.parameters, args, strict=True) if name in tunable.mutated]
    copies = {id(member): member.clone() for member in flat(written) if hasattr(member, "clone")}

    def copy(arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return type(arg)(copy(member) for member in arg)
        return copies.get(id(arg), arg)

    return [copy(arg) for arg in args]
