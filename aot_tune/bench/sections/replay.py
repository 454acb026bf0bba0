"""Time operations of TileGym as the library comes, and replayed from recorded tables, on one GPU.

Each operation is recorded in a process of its own. Then three processes wait beside each other: `bare`, the
library as it comes; `compiled`, replayed from the recorded tables; `cubins`, replayed from the tables and an
archive of cubins, with the compiler out of reach. Their first calls are timed one after another, then their
later calls in turns, so that what the library chose and what was recorded meet the same clocks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aot_tune
from aot_tune import environment
from aot_tune.bench import words
from aot_tune.bench.sections.part import Part, Request
from aot_tune.declare.selection import chosen_arch
from aot_tune.errors import UsageError

SHAPES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "matmul": ((4096, 4096, 4096), (512, 14336, 4096), (8192, 1024, 8192)),
    "static_persistent_matmul": ((4096, 4096, 4096), (512, 14336, 4096), (8192, 1024, 8192)),
    "attention": ((1, 32, 8, 4096, 128), (4, 32, 8, 1024, 128), (1, 64, 8, 2048, 128)),
    "softmax": ((4096, 4096), (8192, 2048), (1024, 8192)),
    "rms_norm": ((4096, 4096), (256, 8192), (8192, 2048)),
    "silu_and_mul": ((4096, 14336), (2048, 11008), (8192, 4096)),
    "bmm": ((32, 1024, 1024, 128), (8, 2048, 2048, 512), (64, 128, 4096, 128)),
    "rope": ((1, 32, 8, 4096, 128), (1, 64, 8, 2048, 128), (4, 32, 4, 1024, 128)),
    "layer_norm": ((4096, 4096), (8192, 1280), (2048, 8192)),
    "persistent_layer_norm": ((4096, 4096), (8192, 1280), (2048, 8192)),
}
"""Operation to the shapes that `aot_tune.bench.children.replay` calls it with, those of LLM servers.

The hidden sizes of silu_and_mul differ, since the library's cache does not tell rows apart.
"""

VARIANTS = ("bare", "compiled", "cubins")
"""The processes that are compared; those that replay come after the one that does not."""

ROUNDS = 5
"""Rounds in which the processes take turns at their later calls."""

TIE = 0.02
"""Two times within this fraction of each other are the same, as everywhere in this project."""

COMPILED = "compiled although cubins were given"
"""The figure that says why a process without a compiler could not go on."""

LIMIT_S = 300.0
"""Seconds after which a process that does not answer, or a recording that does not end, is killed."""

CHILD = "aot_tune.bench.children.replay"
"""The module that calls the operations."""

COMMAND_LINE = "aot_tune"
"""The module that records, compiles and replays."""

_LINES = 12
"""Last lines on stderr of a process that are printed: what recording tells, and why a process died."""

_BESIDE = Path("build/third-party/tilegym")
"""Where `make third-party` puts the library."""


class ReplayError(Exception):
    """An operation cannot be measured. The others are."""


def run(request: Request) -> Iterator[Part]:
    """Measure milliseconds of first calls, and microseconds of later calls on the host and on the GPU."""
    names = request.kernels or tuple(SHAPES)
    words.check_known(names, SHAPES, "replay has no operation")
    arch = str(chosen_arch(None))
    yield from measured(names, arch, paths=library_paths(), limit_s=request.limit_s)


def library_paths() -> list[Path]:
    """The folders that the processes need on their path to import TileGym, none where it is installed.

    Raises:
        UsageError: It is nowhere.
    """
    if find_spec("tilegym") is not None:
        return []
    if (_BESIDE / "tilegym").is_dir():
        return [_BESIDE.absolute()]
    raise UsageError(
        "replay measures TileGym, which cannot be imported here: make third-party puts it into "
        f"{_BESIDE}; where it lies elsewhere, name that folder in PYTHONPATH"
    )


def measured(
    names: Sequence[str],
    arch: str,
    *,
    paths: Sequence[Path] = (),
    child: str = CHILD,
    limit_s: float = math.inf,
    answer_s: float = LIMIT_S,
) -> Iterator[Part]:
    """Measure some operations; a part for each, then the summary.

    Args:
        names: The operations.
        arch: The arch of this machine's GPU, such as ``sm90``.
        paths: Folders to import from, beside those that this process was given.
        child: The module that calls the operations.
        limit_s: Seconds after which no further operation begins.
        answer_s: Seconds after which a process is killed that does not answer.
    """
    started, figures = time.perf_counter(), dict[str, dict[str, Any]]()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aot-tune-replay-")))
        operations = [_Operation(name, arch, folder / name, paths, child, answer_s) for name in names]
        for one in operations:
            stack.callback(one.close)
        for one, following in zip(operations, [*operations[1:], None], strict=True):
            if time.perf_counter() - started > limit_s:
                print(f"   stopped before {one.name}: the limit of {limit_s:.0f} s is over", flush=True)
                break
            try:
                figures[one.name] = one.figures(following)
            except ReplayError as error:
                figures[one.name] = {"failed": str(error)}
            one.close()
            yield Part(name=one.name, figures=figures[one.name])
    if figures:
        yield Part(name="summary", figures=summary(figures))


class _Operation:
    """One operation: recorded, then called in three processes.

    Args:
        name: Its name in `SHAPES`.
        arch: The arch of this machine's GPU.
        folder: Everything that is written lies below it.
        paths: Folders to import from.
        child: The module that calls the operation.
        answer_s: Seconds after which a process is killed that does not answer.
    """

    def __init__(
        self, name: str, arch: str, folder: Path, paths: Sequence[Path], child: str, answer_s: float
    ) -> None:
        self.name = name
        self._arch, self._folder, self._answer_s = arch, folder, answer_s
        self._tables, self._archives = folder / "tables", folder / "archives"
        self._call = [sys.executable, "-W", "ignore", "-m", child, name]
        self._started: dict[str, _Child] = {}
        kept = {key: value for key, value in os.environ.items() if key not in environment.DESCRIPTIONS}
        kept.pop("TILEGYM_DISABLE_AUTOTUNE", None)
        given = [Path(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        # Absolute, since the processes run in a folder of their own: journals and cubins are kept there.
        folders = [str(one.absolute()) for one in (Path(aot_tune.__file__).parents[1], *paths, *given)]
        self._variables = {**kept, "PYTHONPATH": os.pathsep.join(folders), "CUDA_TILE_CACHE_DIR": "off"}

    def import_for_recording(self) -> None:
        """Start the process that will record, which imports the library and waits."""
        if "record" not in self._started:
            self._start("record", "record", "--out", str(self._tables), "--", *self._call)

    def close(self) -> None:
        """Kill every process of it that runs."""
        for each in self._started.values():
            each.close()

    def figures(self, following: _Operation | None) -> dict[str, Any]:
        """Everything that is measured.

        Args:
            following: The operation that is measured next. It imports while this one is recorded.

        Raises:
            ReplayError: The operation fails.
        """
        self.import_for_recording()
        waiting = self._start_all()
        if following is not None:
            following.import_for_recording()
        figures = self._record()
        recorded = sorted(self._tables.glob("*/*.json"))
        figures["tables"] = len(recorded)
        if recorded:
            shutil.copytree(self._tables, self._archives)
            figures["compile_s"] = self._compile(recorded)
        else:
            waiting.pop("cubins").close()  # nothing was searched: there is nothing to compile
        for each in waiting.values():
            each.ask("prepare")
        return figures | self._compared(waiting)

    def _start_all(self) -> dict[str, _Child]:
        """Start the three processes. They import, and make their context and tensors when they are told."""
        bare = self._child("bare", self._call)
        compiled = self._start("compiled", "run", "--tables", str(self._tables), "--", *self._call)
        cubins = ["--tables", str(self._archives), "--", *self._call, "--no-compiler"]
        return {"bare": bare, "compiled": compiled, "cubins": self._start("cubins", "run", *cubins)}

    def _record(self) -> dict[str, Any]:
        """Record all shapes: seconds of the whole but for imports and tensors, milliseconds of each call."""
        recording = self._started["record"]
        recording.ask("prepare")
        started = time.perf_counter()
        places = {shape: place for place, shape in enumerate(_labels(self.name))}
        calls = {shape: recording.ask("first", place)["ms"] for shape, place in places.items()}
        recording.end()
        print(f"   {self.name}: aot-tune record says:", *recording.said(), sep="\n      ", flush=True)
        return {"record_s": round(time.perf_counter() - started, 2), "record_ms": calls}

    def _compile(self, recorded: Sequence[Path]) -> float:
        """Compile the winners of tables for the process that gets cubins; the seconds that it takes."""
        started = time.perf_counter()
        kernels = [word for path in recorded for word in ("--kernel", path.stem)]
        variables = {environment.TABLES: str(self._archives)}
        self._start("compile", "compile", "--arch", self._arch, *kernels, **variables).end()
        return round(time.perf_counter() - started, 2)

    def _compared(self, waiting: Mapping[str, _Child]) -> dict[str, Any]:
        shapes = _labels(self.name)
        firsts: dict[str, list[dict[str, Any]]] = {}
        for name, each in waiting.items():
            firsts[name] = [each.ask("first", place) for place in range(len(shapes))]
            # Printed at once, so that a run that is cut off has printed all it measured.
            told = ", ".join(f"{one['ms']:.1f}" for one in firsts[name])
            print(f"   {self.name}, {name}: first calls {told} ms", flush=True)
        times = [{(do, name): list[float]() for do in ("gpu", "later") for name in waiting} for _ in shapes]
        for turn in range(ROUNDS):
            for place, kept in enumerate(times):
                for do in ("gpu", "later"):
                    for name in list(waiting)[:: -1 if turn % 2 else 1]:
                        kept[do, name].append(waiting[name].ask(do, place)["us"])
        figures: dict[str, Any] = {"searches": sum(one["searches"] for one in firsts["bare"]), "shapes": {}}
        for place, shape in enumerate(shapes):
            first = {name: answers[place] for name, answers in firsts.items()}
            figures["shapes"][shape] = _shape(first, times[place])
        searched = [
            f"{name} at {shape}"
            for name, answers in firsts.items()
            for shape, answer in zip(shapes, answers, strict=True)
            if name != "bare" and answer["searches"]
        ]
        if searched:
            figures["failed"] = f"a replaying process searched: {', '.join(searched)}"
        return figures

    def _start(self, name: str, *words: str, **variables: str) -> _Child:
        """Start the command line."""
        return self._child(name, [sys.executable, "-m", COMMAND_LINE, *words], **variables)

    def _child(self, name: str, command: Sequence[str], **variables: str) -> _Child:
        self._folder.mkdir(exist_ok=True)
        named = {**self._variables, environment.CACHE_DIR: str(self._folder / f"cache-{name}"), **variables}
        self._started[name] = _Child(name, command, named, self._folder, self._answer_s)
        return self._started[name]


class _Child:
    """A process that answers commands, each a line of JSON, with a line of JSON.

    Args:
        name: What errors call it.
        command: The program and its arguments.
        variables: Its environment.
        folder: Its working folder. What it says on stderr is written there.
        answer_s: Seconds after which it is killed when it does not answer or end.
    """

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], folder: Path, answer_s: float
    ) -> None:
        self._name, self._answer_s = name, answer_s
        self._late = self._closed = False
        self._said = folder / f"{name}.stderr"
        with self._said.open("wb") as said:
            # A session of its own: what `aot-tune` starts is killed with it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=variables,
                cwd=folder, text=True, start_new_session=True,
            )  # fmt: skip

    def ask(self, do: str, shape: int | None = None) -> dict[str, Any]:
        """Give a command and wait for its answer.

        Raises:
            ReplayError: It failed, died or hung.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"do": do} if shape is None else {"do": do, "shape": shape}
        with self._limited():
            with contextlib.suppress(BrokenPipeError):  # it has died: no answer comes
                self._process.stdin.write(json.dumps(command) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise ReplayError(f"{self._name}: {self._why()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise ReplayError(f"{self._name}: {answer['failed']}")
        return answer

    def end(self) -> None:
        """Give no further command, and wait for its end.

        Raises:
            ReplayError: It failed or hung.
        """
        with self._limited():
            self._process.communicate()
        if self._process.returncode:
            raise ReplayError(f"{self._name}: {self._why()}")

    def said(self) -> list[str]:
        """Its last lines on stderr."""
        return self._said.read_text(errors="replace").strip().splitlines()[-_LINES:]

    def close(self) -> None:
        """Kill it with all that it started, if it runs."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        timer = threading.Timer(self._answer_s, self._hung)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _hung(self) -> None:
        self._late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _why(self) -> str:
        if self._late:
            return f"killed after {self._answer_s:.0f} s without an answer"
        code = self._process.wait()
        lines = self.said()
        print(f"   {self._name} says:", *lines, sep="\n      ", flush=True)
        return lines[-1] if lines else f"exit code {code}"


def _labels(name: str) -> list[str]:
    return ["x".join(map(str, shape)) for shape in SHAPES[name]]


# Figures ----------------------------------------------------------------------------------------


def _shape(
    first: Mapping[str, Mapping[str, Any]], times: Mapping[tuple[str, str], Sequence[float]]
) -> dict[str, Any]:
    """The figures of one shape.

    Args:
        first: Process to the answer of its first call.
        times: What was timed, and process, to the microseconds of each round.
    """
    figures: dict[str, Any] = {
        "searches": first["bare"]["searches"],
        "first_ms": {name: one["ms"] for name, one in first.items()},
    }
    replayed = [name for name in first if name != "bare"]
    figures["speed-up"] = {name: round(first["bare"]["ms"] / first[name]["ms"], 1) for name in replayed}
    if missing := first.get("cubins", {}).get("missing"):
        figures[COMPILED] = missing
    for do in ("later", "gpu"):
        figures[f"{do}_us"] = {name: round(statistics.median(times[do, name]), 3) for name in first}
        figures[f"{do}, replayed / bare"] = {
            name: _ratio(times[do, name], times[do, "bare"]) for name in replayed
        }
    if "cubins" in first:
        same = _ratio(times["gpu", "cubins"], times["gpu", "compiled"])
        figures["gpu, two processes with one config"] = same
    return figures


def _ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The ratio of two times of the same rounds: its median, and its range over the rounds."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    found = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 4) for name, value in found.items()}


def is_slower(ratio: Mapping[str, float]) -> bool:
    """Whether it is slower beyond noise: by more than a tie in the median, and in every round."""
    return ratio["median"] > 1 + TIE and ratio["least"] > 1


def summary(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the figures of all operations say together."""
    measured = {name: one for name, one in figures.items() if "shapes" in one}
    searching = {name: one for name, one in measured.items() if one["searches"]}
    found: dict[str, Any] = {
        "operations": list(measured),
        "without a search": [name for name in measured if name not in searching],
        "not measured": [name for name in figures if name not in measured],
    }
    for variant in VARIANTS[1:]:
        ups = {
            f"{name} {shape}": one["speed-up"][variant]
            for name, operation in searching.items()
            for shape, one in operation["shapes"].items()
            if one["searches"] and variant in one["speed-up"]
            if not (variant == "cubins" and COMPILED in one)
        }
        if ups:
            mean = math.exp(statistics.fmean(map(math.log, ups.values())))
            found[f"speed-up, {variant}"] = {"geometric mean": round(mean, 1), **_extreme("least", ups, min)}
    found |= _from_cubins(searching)
    for do, title in (("gpu", "recorded winner over own"), ("later", "later calls over bare")):
        ratios = {
            f"{name} {shape}, {variant}": ratio
            for name, operation in measured.items()
            for shape, one in operation["shapes"].items()
            for variant, ratio in one[f"{do}, replayed / bare"].items()
        }
        if ratios:
            medians = {at: ratio["median"] for at, ratio in ratios.items()}
            found[title] = {
                **_extreme("most", medians, max),
                "slower beyond noise": [at for at, ratio in ratios.items() if is_slower(ratio)],
            }
    return found


def later_means(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Later calls over the library's own, by what replays them, and of operations that nothing replays."""
    ratios: dict[str, list[float]] = {}
    for operation in figures.values():
        for one in operation["shapes"].values():
            for variant, ratio in one["later, replayed / bare"].items():
                where = "from cubins" if variant == "cubins" else "compiled on the spot"
                ratios.setdefault(where if operation["searches"] else "without a search", []).append(
                    ratio["median"]
                )
    return {where: math.exp(statistics.fmean(map(math.log, found))) for where, found in ratios.items()}


def _from_cubins(searching: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The longest first calls without a compiler, of a process's first shape and of the next ones."""
    first, following, compiled = dict[str, float](), dict[str, float](), list[str]()
    for name, operation in searching.items():
        for place, (shape, one) in enumerate(operation["shapes"].items()):
            at = f"{name} {shape}"
            if COMPILED in one:
                compiled.append(at)
            elif "cubins" in one["first_ms"]:
                (following if place else first)[at] = one["first_ms"]["cubins"]
    found: dict[str, Any] = {}
    if first:
        found["first call from cubins, ms"] = _extreme("most", first, max)
    if following:
        found["next first calls from cubins, ms"] = _extreme("most", following, max)
    found[COMPILED] = compiled
    return found


def _extreme(title: str, values: Mapping[str, float], choose: Any) -> dict[str, Any]:
    at = choose(values, key=lambda one: values[one])
    return {title: values[at], "at": at}
