"""What a sweep is asked for and what it reports, as values. Knows neither GPU, compiler nor terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from aot_tune.tables.table import Evidence
from aot_tune.tuner.plan.sizes import spread
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem, problem_option

if TYPE_CHECKING:
    from aot_tune.declare.discovery import Found

PREDICTED_FOLDER = Path("build") / "tuned_configs"
"""Where predicted tables are written unless --out names another folder: never among the measured ones."""

FIRST_LOOK_BUCKETS = 12
"""Most buckets of each kernel in a first look. It is a number and no time limit, so that every machine writes
the same tables. With five candidates each, sixteen kernels need 297 compilations: 75 seconds on two cores.
"""

FIRST_LOOK_CANDIDATES = 5
"""Most candidates of each bucket in a first look: the default, and others evenly spread over the space."""


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """One `aot-tune tune`: what to sweep, how thoroughly, and where its results go."""

    kernels: tuple[Found, ...]
    """The kernels, each with the module a child process imports to find it again."""

    arch: Arch
    """The arch to tune for."""

    modules: tuple[str, ...] = ()
    """Modules named by --module, for the command that resumes."""

    problems: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    """Kernel name -> the problems chosen by --problem; a kernel not in it sweeps all its typical ones."""

    limit: int | None = None
    """Most buckets of each kernel; None for all."""

    first_look: bool = False
    """Whether to predict a fixed part of each kernel's buckets and candidates, evenly spread, and not all."""

    exhaustive: bool = False
    """Measure every candidate and not only the model's best few."""

    require_measured: bool = False
    """Whether a missing GPU is an error, which the command line has seen to; otherwise the sweep predicts."""

    out: Path | None = None
    """Folder of tables to write to; None for each package's own, or build/tuned_configs when predicting."""

    jobs: int | None = None
    """Compiling processes; None for one a core."""

    gpu: int | None = None
    """Index of the GPU to measure on, as torch counts them, of `arch`; None to predict without one."""

    journal: Path | None = None
    """The folder of journals; None for their usual place below build/."""

    cubins: Path | None = None
    """Folder of cubins to reuse and add to; None for its usual place below build/."""

    fresh: bool = False
    """Whether to set an existing journal aside and start over."""

    verbose: bool = False
    """Whether to tell each bucket's choice and its figures."""

    @property
    def predicts(self) -> bool:
        """Whether it predicts for want of a GPU."""
        return self.gpu is None

    def buckets(self, found: Found) -> tuple[Problem, ...]:
        """The buckets of one kernel to sweep, in the declaration's order, evenly spread where not all are."""
        tunable = found.tunable
        if self.first_look:
            return spread(tunable.buckets, FIRST_LOOK_BUCKETS)
        chosen = self.problems.get(tunable.name)
        if chosen is None:
            return spread(tunable.buckets, self.limit)
        return spread(tuple(dict.fromkeys(map(tunable.bucket_of, chosen))), self.limit)

    def command(self) -> str:
        """The shell command that asks for the same sweep again; without --fresh, which would not resume."""
        return shlex.join(["aot-tune", "tune", *self._words()])

    def commands_for_everything(self) -> tuple[str, str]:
        """The shell commands that predict what a first look leaves out: installed, and in a checkout."""
        words = [*self._words(), "--full"]
        return shlex.join(["aot-tune", "tune", *words]), f"make tune ARGS={shlex.quote(shlex.join(words))}"

    def _words(self) -> list[str]:
        # A first look is of all kernels: naming them would ask for everything of each.
        names = () if self.first_look else (found.tunable.name for found in self.kernels)
        words = [*names, "--arch", str(self.arch)]
        for module in self.modules:
            words += ["--module", module]
        # A problem chosen for two kernels is written once.
        for text in dict.fromkeys(problem_option(p) for chosen in self.problems.values() for p in chosen):
            words += ["--problem", text]
        valued = {"--limit": self.limit, "--out": self.out, "--jobs": self.jobs, "--gpu": self.gpu}
        for option, value in {**valued, "--journal": self.journal, "--cubins": self.cubins}.items():
            words += [] if value is None else [option, str(value)]
        words += ["--exhaustive"] if self.exhaustive else []
        words += ["--require", "measured"] if self.require_measured else []
        return words


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What became of one kernel: a row of the closing table."""

    kernel: str
    """Its name."""

    evidence: Evidence
    """Whether its figures are measured or a model's."""

    problems: int
    """Buckets swept."""

    speedup: float
    """Geometric mean over the buckets of the default's time / the winner's."""

    failures: int
    """Candidates that failed anywhere: compiler, resources, launch, wrong result, time limit."""

    compile_s: float
    """Seconds until the last compilation ended; measuring overlaps them."""

    measure_s: float
    """Seconds the GPU spent on timing."""

    verify_s: float
    """Seconds spent comparing with the reference."""

    path: Path | None
    """The table written; None when it was not published."""

    changed: int = 0
    """Entries added, removed, or otherwise than in the table that was there before."""

    resumed: int = 0
    """Measurements taken over from the journal of an earlier run."""

    device_name: str = ""
    """The GPU it was measured on, or the reference device it was predicted for."""

    refusals: tuple[str, ...] = ()
    """Why the table was not published, one sentence each; empty when it was."""


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """What a sweep did."""

    arch: Arch
    """The arch it tuned for."""

    device_name: str
    """The GPU it measured on, or the reference device it predicted for."""

    rows: tuple[KernelReport, ...]
    """One a kernel, in the order asked for."""

    seconds: float
    """How long the whole took, seconds."""

    resumed: int = 0
    """Measurements taken over from the journal of an earlier run."""

    @property
    def published(self) -> bool:
        """Whether every kernel's table was published."""
        return all(not row.refusals for row in self.rows)
