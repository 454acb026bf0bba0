"""Measure at problems that nobody declared what the choice of a config leaves, in each state of the GPU.

Each problem is measured in two runs; in each, all configs take turns. All samples go to a journal, from which
the next call goes on, so that several calls of a few minutes add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aot_tune.bench import words
from aot_tune.bench.gpu import BenchGpu, shipped, this_gpu
from aot_tune.bench.sections.part import Part, Request
from aot_tune.bench.states.timing import COOL, LOADED, StateClock, renewing
from aot_tune.bench.undeclared.figures import RIVAL, RUNS, TOGETHER, Seen, figures
from aot_tune.bench.undeclared.journal import Journal, Key, Samples, Taken
from aot_tune.bench.undeclared.problems import BATCH, FACTOR, KERNELS, Drawn, drawn
from aot_tune.choose.legality import Legality
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.nvidia import cutile
from aot_tune.serve import loader
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan
from aot_tune.values.config import Config
from aot_tune.values.lazy import lazy
from aot_tune.values.text import error_in_words

_SAMPLES = 11
"""Launches of each config in each state of a run."""

_HOPELESS = 2.0
"""A config that takes this many times as long as the fastest, in one launch each, is not measured further."""

_TRIES = 3
"""Most times that the samples of a problem are taken in a row, where launches are held up."""

_DISTURBED = "most launches of a config were held up; a call on an idle machine takes the samples again"


def run(request: Request) -> Iterator[Part]:
    """Measure what the journal lacks until the time is up; then yield the figures of all that it holds.

    Raises:
        UsageError: No problems are drawn of one of the asked kernels.
    """
    names = request.kernels or KERNELS
    words.check_known(names, KERNELS, "no problems are drawn of")
    until = time.monotonic() + request.limit_s
    journal = Journal(Path(request.journal))
    found = shipped()
    with this_gpu() as gpu:
        clock = StateClock()
        kernels = [_Kernel(gpu, clock, found[name], drawn(name)[: request.problems]) for name in names]
        for number in range(RUNS):
            for kernel in kernels:
                kernel.measure(journal, number, until)
        every: list[Seen] = []
        for kernel in kernels:
            seen, failed = kernel.seen(journal)
            every += seen
            yield Part(
                name=kernel.name, kernels=(kernel.name,), figures=figures(seen, len(kernel.drawn), failed)
            )
        if len(kernels) > 1:
            yield Part(
                name=TOGETHER,
                kernels=tuple(kernel.name for kernel in kernels),
                figures=figures(every, sum(len(kernel.drawn) for kernel in kernels)),
            )


@dataclass(frozen=True)
class _Kernel:
    """The drawn problems of one kernel on this GPU."""

    gpu: BenchGpu
    clock: StateClock
    found: FoundKernel
    drawn: Sequence[Drawn]

    @property
    def name(self) -> str:
        return self.found.tunable.name

    @lazy
    def _kernel(self) -> DeviceKernel:
        return DeviceKernel(self.found, self.gpu.arch, self.gpu.device)

    @lazy
    def _portfolio(self) -> tuple[Config, ...]:
        tables = loader.load(self.found.tunable, self.gpu.arch).tables
        return tuple(dict.fromkeys(config for one in tables for config in one.table.portfolio))

    @lazy
    def _legality(self) -> Legality:
        return Legality(self.found.tunable, self.gpu.arch)

    @lazy
    def _code(self) -> dict[str, str]:
        compiler = cutile.compiler_version() or "none"
        return {"source_hash": source_hash(self.found.tunable), "tileiras": compiler}

    def chosen(self, one: Drawn) -> Config:
        """The config that serving takes for a problem."""
        return (
            dispatcher_of(self.found.tunable)
            .choice(self.gpu.arch, one.problem, device=self.gpu.device)
            .config
        )

    def configs(self, one: Drawn) -> tuple[Config, ...]:
        """The choice and the default, then what they are compared with."""
        tunable = self.found.tunable
        whole = tunable.candidates(self.gpu.arch, one.problem) if one.whole else ()
        served = [c for c in self._portfolio if self._legality.refusal(c, one.problem) is None]
        return tuple(dict.fromkeys((self.chosen(one), self._default(one), *served, *whole)))

    def measure(self, journal: Journal, number: int, until: float) -> None:
        """Measure the problems that a run lacks. Their compilations are all submitted before."""
        missing = [one for one in self.drawn if not self._is_known(journal, one, number)]
        if not missing or time.monotonic() > until:
            return
        plans = [self.gpu.plan_served(self._kernel, one.problem, self.configs(one)) for one in missing]
        for one, plan in zip(missing, plans, strict=True):
            if time.monotonic() > until:
                return
            key = self._key(one, number)
            journal.begin(key)
            taken = self._taken(one, plan)
            for _ in range(_TRIES - 1):
                if not taken.disturbed or time.monotonic() > until:
                    break
                again = self._taken(one, plan)
                taken = again if again.failed is None else taken
            journal.keep(key, taken)

    def _taken(self, one: Drawn, plan: ProblemPlan) -> Taken:
        try:
            return Taken(us=samples(self.gpu, self.clock, self._kernel, one, plan))
        except Exception as error:  # others may still succeed
            return Taken(us={}, failed=error_in_words(error))

    def seen(self, journal: Journal) -> tuple[list[Seen], list[str]]:
        """The problems that the journal has samples of, in as many runs as it has; and why others failed."""
        seen, failed = [], []
        for one in self.drawn:
            taken = [journal.taken(self._key(one, number)) for number in range(RUNS)]
            chosen, default = str(self.chosen(one)), str(self._default(one))
            runs = [
                each.us
                for each in taken
                if each and not each.disturbed and {chosen, default} <= each.us.keys()
            ]
            why = [
                each.failed or (_DISTURBED if each.disturbed and not runs else "") for each in taken if each
            ]
            failed += [f"{one.problem}: {each}" for each in why if each][:1]
            if runs:
                seen.append(
                    Seen(
                        problem=f"{self.name} {one.problem}",
                        runs=runs,
                        chosen=chosen,
                        default=default,
                        portfolio=tuple(map(str, self._portfolio)),
                        whole=one.whole,
                        ragged=one.problem.size(BATCH[self.name]) % FACTOR != 0,
                    )
                )
        return seen, failed

    def _default(self, one: Drawn) -> Config:
        return self.found.tunable.default_config(self.gpu.arch, one.problem)

    def _is_known(self, journal: Journal, one: Drawn, number: int) -> bool:
        """Whether a run has a problem's samples, with those of the config that is chosen now."""
        taken = journal.taken(self._key(one, number))
        if taken is None or taken.failed is not None:
            return taken is not None
        return not taken.disturbed and {str(self.chosen(one)), str(self._default(one))} <= taken.us.keys()

    def _key(self, one: Drawn, number: int) -> Key:
        device = self.gpu.device.name
        return Key(kernel=self.name, problem=str(one.problem), run=number, device=device, **self._code)


def samples(gpu: BenchGpu, clock: StateClock, kernel: DeviceKernel, one: Drawn, plan: ProblemPlan) -> Samples:
    """Take the samples of a problem's configs, and of the rival where it has one."""
    tunable, problem = kernel.tunable, one.problem
    cubins = gpu.cubins(plan)
    seeds = [tunable.make_args(problem, gpu.torch_device, seed) for seed in (0, 1)]
    renewed = renewing(tunable, seeds)
    runs = {
        str(config): [gpu.launcher(kernel, problem, config, cubins[config], args) for args in seeds]
        for config in plan.candidates
        if config in cubins
    }
    once = {name: clock.once(launches, renewed) for name, launches in runs.items()}
    chosen = str(dispatcher_of(tunable).choice(gpu.arch, problem, device=gpu.device).config)
    kept = {chosen, str(plan.default)}
    limit = _HOPELESS * min(once.values())
    runs = {name: launches for name, launches in runs.items() if name in kept or once[name] <= limit}
    if tunable.name in _RIVALS:
        runs[RIVAL] = [_RIVALS[tunable.name](args) for args in seeds]
    found = clock.samples(runs, renewed, (*COOL, *LOADED) if one.capped else COOL, _SAMPLES)
    del runs, seeds, renewed
    torch.cuda.empty_cache()
    return {
        name: {state: [round(us, 3) for us in own] for state, own in by_state.items()}
        for name, by_state in found.items()
    }


def _product(args: Sequence[Any]) -> Callable[[], object]:
    a, b, out = args[:3]
    return lambda: torch.mm(a, b, out=out)


def _linear(args: Sequence[Any]) -> Callable[[], object]:
    x, weight, out = args[:3]
    return lambda: torch.mm(x, weight.t(), out=out)


_RIVALS: dict[str, Callable[[Sequence[Any]], Callable[[], object]]] = {"matmul": _product, "linear": _linear}
"""What else multiplies, by kernel; it writes the result in place of the kernel."""
