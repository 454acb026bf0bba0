"""Choice of a config: options, result and reason, and the messages of a miss. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from aot_tune import environment
from aot_tune.declare.declaration import Declaration
from aot_tune.environment import OnMiss
from aot_tune.errors import MissError
from aot_tune.tables.table import Entry
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem, problem_option

Source = Literal[
    "given", "asked default", "invariant", "own", "cached", "nearest", "searched", "far", "default"
]
"""Source of a config: steps 1, 1, 1, 2, 2, 3, 4, 4 and 5 of `resolve`."""

MISSES: frozenset[Source] = frozenset({"searched", "far", "default"})
"""Sources of a choice where nothing was tuned for the problem or near it."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Config that a problem gets, and why."""

    config: Config
    """Config to run."""

    source: Source
    """Step of `resolve` that gave the config."""

    why: Callable[[], str] = field(compare=False, repr=False)
    """Makes the text of `reason`; a function, because the reason of few choices is read."""

    entry: Entry | None = None
    """Table's entry that gave the config; None where no table did."""

    @property
    def reason(self) -> str:
        """Reason for the user: the entry and point that gave the config, or the missing table or entry."""
        return self.why()

    @property
    def missed(self) -> bool:
        """Whether nothing was tuned for the problem or near it."""
        return self.source in MISSES


class Options(NamedTuple):
    """Options of a choice in addition to its problem."""

    given: Config | None = None
    """Config that the caller gives."""

    asked_default: bool = False
    """Whether AOT_TUNE_CONFIG asks for the default."""

    on_miss: OnMiss = "search"
    """Value of AOT_TUNE_ON_MISS."""

    sm_count: int | None = None
    """Multiprocessors of the launching GPU, by which waves are counted; None for the GPU that a table was
    measured on."""

    gpu_model: str | None = None
    """Name of the launching GPU; None for the GPU that a table was measured on. On other models, the bytes
    that a config loads decide between configs whose estimates overlap."""


def miss_error(tunable: Declaration, arch: Arch, problem: Problem) -> MissError:
    """Return the error of a miss where AOT_TUNE_ON_MISS is ``error``."""
    return MissError(
        f"no tuned config for {tunable.name} {named(problem)} on {arch}, and "
        f"{environment.ON_MISS}=error; tune it: {tune_command(tunable, arch, problem)}"
    )


def miss_message(
    tunable: Declaration, arch: Arch, problem: Problem, choice: Choice, folders: Iterable[Path]
) -> str:
    """Return the one-line warning for a problem that nothing was tuned for.

    Args:
        tunable: The kernel's declaration.
        arch: The arch of the GPU.
        problem: The problem.
        choice: The config that runs.
        folders: The folders of tables that were read.
    """
    places = " or ".join(map(str, folders)) or "no folder"
    return (
        f"no tuned config for {tunable.name} {named(problem)} on {arch} in {places}; took {choice.config} "
        f"({choice.reason}); tune it: {tune_command(tunable, arch, problem)}"
    )


def tune_command(tunable: Declaration, arch: Arch, problem: Problem) -> str:
    """Return the command that tunes a problem."""
    values = problem_option(problem)
    return f"aot-tune tune {tunable.name} --arch {arch}{tunable.module_option} --problem {values}"


def named(problem: Problem) -> str:
    """Return a problem's text in messages: ``M=300 N=4096 dtype=bfloat16``."""
    return problem_option(problem).replace(",", " ")
