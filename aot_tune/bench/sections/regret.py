"""Measure the regret of the chosen configs at undeclared problems, in each state of the GPU.

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
"""Slowdown against the fastest config, in one launch each, beyond which a config is not measured further."""

_TRIES = 3
"""Most attempts in a row at the samples of a problem, where launches are held up."""

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
    kernels_by_name = shipped()
    with this_gpu() as gpu:
        clock = StateClock()
        kernels = [
            _Kernel(gpu, clock, kernels_by_name[name], drawn(name)[: request.problems]) for name in names
        ]
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
    """Drawn problems of a kernel on this GPU."""

    gpu: BenchGpu
    clock: StateClock
    declared: FoundKernel
    drawn: Sequence[Drawn]

    @property
    def name(self) -> str:
        return self.declared.tunable.name

    @lazy
    def _kernel(self) -> DeviceKernel:
        return DeviceKernel(self.declared, self.gpu.arch, self.gpu.device)

    @lazy
    def _portfolio(self) -> tuple[Config, ...]:
        tables = loader.load(self.declared.tunable, self.gpu.arch).tables
        return tuple(dict.fromkeys(config for table in tables.values() for config in table.portfolio))

    @lazy
    def _legality(self) -> Legality:
        return Legality(self.declared.tunable, self.gpu.arch)

    @lazy
    def _code(self) -> dict[str, str]:
        compiler = cutile.compiler_version() or "none"
        return {"source_hash": source_hash(self.declared.tunable), "tileiras": compiler}

    def chosen(self, draw: Drawn) -> Config:
        """Return the config that serving takes for a problem."""
        return (
            dispatcher_of(self.declared.tunable)
            .choice(self.gpu.arch, draw.problem, device=self.gpu.device)
            .config
        )

    def configs(self, draw: Drawn) -> tuple[Config, ...]:
        """Return the choice and the default, then the configs that they are compared with."""
        tunable = self.declared.tunable
        whole = tunable.candidates(self.gpu.arch, draw.problem) if draw.whole else ()
        served = [c for c in self._portfolio if self._legality.refusal(c, draw.problem) is None]
        return tuple(dict.fromkeys((self.chosen(draw), self._default(draw), *served, *whole)))

    def measure(self, journal: Journal, number: int, until: float) -> None:
        """Measure the problems that a run lacks. Their compilations are all submitted before."""
        missing = [draw for draw in self.drawn if not self._is_known(journal, draw, number)]
        if not missing or time.monotonic() > until:
            return
        plans = [self.gpu.plan_served(self._kernel, draw.problem, self.configs(draw)) for draw in missing]
        for draw, plan in zip(missing, plans, strict=True):
            if time.monotonic() > until:
                return
            key = self._key(draw, number)
            journal.begin(key)
            taken = self._taken(draw, plan)
            for _ in range(_TRIES - 1):
                if not taken.disturbed or time.monotonic() > until:
                    break
                again = self._taken(draw, plan)
                taken = again if again.failed is None else taken
            journal.keep(key, taken)

    def _taken(self, draw: Drawn, plan: ProblemPlan) -> Taken:
        try:
            return Taken(us=samples(self.gpu, self.clock, self._kernel, draw, plan))
        except Exception as error:  # others may still succeed
            return Taken(us={}, failed=error_in_words(error))

    def seen(self, journal: Journal) -> tuple[list[Seen], list[str]]:
        """Return the problems with samples in the journal, in as many runs as it has; and other failures."""
        seen, failed = [], []
        for draw in self.drawn:
            taken = [journal.taken(self._key(draw, number)) for number in range(RUNS)]
            chosen, default = str(self.chosen(draw)), str(self._default(draw))
            runs = [
                outcome.us
                for outcome in taken
                if outcome and not outcome.disturbed and {chosen, default} <= outcome.us.keys()
            ]
            why = [
                outcome.failed or (_DISTURBED if outcome.disturbed and not runs else "")
                for outcome in taken
                if outcome
            ]
            failed += [f"{draw.problem}: {reason}" for reason in why if reason][:1]
            if runs:
                seen.append(
                    Seen(
                        problem=f"{self.name} {draw.problem}",
                        runs=runs,
                        chosen=chosen,
                        default=default,
                        portfolio=tuple(map(str, self._portfolio)),
                        whole=draw.whole,
                        ragged=draw.problem.size(BATCH[self.name]) % FACTOR != 0,
                    )
                )
        return seen, failed

    def _default(self, draw: Drawn) -> Config:
        return self.declared.tunable.default_config(self.gpu.arch, draw.problem)

    def _is_known(self, journal: Journal, draw: Drawn, number: int) -> bool:
        """Whether a run has a problem's samples, with those of the config that is chosen now."""
        taken = journal.taken(self._key(draw, number))
        if taken is None or taken.failed is not None:
            return taken is not None
        return not taken.disturbed and {str(self.chosen(draw)), str(self._default(draw))} <= taken.us.keys()

    def _key(self, draw: Drawn, number: int) -> Key:
        device = self.gpu.device.name
        return Key(kernel=self.name, problem=str(draw.problem), run=number, device=device, **self._code)


def samples(
    gpu: BenchGpu, clock: StateClock, kernel: DeviceKernel, draw: Drawn, plan: ProblemPlan
) -> Samples:
    """Take the samples of a problem's configs, and of the rival where it has one."""
    tunable, problem = kernel.tunable, draw.problem
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
    taken = clock.samples(runs, renewed, (*COOL, *LOADED) if draw.capped else COOL, _SAMPLES)
    del runs, seeds, renewed
    torch.cuda.empty_cache()
    return {
        name: {state: [round(us, 3) for us in own] for state, own in by_state.items()}
        for name, by_state in taken.items()
    }


def _product(args: Sequence[Any]) -> Callable[[], object]:
    a, b, out = args[:3]
    return lambda: torch.mm(a, b, out=out)


def _linear(args: Sequence[Any]) -> Callable[[], object]:
    x, weight, out = args[:3]
    return lambda: torch.mm(x, weight.t(), out=out)


_RIVALS: dict[str, Callable[[Sequence[Any]], Callable[[], object]]] = {"matmul": _product, "linear": _linear}
"""Rival products by kernel; each writes the result in place of the kernel."""
