"""The lines a sweep says: how it begins, what fails, the closing table. Pure: prints nothing."""

from __future__ import annotations

from collections.abc import Sequence

from aot_tune.tuner.outcome import Stage
from aot_tune.tuner.sweep.report import (
    FIRST_LOOK_CANDIDATES,
    PREDICTED_FOLDER,
    KernelReport,
    SweepRequest,
)
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted

MESSAGE_CHARACTERS = 160
"""A compiler's message may run over pages: this much of its first line is shown; the journal keeps all."""


def prediction_notice(request: SweepRequest, compiler: str | None) -> list[str]:
    """The first lines of a sweep that only predicts: how it does, where it writes, and what it leaves out.

    Args:
        request: What was asked for.
        compiler: The version of cuTile's compiler; None when there is none.
    """
    folder = request.out or PREDICTED_FOLDER
    lines = [
        f"no {request.arch} GPU here: this predicts, and measures nothing. Each candidate is compiled by "
        f"tileiras {compiler or '(not installed)'};",
        "what fails, spills or does not fit is dropped, and a performance model ranks the rest for "
        f"{Device.reference(request.arch).name}.",
        f"Writes {folder / str(request.arch)}/, marked predicted; measured tables stay as they are. "
        f"To use them: AOT_TUNE_TABLES={folder}",
    ]
    return lines + (_left_out(request) if request.first_look else [])


def _left_out(request: SweepRequest) -> list[str]:
    """What a first look leaves out, and the commands for everything."""
    declared = sum(len(found.tunable.buckets) for found in request.kernels)
    chosen = sum(len(request.buckets(found)) for found in request.kernels)
    installed, checkout = request.commands_for_everything()
    return [
        f"This is a first look at {counted(len(request.kernels), 'kernel')}: it predicts {chosen} of "
        f"{counted(declared, 'bucket')} with at most {FIRST_LOOK_CANDIDATES} candidates each, evenly spread,",
        f"and leaves out {counted(declared - chosen, 'bucket')} and all further candidates.",
        f"To predict everything: {installed}",
        f"or, in a checkout: {checkout}",
    ]


def started_line(kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> str:
    """The line a kernel begins with."""
    return f"{kernel} {arch} on {device}: {counted(problems, 'problem')}, {counted(jobs, 'compilation')}"


def failure_line(kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str) -> str:
    """One candidate's failure on one line."""
    where = f" {problem}" if problem is not None else ""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    if len(first) > MESSAGE_CHARACTERS:
        first = first[: MESSAGE_CHARACTERS - 1] + "…"
    return f"{kernel}{where}: {stage}: {config}: {first}"


def closing_table(rows: Sequence[KernelReport]) -> list[str]:
    """The table a sweep ends with, aligned; below it the reasons of tables that were not published."""
    heads = ("kernel", "problems", "speed-up", "failures", "compile s", "measure s", "verify s", "table")
    cells = [
        (
            row.kernel,
            str(row.problems),
            f"{row.speedup:.2f}x" + (" predicted" if row.evidence == "predicted" else ""),
            str(row.failures),
            f"{row.compile_s:.1f}",
            f"{row.measure_s:.1f}",
            f"{row.verify_s:.1f}",
            "not published" if row.path is None else f"{row.path} ({counted(row.changed, 'change')})",
        )
        for row in rows
    ]
    reasons = [f"{row.kernel}: not published: {reason}" for row in rows for reason in row.refusals]
    return aligned([heads, *cells]) + reasons
