"""Time a few configs in this process, on clones of what the kernel mutates. Remembers nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.nvidia import cutile
from aot_tune.serve.runtime import Runtime
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

Winner = tuple[Config, float]
"""The fastest config and its mean, microseconds."""


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
    number: int,
    here: Runtime,
    limit_s: float,
) -> Winner | None:
    """Run cuTile's search over configs whose results are known to be right.

    Args:
        tunable: The declaration.
        problem: What is launched.
        args: The launch arguments; none of them is changed.
        configs: What to time.
        kernel_of: Config -> its hinted kernel, kept by the caller.
        device: The GPU.
        number: Its index.
        here: The runtime.
        limit_s: Seconds after which no further run is started.

    Returns:
        The winner; None where nothing ran, memory ran out, or the time was used up before all were timed.
    """
    end = time.monotonic() + limit_s
    late = False

    def args_of(config: Config) -> tuple[Any, ...]:
        nonlocal late
        if time.monotonic() > end:
            late = True
            raise _LateError  # the search takes it for this config's failure, and goes on to the next
        return tunable.args_fn(config, *clones)

    try:
        # Another thread may begin to capture while we allocate and synchronise; relaxed, we leave its graph
        # whole.
        with here.entered(number), here.relaxed_capture():
            clones = cloned(tunable, args)
            result = cutile.search(
                list(configs),
                here.raw_stream(number),
                kernel=kernel_of,
                grid_of=lambda config: tunable.grid(config, device, problem),
                args_of=args_of,
            )
    except Exception:  # out of memory, or every config failed: the ladder's next step is the answer to each
        return None
    return None if late else (result.best.config, float(result.best.mean_us))


def cloned(tunable: Declaration, args: Sequence[Any]) -> list[Any]:
    """The arguments with what the kernel mutates replaced by clones; one tensor passed twice stays one."""
    mutated = {id(arg) for name, arg in zip(tunable.parameters, args, strict=True) if name in tunable.mutated}
    copies = {id(arg): arg.clone() for arg in args if id(arg) in mutated and hasattr(arg, "clone")}
    return [copies.get(id(arg), arg) for arg in args]
