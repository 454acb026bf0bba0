"""Time operations of TileGym and FlashInfer as they come, and replayed from recorded tables, on one GPU.

Each operation is recorded in a process of its own. Then three processes wait side by side: `bare`, the
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aot_tune
from aot_tune import environment
from aot_tune.bench import words
from aot_tune.bench.libraries import fetched
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
    "mm_bf16": ((64, 6144, 4096), (256, 4096, 14336), (1, 10240, 8192)),
    "bmm_bf16": ((16, 1024, 512, 128), (16, 64, 128, 512), (128, 16, 512, 128)),
    "fp8_groupwise": ((64, 4608, 7168), (256, 7168, 2304), (1, 6144, 4096)),
    "decode_paged": (
        (64, 32, 8, 128, 128, 16_384),
        (1, 64, 8, 128, 512, 16_384),
        (256, 16, 2, 128, 32, 16_384),
    ),
    "decode_mla": ((64, 16, 32, 8192), (1, 16, 128, 8192), (16, 128, 32, 8192)),
    "prefill_ragged": ((1, 2048, 32, 8, 128), (4, 2048, 64, 8, 64), (16, 512, 16, 2, 128)),
    "prefill_paged": ((1, 2048, 32, 8, 128), (4, 2048, 64, 8, 64), (16, 512, 16, 2, 128)),
    "rope_quantize_fp8": ((64, 16), (256, 16), (1, 128)),
}
"""Shapes of LLM servers by operation, with which `aot_tune.bench.children.operations` calls it.

TileGym's operations come first, then FlashInfer's, from mm_bf16 on.

The hidden sizes of silu_and_mul differ, because the library's cache does not distinguish rows.
"""

VARIANTS = ("bare", "compiled", "cubins")
"""Compared processes; those that replay come after the process that does not."""

ROUNDS = 5
"""Rounds in which the processes take turns at their later calls."""

TIE = 0.02
"""Fraction within which two times tie, as everywhere in this project."""

COMPILED = "compiled although cubins were given"
"""Key of the reason why a process without a compiler could not go on."""

OURS = "ours of the first call from cubins, ms"
"""Key of the parts of a first call that are ours; nearly all else is the library, cuTile and the driver."""

LIMIT_S = 300.0
"""Seconds after which a process that does not answer, or a recording that does not end, is killed."""

CHILD = "aot_tune.bench.children.replay"
"""Module that calls the operations."""

COMMAND_LINE = "aot_tune"
"""Module that records, compiles and replays."""

_LINES = 12
"""Printed last lines of a process's stderr: what recording reports, or why a process died."""

FLASHINFER = tuple(SHAPES)[list(SHAPES).index("mm_bf16") :]
"""FlashInfer's operations."""

_FETCHED = {
    "tilegym": (fetched.TILEGYM, "make third-party"),
    "flashinfer": (fetched.FOLDER, "make flashinfer"),
}
"""Folder of each library, and the command that puts it there."""


class ReplayError(Exception):
    """An operation cannot be measured; the other operations go on."""


def run(request: Request) -> Iterator[Part]:
    """Measure milliseconds of first calls, and microseconds of later calls on the host and on the GPU."""
    names = request.kernels or tuple(SHAPES)
    words.check_known(names, SHAPES, "replay has no operation")
    arch = str(chosen_arch(None))
    paths = library_paths({"flashinfer" if name in FLASHINFER else "tilegym" for name in names})
    yield from measured(names, arch, paths=paths, limit_s=request.limit_s)


def library_paths(libraries: Collection[str]) -> list[Path]:
    """Return the folders for the processes' path to import libraries, none of those that are installed.

    Raises:
        UsageError: A library cannot be found.
    """
    paths = []
    for library in sorted(libraries):
        folder, command = _FETCHED[library]
        if find_spec(library) is not None:
            continue
        if not (folder / library).is_dir():
            raise UsageError(
                f"replay measures {library}, which cannot be imported here: {command} puts it into {folder}; "
                "if it is elsewhere, name that folder in PYTHONPATH"
            )
        paths.append(folder.absolute())
    return paths


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
        paths: Folders to import from, in addition to this process's PYTHONPATH.
        child: The module that calls the operations.
        limit_s: Seconds after which no further operation begins.
        answer_s: Seconds after which a process is killed that does not answer.
    """
    started, figures = time.perf_counter(), dict[str, dict[str, Any]]()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aot-tune-replay-")))
        operations = [_Operation(name, arch, folder / name, paths, child, answer_s) for name in names]
        for operation in operations:
            stack.callback(operation.close)
        for operation, following in zip(operations, [*operations[1:], None], strict=True):
            if time.perf_counter() - started > limit_s:
                print(f"   stopped before {operation.name}: the limit of {limit_s:.0f} s is over", flush=True)
                break
            try:
                figures[operation.name] = operation.figures(following)
            except ReplayError as error:
                figures[operation.name] = {"failed": str(error)}
            operation.close()
            yield Part(name=operation.name, figures=figures[operation.name])
    if figures:
        yield Part(name="summary", figures=summary(figures))


class _Operation:
    """One operation: recorded, then called in three processes.

    Args:
        name: The operation's name in `SHAPES`.
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
        given = [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        # Absolute, because the processes run in a folder of their own: journals and cubins are kept there.
        folders = [str(path.absolute()) for path in (Path(aot_tune.__file__).parents[1], *paths, *given)]
        self._variables = {**kept, "PYTHONPATH": os.pathsep.join(folders), "CUDA_TILE_CACHE_DIR": "off"}

    def import_for_recording(self) -> None:
        """Start the process that will record, which imports torch and waits."""
        if "record" not in self._started:
            self._start("record", "record", "--out", str(self._tables), "--", *self._call)

    def close(self) -> None:
        """Kill the operation's running processes."""
        for child in self._started.values():
            child.close()

    def figures(self, following: _Operation | None) -> dict[str, Any]:
        """Measure the operation and return all figures.

        Args:
            following: The operation that is measured next. It imports while the present operation is
                recorded.

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
        for child in waiting.values():
            child.ask("prepare")
        return figures | self._compared(waiting)

    def _start_all(self) -> dict[str, _Child]:
        """Start the three processes. On a command they import the library, and make context and tensors."""
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
        print(f"   {self.name}: aot-tune record:", *recording.last_lines(), sep="\n      ", flush=True)
        return {"record_s": round(time.perf_counter() - started, 2), "record_ms": calls}

    def _compile(self, recorded: Sequence[Path]) -> float:
        """Compile the winners of tables for the process with cubins; return the seconds that it takes."""
        started = time.perf_counter()
        kernels = [word for path in recorded for word in ("--kernel", path.stem)]
        variables = {environment.TABLES: str(self._archives)}
        self._start("compile", "compile", "--arch", self._arch, *kernels, **variables).end()
        return round(time.perf_counter() - started, 2)

    def _compared(self, waiting: Mapping[str, _Child]) -> dict[str, Any]:
        shapes = _labels(self.name)
        firsts: dict[str, list[dict[str, Any]]] = {}
        for name, child in waiting.items():
            firsts[name] = [child.ask("first", place) for place in range(len(shapes))]
            # Printed at once, so that a run that is cut off has printed all it measured.
            ms = ", ".join(f"{answer['ms']:.1f}" for answer in firsts[name])
            print(f"   {self.name}, {name}: first calls {ms} ms", flush=True)
        times = [{(do, name): list[float]() for do in ("gpu", "later") for name in waiting} for _ in shapes]
        for turn in range(ROUNDS):
            for place, kept in enumerate(times):
                for do in ("gpu", "later"):
                    for name in list(waiting)[:: -1 if turn % 2 else 1]:
                        kept[do, name].append(waiting[name].ask(do, place)["us"])
        searches = sum(answer["searches"] for answer in firsts["bare"])
        figures: dict[str, Any] = {"searches": searches, "shapes": {}}
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
    """A child process that answers commands, each a line of JSON, with a line of JSON.

    Args:
        name: The process's name in errors.
        command: The program and its arguments.
        variables: The environment.
        folder: The working folder, where stderr is written to a file.
        answer_s: Seconds after which the process is killed when it does not answer or end.
    """

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], folder: Path, answer_s: float
    ) -> None:
        self._name, self._answer_s = name, answer_s
        self._late = self._closed = False
        self._stderr = folder / f"{name}.stderr"
        with self._stderr.open("wb") as stderr:
            # A session of its own: the processes that `aot-tune` starts are killed with it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=variables,
                cwd=folder, text=True, start_new_session=True,
            )  # fmt: skip

    def ask(self, do: str, shape: int | None = None) -> dict[str, Any]:
        """Give a command and wait for its answer.

        Raises:
            ReplayError: The process failed, died or hung.
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
        """Send no further command, and wait for the process's end.

        Raises:
            ReplayError: The process failed or hung.
        """
        with self._limited():
            self._process.communicate()
        if self._process.returncode:
            raise ReplayError(f"{self._name}: {self._why()}")

    def last_lines(self) -> list[str]:
        """Return the last lines on stderr."""
        return self._stderr.read_text(errors="replace").strip().splitlines()[-_LINES:]

    def close(self) -> None:
        """Kill the process with all that it started, if it runs."""
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
        lines = self.last_lines()
        print(f"   last lines of {self._name}:", *lines, sep="\n      ", flush=True)
        return lines[-1] if lines else f"exit code {code}"


def _labels(name: str) -> list[str]:
    return ["x".join(map(str, shape)) for shape in SHAPES[name]]


# Figures ----------------------------------------------------------------------------------------


def _shape(
    first: Mapping[str, Mapping[str, Any]], times: Mapping[tuple[str, str], Sequence[float]]
) -> dict[str, Any]:
    """Return the figures of one shape.

    Args:
        first: Process to the answer of its first call.
        times: Microseconds of each round, by what was timed and the process.
    """
    figures: dict[str, Any] = {
        "searches": first["bare"]["searches"],
        "first_ms": {name: answer["ms"] for name, answer in first.items()},
    }
    replayed = [name for name in first if name != "bare"]
    figures["bits equal"] = {name: first[name].get("bits") == first["bare"].get("bits") for name in replayed}
    figures["speed-up"] = {name: round(first["bare"]["ms"] / first[name]["ms"], 1) for name in replayed}
    if ours := first.get("cubins", {}).get("ours_ms"):
        figures[OURS] = ours
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
    """Return the ratio of two times of the same rounds: its median, and its range over the rounds."""
    ratios = [upper / lower for upper, lower in zip(over, under, strict=True)]
    figures = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 4) for name, value in figures.items()}


def is_slower(ratio: Mapping[str, float]) -> bool:
    """Whether a ratio is slower beyond noise: by more than a tie in the median, and in every round."""
    return ratio["median"] > 1 + TIE and ratio["least"] > 1


def summary(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the figures of all operations."""
    measured = {name: operation for name, operation in figures.items() if "shapes" in operation}
    searching = {name: operation for name, operation in measured.items() if operation["searches"]}
    result: dict[str, Any] = {
        "operations": list(measured),
        "without a search": [name for name in measured if name not in searching],
        "not measured": [name for name in figures if name not in measured],
    }
    for variant in VARIANTS[1:]:
        ups = {
            f"{name} {shape}": measured_shape["speed-up"][variant]
            for name, operation in searching.items()
            for shape, measured_shape in operation["shapes"].items()
            if measured_shape["searches"] and variant in measured_shape["speed-up"]
            if not (variant == "cubins" and COMPILED in measured_shape)
        }
        if ups:
            mean = math.exp(statistics.fmean(map(math.log, ups.values())))
            result[f"speed-up, {variant}"] = {"geometric mean": round(mean, 1), **_extreme("least", ups, min)}
    result["bits not equal to the library's own"] = [
        f"{name} {shape}, {variant}"
        for name, operation in measured.items()
        for shape, measured_shape in operation["shapes"].items()
        for variant, equal in measured_shape.get("bits equal", {}).items()  # recorded results may have none
        if not equal
    ]
    result |= _from_cubins(searching)
    for do, title in (("gpu", "recorded winner over own"), ("later", "later calls over bare")):
        ratios = {
            f"{name} {shape}, {variant}": ratio
            for name, operation in measured.items()
            for shape, measured_shape in operation["shapes"].items()
            for variant, ratio in measured_shape[f"{do}, replayed / bare"].items()
        }
        if ratios:
            medians = {at: ratio["median"] for at, ratio in ratios.items()}
            result[title] = {
                **_extreme("most", medians, max),
                "slower beyond noise": [at for at, ratio in ratios.items() if is_slower(ratio)],
            }
    return result


def later_means(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return mean ratios of later calls to the library's own, by what replays them, or without a search."""
    ratios: dict[str, list[float]] = {}
    for operation in figures.values():
        for shape in operation["shapes"].values():
            for variant, ratio in shape["later, replayed / bare"].items():
                where = "from cubins" if variant == "cubins" else "compiled on the spot"
                ratios.setdefault(where if operation["searches"] else "without a search", []).append(
                    ratio["median"]
                )
    return {where: math.exp(statistics.fmean(map(math.log, medians))) for where, medians in ratios.items()}


def _from_cubins(searching: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the longest first calls without a compiler, of a process's first shape and of the next ones."""
    first, following, compiled = dict[str, float](), dict[str, float](), list[str]()
    ours: tuple[dict[str, float], dict[str, float]] = {}, {}
    for name, operation in searching.items():
        for place, (shape, measured) in enumerate(operation["shapes"].items()):
            at = f"{name} {shape}"
            if COMPILED in measured:
                compiled.append(at)
            elif "cubins" in measured["first_ms"]:
                (following if place else first)[at] = measured["first_ms"]["cubins"]
                if OURS in measured:
                    ours[bool(place)][at] = round(sum(measured[OURS].values()), 3)
    result: dict[str, Any] = {}
    if first:
        result["first call from cubins, ms"] = _extreme("most", first, max)
    if following:
        result["next first calls from cubins, ms"] = _extreme("most", following, max)
    for title, by_call in zip((OURS, f"{OURS}, of next ones"), ours, strict=True):
        if by_call:
            result[title] = _extreme("most", by_call, max)
    result[COMPILED] = compiled
    return result


def _extreme(title: str, values: Mapping[str, float], choose: Any) -> dict[str, Any]:
    at = choose(values, key=lambda name: values[name])
    return {title: values[at], "at": at}
