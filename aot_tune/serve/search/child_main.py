"""Process that checks and times unverified configs: a JSON request on stdin, a JSON answer on stdout.

`aot_tune.serve.search.child` starts a Python that calls `main`, and kills it at the time limit. A fault or a
hang stays in this process and never reaches the serving process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from aot_tune.declare.comparison import compare, poison
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import load
from aot_tune.declare.reference import closes_of
from aot_tune.serve.kernels import HintedKernels
from aot_tune.serve.runtime import runtime
from aot_tune.serve.search.trial import cloned, fastest
from aot_tune.values.config import Config
from aot_tune.values.parts import named_parts, part_names
from aot_tune.values.problem import Problem

_PR_SET_PDEATHSIG = 1
_LIMIT_S = 3600.0
"""Time limit in seconds, so long that only the parent's limit counts."""


def main() -> None:
    """Answer the request on stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the compiler must learn how its own children end
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imported modules must not mix with the answer
    request = json.load(sys.stdin)
    tunable = load(request["module"], request["kernel"])
    configs = [Config(**config) for config in request["configs"]]
    best = search(tunable, Problem(request["problem"]), configs, request["device"])
    if best is None:
        sys.exit(1)
    json.dump({"best": configs.index(best[0]), "mean_us": best[1]}, answers)
    answers.flush()


def search(
    tunable: Declaration, problem: Problem, configs: Sequence[Config], device_index: int
) -> tuple[Config, float] | None:
    """Return the fastest of the configs with correct results, and its mean in microseconds."""
    here = runtime()
    device = here.device(device_index)
    with here.entered(device_index):
        args = tunable.make_args(problem, f"cuda:{device_index}", 0)
        kernels = HintedKernels(tunable)
        right = [c for c in configs if _is_right(tunable, problem, args, c, kernels, device_index)]
        if not right:
            return None
        return fastest(
            tunable,
            problem,
            args,
            right,
            kernels.of,
            device=device,
            device_index=device_index,
            runtime=here,
            limit_s=_LIMIT_S,
        )


def _is_right(
    tunable: Declaration,
    problem: Problem,
    args: Sequence[Any],
    config: Config,
    kernels: HintedKernels,
    device_index: int,
) -> bool:
    """Whether a run on poisoned outputs gives the reference's results."""
    from cuda.tile import launch

    here = runtime()
    trial = cloned(tunable, args)
    named = dict(zip(tunable.parameters, trial, strict=True))
    results = named_parts(named, trial)
    for name in part_names(tunable.output_names, named):
        poison(results[name], 0)
    try:
        device = here.device(device_index)
        kernel_args = tunable.args_fn_on(device)(config, *trial)
        grid = tunable.grid(config, device, problem)
        launch(here.raw_stream(device_index), grid, kernels.of(config), kernel_args)
    except Exception:  # it does not compile or cannot be launched, so it is not a candidate
        return False
    expected = closes_of(tunable, tunable.reference(*args), named)
    return all(compare(name, results[name], close) is None for name, close in expected.items())
