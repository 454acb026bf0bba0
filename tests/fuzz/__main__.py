"""Fuzz the readers: ``python -m tests.fuzz [--seconds 60] [--runs N] [TARGET ...]``, or ``make fuzz``.

Each target runs in a process of its own, with atheris (coverage-guided) where it is installed. Elsewhere the
same mutations run in a loop, which keeps inputs whose outcome is new. A finding ends its target: its input is
written below build/fuzz, and belongs in tests/fuzz/corpus/<target>, which the tests replay.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from types import FrameType

FOUND = Path("build") / "fuzz"
"""The folder of inputs that found something, and of each target's outcomes with their counts."""

MOST_S = 5.0
"""The most processor time that one input may take, seconds: 1000 times what a usual one takes."""

MOST_MIB = 512
"""The most memory that one input may add to the peak of the process, MiB."""

MOST_KEPT = 2000
"""The most inputs that the loop without atheris keeps."""

INSTRUMENTED = [
    "aot_tune.declare",
    "aot_tune.tables",
    "aot_tune.serve",
    "aot_tune.cubins",
    "aot_tune.tuner",
    "aot_tune.values",
]
"""The packages whose coverage guides atheris: not the kernels, whose code cuTile reads."""

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""The folder of files in memory, where the system has one: some targets write their input to a file."""

WITH_ATHERIS = importlib.util.find_spec("atheris") is not None


def main() -> int:
    """Fuzz the targets one after another; the exit code is 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="those to fuzz; all without any")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--runs", type=int, default=0, help="inputs of each target, in place of a time")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31 + 1)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        fuzz = _with_atheris if WITH_ATHERIS else _without
        fuzz(asked.targets[0], asked.seconds, asked.runs, asked.seed)
        return 0
    names = asked.targets or _names()
    if not WITH_ATHERIS:
        print("atheris is not installed (pip install -e '.[fuzz]'): mutating at random, without coverage")
    options = [f"--seconds={asked.seconds / len(names)}", f"--runs={asked.runs}", f"--seed={asked.seed}"]
    command = [sys.executable, "-m", "tests.fuzz", "--one", *options]
    with tempfile.TemporaryDirectory(prefix="aot_tune-fuzz-", dir=MEMORY) as folder:
        env = {**os.environ, "TMPDIR": folder}
        codes = [subprocess.run([*command, name], env=env, check=False).returncode for name in names]
    return int(any(codes))


def _names() -> list[str]:
    from tests.fuzz.targets import TARGETS

    return list(TARGETS)


class Finding(Exception):
    """An input took too long or too much memory."""


class Runner:
    """Runs one target's inputs within bounds of time and memory, and counts them.

    Args:
        name: The target's name.
        seconds: The time to spend.
        runs: How many inputs to run, in place of a time; 0 for the time.
    """

    def __init__(self, name: str, seconds: float, runs: int) -> None:
        from tests.fuzz import targets

        target = targets.TARGETS[name]
        self.seeds = [*target.seeds(), *targets.corpus(name).values()]
        """The inputs to begin with."""
        self.outcomes: dict[str, int] = {}
        """How many inputs had each outcome; numbers of several digits in it do not count."""
        self._name, self._run, self._seconds, self._runs = name, target.run, seconds, runs
        self._count, self._slowest_s, self._slowest = 0, 0.0, b""
        self._started = time.monotonic()
        self._stopped = False
        signal.signal(signal.SIGPROF, _took_long)
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """End early, with the report of what was done."""
        self._stopped = True

    @property
    def done(self) -> bool:
        """Whether the time is over, all inputs ran, or the process was asked to end."""
        if self._stopped:
            return True
        if self._runs:
            return self._count >= self._runs
        return time.monotonic() - self._started >= self._seconds

    def run(self, data: bytes) -> None:
        """Run one input.

        Raises:
            Exception: Whatever the target found; the input was written to a file.
        """
        memory, started = _peak_mib(), time.process_time()
        signal.setitimer(signal.ITIMER_PROF, MOST_S)
        try:
            outcome = self._run(data)
            if _peak_mib() - memory > MOST_MIB:
                raise Finding(f"took over {MOST_MIB} MiB")
        except BaseException:
            FOUND.mkdir(parents=True, exist_ok=True)
            path = FOUND / f"{self._name}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            print(f"{self._name}: a finding after {self._count} inputs: {path}", file=sys.stderr)
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self._count += 1
        took_s = time.process_time() - started
        if took_s > self._slowest_s:
            self._slowest_s, self._slowest = took_s, data
        outcome = re.sub(r"\d\d+", "#", outcome)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def report(self) -> None:
        """Print what was done, and write the outcomes with their counts, and the slowest input."""
        FOUND.mkdir(parents=True, exist_ok=True)
        by_count = dict(sorted(self.outcomes.items(), key=lambda item: -item[1]))
        (FOUND / f"{self._name}.slowest").write_bytes(self._slowest)
        (FOUND / f"{self._name}.outcomes.json").write_text(json.dumps(by_count, indent=1) + "\n")
        print(
            f"{self._name}: {self._count} inputs in {time.monotonic() - self._started:.0f} s, "
            f"{len(self.outcomes)} different outcomes, no finding; the slowest took "
            f"{1000 * self._slowest_s:.0f} ms",
            flush=True,
        )


def _took_long(number: int, frame: FrameType | None) -> None:
    raise Finding(f"took over {MOST_S:.0f} s")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _without(name: str, seconds: float, runs: int, seed: int) -> None:
    from tests.fuzz.mutations import mutate

    runner, random = Runner(name, seconds, runs), Random(seed)
    inputs = list(runner.seeds)
    for data in inputs:
        runner.run(data)
    while not runner.done:
        data, known = mutate(random.choice(inputs), random, inputs), len(runner.outcomes)
        runner.run(data)
        if len(runner.outcomes) > known and len(inputs) < MOST_KEPT:
            inputs.append(data)
    runner.report()


def _with_atheris(name: str, seconds: float, runs: int, seed: int) -> None:
    import atheris

    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz import targets  # noqa: F401  (imported here to be instrumented)
    from tests.fuzz.mutations import mutate

    runner = Runner(name, seconds, runs)
    folder = Path(tempfile.mkdtemp(prefix="aot_tune-fuzz-seeds-"))
    for number, data in enumerate(runner.seeds):
        (folder / str(number)).write_bytes(data)

    def changed(data: bytes, most: int, number: int) -> bytes:
        random = Random(number)
        if random.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return mutate(data, random, runner.seeds)[:most]

    def one(data: bytes) -> None:
        runner.run(data)
        if runner.done:  # libFuzzer would end the process without another line of Python
            runner.report()
            os._exit(0)

    # The limit is on processor time (`MOST_S`). This one is of the clock, which a busy machine passes.
    words = [
        f"-seed={seed}",
        "-max_len=65536",
        "-timeout=3600",
        "-verbosity=0",
        f"-artifact_prefix={folder}/",
    ]
    atheris.Setup(["fuzz", str(folder), *words], one, custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
