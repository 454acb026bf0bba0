"""`aot-tune bench --kernels --verify`: check every config of every portfolio on every declared shape.

Results are compared with the kernel's reference on two seeds, those of a sweep's own check, in a process that
may crash or hang without harm. Each shape without a wrong result is noted in a file, so that the same command
continues after a time limit or a kill. A note counts for the same source, portfolio, versions and GPU.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson

from aot_tune.cubins.size_classes import ODD_SEED
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import Gpu, visible_gpus
from aot_tune.tables import store
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.measure.request import Recheck
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.outcome import Failure
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, plan_only
from aot_tune.tuner.sweep.resources import CUBINS
from aot_tune.values.config import Config
from aot_tune.values.text import counted

CHECKED = Path("build/verified.jsonl")
"""File of notes: one line for each shape without a wrong result."""

_SEEDS = (2, ODD_SEED)
"""An even and an odd seed, which poison outputs differently. The odd seed also gives other sizes that no axis
names."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of checking a kernel."""

    kernel: str
    """Name of the kernel."""

    declared: int
    """Number of declared shapes."""

    shapes: int
    """Number of declared shapes that were checked."""

    results: int
    """Number of results compared: configs times seeds, summed over the checked shapes."""

    wrong: tuple[str, ...]
    """Configs that are wrong or fail in another way, with their problems."""

    def __str__(self) -> str:
        text = "; ".join(self.wrong) if self.wrong else "none wrong"
        return (
            f"{self.kernel}: {self.shapes} of {counted(self.declared, 'declared shape')}, "
            f"{counted(self.results, 'result')}: {text}"
        )

    @property
    def held(self) -> bool:
        """Whether all shapes are checked and no result is wrong."""
        return not self.wrong and self.shapes == self.declared


def run(kernels: Sequence[FoundKernel], *, limit_s: float, checked: Path = CHECKED) -> int:
    """Check the kernels one after another and print each result; return 0 where all of them hold."""
    gpu = next(gpu for gpu in visible_gpus() or () if gpu.arch is not None)
    ends, proofs = time.monotonic() + limit_s, []
    with CompileFeed(partial(CompilePool, usable_cores(), folder=CUBINS)) as feed:
        for kernel in kernels:
            proofs.append(_verified(kernel, gpu, feed, ends, checked))
            print(proofs[-1], flush=True)
    if any(proof.shapes < proof.declared for proof in proofs):
        print("not complete: the same command goes on")
    held = all(proof.held for proof in proofs)
    print(f"{'held' if held else 'MISSED'}: no wrong result of any portfolio on any declared shape")
    return 0 if held else 1


def _verified(declared: FoundKernel, gpu: Gpu, feed: CompileFeed, ends: float, checked: Path) -> Proof:
    assert gpu.arch is not None
    tunable, kernel = declared.tunable, DeviceKernel(declared, gpu.arch)
    path = store.table_path(store.package_folder(tunable), gpu.arch, tunable.name)
    portfolio = store.read_table(path).portfolio if path.exists() else ()
    plans = [plan_only(kernel, problem, portfolio) for problem in tunable.typical_problems]
    under = _conditions(kernel, gpu, portfolio)
    right = _right_before(checked, under)
    done = [plan for plan in plans if str(plan.problem) in right]
    left = [plan for plan in plans if str(plan.problem) not in right]
    wrong: list[str] = []
    if left and time.monotonic() < ends:
        for plan in left:
            feed.submit(plan.jobs.values())
        with MeasureSession(declared, gpu.index, on_event=print) as session:
            for plan in left:
                if time.monotonic() > ends:
                    break
                failures = _wrong(session, feed, plan)
                if not failures:
                    _note(checked, {"under": under, "problem": str(plan.problem)})
                wrong += failures
                done.append(plan)
    return Proof(
        kernel=tunable.name,
        declared=len(plans),
        shapes=len(done),
        results=len(_SEEDS) * sum(len(plan.candidates) for plan in done),
        wrong=tuple(wrong),
    )


def _wrong(session: MeasureSession, feed: CompileFeed, plan: ProblemPlan) -> list[str]:
    """Return the failures on one problem as text, with those of compilations."""
    results = feed.wait({job.key for job in plan.jobs.values()}, lambda: None)
    cubins: dict[Config, Path] = {}
    texts = []
    for config, job in plan.jobs.items():
        result = results[job.key]
        if isinstance(result, Compiled):
            cubins[config] = result.path
        else:
            texts.append(f"{config} on {plan.problem} does not compile: {result.message[:200]}")
    request = Recheck(plan.problem, cubins, seeds=_SEEDS, launches=0)
    outcomes = session.answer(request) if cubins else []
    return texts + [
        f"{outcome.config} on {plan.problem}: {outcome.stage}: {outcome.message[:200]}"
        for outcome in outcomes
        if isinstance(outcome, Failure)
    ]


def _conditions(kernel: DeviceKernel, gpu: Gpu, portfolio: Sequence[Config]) -> str:
    """Return a digest of the source, portfolio, versions and GPU that a note counts for."""
    versions = [cutile.version(), cutile.compiler_version() or "", gpu.name]
    parts = [kernel.tunable.name, source_hash(kernel.tunable), *versions, *map(str, portfolio)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _right_before(checked: Path, under: str) -> set[str]:
    """Return the problems without a wrong result in an earlier run under the same conditions."""
    right: set[str] = set()
    for line in checked.read_bytes().splitlines() if checked.exists() else ():
        with suppress(orjson.JSONDecodeError):  # the end of a run that was killed
            note = orjson.loads(line)
            if note["under"] == under:
                right.add(note["problem"])
    return right


def _note(checked: Path, note: Mapping[str, object]) -> None:
    checked.parent.mkdir(parents=True, exist_ok=True)
    with checked.open("ab") as file:
        file.write(orjson.dumps(note) + b"\n")
