"""`make check-archs`: compile kernels for archs whose GPU is not at hand. It launches no kernel.

For every bucket of the declared problems it compiles the default and the portfolio's configs. An arch without
a table has no portfolio yet. For such an arch it compiles the `LIKELY` configs of each bucket that the model
ranks best. The model ranks them by their tiles alone, because nothing is compiled yet. Where the model ranks
nothing, it compiles `MOST_UNRANKED` candidates that are evenly spread over the space.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from aot_tune.cli import command
from aot_tune.cli.command import AsJson, Modules, Verbose, guarded
from aot_tune.cli.json_text import json_text
from aot_tune.declare import selection
from aot_tune.declare.checks import declaration_problems
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel, find_tunables
from aot_tune.tables import store
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileJob, CompileResult
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, plan
from aot_tune.tuner.plan.model import residency, spills
from aot_tune.tuner.plan.shortlist import predictions
from aot_tune.tuner.plan.sizes import spread
from aot_tune.tuner.sweep.resources import CUBINS
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.text import aligned, duration

ARCHS = tuple(map(Arch.parse, ("sm80", "sm89", "sm100", "sm103", "sm120")))
"""The archs that kernels are shipped for although no GPU of theirs has measured them: the default choice."""

LIKELY = 3
"""Configs of each bucket that stand for a portfolio when the model can rank them.

On 54 matmul problems of an H200 the fastest of the model's best three was within 1 % of the fastest of all
(geometric mean).
"""

MOST_UNRANKED = 8
"""Configs of each bucket, at most, when the model ranks nothing: the size of a portfolio."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_SAY_SECONDS = 30.0
"""Seconds between two lines of progress, at least."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """How the compilations of one kernel for one arch ended."""

    kernel: str
    """The kernel's name."""

    arch: Arch
    """The arch that was compiled for."""

    portfolio: bool
    """Whether the arch has a table, so that its portfolio was compiled."""

    asked: int
    """Different compilations that were asked for."""

    compiled: int
    """Compilations that gave a cubin."""

    spilling: int
    """Cubins that spill registers in the inner loop, or anywhere when no inner loop is found."""

    too_large: int
    """Cubins of which a multiprocessor cannot hold even one block."""

    refused: str
    """Why `legal` refuses every config on the arch; empty when it allows one."""

    wrong: str
    """The declaration's first mistake, else the first config that does not compile; empty if none."""


def check(
    kernels: Sequence[FoundKernel],
    archs: Sequence[Arch],
    say: Callable[[str], None],
    *,
    jobs: int | None = None,
    most: int | None = None,
    folder: Path = CUBINS,
) -> tuple[Checked, ...]:
    """Compile what the kernels would run on the given archs.

    Args:
        kernels: The kernels.
        archs: The archs to compile for.
        say: Called with each line of progress.
        jobs: Number of compiling processes; None for one a usable core.
        most: Compilations of each kernel on each arch, at most, evenly spread; None for all.
        folder: Folder that keeps the cubins for the next run.

    Returns:
        One result for each kernel on each arch, ordered by arch and then by kernel.

    Raises:
        TuneError: Nothing can be compiled on this machine.
        TableError: A table is not valid.
        StoreError: A table cannot be read.
    """
    wanted = [_wanted(found, arch, most) for arch in archs for found in kernels]
    results: dict[str, CompileResult] = {}
    said = time.monotonic()
    with CompilePool(jobs or usable_cores(), folder=folder) as pool:
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
    """The compilations of one kernel for one arch, before they are made."""

    kernel: DeviceKernel
    portfolio: bool
    refused: str
    mistake: str
    jobs: tuple[tuple[CompileJob, str], ...]
    """Different compilations, each with the first config and problem that need it."""


def _wanted(found: FoundKernel, arch: Arch, most: int | None) -> _Wanted:
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
        kernel=DeviceKernel(found, arch),
        portfolio=portfolio is not None,
        refused=refused,
        mistake=mistakes[0] if mistakes else "",
        jobs=spread(tuple(jobs.values()), most),
    )


def _refused(tunable: Declaration, arch: Arch) -> str:
    """Why `legal` refuses the whole space on an arch; empty when it allows a config or the space is empty."""
    first = tunable.buckets[0]
    if any(tunable.candidates(arch, bucket) for bucket in tunable.buckets) or not tunable.space(arch, first):
        return ""
    return tunable.refusal(tunable.default_config(arch, first), arch, first) or ""


def _chosen(kernel: DeviceKernel, each: ProblemPlan, portfolio: Sequence[Config] | None) -> Sequence[Config]:
    """The configs to compile for one bucket besides the default."""
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


def lines(checks: Sequence[Checked]) -> list[str]:
    """The results for a person, one line for each kernel on each arch."""
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


@app.command()
@guarded
def main(
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", metavar="sm100", help="An arch; sm80 sm89 sm100 sm103 sm120 by default."),
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="A kernel; all kernels by default; may be repeated.")
    ] = None,
    module: Modules = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compiling processes; one a usable core by default.")
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(min=1, help="Compilations of each kernel on each arch, at most; all by default."),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Compile every default and portfolio for archs whose GPU is not at hand; launch nothing.

    Exit code 1 when a declaration is wrong or a config does not compile.
    """
    started = time.monotonic()
    kernels = selection.chosen_kernels(find_tunables(module or ()), kernel or ())
    archs = tuple(dict.fromkeys(map(Arch.parse, arch or ()))) or ARCHS
    with command.signals_stop():
        checks = check(kernels, archs, command.say, jobs=jobs, most=most)
    command.put(json_text(checks) if as_json else lines(checks))
    command.say(f"{sum(one.asked for one in checks)} compilations, {duration(time.monotonic() - started)}")
    wrong = [one.wrong for one in checks if one.wrong]
    for text in wrong:
        command.say(text)
    command.leave(failed=bool(wrong))


if __name__ == "__main__":
    app(prog_name="python -m tests.check_archs")
