"""A measuring backend that does as its script says, in a real child process and without a GPU.

A script maps a config's ``name`` constant to its behaviour. What is to happen only so many times is counted
in files, since the process that counted may be the one that is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from aot_tune.errors import ArgumentsError, DeclarationError
from aot_tune.tables.states import State
from aot_tune.tuner.measure.worker.backend import Counters, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Measurement, Stage
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

ALWAYS = 1_000_000


class OutOfGpuMemory(Exception):
    """What a driver says when memory is short."""


class CompilerError(Exception):
    """What a compiler says when it refuses a kernel."""


@dataclass(frozen=True, kw_only=True)
class Does:
    """What one config does."""

    us: Sequence[float] = (10.0,)
    """Its mean in each round, in turn, microseconds."""

    in_turn: Sequence[float] = ()
    """What one launch takes, in turn; as `us` without it."""

    in_states: Mapping[str, float] = field(default_factory=dict)
    """What one launch takes in a state of the GPU; as `in_turn` without it."""

    margin_us: float = 0.01
    """The error margin of each."""

    fault: str = ""
    """What goes wrong at a launch: poison, quiet poison, hang, crash, oom, compile, launch, undeclared; or
    damage: it overwrites what the check expects, so that all are wrong in this process from then on; or
    garbage: what is no message is written to the pipe."""

    times: int = ALWAYS
    """How often it goes wrong, over all processes."""

    at_launch: int = 1
    """The first launch in a process that may go wrong; a verification is two launches, a timing eight."""

    only_in: str = ""
    """The one sort of launch that may go wrong: verify, again, time or sample; any of them without it."""

    only_on: int = 0
    """The M of the one problem where it goes wrong; 0 for all."""

    wrong: str = ""
    """What a verification finds."""

    wrong_for_seed: int = -1
    """The one seed with which it finds that; -1 for all."""

    wrong_times: int = ALWAYS
    """How often it is found, over all processes."""

    wrong_again: str = ""
    """What one of the further launches finds."""

    wrong_in: Mapping[str, str] = field(default_factory=dict)
    """What is found after a launch in a state of the GPU, or under ``load``."""

    wrong_timed: str = ""
    """What is found after timed launches."""

    seconds: float = 0.0
    """How long a verification takes, seconds."""

    seconds_again: float = 0.0
    """How long each of the further launches takes, seconds."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the GPU and its kernels do."""

    folder: Path
    """Where occurrences are counted and events are logged."""

    configs: Mapping[str, Does]
    """By a config's name."""

    slow_starts: int = 0
    """How many starts never end."""

    dead_starts: int = 0
    """How many starts end the process."""

    bad_canaries: Collection[int] = ()
    """Which canaries fail, counted over all processes from 0."""

    short_opens: Collection[int] = ()
    """Which opens run out of memory, counted likewise."""

    bad_opens: Mapping[int, str] = field(default_factory=dict)
    """What happens when the problem with this M is opened: kill, hang or raise; with
    "arguments" it raises what an exception of `make_args` becomes."""

    disturbances: Sequence[str] = field(default_factory=tuple)
    """What disturbs, one for each question from the first; nothing afterwards."""


def plain(script: Script) -> dict[str, Any]:
    """A script as values that can be sent to a process which has not imported this module yet."""
    return {
        **{one.name: getattr(script, one.name) for one in fields(script)},
        "configs": {name: asdict(does) for name, does in script.configs.items()},
        "bad_opens": [list(pair) for pair in script.bad_opens.items()],
    }


def config(name: str) -> Config:
    """The config called `name`."""
    return Config(constants={"name": name})


def events(folder: Path) -> list[str]:
    """What happened, in order, over all processes."""
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


def write_garbage() -> None:
    """Write to every pipe of this process that can be written, as a kernel with a wild pointer may."""
    for number in os.listdir("/proc/self/fd"):
        descriptor = int(number)
        try:
            if descriptor > 2 and os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
                os.write(descriptor, b"garbage" * 10)
        except OSError:
            continue  # the reading end of the other pipe
    time.sleep(600)


class ScriptedBackend:
    """A `Backend` that follows a `Script`."""

    def __init__(self, *, script: dict[str, Any]) -> None:
        configs = {name: Does(**does) for name, does in script["configs"].items()}
        script = {**script, "configs": configs, "bad_opens": dict(script["bad_opens"])}
        self._script = Script(**script)
        self._dead = self._damaged = self._loaded = self._prepared = False
        self._prepared_in: str | None = None
        self._launches: dict[str, int] = {}
        self._problem = Problem({"M": 0})
        self._seeds: Sequence[int] = ()
        self._log("start")
        if self._happens("slow start", self._script.slow_starts):
            time.sleep(600)
        if self._happens("dead start", self._script.dead_starts):
            os.kill(os.getpid(), signal.SIGKILL)

    def device(self) -> Device:
        return Device.reference(Arch.parse("sm90"))

    def state(self) -> GpuState:
        return GpuState(sm_clock_mhz=1980, clocks_locked=False, reasons=("power cap",))

    def disturbance(self) -> str | None:
        number = self._count("disturbance")
        return self._script.disturbances[number] if number < len(self._script.disturbances) else None

    def canary(self) -> None:
        if self._count("canary") in self._script.bad_canaries:
            raise RuntimeError("CUDA error: device unavailable")
        self._log("canary")

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        self._log(f"open {problem}")
        self._alive()
        if self._count("open") in self._script.short_opens:
            raise OutOfGpuMemory("tried to allocate 96 GiB")
        bad = self._script.bad_opens.get(problem.size("M"), "")
        if bad == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif bad == "hang":
            time.sleep(600)
        elif bad == "arguments":
            raise ArgumentsError("scale: make_args raises ValueError: no such size")
        elif bad:
            raise RuntimeError("no such size")
        self._damaged = False
        self._problem, self._seeds = problem, seeds

    def verify(self, trial: Trial) -> str | None:
        name, does = self._asked(trial, "verify")
        time.sleep(does.seconds)
        for seed in self._seeds:
            self._launch(name, does)
            here = does.wrong_for_seed in (-1, seed) and does.only_on in (0, self._problem["M"])
            if does.wrong and here and self._happens(f"wrong {name}", does.wrong_times):
                return does.wrong
        return "out: all are wrong" if self._damaged else None

    def again(self, trial: Trial, number: int) -> str | None:
        name, does = self._asked(trial, "again")
        time.sleep(does.seconds_again)
        self._launch(name, does)
        return does.wrong_again or None

    def prepare(self) -> None:
        self._prepared = True

    def check(self) -> str | None:
        does = self._script.configs[self._last]
        if self._prepared_in is None:
            return does.wrong_timed or None
        wrong = does.wrong_in.get(self._prepared_in, "")
        return wrong if wrong and self._happens(f"wrong {self._last}", does.wrong_times) else None

    def damage(self) -> str | None:
        return "the expected out changed, seed 0" if self._damaged else None

    def time(self, trial: Trial) -> Measurement:
        name, does = self._asked(trial, "time")
        self._prepared_in = None
        for _ in range(8):
            self._launch(name, does)
        taken = does.us[self._count(f"rounds of {name}") % len(does.us)]
        return Measurement(config=trial.config, mean_us=taken, error_margin_us=does.margin_us, num_samples=5)

    def busy(self, seconds: float) -> None:
        self._log(f"busy {seconds}")
        self._loaded = True

    def sample(self, trial: Trial, state: State) -> float:
        loaded, self._loaded = self._loaded, False
        if self._prepared:  # it is compared, and its time does not count
            self._prepared, self._prepared_in = False, "load" if loaded else state
            name, does = self._asked(trial, "compare", f" {self._prepared_in}")
            self._launch(name, does)
            return 10.0
        name, does = self._asked(trial, "sample", "" if loaded else f" {state}")
        self._launch(name, does)
        if state in does.in_states and not loaded:
            return does.in_states[state]
        return (does.in_turn or does.us)[self._count(f"samples of {name}") % len(does.in_turn or does.us)]

    def counters(self, trial: Trial) -> Counters:
        name, does = self._asked(trial, "counters")
        self._launch(name, does)
        return Counters(values={"gpu__time_duration.sum": 10_000.0}, passes=3)

    def healthy(self) -> bool:
        return not self._dead

    def stage(self, error: Exception) -> Stage:
        if self._dead:
            return "fault"
        if isinstance(error, OutOfGpuMemory):
            return "memory"
        return "compile" if isinstance(error, CompilerError) else "launch"

    def _asked(self, trial: Trial, what: str, more: str = "") -> tuple[str, Does]:
        name = self._last = str(trial.config["name"])
        self._what = what
        self._log(f"{what} {name}{more}")
        self._alive()
        return name, self._script.configs[name]

    def _launch(self, name: str, does: Does) -> None:
        launch = self._launches[name] = self._launches.get(name, 0) + 1
        here = does.only_on in (0, self._problem["M"]) and does.only_in in ("", self._what)
        if does.fault and here and launch >= does.at_launch and self._happens(f"fault of {name}", does.times):
            self._go_wrong(does.fault)

    def _go_wrong(self, fault: str) -> None:
        if fault == "hang":
            time.sleep(600)
        elif fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "oom":
            raise OutOfGpuMemory("out of memory")
        elif fault == "compile":
            raise CompilerError("tile of 3 is no power of two")
        elif fault == "launch":
            raise RuntimeError("too much shared memory" + " and more" * 3_000_000)
        elif fault == "damage":
            self._damaged = True
        elif fault == "garbage":
            write_garbage()
        elif fault == "undeclared":
            raise DeclarationError("scripted: the kernel changes its argument weight")
        else:
            self._dead = True
            if fault == "poison":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _alive(self) -> None:
        if self._dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _happens(self, what: str, times: int) -> bool:
        return times > 0 and self._count(what) < times

    def _count(self, what: str) -> int:
        """How often this was asked before, over all processes."""
        with (self._script.folder / what).open("ab") as file:
            before = file.tell()
            file.write(b".")
        return before

    def _log(self, line: str) -> None:
        with (self._script.folder / "log").open("a") as file:
            file.write(line + "\n")
