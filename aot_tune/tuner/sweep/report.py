"""The request for a sweep and its report, as values."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from aot_tune.tables import store
from aot_tune.tables.table import Evidence
from aot_tune.tuner.plan.sizes import spread
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem, problem_option

if TYPE_CHECKING:
    from aot_tune.declare.discovery import FoundKernel

PREDICTED_FOLDER = Path("build") / "tuned_configs"
"""The folder of predicted tables unless --out names another; it is never a folder of measured tables."""

JOURNALS = Path("build") / "journal"
"""The folder of journals unless --journal names another. The journal of a whole sweep is
``<arch>/<kernel>.jsonl`` below it."""

FIRST_LOOK_BUCKETS = 10
"""Most buckets of each kernel in a first look; a number, so that every machine writes the same tables."""

FIRST_LOOK_CANDIDATES = 4
"""Most candidates of each bucket in a first look: the default, and others evenly spread."""


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """The request of an `aot-tune tune`: its kernels, thoroughness and folders."""

    kernels: tuple[FoundKernel, ...]
    """The kernels, each with the module that a child process imports."""

    arch: Arch
    """The arch to tune for."""

    modules: tuple[str, ...] = ()
    """Modules named by --module; `command` repeats them."""

    problems: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    """Kernel name to the problems of --problem; other kernels sweep all their typical problems."""

    limit: int | None = None
    """Most buckets of each kernel; None for all."""

    first_look: bool = False
    """Whether to predict only a fixed, evenly spread part of each kernel's buckets and candidates."""

    exhaustive: bool = False
    """Whether to measure every candidate instead of the model's best few."""

    require_measured: bool = False
    """Whether a missing GPU is an error instead of a reason to predict. The command line raises it; `command`
    repeats the option."""

    out: Path | None = None
    """Folder of tables to write to; None for each package's own folder, or `PREDICTED_FOLDER` when
    predicting."""

    jobs: int | None = None
    """Number of compiling processes; None for one per usable core."""

    gpus: tuple[int, ...] = ()
    """Indexes, as torch counts, of the GPUs of `arch` to measure on, all of one model; empty to predict."""

    ray: str | None = None
    """Address of the Ray cluster to measure on; empty for the cluster that Ray finds or starts, None for this
    machine's GPUs."""

    journal: Path | None = None
    """Folder of journals; None for `JOURNALS`."""

    cubins: Path | None = None
    """Folder of cubins to reuse and add to; None for `aot_tune.tuner.sweep.resources.CUBINS`."""

    fresh: bool = False
    """Whether to set an existing journal aside and start over."""

    allow_worse: bool = False
    """Whether to publish entries that gain less over the default than before without a reason."""

    time_budget_s: float | None = None
    """Time for all kernels, seconds; None without a limit."""

    verbose: bool = False
    """Whether to show each bucket's winner and its figures."""

    @property
    def predicts(self) -> bool:
        """Whether the sweep predicts, because no GPU and no cluster is named."""
        return not self.gpus and self.ray is None

    def buckets(self, kernel: FoundKernel) -> tuple[Problem, ...]:
        """Return a kernel's buckets to sweep, in the declaration's order; a part is evenly spread."""
        tunable = kernel.tunable
        if self.first_look:
            return spread(tunable.buckets, FIRST_LOOK_BUCKETS)
        chosen = self.problems.get(tunable.name)
        if chosen is None:
            return spread(tunable.buckets, self.limit)
        return spread(tuple(dict.fromkeys(map(tunable.bucket_of, chosen))), self.limit)

    def is_whole(self, kernel: FoundKernel) -> bool:
        """Return whether all declared buckets of a kernel are swept."""
        return self.limit is None and kernel.tunable.name not in self.problems

    def table_path(self, kernel: FoundKernel) -> Path:
        """Return the file of a kernel's table."""
        folder = PREDICTED_FOLDER if self.predicts else store.package_folder(kernel.tunable)
        return store.table_path(self.out or folder, self.arch, kernel.tunable.name)

    def journal_path(self, kernel: FoundKernel) -> Path:
        """Return the file of a kernel's journal.

        A partial selection has a journal of its own, so that publishing it keeps the journal of an unfinished
        whole sweep.
        """
        name = kernel.tunable.name
        if not self.is_whole(kernel):
            chosen = "\n".join(str(bucket) for bucket in self.buckets(kernel))
            name += f".{hashlib.sha256(chosen.encode()).hexdigest()[:8]}"
        return (self.journal or JOURNALS) / str(self.arch) / f"{name}.jsonl"

    def command(self) -> str:
        """Return the shell command for the same sweep, without --fresh, so that it resumes."""
        return shlex.join(["aot-tune", "tune", *self._words()])

    def commands_for_everything(self) -> tuple[str, str]:
        """Return the shell commands to predict everything, with the package installed and in a checkout."""
        words = [*self._words(), "--full"]
        return shlex.join(["aot-tune", "tune", *words]), f"make tune ARGS={shlex.quote(shlex.join(words))}"

    def _words(self) -> list[str]:
        # A first look takes all kernels. A command that names a kernel predicts all of its buckets.
        names = () if self.first_look else (kernel.tunable.name for kernel in self.kernels)
        words = [*names, "--arch", str(self.arch)]
        for module in self.modules:
            words += ["--module", module]
        # A problem chosen for two kernels is written once.
        if () in self.problems.values():  # a kernel of which no bucket is swept, and all are verified
            words.append("--only-stale")
        else:
            for text in dict.fromkeys(problem_option(p) for chosen in self.problems.values() for p in chosen):
                words += ["--problem", text]
        if self.ray is not None:
            words += ["--ray", self.ray] if self.ray else ["--ray"]
        gpus = ",".join(map(str, self.gpus)) if self.gpus and self.ray is None else None
        valued = {"--limit": self.limit, "--out": self.out, "--jobs": self.jobs, "--gpus": gpus}
        for option, value in {**valued, "--journal": self.journal, "--cubins": self.cubins}.items():
            words += [] if value is None else [option, str(value)]
        if self.time_budget_s is not None:
            words += ["--time-budget", f"{self.time_budget_s:g}s"]
        words += ["--exhaustive"] if self.exhaustive else []
        words += ["--allow-worse"] if self.allow_worse else []
        words += ["--require", "measured"] if self.require_measured else []
        return words


# The report -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SweptKernel:
    """The result for one kernel: a row of the closing table."""

    kernel: str
    """The kernel's name."""

    evidence: Evidence
    """Whether the times are measured or predicted by the model."""

    problems: int
    """Number of buckets swept."""

    speedup: float = 1.0
    """Geometric mean over the buckets of the default's time divided by the winner's."""

    failures: int = 0
    """Number of candidates that failed on a problem, at any stage but ``legal``."""

    compile_s: float = 0.0
    """Time until the last compilation ended, seconds; measuring overlaps it."""

    measure_s: float = 0.0
    """Time spent on timing on the GPU, seconds."""

    verify_s: float = 0.0
    """Time spent on comparing with the reference, seconds."""

    path: Path | None = None
    """The table's file; None when it was not published."""

    changed: int = 0
    """Number of entries that were added, removed or changed."""

    resumed: int = 0
    """Number of outcomes taken from the journal of an earlier run."""

    device_name: str = ""
    """The name of the GPU, or of the reference device that was predicted for."""

    refusals: tuple[str, ...] = ()
    """The reasons why the table was not published, one sentence each; empty when it was."""

    failed: bool = False
    """Whether an error ended the kernel's sweep; `refusals` has its message."""

    leaves: int = 0
    """Number of predicted entries that leave the default."""

    worth: str = ""
    """What the predictions are worth, in words; empty for measured times."""

    left_out: tuple[str, ...] = ()
    """Problems that could not be opened, or whose default failed, each with the reason."""

    unreached: tuple[str, ...] = ()
    """Buckets skipped when the time budget ran out, each with its present state."""

    disturbed: tuple[str, ...] = ()
    """Buckets whose entries have disturbed samples, each with the disturbance."""

    @property
    def complete(self) -> bool:
        """Whether the table was published with all its problems."""
        return not self.refusals and not self.left_out


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """The busy and idle time of a GPU in a sweep."""

    index: int
    """Its index, as torch counts."""

    gpu: str
    """Its uuid; empty where it never answered."""

    busy_s: float
    """Time with a problem, the starts of its processes included, seconds."""

    idle_s: float
    """Time without a problem: other GPUs were busy, or nothing was compiled yet, seconds."""

    lost: str = ""
    """The reason why it left the sweep; empty where it did not."""


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The result of a sweep."""

    arch: Arch
    """The arch tuned for."""

    device_name: str
    """The name of the GPU, or of the reference device that was predicted for."""

    rows: tuple[SweptKernel, ...]
    """One report for each kernel, in the order of the request."""

    seconds: float
    """Duration of the whole sweep, seconds."""

    resumed: int = 0
    """Number of outcomes taken from the journals of an earlier run."""

    gpus: tuple[GpuUse, ...] = ()
    """The GPUs that measured; empty for a prediction."""

    @property
    def complete(self) -> bool:
        """Whether every kernel's table was published with all its problems, as in the exit code."""
        return all(row.complete for row in self.rows)
