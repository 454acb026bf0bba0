"""`make check-archs`: the kernels through the compiler for archs that are not here. Runs no kernel.

Compiled is, for every bucket of the declared problems, the default and the portfolio's configs. An arch
without a table has no portfolio yet. There the model's `LIKELY` best of each bucket stand for it, ranked by
their tiles alone as nothing is compiled. Where the model ranks nothing, `MOST_UNRANKED` candidates do, evenly
spread over the space.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune.cli import command
from aot_tune.declare.checks import declaration_problems
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import OWN_KERNELS, Found, find_tunables
from aot_tune.declare.selection import chosen_kernels
from aot_tune.errors import AotTuneError
from aot_tune.tables import store
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileJob, CompileResult
from aot_tune.tuner.compile.pool import CompilePool
from aot_tune.tuner.plan.candidates import Kernel, ProblemPlan, plan
from aot_tune.tuner.plan.model import residency, spills
from aot_tune.tuner.plan.shortlist import predictions
from aot_tune.tuner.plan.sizes import spread
from aot_tune.tuner.sweep.run import CUBINS
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.text import aligned, duration

ARCHS = tuple(map(Arch.parse, ("sm80", "sm89", "sm100", "sm103", "sm120")))
"""The archs that kernels are shipped for and nothing is measured on."""

LIKELY = 3
"""On 54 matmul problems of an H200 the best of the model's three was within 1 % of the best (geometric mean).
"""

MOST_UNRANKED = 8
"""As many as a portfolio holds."""

_SAY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the compiler said of one kernel on one arch."""

    kernel: str
    """Its name."""

    arch: Arch
    """The target."""

    portfolio: bool
    """Whether the arch has a table, whose portfolio was compiled."""

    asked: int
    """Compilations, each once."""

    compiled: int
    """Of them, those that gave a cubin."""

    spilling: int
    """Of these, those that spill registers in the inner loop; anywhere, where none is found."""

    too_large: int
    """Of these, those of which no multiprocessor holds a block."""

    refused: str
    """Why `legal` refuses every config there; empty where the kernel is for the arch."""

    wrong: str
    """The declaration's first mistake there, else the first config that does not compile; empty if none."""


def check(
    kernels: Sequence[Found],
    archs: Sequence[Arch],
    say: Callable[[str], None],
    *,
    jobs: int | None = None,
    most: int | None = None,
    folder: Path = CUBINS,
) -> tuple[Checked, ...]:
    """Compile what the kernels would run on some archs.

    Args:
        kernels: The kernels.
        archs: Targets.
        say: Told of progress, a line at a time.
        jobs: Compiling processes; one a core by default.
        most: Compilations of each kernel on each arch at most, evenly spread; all by default.
        folder: Where cubins are kept for the next run.

    Returns:
        Arch after arch, kernel after kernel.

    Raises:
        TuneError: Nothing can be compiled here.
        TableError: A table cannot be read.
    """
    wanted = [_wanted(found, arch, most) for arch in archs for found in kernels]
    results: dict[str, CompileResult] = {}
    said = time.monotonic()
    with CompilePool(jobs or os.cpu_count() or 1, folder=folder) as pool:
        for one in wanted:
            for job, _ in one.jobs:
                pool.submit(job)
        while pool.unfinished:
            results |= {result.key: result for result in pool.poll(1.0)}
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                say(f"{len(results)} compiled, {pool.unfinished} to go")
    return tuple(_checked(one, results) for one in wanted)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What is to be compiled of one kernel on one arch."""

    kernel: Kernel
    portfolio: bool
    refused: str
    mistake: str
    jobs: tuple[tuple[CompileJob, str], ...]
    """Each once, with the first config and problem that ask for it."""


def _wanted(found: Found, arch: Arch, most: int | None) -> _Wanted:
    tunable = found.tunable
    path = store.table_path(store.package_folder(tunable), arch, tunable.name)
    portfolio = store.read_table(path).portfolio if path.exists() else None
    refused = _refused(tunable, arch)
    mistakes = [] if refused else declaration_problems(tunable, arch)
    jobs: dict[str, tuple[CompileJob, str]] = {}
    if not refused and not mistakes:
        planned = plan(found, arch, tunable.buckets)
        for each in planned.problems:
            for config in (each.default, *_chosen(planned.kernel, each, portfolio)):
                job = each.jobs[config]
                jobs.setdefault(job.key, (job, f"{config} on {each.problem}"))
    return _Wanted(
        kernel=Kernel(found, arch),
        portfolio=portfolio is not None,
        refused=refused,
        mistake=mistakes[0] if mistakes else "",
        jobs=spread(tuple(jobs.values()), most),
    )


def _refused(tunable: Declaration, arch: Arch) -> str:
    """Why nothing of a space is allowed on an arch; empty where something is, or where there is nothing."""
    first = tunable.buckets[0]
    if any(tunable.candidates(arch, bucket) for bucket in tunable.buckets) or not tunable.space(arch, first):
        return ""
    return tunable.refusal(tunable.default_config(arch, first), arch, first) or ""


def _chosen(kernel: Kernel, each: ProblemPlan, portfolio: Sequence[Config] | None) -> Sequence[Config]:
    if portfolio is not None:
        return [config for config in portfolio if config in each.jobs]
    predicted = predictions(kernel, each, each.candidates, {})
    if not predicted:
        return spread(each.candidates, MOST_UNRANKED)
    return sorted(predicted, key=lambda config: predicted[config])[:LIKELY]


def _checked(one: _Wanted, results: dict[str, CompileResult]) -> Checked:
    cubins: list[Compiled] = []
    wrong = one.mistake
    for job, asked_by in one.jobs:
        result = results[job.key]
        if isinstance(result, Compiled):
            cubins.append(result)
        elif not wrong:
            wrong = _failure(job, asked_by, result)
    return Checked(
        kernel=one.kernel.tunable.name,
        arch=one.kernel.arch,
        portfolio=one.portfolio,
        refused=one.refused,
        asked=len(one.jobs),
        compiled=len(cubins),
        spilling=sum(spills(cubin.resources, cubin.loop) for cubin in cubins),
        too_large=sum(residency(one.kernel.device, cubin.resources) == 0 for cubin in cubins),
        wrong=wrong,
    )


def _failure(job: CompileJob, asked_by: str, failure: CompileFailure) -> str:
    said = " ".join(failure.message.split())[:500]
    return f"{job.name} on {job.arch} does not compile with {asked_by}: {said}"


# The command ------------------------------------------------------------------------------------


def lines(checks: Sequence[Checked]) -> list[str]:
    """A line for each kernel on each arch."""
    rows = []
    for one in checks:
        counts = (
            f"{one.compiled} of {one.asked} compile",
            f"{one.spilling} spill",
            f"{one.too_large} do not fit",
        )
        which = "its portfolio" if one.portfolio else "its likely configs"
        rows.append((str(one.arch), one.kernel, *counts, f"refused: {one.refused}" if one.refused else which))
    return aligned(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, print; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(prog="make check-archs ARGS=", description=__doc__)
    parser.add_argument("--arch", action="append", metavar="sm100", help="may be repeated; all by default")
    parser.add_argument("--kernel", action="append", help="may be repeated; all by default")
    parser.add_argument(
        "--module", action="append", metavar="lib.kernels", help="by default the shipped ones"
    )
    parser.add_argument("--jobs", type=int, help="compiling processes; one a core by default")
    parser.add_argument("--most", type=int, help="compilations of each kernel on each arch, evenly spread")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        kernels = chosen_kernels(find_tunables(options.module or [OWN_KERNELS]), options.kernel or ())
        archs = [Arch.parse(name) for name in options.arch] if options.arch else ARCHS
        checks = check(kernels, archs, command.say, jobs=options.jobs, most=options.most)
    except AotTuneError as error:
        command.say(f"check-archs: {error}")
        return command.EXIT_FAILED
    command.put(lines(checks))
    command.say(f"{sum(one.asked for one in checks)} compilations, {duration(time.monotonic() - started)}")
    wrong = [one.wrong for one in checks if one.wrong]
    for text in wrong:
        command.say(text)
    return command.EXIT_FAILED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
