"""Time the declared shapes of a kernel against its rivals on this machine's GPU. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from aot_tune.bench.gpu import BenchGpu
from aot_tune.bench.kernels.contest import ROUNDS, WARM_UPS, Call, Round, contest
from aot_tune.bench.kernels.standard import Rival, Standard
from aot_tune.bench.kernels.standing import COPY, DEFAULT, FLOOR, NOISE, READ, TUNED, Shape
from aot_tune.errors import TuneError
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

MORE_ROUNDS = 3 * ROUNDS
"""Rounds of a second contest where the tuned config looks slower than its default: under a power cap a single
median moves by more than noise."""

SETTLE_S = 0.05
"""Seconds for which a shape's contenders take turns before a round counts. The shape before leaves the GPU in
another state: right after seconds of products at full power a product of 256 x 5120 x 2048 took 18.7 us and
cuBLAS 14.2 us, and after 20 ms 15.8 us and 13.1 us (one H200, one process)."""


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """One kernel on this process's GPU."""

    gpu: BenchGpu
    """Compiles the cubins in parallel, and launches them."""

    kernel: DeviceKernel
    """Kernel on that GPU."""

    standard: Standard
    """Rivals, work and demands."""

    rounds: Round
    """Times one round of calls."""

    ceilings: Mapping[str, float]
    """Rates that `aot_tune.bench.kernels.contest.ceilings` measured."""

    def shapes(self, problems: Sequence[Problem], until: float) -> Iterator[Shape]:
        """Time one problem after another; start none after `until` on the clock of `time.monotonic`."""
        choose = dispatcher_of(self.kernel.tunable).choice
        chosen = {problem: choose(self.gpu.arch, problem).config for problem in problems}
        plans = [self.gpu.plan_configs(self.kernel, problem, [tuned]) for problem, tuned in chosen.items()]
        floors = self._floors(chosen)
        for plan in plans:
            if time.monotonic() > until:
                return
            yield self._shape(plan, chosen[plan.problem], floors.get(plan.problem))
            torch.cuda.empty_cache()

    def _floors(self, chosen: Mapping[Problem, Config]) -> dict[Problem, Rival]:
        """Return functions that launch the standard's floor, by problem; empty where it has no floor."""
        if self.standard.floor is None:
            return {}
        floor = DeviceKernel(self.standard.floor, self.kernel.arch, self.kernel.device)
        plans = {problem: self.gpu.plan_configs(floor, problem, [tuned]) for problem, tuned in chosen.items()}
        return {
            problem: lambda *args, plan=plan, tuned=chosen[problem]: self._ours(floor, plan, tuned, args)
            for problem, plan in plans.items()
        }

    def _shape(self, plan: ProblemPlan, tuned: Config, floor: Rival | None) -> Shape:
        args = self.kernel.tunable.make_args(plan.problem, self.gpu.torch_device, 0)
        moved, flops = self.standard.work(self.kernel.tunable, plan.problem, args)
        dtype = self.standard.matrix_dtype_of(plan.problem)
        contenders: dict[str, Callable[[], Call]] = {
            TUNED: partial(self._ours, self.kernel, plan, tuned, args)
        }
        if tuned != plan.default:
            contenders[DEFAULT] = partial(self._ours, self.kernel, plan, plan.default, args)
        if floor is not None:
            contenders[FLOOR] = partial(floor, *args)
        if self.standard.copies:
            contenders[COPY] = partial(_copy, int(moved) // 2)
        if self.standard.reads:
            contenders[READ] = partial(_sum, int(moved))
        torch._dynamo.reset()  # it compiles at most eight shapes of one function
        contenders.update({name: partial(rival, *args) for name, rival in self.standard.rivals.items()})
        failed: dict[str, str] = {}
        us = timed(contenders, self.rounds, failed)
        if tuned == plan.default and TUNED in us:
            us[DEFAULT] = us[TUNED]
        bounds = moved / self.ceilings["copy"], flops / self.ceilings[dtype] if dtype else 0.0
        return Shape(
            problem=dict(plan.problem),
            config=str(tuned),
            bytes=moved,
            flops=flops,
            roofline_us=1e6 * max(bounds),
            us={name: round(value, 2) for name, value in us.items()},
            failed=failed,
        )

    def _ours(self, kernel: DeviceKernel, plan: ProblemPlan, config: Config, args: Sequence[Any]) -> Call:
        cubin = self.gpu.cubins(plan).get(config)
        if cubin is None:
            raise TuneError(f"{config} does not compile")
        return self.gpu.launcher(kernel, plan.problem, config, cubin, args)


_EVEN = 4096
"""Divisor of the bytes of copies: other sizes take 3 us longer (H200) and would flatter kernels."""


def _copy(size: int) -> Call:
    source = torch.ones(-(-size // _EVEN) * _EVEN, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _sum(size: int) -> Call:
    return torch.ones(size // 4, device="cuda").sum


def timed(
    contenders: Mapping[str, Callable[[], Call]], rounds: Round, failed: dict[str, str]
) -> dict[str, float]:
    """Warm up, let the GPU settle, and time the contenders; note in `failed` why a contender cannot run."""
    calls: dict[str, Call] = {}
    for name, make in contenders.items():
        try:
            call = make()
            for _ in range(WARM_UPS):
                call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # a rival may raise anything
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    until = time.monotonic() + SETTLE_S
    while calls and time.monotonic() < until:
        rounds(list(calls.values()))
    us = contest(calls, rounds) if calls else {}
    if DEFAULT in us and TUNED in us and us[DEFAULT] < us[TUNED] * (1 - NOISE):
        us |= contest({name: calls[name] for name in (TUNED, DEFAULT)}, rounds, rounds=MORE_ROUNDS)
    return us
