"""Time configs of a matmul or linear, and each with a stage left out, in every state of this machine's GPU.

States: before each launch L2 is filled by reading (read) or by writing (written); launches in a tight row
(tight); the first two also after twenty large products, at the power cap (loaded).

    python -m aot_tune.bench.states matmul --problem dtype=bfloat16,M=885,N=5120,K=25600
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import cuda.tile as ct
import orjson
import torch
import typer

from aot_tune.bench import words
from aot_tune.bench.gpu import BenchGpu, shipped, this_gpu
from aot_tune.bench.states import stages
from aot_tune.bench.states.timing import COOL, LOADED, Launch, StateClock, renewing
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.selection import chosen_problems, parse_problem
from aot_tune.errors import UsageError
from aot_tune.serve import loader
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned

_BY_ROWS = {"matmul": False, "linear": True}
"""Whether B is (N, K), by kernel whose stages can be left out."""

_SAMPLES = 11
"""Launches in each state of which the median is taken."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments request; return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    return words.called(_printed, given, "python -m aot_tune.bench.states")


def _printed(
    kernel: Annotated[str, typer.Argument(help="matmul or linear.")],
    problem: Annotated[str, typer.Option(metavar="M=300,...", help="All values of a problem.")],
    most: Annotated[
        int, typer.Option(min=1, help="Most configs: the chosen one, the default, then the portfolio's.")
    ] = 4,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File of the figures, JSON.")] = None,
) -> int:
    """Time configs of a problem, and each with a stage left out, in every state of this machine's GPU."""
    if not torch.cuda.is_available():
        print("aot_tune.bench.states: no GPU here; run it on a GPU host", file=sys.stderr)
        return 1
    if kernel not in _BY_ROWS:
        raise UsageError(f"{kernel} has no stages to leave out; there is {' '.join(_BY_ROWS)}")
    declared = shipped()[kernel]
    [chosen, *more] = chosen_problems(declared.tunable, parse_problem(problem))
    if more:
        raise UsageError(f"{1 + len(more)} problems agree; give all values, as in {chosen}")
    with this_gpu() as gpu:
        rows = _measured(gpu, declared, chosen, most)
    print(f"{kernel} {chosen} on {torch.cuda.get_device_name(0)}, medians of {_SAMPLES}, us")
    states = list(next(iter(rows.values()), {}))
    print("\n".join(aligned([("", *states), *(_row(name, times, states) for name, times in rows.items())])))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2))
    return 0


def _row(name: str, times: Mapping[str, float], states: Sequence[str]) -> tuple[str, ...]:
    return name, *(f"{times[state]:.1f}" for state in states)


def _measured(
    gpu: BenchGpu, declared: FoundKernel, problem: Problem, most: int
) -> dict[str, dict[str, float]]:
    """Return the times of each config, and of each with a stage left out, by state."""
    tunable = declared.tunable
    kernel, _ = gpu.plans(declared, [problem])
    configs = worth_timing(kernel, problem)[:most]
    plan = gpu.plan_configs(kernel, problem, configs)
    cubins = gpu.cubins(plan)
    seeds = [tunable.make_args(problem, gpu.torch_device, seed) for seed in (0, 1)]
    runs: dict[str, list[Launch]] = {}
    for config in (config for config in configs if config in cubins):
        runs[str(config)] = [gpu.launcher(kernel, problem, config, cubins[config], args) for args in seeds]
        if stages.takes(config):
            for name, launches in _staged(kernel, problem, config, seeds):
                runs[f"   {name}: {config}"] = launches
    renewed = renewing(tunable, seeds)
    return _times(runs, renewed)


def worth_timing(kernel: DeviceKernel, problem: Problem) -> list[Config]:
    """Return the chosen config, the default, and the portfolio's, all of which may run there."""
    tunable, arch = kernel.tunable, kernel.arch
    known = [
        dispatcher_of(tunable).choice(arch, problem, device=kernel.device).config,
        tunable.default_config(arch, problem),
        *(config for table in loader.load(tunable, arch).tables.values() for config in table.portfolio),
    ]
    legal = set(tunable.candidates(arch, problem))
    return [config for config in dict.fromkeys(known) if config in legal]


def _staged(
    kernel: DeviceKernel, problem: Problem, config: Config, seeds: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[str, list[Launch]]]:
    """Make launches of each variant of a config, on each set of arguments; the first launch compiles."""
    hinted, grid = stages.staged_kernel.replace_hints(**config.hints), kernel.grid(problem, config)

    def launch(args: tuple[Any, ...], variant: stages.Variant) -> Launch:
        own = (*args[:3], *stages.constants(config, variant, by_rows=_BY_ROWS[kernel.tunable.name]))
        return lambda: ct.launch(torch.cuda.current_stream().cuda_stream, grid, hinted, own)

    for name, variant in stages.VARIANTS.items():
        yield name, [launch(args, variant) for args in seeds]


def _times(runs: Mapping[str, list[Launch]], renewed: Sequence[Launch]) -> dict[str, dict[str, float]]:
    """Return the median of each run in each state."""
    taken = StateClock().samples(runs, renewed, (*COOL, *LOADED), _SAMPLES)
    return {
        name: {state: round(statistics.median(us), 2) for state, us in by_state.items()}
        for name, by_state in taken.items()
    }


if __name__ == "__main__":
    sys.exit(main())
