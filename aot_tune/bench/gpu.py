"""Time configs on this machine's GPU for the benches. Cubins are compiled in parallel before."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.tune import exhaustive_search

from aot_tune.declare.discovery import FoundKernel, find_tunables
from aot_tune.nvidia import cutile
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.measure.worker.clock import EventRound
from aot_tune.tuner.measure.worker.gpu import MOST_SAMPLES
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, plan, plan_only
from aot_tune.tuner.plan.shortlist import Shortlist, shortlist
from aot_tune.tuner.sweep.resources import CUBINS
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_SAMPLES = 21
"""Number of calls whose median `flushed_us` takes."""


@contextmanager
def this_gpu() -> Iterator[BenchGpu]:
    """Open the GPU, with a compile feed over the folder of cubins that sweeps use too."""
    with CompileFeed(partial(CompilePool, usable_cores(), folder=CUBINS, yielding=True)) as feed:
        yield BenchGpu(feed)


def shipped() -> dict[str, FoundKernel]:
    """Return the shipped kernels by name."""
    return find_tunables(["aot_tune.kernels"])


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Times of all candidates of a problem, from one run."""

    problem: Problem
    """Timed problem."""

    us: dict[Config, float]
    """Mean time in microseconds of each config that ran."""

    listed: Shortlist
    """Candidates that compiled, in the model's order, and refused ones."""


class BenchGpu:
    """Current device, with a feed that compiles for it.

    Args:
        feed: The feed that compiles the launched cubins.
    """

    def __init__(self, feed: CompileFeed) -> None:
        cutile.limit_samples(MOST_SAMPLES)
        properties = torch.cuda.get_device_properties(0)
        self.arch = Arch.parse((properties.major, properties.minor))
        self.device = Device.reference(self.arch).with_sm_count(
            properties.name, properties.multi_processor_count
        )
        self.torch_device = torch.device("cuda", 0)
        self._feed = feed
        self._kernels: dict[tuple[object, ...], Any] = {}
        self._round = EventRound()

    def plans(
        self, kernel: FoundKernel, problems: Sequence[Problem]
    ) -> tuple[DeviceKernel, tuple[ProblemPlan, ...]]:
        """Plan problems and start compiling all their candidates."""
        planned = plan(kernel, self.arch, problems, device=self.device)
        self._feed.submit(planned.jobs)
        return planned.kernel, planned.problems

    def plan_configs(self, kernel: DeviceKernel, problem: Problem, configs: Sequence[Config]) -> ProblemPlan:
        """Plan some configs of a problem and its default, and start compiling them."""
        planned = plan_only(kernel, problem, configs)
        self._feed.submit(planned.jobs.values())
        return planned

    def plan_served(self, kernel: DeviceKernel, problem: Problem, configs: Sequence[Config]) -> ProblemPlan:
        """Plan configs like `plan_configs`, also of other problems' spaces, as serving takes them."""
        wanted = dict.fromkeys((kernel.default(problem), *configs))
        admitted = tuple(config for config in wanted if kernel.failure(problem, config) is None)
        jobs = {config: kernel.job(problem, config) for config in admitted}
        self._feed.submit(jobs.values())
        return ProblemPlan(
            problem=problem, default=kernel.default(problem), incumbent=None, candidates=admitted, refused=(),
            jobs=jobs,
        )  # fmt: skip

    def cubins(self, planned: ProblemPlan) -> dict[Config, Path]:
        """Wait for a plan's compilations; return the cubin of each config that compiled."""
        results = self._feed.wait({job.key for job in planned.jobs.values()}, lambda: None)
        return {
            config: result.path
            for config, job in planned.jobs.items()
            if isinstance(result := results[job.key], Compiled)
        }

    def launcher(
        self, kernel: DeviceKernel, problem: Problem, config: Config, cubin: Path, args: Sequence[Any]
    ) -> Callable[[], object]:
        """Make a function that launches a config on the current stream and does nothing else."""
        ready, grid = self._kernel(kernel.tunable, cubin, config), kernel.grid(problem, config)
        arguments = tuple(kernel.tunable.args_fn_on(kernel.device)(config, *args))
        return lambda: ct.launch(torch.cuda.current_stream().cuda_stream, grid, ready, arguments)

    def exhaustive(self, kernel: DeviceKernel, planned: ProblemPlan) -> Timed:
        """Time every candidate that compiles, fits the device and does not spill registers."""
        keys = {job.key for job in planned.jobs.values()}
        compiled = self._feed.wait(keys, lambda: None)
        listed = shortlist(kernel, planned, compiled, exhaustive=True)
        return Timed(problem=planned.problem, us=self.times(kernel, planned, listed.configs), listed=listed)

    def times(
        self, kernel: DeviceKernel, planned: ProblemPlan, configs: Sequence[Config]
    ) -> dict[Config, float]:
        """Time some configs of one problem. Before each run L2 is filled with other data."""
        results = self._feed.wait({planned.jobs[config].key for config in configs}, lambda: None)
        paths = {
            config: result.path
            for config in configs
            if isinstance(result := results[planned.jobs[config].key], Compiled)
        }
        tunable = kernel.tunable
        args = tunable.make_args(planned.problem, self.torch_device, 0)

        def fresh(config: Config) -> tuple[Any, ...]:
            self._round.flush()
            return tuple(tunable.args_fn_on(kernel.device)(config, *args))

        result = exhaustive_search(
            list(paths),
            torch.cuda.current_stream().cuda_stream,
            lambda config: kernel.grid(planned.problem, config),
            lambda config: self._kernel(tunable, paths[config], config),
            fresh,
            quiet=True,
            flush_l2=False,
        )
        return {measurement.config: measurement.mean_us for measurement in result.successes}

    def flushed_us(self, call: Callable[[], object]) -> float:
        """Return a call's median GPU time, microseconds. Before each call L2 is filled with other data."""
        for _ in range(3):
            call()
        return statistics.median(self._round([call] * _SAMPLES))

    def _kernel(self, tunable: Any, path: Path, config: Config) -> Any:
        key = (tunable.name, config.kernel, path, tuple(config.hints.items()))
        if key not in self._kernels:
            cubin = path.read_bytes()
            self._kernels[key] = cutile.with_hints(
                tunable.kernel_of(config),
                config.hints,
                lambda symbol, arch: (
                    cutile.Cubin(cubin, symbol) if symbol.encode() + b"\0" in cubin else None
                ),
            )
        return self._kernels[key]
