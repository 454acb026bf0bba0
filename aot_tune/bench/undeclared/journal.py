"""Keep the samples of undeclared problems in a file of JSON lines, so that several short calls add up.

A line is written before a problem is measured and one after. A process that a problem ends leaves the first
alone; a problem that has ended two is left out from then on. A line that was cut off is left out.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

MOST_ENDED = 2
"""Processes that a problem may end before it is left out."""

Samples = Mapping[str, Mapping[str, "list[float]"]]
"""A config's text, or a rival's name, to the samples in each state, microseconds."""

_HELD_UP, _FAR_OFF = 1.25, 1.9
"""Bounds of the median and the largest of samples over one of the least: beyond both they are taken again. Of
1,240 measurements each on an H200 and an H100 nothing else was beyond 1.25 and 1.6."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """Key of a measurement: kernel, problem, run, GPU, code and compiler."""

    kernel: str
    """Kernel's name."""

    problem: str
    """Problem as text."""

    run: int
    """Number of the run, from 0."""

    device: str
    """GPU's product name."""

    source_hash: str
    """Hash of the kernel's code."""

    tileiras: str
    """Version of the compiler."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Outcome of one problem in one run."""

    us: Samples
    """Samples; empty where the problem failed."""

    failed: str | None = None
    """Reason why it has no samples."""

    @property
    def disturbed(self) -> bool:
        """Whether more than half of the launches of a config in a state were held up.

        The system had given this process's core to another between the first event of a launch and the
        launch: those samples are far off and differ from each other, where other clocks or another state of
        the cache make all slower alike.
        """
        every = (sorted(us) for by_state in self.us.values() for us in by_state.values())
        return any(_is_held_up(us) for us in every)


def _is_held_up(ascending: Sequence[float]) -> bool:
    quick = ascending[len(ascending) // 4]  # not the least, which may be a stroke of luck
    return statistics.median(ascending) > _HELD_UP * quick and ascending[-1] > _FAR_OFF * quick


class Journal:
    """A file of samples.

    Args:
        path: The file; its folder is made with it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken: dict[Key, Taken] = {}
        self._begun: dict[Key, int] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            self._read(line)

    def _read(self, line: bytes) -> None:
        try:
            value = orjson.loads(line)
            key = Key(**value["key"])
            taken = Taken(**value["taken"]) if "taken" in value else None
        except (ValueError, KeyError, TypeError):
            return  # it was cut off, or another release wrote it
        if taken is None:
            self._begun[key] = self._begun.get(key, 0) + 1
        else:
            self._taken[key], self._begun[key] = taken, 0

    def taken(self, key: Key) -> Taken | None:
        """Return the known outcome, samples or a failure; None where it has to be measured."""
        if self._begun.get(key, 0) >= MOST_ENDED:
            return Taken(us={}, failed=f"it ended the process {MOST_ENDED} times")
        return self._taken.get(key)

    def begin(self, key: Key) -> None:
        """Write the start of a problem."""
        self._begun[key] = self._begun.get(key, 0) + 1
        self._write({"key": asdict(key)})

    def keep(self, key: Key, taken: Taken) -> None:
        """Write the outcome of a problem."""
        self._taken[key], self._begun[key] = taken, 0
        self._write({"key": asdict(key), "taken": asdict(taken)})

    def _write(self, value: object) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(b"\n" + orjson.dumps(value) + b"\n")  # a line that was cut off before ends here
            file.flush()
            os.fsync(file.fileno())
