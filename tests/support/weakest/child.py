"""A child process that runs shipped kernels as their weakest cubins on a GPU and compares the results.

A process of its own, since tests of the tuner need theirs to have no CUDA context. Prints a line of JSON a
launch, ``[kernel, case, "right" or what is wrong]``, and ``[kernel, "cubins", how many it was served]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cuda.tile as ct
import torch

from aot_tune.declare.comparison import compare, poison
from aot_tune.declare.declaration import Close
from aot_tune.errors import AotTuneError
from aot_tune.nvidia import cutile
from aot_tune.tunable import Tunable
from aot_tune.tuner.archives.signatures import Compilation
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.weakest.cases import Case, cases, compilation_of, compiled, weakest
from tests.support.weakest.large import LARGE

GPU = "cuda:0"
BEYOND = "more than 2^31 elements, odd strides"
Run = Callable[[Tunable, Problem, tuple[Any, ...]], None]


def main(names: Sequence[str]) -> None:
    """Compile all that is needed on all cores, then run every case of the kernels, and the large tensors."""
    properties = torch.cuda.get_device_properties(0)
    arch = Arch(properties.major, properties.minor)
    cubins = compiled(wanted(names, arch), arch)
    device = Device.reference(arch).with_sm_count(properties.name, properties.multi_processor_count)
    weak = Weakest(device, cubins)
    for name in names:
        weak.used.clear()
        for case in cases(name):
            say(name, case.name, verdict(case, GPU, weak.run))
        say(name, "cubins", len(weak.used))
        if name in LARGE:
            _, made, check = LARGE[name]
            say(name, BEYOND, check(made(GPU), weak.run))
            torch.cuda.empty_cache()


def wanted(names: Sequence[str], arch: Arch) -> dict[str, set[Compilation]]:
    """All that the cases of some kernels, and their large tensors, need compiled."""
    each = {name: set(weakest(name, arch)) for name in names}
    for name, (tunable, made, _) in LARGE.items():
        if name in each:
            args = made("meta")
            each[name].add(compilation_of(tunable, Problem(tunable.problem(*args)), args, arch))
    return each


def say(*what: object) -> None:
    """Print at once: the next launch may end the process."""
    print(json.dumps(what), flush=True)


def verdict(case: Case, device: str, run: Run) -> str:
    """Run a case; "right", or what is wrong."""
    tunable, args = case.tunable, case.args(device)
    answer = tunable.reference(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))
    expected = {tunable.mutated[0]: answer} if isinstance(answer, Close) else answer
    if expected.keys() != set(tunable.mutated):
        return f"the reference tells of {sorted(expected)}, and not of {sorted(tunable.mutated)}"
    named = dict(zip(tunable.parameters, args, strict=True))
    for name in tunable.output_names:
        poison(named[name], 0)
    try:
        run(tunable, case.problem, args)
    except AotTuneError as error:
        return f"not launched: {error}"
    wrong = (compare(name, named[name], close) for name, close in expected.items())
    return next((text for text in wrong if text), "right")


class Weakest:
    """Launches defaults, served by weakest cubins alone.

    Args:
        device: The GPU.
        cubins: By kernel and what they were compiled for.
    """

    def __init__(self, device: Device, cubins: Mapping[tuple[str, Compilation], bytes]) -> None:
        self.used: set[Compilation] = set()
        self._device, self._cubins = device, cubins
        self._kernels: dict[tuple[str, Any], Any] = {}

    def run(self, tunable: Tunable, problem: Problem, args: tuple[Any, ...]) -> None:
        """One launch, waited for."""
        config = tunable.default_config(self._device.arch, problem)
        grid = tuple(tunable.grid_fn(config, self._device, problem))
        passed = tuple(tunable.args_fn(config, *args))
        self.used.add(compilation_of(tunable, problem, args, self._device.arch))
        kernel = self._hinted(tunable, config.hints)
        ct.launch(torch.cuda.current_stream().cuda_stream, grid, kernel, passed)
        torch.cuda.synchronize()

    def _hinted(self, tunable: Tunable, hints: Mapping[str, int]) -> Any:
        """The kernel with these hints, made once and never dropped."""
        key = tuple(hints.items())

        def source(signature: str, arch: Arch) -> cutile.Cubin:
            weak = cutile.weakest_signature(tunable.kernel, signature)
            return cutile.Cubin(
                self._cubins[tunable.name, Compilation(key, weak)], cutile.symbol_of(tunable.kernel)
            )

        if (tunable.name, key) not in self._kernels:
            self._kernels[tunable.name, key] = cutile.with_hints(tunable.kernel, hints, source)
        return self._kernels[tunable.name, key]


if __name__ == "__main__":
    main(sys.argv[1:])
