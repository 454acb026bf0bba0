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
from typing import Any

from aot_tune.bench.gpu import shipped
from aot_tune.bench.sections.part import Part, Request
from aot_tune.errors import TuneError, UsageError
from aot_tune.nvidia.nvml import Gpu, visible_gpus
from aot_tune.tables import store
from aot_tune.tables.table import Table
from aot_tune.tuner.choose.times import is_tie
from aot_tune.tuner.measure.rounds import combined
from aot_tune.tuner.measure.worker.gpu_state import GpuMonitor
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep.journal import Record
from aot_tune.tuner.sweep.results import Step, SweepResults, accepts, config_of
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

KERNELS = ("rms_norm", "layer_norm", "softmax", "rope", "gated_activation", "attention")
"""The kernels that are swept unless others are named: long and short ones, two of which compile for long."""

KILLED = "one worker killed"
"""Stands behind the name of the run in which a worker is killed."""

_STEPS: tuple[Step, ...] = ("candidate finals", "portfolio finals", "candidates", "portfolio")
"""Where the times of two configs are looked for, the best step first."""


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
    if unknown := [name for name in names if name not in shipped()]:
        raise UsageError(f"no shipped kernel is called {' '.join(unknown)}; there is {' '.join(shipped())}")
    gpus = [gpu for gpu in visible_gpus() or () if gpu.arch is not None]
    words = [*names, "--limit", str(request.problems)]
    with tempfile.TemporaryDirectory(prefix="aot-tune-scaling-") as temporary:
        sweeps = Sweeps(words, gpus, Path(temporary))
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
    """In how many entries the winners of two sweeps differ, in how many of these they tie, and the others."""
    entries = differing = 0
    apart = []
    for name, table in one.tables.items():
        results = [SweepResults(None, sweep.records[name]) for sweep in (one, other)]
        theirs = {entry.bucket: entry.config for entry in other.tables[name].entries}
        codes = _codes([*one.records[name], *other.records[name]])
        for entry in table.entries:
            entries += 1
            config = theirs.get(entry.bucket)
            if config == entry.config:
                continue
            differing += 1
            both = [entry.config, *([config] if config else [])]
            if len({codes.get((entry.bucket, each), str(each)) for each in both}) < len(both):
                continue  # the same code, which was timed once
            pairs = [_times(found, entry.bucket, both) for found in results]
            if any(pair is not None and is_tie(*pair) for pair in pairs):
                continue
            apart.append(
                {
                    "kernel": name,
                    "problem": str(entry.bucket),
                    "winners": [str(entry.config), str(config or "no entry")],
                    "us": [[round(time.mean_us, 2) for time in pair] if pair else None for pair in pairs],
                }
            )
    return {
        "entries": entries,
        "differ": differing,
        "of these tie": differing - len(apart),
        "apart": apart,
    }


def _codes(records: Iterable[Record]) -> dict[tuple[Problem, Config], str]:
    """The digest of the machine code of each config that was compiled for a problem."""
    return {
        (Problem(record["problem"]), config_of(record)): record["code"]
        for record in records
        if record["kind"] == "compile" and "code" in record
    }


def _times(
    results: SweepResults, problem: Problem, configs: Sequence[Config]
) -> tuple[Measurement, Measurement] | None:
    """The times of two configs from one step, taken in turn there; None where no step has two."""
    for step in _STEPS:
        found = [_time(results, step, problem, config) for config in configs]
        if len(found) == 2 and found[0] is not None and found[1] is not None:
            return found[0], found[1]
    return None


def _time(results: SweepResults, step: Step, problem: Problem, config: Config) -> Measurement | None:
    """A config's time in a step: that of its rounds together where the step has rounds."""
    if rounds := results.rounds(step, problem, config):
        return combined(config, rounds)
    outcome = results.outcome(step, problem, config)
    return outcome if isinstance(outcome, Measurement) else None
