"""Record sites on all GPUs of this host at once, within a time limit, and merge what they recorded.

Each GPU has a folder of tables and journals of its own. Several processes record on it: one searches at a
time, while the others compile. A run goes on with what earlier runs have put into the folder.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from aot_tune import environment
from aot_tune.bench.libraries import fetched
from aot_tune.bench.libraries.sites import HELD_OUT, SITES, label, shapes_of
from aot_tune.errors import TableError
from aot_tune.replay.document import MOST_LAUNCHED, dump
from aot_tune.replay.files import listed_recorded, read_recorded
from aot_tune.replay.table import Library, RecordedTable
from aot_tune.tables.files import write_atomic

CHILD = "aot_tune.bench.children.library"
"""Module that calls a site."""

_ROOT = Path(__file__).parents[3]

MOST_STARTS = 3
"""Processes that a task is given: a config that ends one is passed over by the next."""

_GRACE_S = 30.0
"""Seconds that a recorder has to end in after it was asked to."""


class Task(NamedTuple):
    """A site at the shapes of a model."""

    site: str
    model: str

    @property
    def shapes(self) -> int:
        """Return the number of shapes."""
        return len(shapes_of(self.site, self.model))


def recorded_on(out: Path) -> set[tuple[str, str, Library]]:
    """Return the GPU models, drivers and libraries that a folder's tables were recorded with."""
    tables = map(read_recorded, listed_recorded(sorted((out / "work").glob("gpu*"))))
    return {(table.built_with.device_name, table.built_with.driver, table.library) for table in tables}


def tasks(sites: Sequence[str], models: Sequence[str]) -> list[Task]:
    """Return the tasks of some sites and models, model by model, so that an early end has some of each."""
    every = (Task(site, model) for model in models for site in sites)
    return [task for task in every if task.shapes]


class Run:
    """Records tasks into a folder, and calls those of held-out models with its tables, where a miss fails.

    Args:
        out: The folder: ``tables`` are the result, ``work`` holds what a later run goes on with.
        gpus: The GPUs, each as CUDA_VISIBLE_DEVICES names it.
        limit_s: Seconds after which everything is asked to end.
        processes: Processes that record on each GPU.
        child: The module that calls a site.
    """

    def __init__(
        self, out: Path, gpus: Sequence[str], limit_s: float, *, processes: int = 1, child: str = CHILD
    ) -> None:
        self._out, self._gpus, self._processes, self._child = out.absolute(), gpus, processes, child
        self._deadline = time.monotonic() + limit_s
        self._waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        (self._out / "work").mkdir(parents=True, exist_ok=True)

    def record(self, wanted: Sequence[Task]) -> None:
        """Record what is not recorded yet of some tasks, then write the merged tables."""
        for task in wanted:
            if task.model in HELD_OUT:  # the tables may hold more than the last time
                self._lines(task).unlink(missing_ok=True)
            if len(self.ended(task)) < task.shapes:
                self._waiting.put(task)
        places = range(len(self._gpus) * self._processes)
        threads = [threading.Thread(target=self._on, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for cubins in (self._out / "work" / "journals").glob("*/cubins"):
            shutil.rmtree(cubins)  # many, and made again where they are wanted
        for path, table in self._merged().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, dump(table))

    def ended(self, task: Task) -> list[str]:
        """Return the lines of a task's ended calls, without those of shapes that it no longer has."""
        with suppress(FileNotFoundError):
            labels = set(map(label, shapes_of(*task)))
            lines = self._lines(task).read_text().splitlines()
            return [line for line in lines if line.split("\t")[-1] in labels]
        return []

    def _lines(self, task: Task) -> Path:
        return self._out / "work" / f"{task.site}.{task.model}.txt"

    def _on(self, place: int) -> None:
        """Record waiting tasks one after another, in one of the places for a process."""
        with suppress(queue.Empty):
            while time.monotonic() < self._deadline:
                task = self._waiting.get_nowait()
                for _ in range(MOST_STARTS):
                    self._one(task, place)
                    if len(self.ended(task)) == task.shapes or time.monotonic() > self._deadline:
                        break

    def _one(self, task: Task, place: int) -> None:
        """Record a task in a process of its own."""
        gpu = place % len(self._gpus)
        lines, work = self._lines(task), self._out / "work"
        words = ["record", "--package", SITES[task.site].library, "--out", str(work / f"gpu{gpu}")]
        words += ["--journal", str(work / "journals" / str(gpu))]
        if task.model in HELD_OUT:
            words = ["run", "--tables", str(self._out / "tables")]
        program = [sys.executable, "-m", self._child, *task, str(lines)]
        command, cores = [sys.executable, "-m", "aot_tune", *words, "--", *program], self._cores(place)
        started = time.monotonic()
        with lines.with_suffix(".log").open("a") as written:
            process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env={**os.environ, **self._variables(task, gpu)},
                stdout=written,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),  # it compiles on these alone
            )
            try:
                process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
        state = f"{len(self.ended(task))} of {task.shapes} shapes, {time.monotonic() - started:.0f} s"
        print(f"GPU {gpu}: {task.site} {task.model}: {state}, exit code {process.returncode}", flush=True)

    def _variables(self, task: Task, gpu: int) -> Mapping[str, str]:
        paths = [_ROOT, *(_ROOT / folder for folder in (fetched.FOLDER, fetched.TILEGYM))]
        known = os.environ.get("PYTHONPATH", "")
        return {
            "CUDA_VISIBLE_DEVICES": self._gpus[gpu],
            **({environment.ON_MISS: "error"} if task.model in HELD_OUT else {}),
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *([known] if known else [])]),
        }

    def _cores(self, place: int) -> set[int]:
        """Return the share of the cores that a process compiles on."""
        cores = sorted(os.sched_getaffinity(0))
        return set(cores[place :: len(self._gpus) * self._processes]) or set(cores)

    def _merged(self) -> dict[Path, RecordedTable]:
        """Return the tables of all GPUs, those of one kernel in one.

        Raises:
            TableError: Tables of a kernel were recorded under different conditions.
        """
        merged: dict[Path, RecordedTable] = {}
        for path in listed_recorded(sorted((self._out / "work").glob("gpu*"))):
            table = read_recorded(path)
            target = self._out / "tables" / path.parent.name / path.name
            merged[target] = joined(merged[target], table) if target in merged else table
        return merged


def joined(one: RecordedTable, other: RecordedTable) -> RecordedTable:
    """Return a table with the entries of two of one kernel.

    Raises:
        TableError: They differ in code, library, GPU or software.
    """
    bare = [dataclasses.replace(table, entries=(), launched=()) for table in (one, other)]
    if bare[0] != bare[1]:
        raise TableError(
            f"{one.kernel} was recorded under different conditions on two GPUs: {bare[0]} and {bare[1]}; "
            "record into another folder"
        )
    known = {(entry.space, entry.problem) for entry in one.entries}
    added = [entry for entry in other.entries if (entry.space, entry.problem) not in known]
    launched = sorted({*one.launched, *other.launched})[:MOST_LAUNCHED]
    return dataclasses.replace(one, entries=(*one.entries, *added), launched=tuple(launched))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
