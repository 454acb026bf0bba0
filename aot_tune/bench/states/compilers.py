"""Find out what another compiler changes: compile the same configs by each, then time both codes on a GPU.

    python -m aot_tune.bench.states.compilers matmul rms_norm                         for each compiler
    python -m aot_tune.bench.states.compilers matmul rms_norm --time 13.4.92 13.5.37  on a GPU host

The first needs no GPU: it compiles for the arch, config by config, and keeps the cubins in a folder named
after its compiler. The second launches the cubins of both in turn, in each state of the GPU, and prints for
each kernel how long the second compiler's code takes beside the first one's, as a geometric mean.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aot_tune.bench.gpu import BenchGpu, shipped, this_gpu
from aot_tune.bench.states.configs import worth_timing
from aot_tune.bench.states.timing import COOL, LOADED, Launch, StateClock, renewing
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.declare.selection import chosen_kernels
from aot_tune.errors import AotTuneError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileJob, cached
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.tuner.plan.sizes import spread
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.parts import flat
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned

_FOLDER = Path("build/compilers")
"""The folder of the compilers' folders."""

_SAMPLES = 11
"""Launches of each code in each state of which the median is taken."""

_STATES = (*COOL, *LOADED)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A config of a problem."""

    problem: Problem
    """The problem."""

    config: Config
    """The config."""

    job: CompileJob
    """The compilation that it needs; its key is the same whatever compiler is installed."""


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A config whose code of both compilers was timed."""

    case: _Case
    """The config and its problem."""

    us: tuple[Mapping[str, float], Mapping[str, float]]
    """The median of each state, microseconds: of the first compiler's code, of the second one's."""

    same_code: bool
    """Whether both made the same machine code."""

    same_bits: bool
    """Whether both computed the same bits."""

    def ratio(self, state: str) -> float:
        """The second code's time over the first one's."""
        return self.us[1][state] / self.us[0][state]


def main(words: Sequence[str] | None = None) -> int:
    """Compile, or time what was compiled; return the exit status."""
    options = _parser().parse_args(words)
    try:
        chosen = chosen_kernels(shipped(), options.kernels)
        if options.time is not None:
            _time(chosen, options)
        else:
            _compile(chosen, options)
    except AotTuneError as error:
        print(f"aot_tune.bench.states.compilers: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aot_tune.bench.states.compilers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernels", nargs="+", help="shipped kernels")
    parser.add_argument("--arch", default="sm90", help="the arch to compile for; sm90 by default")
    parser.add_argument(
        "--problems", type=_count, default=8, help="most problems of each kernel; 8 by default"
    )
    parser.add_argument("--most", type=_count, default=4, help="most configs of each: the chosen one, the"
                        " default, then the portfolio's; 4 by default")  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=_FOLDER, help=f"folder of the compilers' folders; {_FOLDER}"
    )
    parser.add_argument("--time", nargs=2, metavar=("FIRST", "SECOND"), help="the versions of two compilers,"
                        " to time what they have made")  # fmt: skip
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few; give 1 or more")
    return number


def _cases(kernel: DeviceKernel, problems: int, most: int) -> list[_Case]:
    """Some configs of problems that lie evenly among the declared ones."""
    declared = [one for one in kernel.tunable.typical_problems if kernel.tunable.candidates(kernel.arch, one)]
    source = source_hash(kernel.tunable)
    return [
        _Case(problem=problem, config=config, job=_by_any(kernel.job(problem, config), source))
        for problem in spread(declared, problems)
        for config in worth_timing(kernel, problem)[:most]
    ]


def _by_any(job: CompileJob, source: str) -> CompileJob:
    """The same job with a key that does not name the compiler: what each makes is kept under it."""
    parts = [source, str(job.arch), job.kernel, job.signature, sorted(job.hints.items())]
    return replace(job, key=hashlib.sha256(json.dumps(parts).encode()).hexdigest())


# Compiling --------------------------------------------------------------------------------------------------


def _compile(chosen: Sequence[FoundKernel], options: argparse.Namespace) -> None:
    compiler, arch = cutile.compiler_version(), Arch.parse(options.arch)
    folder: Path = options.folder / str(compiler)
    jobs = {
        case.job.key: case.job
        for found in chosen
        for case in _cases(DeviceKernel(found, arch), options.problems, options.most)
    }
    with CompileFeed(partial(CompilePool, usable_cores(), folder=folder)) as feed:
        feed.submit(jobs.values())
        results = feed.wait(set(jobs), lambda: None).values()
    made = [result for result in results if isinstance(result, Compiled)]
    seconds, spill = sum(one.seconds for one in made), sum(one.resources.stack_bytes > 0 for one in made)
    print(
        f"tileiras {compiler}, {arch}: {len(made)} cubins in {folder} ({seconds:.1f} s of compiling), "
        f"{spill} of which spill"
    )
    for result in results:
        if isinstance(result, CompileFailure):
            print(f"  not compiled: {result.message.partition(chr(10))[0]}")


# Timing -----------------------------------------------------------------------------------------------------


def _time(chosen: Sequence[FoundKernel], options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise UsageError("no GPU here; run it on a GPU host")
    folders = [options.folder / version for version in options.time]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not there; compile in an environment of that compiler first")
    print(f"{folders[1].name} over {folders[0].name} on {torch.cuda.get_device_name(0)},", end=" ")
    print(f"medians of {_SAMPLES}; below each state the geometric mean")
    head = (
        "",
        "configs",
        "left out",
        "same code",
        "other bits",
        *_STATES,
        "worst",
        "best",
        "fastest of each",
    )
    rows: list[tuple[str, ...]] = [head]
    with this_gpu() as gpu:
        clock = StateClock()
        for found in chosen:
            kernel = DeviceKernel(found, gpu.arch, gpu.device)
            cases = _cases(kernel, options.problems, options.most)
            made = [(case, [cached(folder, case.job.key) for folder in folders]) for case in cases]
            compared = [
                _compared(gpu, clock, kernel, case, (first, second))
                for case, (first, second) in made
                if first is not None and second is not None
            ]
            rows.append(_row(found.tunable.name, compared, left_out=len(cases) - len(compared)))
    print("\n".join(aligned(rows)))


def _compared(
    gpu: BenchGpu, clock: StateClock, kernel: DeviceKernel, case: _Case, codes: tuple[Compiled, Compiled]
) -> _Compared:
    tunable = kernel.tunable
    seeds = [tunable.make_args(case.problem, gpu.torch_device, seed) for seed in (0, 1)]

    def launcher(code: Compiled, args: Sequence[Any]) -> Launch:
        return gpu.launcher(kernel, case.problem, case.config, code.path, args)

    results = []
    for code in codes:
        args = tunable.make_args(case.problem, gpu.torch_device, 0)
        results.append(_result(kernel, launcher(code, args), args))
    names = ("first", "second")
    runs = {name: [launcher(code, args) for args in seeds] for name, code in zip(names, codes, strict=True)}
    taken = clock.samples(runs, renewing(tunable, seeds), _STATES, _SAMPLES)
    first, second = ({state: statistics.median(us) for state, us in taken[name].items()} for name in names)
    return _Compared(
        case=case,
        us=(first, second),
        same_code=codes[0].code == codes[1].code,
        same_bits=all(map(torch.equal, *results)),
    )


def _result(kernel: DeviceKernel, launch: Launch, args: Sequence[Any]) -> list[torch.Tensor]:
    """What a launch leaves in all that the kernel writes, as bytes. What it must fill holds ones before."""
    tunable = kernel.tunable
    named = dict(zip(tunable.parameters, args, strict=True))
    for name in tunable.output_names:
        for tensor in flat([named[name]]):
            tensor.fill_(1)
    renewing(tunable, [tuple(args)])[0]()
    launch()
    torch.cuda.synchronize()
    written = flat([named[name] for name in (*tunable.output_names, *tunable.inplace)])
    return [tensor.contiguous().view(torch.uint8) for tensor in written]


def _row(name: str, compared: Sequence[_Compared], *, left_out: int = 0) -> tuple[str, ...]:
    if not compared:
        return (name, "0", str(left_out), "", "", *[""] * len(_STATES), "", "", "")
    ratios = {state: [one.ratio(state) for one in compared] for state in _STATES}
    every = [ratio for of_state in ratios.values() for ratio in of_state]
    return (
        name,
        str(len(compared)),
        str(left_out),
        str(sum(one.same_code for one in compared)),
        str(sum(not one.same_bits for one in compared)),
        *(f"{statistics.geometric_mean(ratios[state]):.3f}" for state in _STATES),
        f"{max(every):.2f}",
        f"{min(every):.2f}",
        f"{statistics.geometric_mean(_fastest(compared)):.3f}",
    )


def _fastest(compared: Sequence[_Compared]) -> list[float]:
    """For each problem and state the time of the second compiler's fastest code over that of the first's."""
    by_problem: dict[Problem, list[_Compared]] = {}
    for one in compared:
        by_problem.setdefault(one.case.problem, []).append(one)
    return [
        min(one.us[1][state] for one in group) / min(one.us[0][state] for one in group)
        for group in by_problem.values()
        for state in _STATES
    ]


if __name__ == "__main__":
    sys.exit(main())
