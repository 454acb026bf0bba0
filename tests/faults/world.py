"""Runs whole sweeps in child processes and judges them: what was lost, wrong or hung. Knows no fault."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from aot_tune.cubins.archive import FILE_NAME
from tests.faults import injector
from tests.faults.injector import Plan
from tests.support.marks import MARK, marked

ROOT = Path(__file__).parents[2]
CUBINS = ROOT / "build" / "faults" / "cubins"
"""Cubins of all scenarios: they are compiled once in a checkout."""

DEADLINE_S = 180.0
"""Seconds after which a sweep counts as hung on an idle machine: undisturbed, it takes 5 s."""

END_S = 10.0
"""Seconds that the processes of a sweep that has ended may take to end."""


def patience(seconds: float) -> float:
    """A limit that follows the load of this machine: a process that hangs uses no CPU time."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Tally:
    """What a row of the report adds up."""

    injected: int = 0
    """Faults that happened."""

    lost: int = 0
    """Measurements that were made again, or went, although they were reported as done."""

    wrong: int = 0
    """Sweeps or launches with another result than they should have."""

    hung: int = 0
    """Processes that did not end in time, or stayed behind."""

    why: list[str] = field(default_factory=list)
    """One line for each that was lost, wrong or hung."""

    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, what: str, number: int, why: str) -> None:
        """Count what was lost, wrong or hung."""
        if number:
            with self.lock:
                setattr(self, what, getattr(self, what) + number)
                self.why.append(f"{what}: {why}")

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, wrong or hung, and anything was injected at all."""
        return bool(self.injected) and not (self.lost or self.wrong or self.hung)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a sweep ended."""

    code: int
    """Its exit code, or minus the signal that ended it."""

    said: str
    """What it wrote to stderr."""

    seconds: float
    """How long it took."""


class Sweep:
    """One folder with a journal and tables, in which sweeps of the small kernel run one after another."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.folder, self._tally = folder, tally
        self.name = folder.name
        # Processes that run the faults at the same time have GPUs of their own.
        self.uuid = f"GPU-{sha256(str(folder).encode()).hexdigest()[:8]}-{folder.name}"
        self.seconds = 0.0
        folder.mkdir(parents=True)

    @property
    def path(self) -> Path:
        """The table's file."""
        return self.folder / "tables" / "sm90" / "scale.json"

    @property
    def archive(self) -> Path:
        """The archive's file."""
        return self.path.with_name(FILE_NAME)

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.folder / "journal" / "sm90" / "scale.jsonl"

    def table(self) -> bytes | None:
        """The table's bytes; None without one."""
        return self.path.read_bytes() if self.path.exists() else None

    def winners(self) -> dict[int, tuple[dict[str, int], float]]:
        """By bucket, the winner's constants and its gain over the default."""
        entries = json.loads(self.table() or b'{"entries": []}')["entries"]
        return {
            entry["bucket"]["M"]: (entry["config"]["constants"], entry["default_us"] / entry["mean_us"])
            for entry in entries
        }

    def start(self, plan: Plan, *more: str, **variables: str) -> subprocess.Popen[str]:
        """Begin a sweep; or, where `more` begins with ``compile``, its archive."""
        if plan.uuid == Plan.uuid:
            plan = dataclasses.replace(plan, uuid=self.uuid)
        plan.write(self.folder)
        cubins = self.folder / "cubins" if plan.compilers else CUBINS
        if plan.compilers and not cubins.exists():
            shutil.copytree(CUBINS, cubins)
        verb, *options = more if "compile" in more else ("tune", *more)
        words = [verb, "--module", "tests.faults.small_kernel", "--arch", "sm90", "--jobs", "2"]
        words += ["--out", "tables", "--cubins", str(cubins)]
        if verb == "tune":
            words += ["--journal", "journal", *(() if "--gpus" in more else ("--gpus", "0"))]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            injector.PLAN: str(self.folder),
            MARK: str(self.folder),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "tests.faults.tuner_process", *words, *options],
            cwd=self.folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(
        self,
        plan: Plan,
        *more: str,
        meanwhile: Callable[[subprocess.Popen[str]], object] = lambda process: None,
        **variables: str,
    ) -> Ended:
        """Run a sweep to its end; `meanwhile` may do something to it first."""
        began, before = time.monotonic(), injector.count(self.folder)
        process = self.start(plan, *more, **variables)
        meanwhile(process)
        ended = self.finish(process, began)
        self._tally.injected += injector.count(self.folder) - before
        return ended

    def finish(self, process: subprocess.Popen[str], began: float) -> Ended:
        """Wait for a sweep's end and for that of its processes."""
        limit_s = patience(DEADLINE_S)
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._tally.add("hung", 1, f"{self.name}: no end within {limit_s:.0f} s")
            os.killpg(process.pid, signal.SIGKILL)
            _, said = process.communicate()
        seconds = self.seconds = time.monotonic() - began
        left = self._left()
        self._tally.add("hung", len(left), f"{self.name}: {len(left)} processes are left")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return Ended(code=process.returncode, said=said, seconds=seconds)

    def _left(self) -> list[int]:
        """Processes of this folder that outlive the sweep."""
        until = time.monotonic() + patience(END_S)
        while (left := marked(str(self.folder))) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    # Judging ------------------------------------------------------------------------------------------------

    def timed(self) -> Counter[str]:
        """How often each config was timed on each problem, over all sweeps of this folder."""
        return Counter(line for line in injector.logged(self.folder) if line.startswith("time "))

    def acknowledged(self) -> Counter[str]:
        """How many of these timings are reported as done: they were on disk when the sweep went on."""
        places = set(injector.logged(self.folder, "acknowledged"))  # a place may be written more than once
        return Counter(place.partition(" in ")[0] for place in places)

    def judge(self, wanted: bytes | None, ended: Ended | None = None) -> None:
        """Compare the table's bytes; a traceback is wrong as well."""
        if self.table() != wanted:
            end = (ended.said.strip().splitlines() or [""])[-1] if ended else ""
            found = "no table" if self.table() is None else f"another table {self._shortly()}"
            self._tally.add("wrong", 1, f"{self.name}: {found}; {end[:200]}")
        self.told(ended)

    def told(self, ended: Ended | None) -> None:
        """A traceback on stderr is wrong, whatever the table is."""
        if ended is not None and "Traceback (most recent call last)" in ended.said:
            self._tally.add(
                "wrong", 1, f"{self.name}: a traceback: {ended.said.strip().splitlines()[-1][:200]}"
            )

    def refused(self, ended: Ended, word: str) -> None:
        """A sweep that should have ended with an error that has this word."""
        if ended.code == 0 or word not in ended.said:
            end = (ended.said.strip().splitlines() or [""])[-1]
            self._tally.add("wrong", 1, f"{self.name}: exit code {ended.code} without {word!r}: {end[:200]}")
        self.told(ended)

    def _shortly(self) -> str:
        return str({m: f"{c['tile_m']}-{c['tile_n']} {gain:.2f}x" for m, (c, gain) in self.winners().items()})


class World:
    """Where scenarios run: a folder for each sweep, and the undisturbed sweeps to compare with."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self._references: dict[Plan, Sweep] = {}
        self._lock = threading.Lock()
        self._number = 0

    def sweep(self, name: str, tally: Tally) -> Sweep:
        """A new folder."""
        with self._lock:
            self._number += 1
            return Sweep(self.folder / f"{name}-{self._number}", tally)

    def reference(self, plan: Plan = Plan()) -> Sweep:  # noqa: B008 (frozen)
        """The undisturbed sweep of a plan, run once."""
        with self._lock:
            if plan not in self._references:
                tally = Tally()
                sweep = Sweep(self.folder / f"reference-{len(self._references)}", tally)
                ended = sweep.run(plan)
                assert ended.code == 0, (plan, ended.said)
                assert not tally.why, (plan, tally.why)
                self._references[plan] = sweep
            return self._references[plan]
