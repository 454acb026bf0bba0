"""Process that checks and times unverified configs: JSON requests on stdin, answers on stdout, a line each.

`aot_tune.serve.search.child` starts a Python that calls `main`, and kills it at the time limit. A fault or a
hang stays in this process and never reaches the serving process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

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

_IDLE_S = 60.0
"""Seconds without a request after which the process ends, and with it its part of the GPU's memory."""

_PARENT_S = 0.5
"""Seconds between looks whether the parent lives."""

_LIMIT_S = 3600.0
"""Time limit in seconds, so long that only the parent's limit counts."""


def main() -> None:
    """Answer the requests on stdin, until one has no winner: a candidate may have broken the CUDA context."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the compiler must learn how its own children end
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imported modules must not mix with the answers
    while select.select([sys.stdin], [], [], _IDLE_S)[0] and (line := sys.stdin.readline()):
        request = json.loads(line)
        tunable = load(request["module"], request["kernel"])
        configs = [Config(**config) for config in request["configs"]]
        # Where the parent is gone the alarm ends this, also in a call that holds the interpreter.
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + _PARENT_S)
        best = search(tunable, Problem(request["problem"]), configs, request["device"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        if best is None:
            sys.exit(1)
        torch.cuda.empty_cache()
        print(json.dumps({"best": configs.index(best[0]), "mean_us": best[1]}), file=answers, flush=True)


def _end_with(parent: int) -> None:
    """End this process, and what it started, with its parent, which may be killed."""
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    with suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


_kernels_of = cache(HintedKernels)
"""Kernels of a declaration, kept: another bucket may have the same signature."""


def search(
    tunable: Declaration, problem: Problem, configs: Sequence[Config], device_index: int
) -> tuple[Config, float] | None:
    """Return the fastest of the configs with correct results, and its mean in microseconds."""
    here = runtime()
    device = here.device(device_index)
    with here.entered(device_index):
        args = tunable.make_args(problem, f"cuda:{device_index}", 0)
        kernels = _kernels_of(tunable)
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
