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
"""Kernels that are swept by default: long and short sweeps, two of which compile for long."""

KILLED = "one worker killed"
"""Suffix of the name of the run in which a worker is killed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished sweep."""

    gpus: int
    """Number of GPUs."""

    cores: int
    """Number of cores that the sweep might use."""

    seconds: float
    """Seconds from the start of the sweep's process to its end."""

    tables: Mapping[str, Table]
    """Tables by kernel."""

    records: Mapping[str, Sequence[Record]]
    """Records of the journal by kernel."""


def run(request: Request) -> Iterator[Part]:
    """Sweep with each number of GPUs.

    Raises:
        UsageError: No shipped kernel has a requested name.
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
        for finished in runs:
            yield Part(name=counted(finished.gpus, "GPU"), figures=figures(finished, runs[0]))
        wide = sweeps.swept(widest, 0)
        yield Part(name=counted(widest, "GPU"), figures=figures(wide, (runs or [wide])[0]))
        if runs:
            hurt = sweeps.swept(widest, 0, kill_after_s=wide.seconds / 2)
            yield Part(name=f"{counted(widest, 'GPU')}, {KILLED}", figures=figures(hurt, runs[0]))


def widths(gpus: int) -> list[int]:
    """Return the numbers of GPUs to sweep on: the powers of two below `gpus`, and `gpus`."""
    return [*(1 << place for place in range(gpus.bit_length()) if 1 << place < gpus), gpus]


class Sweeps:
    """Runs sweeps of the same kernels, each in a folder of its own.

    Args:
        words: The arguments of ``aot-tune tune`` that name what is swept.
        gpus: The host's GPUs.
        folder: An empty folder.
    """

    tune: Sequence[str] = (sys.executable, "-m", "aot_tune", "tune")
    """Command that sweeps."""

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
            first: The place of the first GPU.
            kill_after_s: When to kill the worker of the last GPU, seconds; None for never.

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
        contents = [journals.read(path, accepts) for path in (folder / "journal").rglob("*.done")]
        return Run(
            gpus=width,
            cores=len(cores),
            seconds=seconds,
            tables={table.kernel: table for table in _tables(folder / "out", gpus[0].arch)},
            records={content.identity["kernel"]: content.records for content in contents},
        )


def _started(command: Sequence[str], cores: Iterable[int], log: int) -> subprocess.Popen[bytes]:
    """Start a process on some cores, inherited from the thread that starts it, which had all before."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    finally:
        os.sched_setaffinity(0, before)


def _kill_worker(gpu: Gpu, sweep: subprocess.Popen[bytes], after_s: float) -> None:
    """Kill the processes that compute on a GPU, after some seconds.

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


def figures(sweep: Run, alone: Run) -> dict[str, Any]:
    """Return a sweep's times, and how its tables differ from those of the sweep on a single GPU.

    Args:
        sweep: A sweep.
        alone: The narrowest sweep.
    """
    spent = [record for records in sweep.records.values() for record in records if record["kind"] == "spent"]
    worked = sum(record["measure_s"] + record["verify_s"] + record.get("open_s", 0.0) for record in spent)
    started, waited = (sum(record.get(name, 0.0) for record in spent) for name in ("start_s", "waited_s"))
    compiled = sum(
        record.get("seconds", 0.0)
        for records in sweep.records.values()
        for record in records
        if record["kind"] == "compile"
    )
    in_all = sweep.gpus * sweep.seconds
    return {
        "kernels": {name: len(table.entries) for name, table in sweep.tables.items()},
        "cores": sweep.cores,
        "sweep_s": round(sweep.seconds, 3),
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
        "winners": differences(sweep, alone),
    }


def differences(sweep: Run, reference: Run) -> dict[str, Any]:
    """Count the entries whose winners differ in two sweeps, those of them that tie, and list the others.

    Winners are compared nearly as a sweep compares them: by the time in each winner's worst state, but in one
    pass of one sweep. Winners of equal code tie, whatever their grids are. A winner may be missing from the
    other sweep's portfolio, which then had other configs to choose from: portfolios are chosen by the regret
    that they leave in all entries.
    """
    entries = differing = 0
    apart = []
    for name, table in sweep.tables.items():
        timed = [_Timed(run.records[name]) for run in (sweep, reference)]
        theirs = {entry.bucket: entry.config for entry in reference.tables[name].entries}
        portfolios = [run.tables[name].portfolio for run in (sweep, reference)]
        for entry in table.entries:
            entries += 1
            config = theirs.get(entry.bucket)
            if config == entry.config:
                continue
            differing += 1
            pairs = [times.pair(entry.bucket, entry.config, config) if config else None for times in timed]
            alike = config and any(times.same_code(entry.bucket, entry.config, config) for times in timed)
            if alike or any(pair is not None and is_tie(*pair) for pair in pairs):
                continue
            apart.append(
                {
                    "kernel": name,
                    "problem": str(entry.bucket),
                    "winners": [str(entry.config), str(config or "no entry")],
                    "in both portfolios": all(
                        winner is None or winner in portfolio
                        for portfolio in portfolios
                        for winner in (entry.config, config)
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
    """Times of a kernel's sweep, as the sweep compares them.

    Args:
        records: The records of the sweep's journal.
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

    def same_code(self, problem: Problem, left: Config, right: Config) -> bool:
        """Whether two configs were compiled to the same code for a problem."""
        code = self._codes.get((problem, left))
        return code is not None and code == self._codes.get((problem, right))

    def pair(self, problem: Problem, left: Config, right: Config) -> tuple[Measurement, Measurement] | None:
        """Return the times of two configs in the last pass that has both; None where none has."""
        for which in ("portfolio", "candidates"):
            times = self._judged(which, problem)
            both = [self._of_its_code(times, problem, config) for config in (left, right)]
            if both[0] is not None and both[1] is not None:
                return both[0], both[1]
        return None

    def _of_its_code(
        self, times: Mapping[Config, Measurement], problem: Problem, config: Config
    ) -> Measurement | None:
        """Return a config's time, or that of a config of the same code: of equal code one config is timed."""
        if config in times:
            return times[config]
        return next((time for timed, time in times.items() if self.same_code(problem, timed, config)), None)

    def _judged(self, which: Pass, problem: Problem) -> dict[Config, Measurement]:
        """Return each config's time in its worst state, in one pass."""
        last: Step = "portfolio finals" if which == "portfolio" else "candidate finals"
        in_states: Step = "portfolio states" if which == "portfolio" else "candidate states"
        times = self._times(which, problem)
        finals = {config: time for config, time in self._times(last, problem).items() if config in times}
        states = {
            state: timed for state in get_args(State) if (timed := self._times(in_states, problem, state))
        }
        return in_worst_state({**times, **as_of_first_run(times, finals)}, states)

    def _times(self, step: Step, problem: Problem, state: State | None = None) -> dict[Config, Measurement]:
        outcomes = {
            config: self._results.outcome(step, problem, config, state)
            for config in self._configs.get(problem, ())
        }
        return {config: outcome for config, outcome in outcomes.items() if isinstance(outcome, Measurement)}
