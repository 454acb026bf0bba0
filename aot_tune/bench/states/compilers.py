"""Find out what another compiler changes: compile the same configs by each, then time both codes on a GPU.

    python -m aot_tune.bench.states.compilers matmul attention rms_norm            in an environment of each
    python -m aot_tune.bench.states.compilers matmul attention rms_norm --time     on a GPU host

The first needs no GPU: it compiles for the arch, config by config, and keeps the cubins in the folder in the
name of its compiler. The second launches the cubins of both in turn, in each state of the GPU, and prints for
each kernel how long the newer compiler's code takes beside the older one's, as a geometric mean.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from aot_tune.bench.gpu import BenchGpu, shipped, this_gpu
from aot_tune.bench.states.configs import worth_timing
from aot_tune.bench.states.timing import COOL, LOADED, StateClock, renewing
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.selection import chosen_kernels
from aot_tune.errors import AotTuneError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.tuner.compile.job import Compiled, CompileJob
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned

_FOLDER = Path("build/compilers")
"""The folder of the compilers' folders."""

_NOTES = "compiled.json"
"""A compiler's file of notes: a line for each cubin, by the name of its file."""

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
    """The compilation that it needs."""

    @property
    def file(self) -> str:
        """The name of its cubin, whatever compiler makes it."""
        parts = [self.job.name, self.job.kernel, self.job.signature, sorted(self.job.hints.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A config whose code of both compilers was timed."""

    case: _Case
    """The config and its problem."""

    us: tuple[Mapping[str, float], Mapping[str, float]]
    """The median of each state, microseconds: of the older compiler's code, of the newer one's."""

    same_code: bool
    """Whether both made the same machine code."""

    same_bits: bool
    """Whether both computed the same bits."""

    def ratio(self, state: str) -> float:
        """The newer code's time over the older one's."""
        return self.us[1][state] / self.us[0][state]


def main(words: Sequence[str] | None = None) -> int:
    """Compile, or time what was compiled; return the exit status."""
    options = _parser().parse_args(words)
    try:
        chosen = chosen_kernels(shipped(), options.kernels)
        if options.time:
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
    parser.add_argument("--arch", default="sm90", help="the arch to compile for; sm90")
    parser.add_argument("--problems", type=int, default=8, help="declared problems of each kernel")
    parser.add_argument("--most", type=int, default=4, help="most configs: the chosen one, the default, then"
                        " the portfolio's")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="folder of the compilers' folders")
    parser.add_argument("--time", action="store_true", help="time what two compilers have made")
    return parser


def _cases(kernel: DeviceKernel, problems: int, most: int) -> list[_Case]:
    """Some configs of problems that lie evenly among the declared ones."""
    declared = [one for one in kernel.tunable.typical_problems if kernel.tunable.candidates(kernel.arch, one)]
    chosen = [declared[at * len(declared) // problems] for at in range(min(problems, len(declared)))]
    return [
        _Case(problem=problem, config=config, job=kernel.job(problem, config))
        for problem in dict.fromkeys(chosen)
        for config in worth_timing(kernel, problem)[:most]
    ]


# Compiling --------------------------------------------------------------------------------------------------


def _compile(chosen: Sequence[FoundKernel], options: argparse.Namespace) -> None:
    compiler, arch = cutile.compiler_version(), Arch.parse(options.arch)
    folder: Path = options.folder / str(compiler)
    notes = _notes(folder) if folder.is_dir() else {}
    cases = [
        case for found in chosen for case in _cases(DeviceKernel(found, arch), options.problems, options.most)
    ]
    files = {case.job.key: case.file for case in cases}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, CompilePool(usable_cores(), folder=Path(made)) as pool:
        for key, job in {case.job.key: case.job for case in cases}.items():
            if not _is_made(folder, notes, files[key]):
                pool.submit(job)
        while pool.unfinished:
            for result in pool.poll(1.0):
                file, code, spills = files[result.key], None, False
                if isinstance(result, Compiled):
                    (folder / f"{file}.cubin").write_bytes(result.path.read_bytes())
                    code, spills = result.code, result.resources.stack_bytes > 0
                notes[file] = {"seconds": result.seconds, "code": code, "spills": spills}
    (folder / _NOTES).write_bytes(orjson.dumps(notes))
    seconds = sum(note["seconds"] for note in notes.values())
    spilling = sum(note["spills"] for note in notes.values())
    refused = sum(note["code"] is None for note in notes.values())
    print(
        f"tileiras {compiler}, {arch}: {len(notes)} compilations in {folder}, {seconds:.1f} s of them;"
        f" {spilling} spill, {refused} refused"
    )


def _is_made(folder: Path, notes: Mapping[str, Any], file: str) -> bool:
    """Whether a compiler was asked before, and what it made is there."""
    return file in notes and (notes[file]["code"] is None or (folder / f"{file}.cubin").is_file())


def _notes(folder: Path) -> dict[str, Any]:
    try:
        notes: dict[str, Any] = orjson.loads((folder / _NOTES).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no compiler's cubins ({error}); compile them first") from error
    return notes


# Timing -----------------------------------------------------------------------------------------------------


def _time(chosen: Sequence[FoundKernel], options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise UsageError("no GPU here; run it on a GPU host")
    folders = sorted(path for path in options.folder.glob("*") if path.is_dir())
    if len(folders) != 2:
        raise UsageError(
            f"{options.folder} holds the folders of {len(folders)} compilers, and two are compared"
        )
    notes = [_notes(folder) for folder in folders]
    print(f"{folders[1].name} over {folders[0].name} on {torch.cuda.get_device_name(0)},", end=" ")
    print(f"medians of {_SAMPLES}; below each state the geometric mean")
    rows: list[tuple[str, ...]] = [
        ("", "configs", "same code", "other bits", *_STATES, "worst", "best", "fastest of each")
    ]
    with this_gpu() as gpu:
        clock = StateClock()
        for found in chosen:
            compared = list(_compared(gpu, clock, found, folders, notes, options))
            if compared:
                rows.append(_row(found.tunable.name, compared))
    print("\n".join(aligned(rows)))


def _compared(
    gpu: BenchGpu,
    clock: StateClock,
    found: FoundKernel,
    folders: Sequence[Path],
    notes: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
) -> Iterator[_Compared]:
    kernel = DeviceKernel(found, gpu.arch, gpu.device)
    for case in _cases(kernel, options.problems, options.most):
        if any(notes_.get(case.file, {}).get("code") is None for notes_ in notes):
            continue
        seeds = [kernel.tunable.make_args(case.problem, gpu.torch_device, seed) for seed in (0, 1)]
        runs, outputs = {}, []
        for folder in folders:
            cubin = folder / f"{case.file}.cubin"
            runs[folder.name] = [
                gpu.launcher(kernel, case.problem, case.config, cubin, args) for args in seeds
            ]
            outputs.append(_output(kernel, runs[folder.name][0], seeds[0]))
        taken = clock.samples(runs, renewing(kernel.tunable, seeds), _STATES, _SAMPLES)
        old, new = (
            {state: statistics.median(us) for state, us in taken[folder.name].items()} for folder in folders
        )
        yield _Compared(
            case=case,
            us=(old, new),
            same_code=notes[0][case.file]["code"] == notes[1][case.file]["code"],
            same_bits=all(map(torch.equal, *outputs)),
        )


def _output(kernel: DeviceKernel, launch: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """Copies of what a launch leaves in its outputs, as bytes."""
    named = dict(zip(kernel.tunable.parameters, args, strict=True))
    for name in kernel.tunable.reset:
        named[name].zero_()
    launch()
    torch.cuda.synchronize()
    return [named[name].contiguous().view(torch.uint8).clone() for name in kernel.tunable.output_names]


def _row(name: str, compared: Sequence[_Compared]) -> tuple[str, ...]:
    ratios = {state: [one.ratio(state) for one in compared] for state in _STATES}
    every = [ratio for of_state in ratios.values() for ratio in of_state]
    return (
        name,
        str(len(compared)),
        str(sum(one.same_code for one in compared)),
        str(sum(not one.same_bits for one in compared)),
        *(f"{statistics.geometric_mean(ratios[state]):.3f}" for state in _STATES),
        f"{max(every):.2f}",
        f"{min(every):.2f}",
        f"{statistics.geometric_mean(_fastest(compared)):.3f}",
    )


def _fastest(compared: Sequence[_Compared]) -> list[float]:
    """For each problem and state the fastest newer code's time over the fastest older one's."""
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
