"""Sweep the same kernels on one, two, four and all GPUs of this host, each time from empty caches.

Each run is an ``aot-tune tune`` of its own, with its own tables, journals and cubins, and with as many of the
host's cores for each of its GPUs as there are for each in all. The widest run has the host to itself. The
narrower ones run at the same time where there are GPUs and cores enough for all of them: one, two and four of
eight. In a last run as wide, the worker of one GPU is killed halfway.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from aot_tune.bench import words
from aot_tune.bench.gpu import shipped
from aot_tune.bench.sections.part import Part, Request
from aot_tune.errors import TuneError
from aot_tune.nvidia.nvml import Gpu, visible_gpus
from aot_tune.tables import store
from aot_tune.tables.states import State
from aot_tune.tables.table import Table
from aot_tune.tuner.choose.states import in_worst_state
from aot_tune.tuner.choose.times import as_of_first_run, is_tie
from aot_tune.tuner.measure.worker.gpu_state import GpuMonitor
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep.journal import Record
from aot_tune.tuner.sweep.results import Pass, Step, SweepResults, accepts, config_of
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

KERNELS = ("rms_norm", "layer_norm", "softmax", "rope", "gated_activation", "attention")
"""The kernels that are swept unless others are named: long and short ones, two of which compile for long."""

KILLED = "one worker killed"
"""Stands behind the name of the run in which a worker is killed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A sweep that is over."""

    gpus: int
    """Number of GPUs."""

    cores: int
    """Number of cores that it might use."""

    seconds: float
    """From the start of its process to its end."""

    tables: Mapping[str, Table]
    """Kernel to its table."""

    records: Mapping[str, Sequence[Record]]
    """Kernel to the records of its journal."""


def run(request: Request) -> Iterator[Part]:
    """Sweep with each number of GPUs.

    Raises:
        UsageError: No shipped kernel has a name that is asked for.
        TuneError: A sweep failed.
    """
    names = request.kernels or KERNELS
    words.check_known(names, shipped(), "no shipped kernel is called")
    gpus = [gpu for gpu in visible_gpus() or () if gpu.arch is not None]
    with tempfile.TemporaryDirectory(prefix="aot-tune-scaling-") as temporary:
        sweeps = Sweeps([*names, "--limit", str(request.problems)], gpus, Path(temporary))
        sweeps.import_once()
        *narrow, widest = widths(len(gpus))
        runs: list[Run] = []
        if narrow and sum(narrow) <= len(gpus):
            firsts = [sum(narrow[:place]) for place in range(len(narrow))]
            with ThreadPoolExecutor(len(narrow)) as pool:
                runs += pool.map(sweeps.swept, narrow, firsts)
        else:
            runs += [sweeps.swept(width, 0) for width in narrow]
        for one in runs:
            yield Part(name=counted(one.gpus, "GPU"), figures=figures(one, runs[0]))
        wide = sweeps.swept(widest, 0)
        yield Part(name=counted(widest, "GPU"), figures=figures(wide, (runs or [wide])[0]))
        if runs:
            hurt = sweeps.swept(widest, 0, kill_after_s=wide.seconds / 2)
            yield Part(name=f"{counted(widest, 'GPU')}, {KILLED}", figures=figures(hurt, runs[0]))


def widths(gpus: int) -> list[int]:
    """The numbers of GPUs to sweep on: the powers of two below `gpus`, and `gpus`."""
    return [*(1 << place for place in range(gpus.bit_length()) if 1 << place < gpus), gpus]


class Sweeps:
    """Runs sweeps of the same kernels, each in a folder of its own.

    Args:
        words: The words behind ``aot-tune tune`` that say what is swept.
        gpus: The host's GPUs.
        folder: An empty folder.
    """

    tune: Sequence[str] = (sys.executable, "-m", "aot_tune", "tune")
    """The command that sweeps."""

    def __init__(self, words: Sequence[str], gpus: Sequence[Gpu], folder: Path) -> None:
        self._words, self._gpus, self._folder = words, gpus, folder
        self._cores = sorted(os.sched_getaffinity(0))

    def import_once(self) -> None:
        """Import what a sweep imports, so that no run is the first to read it from the disk."""
        command = [sys.executable, "-c", "import aot_tune.tuner.sweep.run, torch; torch.cuda.init()"]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)

    def swept(self, width: int, first: int, kill_after_s: float | None = None) -> Run:
        """Sweep on `width` GPUs from the GPU `first` on.

        Args:
            width: Number of GPUs.
            first: The place of the first of them.
            kill_after_s: When to kill the worker of the last of them, seconds; None for never.

        Raises:
            TuneError: The sweep failed, or there was no worker to kill.
        """
        share = max(1, len(self._cores) // len(self._gpus))
        cores = self._cores[first * share : (first + width) * share] or self._cores
        gpus = self._gpus[first : first + width]
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        command = [*self.tune, *self._words, "--require", "measured", "--jobs", str(len(cores))]
        command += ["--gpus", ",".join(str(gpu.index) for gpu in gpus)]
        for option in ("out", "journal", "cubins"):
            command += [f"--{option}", str(folder / option)]
        with (folder / "log").open("wb") as log:
            began = time.perf_counter()
            process = _started(command, cores, log.fileno())
            try:
                if kill_after_s is not None:
                    _kill_worker(gpus[-1], process, kill_after_s)
                status = process.wait()
            finally:
                process.kill()
        seconds = time.perf_counter() - began
        if status:
            end = (folder / "log").read_text(errors="replace")[-2000:]
            raise TuneError(f"the sweep on {counted(width, 'GPU')} ended with status {status}: {end}")
        found = [journals.read(path, accepts) for path in (folder / "journal").rglob("*.done")]
        return Run(
            gpus=width,
            cores=len(cores),
            seconds=seconds,
            tables={table.kernel: table for table in _tables(folder / "out", gpus[0].arch)},
            records={content.identity["kernel"]: content.records for content in found},
        )


def _started(command: Sequence[str], cores: Iterable[int], log: int) -> subprocess.Popen[bytes]:
    """A process on some cores. It takes them over from the thread that starts it, which had all before."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    finally:
        os.sched_setaffinity(0, before)


def _kill_worker(gpu: Gpu, sweep: subprocess.Popen[bytes], after_s: float) -> None:
    """Kill what computes on a GPU, after some seconds.

    Raises:
        TuneError: Nothing computes there until the sweep has ended.
    """
    time.sleep(after_s)
    monitor = GpuMonitor(gpu.uuid)
    while sweep.poll() is None:
        killed = False
        for process in monitor.processes() or ():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                killed = True
        if killed:
            return
        time.sleep(0.1)
    raise TuneError(f"no process computed on GPU {gpu.index} after {after_s:.0f} s, so that none was killed")


def _tables(folder: Path, arch: Arch | None) -> Iterator[Table]:
    assert arch is not None
    for path in sorted((folder / str(arch)).glob("*.json")):
        yield store.read_table(path)


# Figures ----------------------------------------------------------------------------------------------------


def figures(one: Run, alone: Run) -> dict[str, Any]:
    """What a sweep took, and how its tables differ from those of the one on a single GPU.

    Args:
        one: A sweep.
        alone: The narrowest one.
    """
    spent = [record for records in one.records.values() for record in records if record["kind"] == "spent"]
    worked = sum(record["measure_s"] + record["verify_s"] + record.get("open_s", 0.0) for record in spent)
    started, waited = (sum(record.get(name, 0.0) for record in spent) for name in ("start_s", "waited_s"))
    compiled = sum(
        record.get("seconds", 0.0)
        for records in one.records.values()
        for record in records
        if record["kind"] == "compile"
    )
    in_all = one.gpus * one.seconds
    return {
        "kernels": {name: len(table.entries) for name, table in one.tables.items()},
        "cores": one.cores,
        "sweep_s": round(one.seconds, 1),
        "efficiency": round(alone.seconds * alone.gpus / in_all, 3),
        "GPUs' seconds": {
            "in all": round(in_all, 1),
            "measuring": round(worked, 1),
            "starting processes": round(started, 1),
            "waiting for compilers": round(waited, 1),
            "idle": round(in_all - worked - started - waited, 1),
        },
        "compiling, seconds of cores": round(compiled, 1),
        "compile-bound part": round(waited / in_all, 3),
        "winners": differences(one, alone),
    }


def differences(one: Run, other: Run) -> dict[str, Any]:
    """In how many entries the winners of two sweeps differ, in how many of these they tie, and the others.

    Winners are compared nearly as a sweep compares them: by the time in each one's worst state, but in one
    pass of one sweep. Those of the same code tie, whatever their grids are. A winner may also be no member of
    the other sweep's portfolio, which then had others to choose from: portfolios are settled by what they
    leave in all entries.
    """
    entries = differing = 0
    apart = []
    for name, table in one.tables.items():
        sweeps = [_Timed(sweep.records[name]) for sweep in (one, other)]
        theirs = {entry.bucket: entry.config for entry in other.tables[name].entries}
        portfolios = [sweep.tables[name].portfolio for sweep in (one, other)]
        for entry in table.entries:
            entries += 1
            config = theirs.get(entry.bucket)
            if config == entry.config:
                continue
            differing += 1
            pairs = [sweep.pair(entry.bucket, entry.config, config) if config else None for sweep in sweeps]
            alike = config and any(sweep.same_code(entry.bucket, entry.config, config) for sweep in sweeps)
            if alike or any(pair is not None and is_tie(*pair) for pair in pairs):
                continue
            apart.append(
                {
                    "kernel": name,
                    "problem": str(entry.bucket),
                    "winners": [str(entry.config), str(config or "no entry")],
                    "in both portfolios": all(
                        each is None or each in portfolio
                        for portfolio in portfolios
                        for each in (entry.config, config)
                    ),
                    "us": [[round(time.mean_us, 2) for time in pair] if pair else None for pair in pairs],
                }
            )
    return {
        "entries": entries,
        "differ": differing,
        "of these tie": differing - len(apart),
        "apart": apart,
    }


class _Timed:
    """The times of a kernel's sweep, as the sweep compares them.

    Args:
        records: The records of its journal.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._results = SweepResults(None, records)
        self._configs: dict[Problem, dict[Config, None]] = {}
        self._codes: dict[tuple[Problem, Config], str] = {}
        for record in records:
            problem = Problem(record.get("problem", {}))
            if record["kind"] == "result":
                self._configs.setdefault(problem, {})[config_of(record)] = None
            elif record["kind"] == "compile" and "code" in record:
                self._codes[problem, config_of(record)] = record["code"]

    def same_code(self, problem: Problem, one: Config, other: Config) -> bool:
        """Whether two configs were compiled to the same code for a problem."""
        code = self._codes.get((problem, one))
        return code is not None and code == self._codes.get((problem, other))

    def pair(self, problem: Problem, one: Config, other: Config) -> tuple[Measurement, Measurement] | None:
        """The times of two configs in the last pass that has both; None where none has."""
        for which in ("portfolio", "candidates"):
            times = self._judged(which, problem)
            found = [self._of_its_code(times, problem, config) for config in (one, other)]
            if found[0] is not None and found[1] is not None:
                return found[0], found[1]
        return None

    def _of_its_code(
        self, times: Mapping[Config, Measurement], problem: Problem, config: Config
    ) -> Measurement | None:
        """A config's time, or that of another of the same code: of those alike one is timed."""
        if config in times:
            return times[config]
        return next((time for one, time in times.items() if self.same_code(problem, one, config)), None)

    def _judged(self, which: Pass, problem: Problem) -> dict[Config, Measurement]:
        """Each config's time in its worst state, in one pass."""
        last: Step = "portfolio finals" if which == "portfolio" else "candidate finals"
        there: Step = "portfolio states" if which == "portfolio" else "candidate states"
        times = self._times(which, problem)
        finals = {config: time for config, time in self._times(last, problem).items() if config in times}
        states = {state: found for state in get_args(State) if (found := self._times(there, problem, state))}
        return in_worst_state({**times, **as_of_first_run(times, finals)}, states)

    def _times(self, step: Step, problem: Problem, state: State | None = None) -> dict[Config, Measurement]:
        outcomes = {
            config: self._results.outcome(step, problem, config, state)
            for config in self._configs.get(problem, ())
        }
        return {config: one for config, one in outcomes.items() if isinstance(one, Measurement)}
