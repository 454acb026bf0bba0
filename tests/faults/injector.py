"""Faults as data, and the counts of those that happened: written where a fault happens, read by the report.

A `Plan` lies in a file that every process of a scenario finds through one environment variable. A process
that is about to do harm appends one byte to the file `injected` first: the size of that file is the number of
faults, whatever becomes of the process.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PLAN = "AOT_TUNE_TEST_FAULTS"
"""The variable that names the folder of a scenario."""

ALWAYS = 1_000_000

HARMLESS = ("pause", "factor")
"""Kinds that are no faults: a launch that takes long, a config that is fast. They are not counted."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong, and where and how often."""

    kind: str
    """What happens; the place that obeys the plan says which kinds it knows."""

    config: str = ""
    """The config that misbehaves, ``<tile_m>-<tile_n>``; empty for all."""

    phase: str = ""
    """The phase in which it does: check, recheck, time; empty for all of them. A launch in a state of the GPU
    or under load is of the phase ``time`` and, for example, of ``time written``."""

    only_on: int = 0
    """The M of the problem on which it does; 0 for all."""

    odd: bool = False
    """Whether it does on problems of odd M alone."""

    times: int = ALWAYS
    """How often it happens, over all processes."""

    after: int = 0
    """How often it is spared before that, over all processes."""

    chance: float = 1.0
    """The part of these occasions on which it happens."""

    value: float = 0.0
    """A factor or a time, where the kind needs one."""

    gpu: str = ""
    """The end of the uuid of the GPU whose worker misbehaves; empty for all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all processes of one scenario do."""

    launches: Sequence[Fault] = ()
    """Faults of launches of the kernel, in the measuring worker."""

    times: Sequence[Fault] = ()
    """Faults of the times that come out, likewise."""

    worker: Sequence[Fault] = ()
    """Faults of the worker outside launches; `phase` is start, canary or arguments."""

    compilers: Sequence[Fault] = ()
    """Faults of the compiling processes."""

    calls: Sequence[Fault] = ()
    """Faults of the tuner's system calls on journal and table; `phase` is the call's name."""

    without: Sequence[str] = ()
    """Configs that the declaration refuses."""

    problems: Sequence[int] = (16, 64, 256)
    """The Ms that the declaration names. At M=1 configs would be of the same machine code."""

    changed: Sequence[str] = ()
    """The functions of the declaration that are written in another way: reference, make_args."""

    ignores_children: bool = False
    """Whether the tuner is started with SIGCHLD ignored, as its parent may have done."""

    driver: str = "580.1"
    """The driver's version."""

    gpu: str = "NVIDIA H200"
    """The GPU's name."""

    uuid: str = "GPU-0"
    """The GPU's identifier: scenarios that run at the same time have GPUs of their own."""

    throttled: int = 0
    """How often the GPU says that it is throttled."""

    gpus: int = 1
    """How many such GPUs there are; the uuid of each but an only one ends in its index."""

    slow: float = 1.0
    """What all times are multiplied by."""

    launch_s: float = 0.0
    """What a launch takes of real time, seconds: as long as the sweep of a real GPU should look."""

    real_limits: bool = False
    """Whether the tuner's own time limits hold, in place of short ones."""

    seed: int = 0
    """Draws the faults of less than certain chance."""

    jump_s: float = 0.0
    """Seconds by which the wall clock of every process jumps at each look at it."""

    def write(self, folder: Path) -> None:
        """Make this the plan of a scenario."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(asdict(self)))


def plan() -> Plan:
    """The plan of this process's scenario."""
    values = json.loads((here() / "plan.json").read_text())
    for name in ("launches", "times", "worker", "compilers", "calls"):
        values[name] = tuple(Fault(**one) for one in values[name])
    return Plan(**values)


def here() -> Path:
    """The folder of this process's scenario."""
    return Path(os.environ[PLAN])


# Counting ---------------------------------------------------------------------------------------------------


def happens(faults: Sequence[Fault], *, config: str = "", phase: str = "", only_on: int = 0) -> Fault | None:
    """The first fault that is due now; it is counted as injected."""
    for number, fault in enumerate(faults):
        here_too = (
            fault.config in ("", config)
            and fault.phase in ("", phase, phase.partition(" ")[0])
            and fault.only_on in (0, only_on)
            and not (fault.odd and only_on % 2 == 0)
        )
        if not here_too or not os.environ.get("CUDA_VISIBLE_DEVICES", "").endswith(fault.gpu):
            continue
        occasion = tally(f"occasion {fault.kind} {number} {fault.config} {fault.phase} {fault.gpu}")
        if fault.after <= occasion < fault.after + fault.times and _drawn(fault, occasion):
            if fault.kind not in HARMLESS:
                injected()
            return fault
    return None


def _drawn(fault: Fault, occasion: int) -> bool:
    if fault.chance >= 1.0:
        return True
    import random

    return random.Random(f"{plan().seed} {fault.config} {occasion}").random() < fault.chance


def injected(folder: Path | None = None) -> None:
    """Count one fault, before it does its harm."""
    tally("injected", folder)


def tally(name: str, folder: Path | None = None) -> int:
    """Append a byte to one of the scenario's files; return how many it had before, over all processes."""
    file = (folder or here()) / name.replace("/", "_")
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        before = os.lseek(descriptor, 0, os.SEEK_END)
        os.write(descriptor, b".")
        return before
    finally:
        os.close(descriptor)


def count(folder: Path, name: str = "injected") -> int:
    """How often a thing was counted in a scenario."""
    file = folder / name
    return file.stat().st_size if file.exists() else 0


def log(line: str, name: str = "log") -> None:
    """Write down what the GPU did, or, as `acknowledged`, what the tuner said to be done."""
    descriptor = os.open(here() / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, line.encode() + b"\n")
    os.close(descriptor)


def logged(folder: Path, name: str = "log") -> list[str]:
    """What was written down in a scenario, in order, over all processes."""
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []


# Times ------------------------------------------------------------------------------------------------------

DEFAULT = "16-32"
"""The name of the default config."""


def us_of(m: int, config: str) -> float:
    """The time of a config at the size M, microseconds: the default's is 21 to 22, all others' 10 to 20."""
    digest = hashlib.sha256(f"{m} {config}".encode()).digest()
    part = int.from_bytes(digest[:4], "little") / (1 << 32)
    return 21 + part if config == DEFAULT else 10 + 10 * part
