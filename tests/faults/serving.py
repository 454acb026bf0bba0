"""The faults B1 to B20 of `aot_tune/serve/INSIDE.md`, each done to a serving process of its own.

``python -m tests.faults.serving B3 FOLDER SEED [full]`` does one row's faults and prints its tally as JSON.
A launch or look-up that raises what it should not is *lost*; one with another config than the rule's is
*wrong*.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from aot_tune import environment
from aot_tune.choose.legality import Legality
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import (
    AotTuneError,
    CacheWarning,
    CubinWarning,
    LaunchError,
    UsageError,
)
from aot_tune.nvidia.nvml import Gpu
from aot_tune.serve import loader, runtime
from aot_tune.serve.kernels import HintedKernels
from aot_tune.serve.launch.dispatch import Dispatcher, dispatcher_of
from aot_tune.serve.search import cache, trial
from aot_tune.serve.search.cache import UserCache
from aot_tune.tables import store, strict_json, writer
from aot_tune.tunable import Tunable
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.faults import injector
from tests.faults.world import Tally
from tests.support import driver as stand_in
from tests.support.samples import SM90, SPACE, scale, scale_table, write

AT_64, AT_256 = scale_table().portfolio
FAR = (64, 64)
"""The tiles of the far entry, which a miss takes without a search; they are those of M=256 as well."""

SEARCHED = Config(constants={"tile_m": 32, "tile_n": 128}, hints={"occupancy": 1, "num_ctas": 1})
"""The config that a made-up search finds."""

FOUND = (32, 128)
"""Its tiles."""

OPEN_S = 5.0
"""CPU seconds within which any file must be read or refused."""

BLOCKED = 12
"""Times as long as its limit that a call may take by the clock, which other processes slow down: a call that
blocks uses no CPU time."""


@dataclasses.dataclass
class Row:
    """One row's work in this process."""

    folder: Path
    seed: int
    more: bool
    tally: Tally = dataclasses.field(default_factory=Tally)
    launched: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """The tiles of each launch."""

    def __post_init__(self) -> None:
        self.pick = random.Random(self.seed)

    def injected(self, number: int = 1) -> None:
        """Count faults where they are done."""
        self.tally.injected += number

    def place(self, name: str) -> Path:
        """A folder of this name, which is made."""
        path = self.folder / re.sub(r"[^\w-]", "_", name)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def no_loss(self, what: str, limit_s: float = OPEN_S) -> Iterator[None]:
        """An exception that escapes is a lost call; one that computes beyond the limit, or blocks, hung."""
        began, cpu = time.monotonic(), time.thread_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except BaseException as error:
            self.tally.add("lost", 1, f"{what}: {type(error).__name__}: {error}"[:300])
        passed, spent = time.monotonic() - began, time.thread_time() - cpu
        hung = spent > limit_s or passed > BLOCKED * limit_s
        self.tally.add("hung", int(hung), f"{what}: {spent:.1f} s of CPU time in {passed:.1f} s")

    def expect(self, right: bool, what: str) -> None:
        """Count what is not as it should be."""
        self.tally.add("wrong", int(not right), what)


# The process ------------------------------------------------------------------------------------------------


def _stand_in(row: Row) -> None:
    """One H200 on which nothing runs: launches are written down, and compile nothing."""
    import cuda.tile

    stand_in.install()
    runtime.use(stand_in.FakeRuntime())
    loader.gpus = lambda: (Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="GPU-0"),)

    def record(stream: int, grid: tuple[int, ...], kernel: Any, args: tuple[Any, ...]) -> None:
        row.launched.append(args[2:])

    cuda.tile.launch = record


def _launch_for_real() -> list[stand_in.Launch]:
    """Let cuTile launch, and so compile; the stand-in driver's list of launches takes the row's place."""
    import cuda.tile
    from cuda.tile._cext import launch

    cuda.tile.launch = launch
    return stand_in.DRIVER.launches


def _tuned(folder: Path) -> Tunable:
    write(folder, scale_table())
    return dataclasses.replace(scale, tables=folder)


def _tensors(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    source, target = (torch.empty(rows, 1024, dtype=dtype, device="meta") for _ in range(2))
    return source, target


def _problem(rows: int) -> Problem:
    return Problem({"dtype": "bfloat16", "M": rows, "N": 1024})


PROBLEMS = tuple(map(_problem, (1, 40, 64, 200, 256)))


def _chosen(tunable: Tunable) -> list[Config]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [Dispatcher(tunable).choice(SM90, problem).config for problem in PROBLEMS]


def _may_run(tunable: Tunable, config: Config, problem: Problem) -> bool:
    space = tunable.declared_space(SM90, problem)
    return config in space and tunable.refusal(config, SM90, problem) is None


def _has_config(tunable: Tunable, problem: Problem) -> bool:
    """Whether any config may run for a problem, so that an error is no answer."""
    return any(_may_run(tunable, config, problem) for config in tunable.declared_space(SM90, problem))


# B1 to B3: tables -------------------------------------------------------------------------------------------

WHOLE = writer.dump(scale_table())


def _sparse(size: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


ODD: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(WHOLE[: len(WHOLE) // 2]),
    "NULs": lambda path: path.write_bytes(bytes(4096)),
    "folder": lambda path: path.mkdir(),
    "FIFO": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "urandom": lambda path: path.symlink_to("/dev/urandom"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "1 TB": _sparse(1 << 40),
    "100 MB": _sparse(100 << 20),
}


def odd_tables(row: Row) -> None:
    """B1: a table or a folder of tables is none, beside a good one; shipped tables with flipped bits."""
    good = _tuned(row.place("good"))
    wanted = _chosen(good)
    for name, make in ODD.items():
        bad = row.place(f"bad {name}")
        (bad / "sm90").mkdir()
        make(bad / "sm90" / "scale.json")
        make(bad / "folder")
        for folder in (bad, bad / "folder", bad / "folder" / "tables"):
            row.injected()
            os.environ[environment.TABLES] = str(folder)
            with row.no_loss(f"B1 {name}, {folder.name}"):
                row.expect(_chosen(dataclasses.replace(good)) == wanted, f"B1 {name}: another choice")
            del os.environ[environment.TABLES]
    for _ in range(3000 if row.more else 150):
        tunable, path = row.pick.choice(_shipped())
        data = bytearray(path.read_bytes())
        data[row.pick.randrange(len(data))] ^= 1 << row.pick.randrange(8)
        _chooses_well(row, tunable, bytes(data), "B1 a flipped bit")


def _shipped() -> list[tuple[Tunable, Path]]:
    from tests.support.shipped import SHIPPED

    pairs = [(one, store.table_path(store.package_folder(one), SM90, one.name)) for one in SHIPPED]
    return [(one, path) for one, path in pairs if path.exists()]


def _chooses_well(row: Row, tunable: Tunable, data: bytes, what: str) -> None:
    """With a table of these bytes: no exception, and nothing that may not run is chosen."""
    folder = row.place("table")
    (folder / "sm90").mkdir(exist_ok=True)
    (folder / "sm90" / f"{tunable.name}.json").write_bytes(data)
    row.injected()
    with row.no_loss(f"{what}, {tunable.name}"):
        dispatcher = Dispatcher(dataclasses.replace(tunable, tables=folder))
        typical = tunable.typical_problems
        for problem in {*row.pick.sample(typical, min(2, len(typical))), _inside(tunable, row)}:
            config = dispatcher.choice(SM90, problem).config
            row.expect(_may_run(tunable, config, problem), f"{what}, {tunable.name} {problem}: {config}")


def _inside(tunable: Tunable, row: Row) -> Problem:
    """A declared problem with a size that is no bucket's edge."""
    problem = row.pick.choice(tunable.typical_problems)
    pow2 = [name for name, axis in tunable.axes.items() if axis.kind == "pow2" and problem.size(name) > 2]
    return problem.replaced(**{name: problem.size(name) - 1 for name in pow2[:1]})


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "10^5 levels": lambda data: b"[" * 100_000,
    **{
        f"{n} levels": lambda data, n=n: data.replace(
            b'"axes": {', b'"axes": {"deep": ' + b"[" * n + b"]" * n + b", ", 1
        )  # type: ignore[misc]
        for n in (200, 254, 255, 256, 300, 1000, 1023, 1024, 1025)
    },
    "NaN": lambda data: re.sub(rb'"mean_us": [0-9.]+', b'"mean_us": NaN', data, count=1),
    "Infinity": lambda data: re.sub(rb'"mean_us": [0-9.]+', b'"mean_us": Infinity', data, count=1),
    "1e999": lambda data: re.sub(rb'"mean_us": [0-9.]+', b'"mean_us": 1e999', data, count=1),
    "true for 2": lambda data: data.replace(b'"schema": 2', b'"schema": true', 1),
    "30 digits": lambda data: data.replace(b'"num_ctas": 1', b'"num_ctas": ' + b"9" * 30, 1),
    "5000 digits": lambda data: data.replace(b'"num_ctas": 1', b'"num_ctas": ' + b"9" * 5000, 1),
    "equal keys": lambda data: data.replace(b'"arch":', b'"kernel": "x", "arch":', 1),
    "BOM": lambda data: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "lone surrogate": lambda data: data.replace(b"NVIDIA", b"\\ud800", 1),
    "10^5 constants": lambda data: data.replace(
        b'"tile_m": 32', b", ".join(b'"c%d": 1' % n for n in range(100_000)) + b', "tile_m": 32', 1
    ),
}


def odd_texts(row: Row) -> None:
    """B2: a table nests too deep, is too large, or has numbers and keys that JSON should not have."""
    good = _tuned(row.place("good"))
    wanted = _chosen(good)
    for name, spoil in TEXTS.items():
        bad = row.place(f"bad {name}")
        (bad / "sm90").mkdir()
        data = spoil(WHOLE)
        (bad / "sm90" / "scale.json").write_bytes(data)
        row.injected()
        os.environ[environment.TABLES] = str(bad)
        with row.no_loss(f"B2 {name}"):
            row.expect(_chosen(dataclasses.replace(good)) == wanted, f"B2 {name}: another choice")
        del os.environ[environment.TABLES]
        with row.no_loss(f"B2 {name}, read alone"), contextlib.suppress(AotTuneError):
            strict_json.loads(data)
    pieces = [
        b"{",
        b"}",
        b"[" * 300,
        b"]",
        b'"',
        b",",
        b":",
        b"1e308",
        b"-1",
        b"null",
        b"\\u0000",
        b"\xff",
        b'"entries"',
    ]
    for _ in range(20_000 if row.more else 1500):
        data = bytearray(WHOLE)
        for _ in range(row.pick.randrange(1, 5)):
            at = row.pick.randrange(len(data))
            data[at : at + row.pick.randrange(12)] = row.pick.choice(pieces)
        row.injected()
        with row.no_loss("B2 an edit"), contextlib.suppress(AotTuneError):
            strict_json.loads(bytes(data))


HOSTILE = (0, -1, "x", 1.5, True, 10**9, 2**63 - 1, 1e308, "")
"""What a hand-made table may hold in the place of a constant."""


LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "portfolio": (("loader",), ("space",), ()),
    "entries": (("space",), ()),  # the loader leaves an entry its winner
    "both": (("space",), ()),
}
"""By the place of a hostile config, the layers that hold it back alone; without any it would run."""


def hostile_tables(row: Row) -> None:
    """B3: well-formed tables of all shipped kernels whose constants are no constants of the kernel."""
    ran: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for tunable, path in _shipped():
        document = json.loads(path.read_bytes())
        names = list(document["portfolio"][0]["constants"])
        values = HOSTILE if row.more else row.pick.sample(HOSTILE, 3)
        for name in names if row.more else row.pick.sample(names, min(2, len(names))):
            for value in {*values, 0, 1e308}:
                for where in (
                    ("portfolio", "entries", "both")
                    if row.more
                    else (row.pick.choice(("portfolio", "entries")), "both")
                ):
                    changed = json.loads(path.read_bytes())
                    configs = [] if where == "entries" else list(changed["portfolio"])
                    configs += (
                        [] if where == "portfolio" else [entry["config"] for entry in changed["entries"]]
                    )
                    for config in configs:
                        config["constants"][name] = value
                    data = json.dumps(changed).encode()
                    _chooses_well(row, tunable, data, f"B3 {name}={value!r} in {where}")
                    for layers in LAYERS[where]:
                        with _only(layers):
                            ran[where, layers] += _runs_undeclared(row, tunable, row.place("table"))
    for (where, layers), number in ran.items():
        row.expect(bool(number) != bool(layers), f"B3 {number} undeclared configs of {where} with {layers}")
    _illegal_tables(row)


@contextlib.contextmanager
def _only(layers: Sequence[str]) -> Iterator[None]:
    """Keep some of the layers that hold a config back which may not run, and take the others away."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "loader" not in layers:
            stack.enter_context(patch.object(loader, "undeclared", lambda tunable, table: []))
        if "space" not in layers:
            stack.enter_context(patch.object(Legality, "_in_space", lambda self, config, problem: True))
        if "legal" not in layers:
            stack.enter_context(
                patch.object(Declaration, "refusal", lambda self, config, arch, problem: None)
            )
        yield


def _runs_undeclared(row: Row, tunable: Tunable, folder: Path) -> bool:
    """Whether an edge, or a size inside a bucket, gets a config of a folder's table that no space holds."""
    dispatcher = Dispatcher(dataclasses.replace(tunable, tables=folder))
    problems = tunable.typical_problems
    try:
        asked = (problems[0], _inside(tunable, row))
        configs = [dispatcher.choice(SM90, problem).config for problem in asked]
    except Exception:
        return True  # a function of the declaration was called with what only a file names
    spaces = {config for problem in problems for config in tunable.declared_space(SM90, problem)}
    return not spaces.issuperset(configs)


def _illegal_tables(row: Row) -> None:
    """B3: the winner of each entry is in the search space, and `legal` refuses it."""
    table = scale_table()
    illegal = next(c for c in SPACE if scale.refusal(c, SM90, PROBLEMS[0]) is not None)
    for layers in (("legal",), ()):
        entries = tuple(dataclasses.replace(entry, config=illegal) for entry in table.entries)
        portfolio = (illegal, *table.portfolio[1:])
        write(row.place("illegal"), dataclasses.replace(table, portfolio=portfolio, entries=entries))
        tunable = dataclasses.replace(scale, tables=row.place("illegal"))
        row.injected()
        with _only(layers):
            chosen = _chosen(tunable)
        row.expect((illegal in chosen) != bool(layers), f"B3 {illegal} with the layers {layers}")


# B4, B5: what cannot be written -----------------------------------------------------------------------------

_READ_ONLY = """
import json, os, sys, tempfile
attempts = []
def refuse(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.truncate"):
        if args[0] != "/dev/null":
            attempts.append(str(args[0]))
            os.write(COUNTED, b".")
            raise OSError(30, "Read-only file system")
COUNTED = int(sys.argv[1])
os.write(COUNTED, b".")
sys.dont_write_bytecode = True
CHANGE
sys.addaudithook(refuse)
import aot_tune, aot_tune.kernels as kernels
from aot_tune.values.arch import Arch
from aot_tune.serve.launch.dispatch import dispatcher_of
tunable = kernels.rms_norm_tunable
for problem in tunable.typical_problems[:5]:
    dispatcher_of(tunable).choice(Arch.parse("sm90"), problem)
print("chosen", [one for one in attempts if "aot_tune" in one and not one.startswith("/dev")])
"""

BARE: dict[str, tuple[dict[str, str | None], str]] = {
    "read-only": ({}, ""),
    "no HOME": ({"HOME": None, "XDG_CACHE_HOME": None, "USER": None, "LOGNAME": None}, ""),
    "relative HOME": ({"HOME": "here"}, ""),
    "unknown uid": ({"HOME": None, "USER": None}, "os.getuid = os.geteuid = lambda: 54321"),
    "no TMPDIR": ({"TMPDIR": "/not/there"}, "tempfile.tempdir = None"),
}


def bare_machines(row: Row) -> None:
    """B4: nothing can be written, no HOME, user or temporary folder; stderr is closed; NVML hangs."""
    for name, (changes, code) in BARE.items():
        counts = row.place("counts") / name.replace(" ", "_")
        with counts.open("ab") as file:
            variables = {**os.environ, **{key: value for key, value in changes.items() if value is not None}}
            for key in (key for key, value in changes.items() if value is None):
                variables.pop(key, None)
            done = subprocess.run(
                [sys.executable, "-c", _READ_ONLY.replace("CHANGE", code), str(file.fileno())],
                env=variables, capture_output=True, text=True, timeout=60, pass_fds=[file.fileno()],
            )  # fmt: skip
        row.injected(counts.stat().st_size)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        row.tally.add("lost", int(not done.stdout.startswith("chosen")), f"B4 {name}: {last[:200]}")
    _closed_stderr(row)
    _hanging_nvml(row)


def _closed_stderr(row: Row) -> None:
    """AOT_TUNE_LOG=1, and nobody reads what is printed."""
    tuned, real = _tuned(row.place("stderr")), sys.stderr
    os.environ[environment.LOG] = "1"
    read, written = os.pipe()
    os.close(read)
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    for rows, broken in enumerate((None, closed, os.fdopen(written, "w", buffering=1)), start=100):
        row.injected()
        with row.no_loss(f"B4 stderr is {broken!r:.60}"):
            sys.stderr = broken
            try:
                tuned.launch(*_tensors(rows))
            finally:
                sys.stderr = real
    del os.environ[environment.LOG]


_HANGS = """
import sys, time, types
module = types.ModuleType("pynvml")
def init():
    import os; os.write(COUNTED, b"."); time.sleep(60)
COUNTED = int(sys.argv[1])
module.nvmlInit, module.nvmlShutdown = init, lambda: None
sys.modules["pynvml"] = module
import os
begun = time.monotonic()
from aot_tune.kernels import TUNABLES
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
print(time.monotonic() - begun, flush=True)
os._exit(0)
"""
NVML_S = 50.0
"""Seconds that an import and a fork may take where NVML does not answer within 60 s."""


def _hanging_nvml(row: Row) -> None:
    counts = row.place("counts") / "nvml"
    with counts.open("ab") as file:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _HANGS, str(file.fileno())],
                capture_output=True, text=True, timeout=NVML_S, pass_fds=[file.fileno()],
            )  # fmt: skip
            row.tally.add("lost", int(done.returncode != 0), f"B4 NVML hangs: {done.stderr[-200:]}")
        except subprocess.TimeoutExpired:
            row.tally.add("hung", 1, f"B4 NVML hangs: import and fork take over {NVML_S:g} s")
    row.injected(counts.stat().st_size)


def _found_by_search(row: Row, searches: list[Problem]) -> None:
    """Let every search find `FOUND`, at once and without a GPU."""

    def fastest(tunable: Tunable, problem: Problem, *rest: Any, **named: Any) -> trial.Winner:
        searches.append(problem)
        return SEARCHED, 1.0

    trial.fastest = fastest
    HintedKernels.is_ready = lambda *args: True


def unwritable_caches(row: Row) -> None:
    """B5: the user's cache is read-only or full: one warning, and the winner serves this process."""
    searches: list[Problem] = []
    _found_by_search(row, searches)
    failing: list[int] = []

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        place = str(args[0]) if args else ""
        writes = event == "os.mkdir" or (
            event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        )
        if failing and writes and "/cache-" in place:
            row.injected()
            raise OSError(failing[-1], os.strerror(failing[-1]))

    sys.addaudithook(refuse)
    for number in (errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT):
        os.environ[environment.CACHE_DIR] = str(row.folder / f"cache-{number}")
        tuned = _tuned(row.place(f"tables {number}"))
        failing.append(number)
        seen: list[str] = []
        with row.no_loss(f"B5 {os.strerror(number)}"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for rows in (3000, 6000, 12000, 24000) * 2:
                tuned.launch(*_tensors(rows))
            seen = [str(one.message) for one in caught if issubclass(one.category, CacheWarning)]
        failing.clear()
        row.expect(row.launched[-8:] == [FOUND] * 8, f"B5 {os.strerror(number)}: {row.launched[-8:]}"[:200])
        row.expect(len(seen) == 1, f"B5 {os.strerror(number)}: {len(seen)} warnings")


# B6 to B8: locks and other processes ------------------------------------------------------------------------


def _cold(folder: Path, tables: Path, answers: Any, patch: Callable[[], None] | None) -> None:
    """A process that starts cold and launches one untuned shape; it counts its searches in a file."""
    launched: list[tuple[int, int]] = []

    def fastest(*args: Any, **named: Any) -> trial.Winner:
        with (folder / "searches").open("ab") as file:
            file.write(b".")
        time.sleep(0.3)
        return SEARCHED, 1.0

    row = Row(folder=folder, seed=0, more=False)
    _stand_in(row)
    trial.fastest = fastest
    HintedKernels.is_ready = lambda *args: True
    if patch is not None:
        patch()
    os.environ[environment.CACHE_DIR] = str(folder / "cache")
    os.environ[environment.SEARCH_SECONDS] = "10"
    warnings.simplefilter("ignore")
    try:
        dataclasses.replace(scale, tables=tables).launch(*_tensors(4096))
        launched = row.launched
        answers.put(str(launched[-1]) if launched else "nothing launched")
    except BaseException as error:
        answers.put(f"{type(error).__name__}: {error}")


def _cold_processes(
    row: Row, name: str, number: int, patch: Callable[[], None] | None = None
) -> tuple[list[str], int, Path]:
    """Answers of processes that start at once on one key, and how many of them searched."""
    folder, tables = row.place(name), row.place("tables")
    write(tables, scale_table())
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_cold, args=(folder, tables, answers, patch)) for _ in range(number)]
    for child in children:
        child.start()
    told = []
    for child in children:
        child.join(30)
        if child.is_alive():
            child.kill()
            row.tally.add("hung", 1, f"{name}: a process has no answer after 30 s")
        else:
            told.append(answers.get(timeout=5))
    searches = folder / "searches"
    return told, searches.stat().st_size if searches.exists() else 0, folder


def cold_starts(row: Row) -> None:
    """B6: eight processes start cold on one key."""
    for attempt in range(5 if row.more else 2):
        told, searches, _ = _cold_processes(row, f"cold {attempt}", 8)
        row.injected(8)
        row.tally.add("lost", sum(one != str(FOUND) for one in told), f"B6: {set(told)}"[:300])
        row.expect(searches == 1, f"B6: {searches} of 8 processes searched")


def held_locks(row: Row) -> None:
    """B7: the holder of a lock is killed or stopped, and processes are forked while a thread asks."""
    write(row.place("tables"), scale_table())
    searches: list[Problem] = []
    _found_by_search(row, searches)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        os.environ[environment.CACHE_DIR] = str(row.place(f"cache {number}"))
        os.environ[environment.SEARCH_SECONDS] = "2"
        tuned = dataclasses.replace(scale, tables=row.place("tables"))
        key = dispatcher_of(tuned)._winners.key(SM90, "NVIDIA H200", tuned.bucket_of(_problem(4096)))
        read, written = os.pipe()
        holder = os.fork()
        if not holder:
            with UserCache(Path(os.environ[environment.CACHE_DIR])).locked(key, 5):
                os.write(written, b"h")
                time.sleep(120)
            os._exit(0)
        os.read(read, 1)
        os.kill(holder, number)
        row.injected()
        with row.no_loss(f"B7 {number.name}", limit_s=15):
            tuned.launch(*_tensors(4096))
            wanted = FOUND if number == signal.SIGKILL else FAR
            row.expect(row.launched[-1] == wanted, f"B7 {number.name}: {row.launched[-1]}")
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    del os.environ[environment.SEARCH_SECONDS]
    _forks(row)


def _forks(row: Row) -> None:
    """Fork while other threads ask for new shapes: each child must get its own config in time."""
    tuned = _tuned(row.place("forks"))
    stop = threading.Event()
    sys.setswitchinterval(1e-5)  # a thread is stopped everywhere, also where it holds a lock

    def ask(seed: int) -> None:
        pick = random.Random(seed)
        while not stop.is_set():
            fresh = dataclasses.replace(tuned)
            for _ in range(20):
                dispatcher_of(fresh).choice(SM90, _problem(pick.randrange(1, 100_000)))

    warnings.simplefilter("ignore")
    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(2)]
    for thread in threads:
        thread.start()
    hanging = []
    for number in range(100 if row.more else 30):
        time.sleep(row.pick.random() * 0.01)
        row.injected()
        child = os.fork()
        if not child:
            code = 1
            try:
                dispatcher_of(dataclasses.replace(tuned)).choice(SM90, _problem(33 + number))
                code = 0
            finally:
                os._exit(code)
        until = time.monotonic() + BLOCKED * OPEN_S
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.005)
        if done[0] == 0:
            hanging.append(number)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        else:
            row.tally.add("lost", int(done[1] != 0), "B7 a forked child failed")
        if len(hanging) >= 3:
            break
    stop.set()
    row.tally.add("hung", len(hanging), f"B7 {len(hanging)} forked children hang")


def _lying(kind: str, counted: Path) -> Callable[[], None]:
    def patch() -> None:
        import fcntl

        def flock(*args: Any) -> None:
            with counted.open("ab") as file:
                file.write(b".")
            if kind == "busy":
                raise BlockingIOError(errno.EAGAIN, "busy")
            if kind != "granted":
                raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

        fcntl.flock = flock

    return patch


def lying_locks(row: Row) -> None:
    """B8: locks that are granted to all, fail, or are always busy."""
    for kind in ("granted", "ENOLCK", "EIO", "EOPNOTSUPP", "EACCES", "ENOSYS", "busy"):
        counted = row.folder / f"flock {kind}"
        told, _, folder = _cold_processes(row, f"lying {kind}", 3, _lying(kind, counted))
        row.injected(counted.stat().st_size if counted.exists() else 0)
        fine = {str(FOUND), str(FAR)}
        row.tally.add("lost", sum(one not in fine for one in told), f"B8 {kind}: {set(told)}"[:300])
        for path in folder.rglob("*.json"):
            with row.no_loss(f"B8 {kind}: a torn entry"):
                strict_json.loads(path.read_bytes())


# B9 to B13: launches ----------------------------------------------------------------------------------------


def captures(row: Row) -> None:
    """B9: misses and unseen shapes while this or another thread captures a graph."""
    searches: list[Problem] = []
    _found_by_search(row, searches)
    os.environ[environment.SEARCH_SECONDS] = "10"
    for where in ("capturing", "captures_elsewhere"):
        tuned = _tuned(row.place(where))
        tuned.launch(*_tensors(64))
        setattr(stand_in.DRIVER, where, True)
        for rows in (64, 63, 256, 5000, 9000):
            row.injected()
            with row.no_loss(f"B9 {where} M={rows}"):
                tuned.launch(*_tensors(rows))
        row.expect(not searches, f"B9 {where}: searched {searches}")
        row.expect(not stand_in.DRIVER.synchronized, f"B9 {where}: it synchronised")
        setattr(stand_in.DRIVER, where, False)
        searches.clear()


def ranks(row: Row) -> None:
    """B10: a process that searched becomes a rank: it must choose as a fresh rank does."""
    searches: list[Problem] = []
    _found_by_search(row, searches)
    for name in ("WORLD_SIZE", environment.RANKED):  # which may be set later, unlike those of B20
        os.environ[environment.CACHE_DIR] = str(row.place(f"cache {name}"))
        tuned = _tuned(row.place(name))
        with row.no_loss(f"B10 {name}"):
            for _ in range(2):
                tuned.launch(*_tensors(4096))
            row.expect(row.launched[-1] == FOUND, f"B10 before: {row.launched[-1]}")
            os.environ[name] = "2"
            row.injected()
            for _ in range(2):
                tuned.launch(*_tensors(4096))
            ours = row.launched[-1]
            dataclasses.replace(tuned).launch(*_tensors(4096))
            row.expect(
                ours == row.launched[-1] == FAR, f"B10 {name}: {ours}, a fresh rank {row.launched[-1]}"
            )
        del os.environ[name]
    _distributed(row)


def _distributed(row: Row) -> None:
    """The same by torch.distributed, whose world the process joins after its first launches."""
    tuned = _tuned(row.place("distributed"))
    os.environ[environment.CACHE_DIR] = str(row.place("cache distributed"))
    with row.no_loss("B10 torch.distributed", limit_s=60):
        for _ in range(2):
            tuned.launch(*_tensors(4096))
        import torch.distributed

        world = torch.distributed
        real = world.is_initialized, world.get_world_size
        world.is_initialized, world.get_world_size = lambda: True, lambda *args: 2
        row.injected()
        if hook := getattr(sys.modules["aot_tune.serve.rank"], "joined", None):
            hook()
        for _ in range(2):
            tuned.launch(*_tensors(4096))
        row.expect(row.launched[-1] == FAR, f"B10 torch.distributed: {row.launched[-1]}")
        world.is_initialized, world.get_world_size = real


def failing_searches(row: Row) -> None:
    """B11: the search runs out of memory, raises, or is late; the fallback runs and is remembered."""
    HintedKernels.is_ready = lambda *args: True
    os.environ[environment.SEARCH_SECONDS] = "1"
    from aot_tune.nvidia import cutile

    kinds: dict[str, Callable[[], object]] = {
        "memory": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
        "value": lambda: (_ for _ in ()).throw(ValueError("no valid config")),
        "runtime": lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: an illegal memory access")),
        "late": lambda: time.sleep(1.2),
    }
    for name, happen in kinds.items():
        tuned, asked = _tuned(row.place(name)), []

        def search(
            configs: Any, *rest: Any, args_of: Any, happen: Any = happen, asked: Any = asked, **named: Any
        ) -> Any:
            asked.append(configs)
            row.injected()
            happen()
            for config in configs:
                args_of(config)
            raise ValueError("no valid config")

        cutile.search = search
        with row.no_loss(f"B11 {name}", limit_s=15):
            for rows in (4096, 8192) * 3:
                tuned.launch(*_tensors(rows))
        row.expect(set(row.launched[-6:]) == {FAR}, f"B11 {name}: {row.launched[-6:]}"[:200])
        row.expect(len(asked) == 2, f"B11 {name}: {len(asked)} searches of 2 buckets")
    for value in ("0", "1e-9", "9.3e9", "1e308"):
        os.environ[environment.SEARCH_SECONDS] = value
        row.injected()
        # A value that cannot be is refused by a UsageError.
        with (
            row.no_loss(f"B11 {environment.SEARCH_SECONDS}={value}", limit_s=15),
            contextlib.suppress(UsageError),
        ):
            dataclasses.replace(tuned).launch(*_tensors(20_000))
    del os.environ[environment.SEARCH_SECONDS]


def many_shapes(row: Row) -> None:
    """B12: thousands of new shapes from several threads, hostile sizes among them."""
    tuned = _tuned(row.place("shapes"))
    failures: list[str] = []
    number = 20_000 if row.more else 2500

    def work(seed: int) -> None:
        pick = random.Random(seed)
        for _ in range(number):
            try:
                tuned.launch(*_tensors(pick.randrange(0, 1 << 20)))
            except BaseException as error:
                failures.append(f"{type(error).__name__}: {error}")

    os.environ[environment.DISABLE] = "1"
    warnings.simplefilter("ignore")
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        row.tally.add("hung", int(thread.is_alive()), "B12 a thread does not end")
    row.injected(3 * number)
    row.tally.add("lost", len(failures), f"B12: {set(failures)}"[:300])
    dispatcher = dispatcher_of(tuned)
    kept = max(len(dispatcher._plans), len(dispatcher._memo))
    row.expect(kept <= 4096, f"B12: {kept} plans are kept")
    shipped = [one for one, _ in _shipped()]
    for _ in range(2000 if row.more else 300):
        one = row.pick.choice(shipped)
        problem = row.pick.choice(one.typical_problems)
        axis = row.pick.choice(list(one.axes))
        problem = problem.replaced(**{axis: row.pick.choice([1, 7, 2**20 + 1, 2**31, 2**40])})
        row.injected()
        try:
            config = dispatcher_of(one).choice(SM90, problem).config
        except AotTuneError as error:
            row.tally.add("lost", int(_has_config(one, problem)), f"B12 {one.name} {problem}: {error}"[:300])
            continue
        except Exception as error:
            row.tally.add("lost", 1, f"B12 {one.name} {problem}: {type(error).__name__}: {error}"[:300])
            continue
        row.expect(one.refusal(config, SM90, problem) is None, f"B12 {one.name} {problem}: {config}")
    del os.environ[environment.DISABLE]


def layouts(row: Row) -> None:
    """B13: tensors of other strides and alignments; what may not be written is refused each time."""
    launches = _launch_for_real()
    tuned = _tuned(row.place("layouts"))
    base = torch.empty(512, 2048, dtype=torch.bfloat16, device="meta")
    tuned.launch(*_tensors(256))
    layouts = {
        "row gaps": base[:256, :1024],
        "column stride 2": base[:256, ::2],
        "transposed": torch.empty(1024, 256, dtype=torch.bfloat16, device="meta").t(),
        "misaligned": base.view(-1)[1 : 1 + 256 * 1024].view(256, 1024),
        "expanded, read": base[:1, :1024].expand(256, 1024),
    }
    for name, source in layouts.items():
        row.injected()
        with row.no_loss(f"B13 {name}", limit_s=60):
            tuned.launch(source, _tensors(256)[1])
            row.expect(launches[-1].grid == (4, 16, 1), f"B13 {name}: {launches[-1].grid}")
    for attempt in range(3):
        row.injected()
        before = len(launches)
        with contextlib.suppress(LaunchError):
            tuned.launch(_tensors(256)[0], base[:1, :1024].expand(256, 1024))
        row.expect(len(launches) == before, f"B13 an expanded output is launched, attempt {attempt}")


# B14 to B17: names, caches ----------------------------------------------------------------------------------

NAMES = (
    "../x",
    "/etc/x",
    "a\0b",
    "x" * 300,
    "x" * 65,
    "",
    ".",
    "..",
    "Upper",
    "é",
    "a\nb",
    "-rf",
    "a/b",
    "a b",
)


def names(row: Row) -> None:
    """B14: names that are no names of files."""
    before = sorted(row.folder.rglob("*"))
    for name in NAMES:
        row.injected()
        try:
            dataclasses.replace(scale, name=name, tables=row.folder / "tables")
            row.expect(False, f"B14 {name!r} is accepted")
        except AotTuneError:
            pass
        except Exception as error:
            row.tally.add("lost", 1, f"B14 {name!r}: {type(error).__name__}: {error}"[:200])
    row.expect(sorted(row.folder.rglob("*")) == before, "B14 something was written")


def _place(row: Row, tuned: Tunable) -> tuple[Path, cache.Key]:
    key = dispatcher_of(tuned)._winners.key(SM90, "NVIDIA H200", tuned.bucket_of(_problem(4096)))
    return Path(os.environ[environment.CACHE_DIR]), key


def _entry(key: cache.Key, **changes: Any) -> bytes:
    config = {"constants": dict(SEARCHED.constants), "hints": dict(SEARCHED.hints)}
    entry = {"schema": cache.SCHEMA, "key": key.document, "config": config, "mean_us": 1.0}
    return json.dumps({**entry, **changes}).encode()


def _given(path: Path, mode: int | None = None, owner: int | None = None) -> None:
    if mode is not None:
        path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)


def _linked(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def foreign_caches(row: Row) -> None:
    """B15: folders that others may write to, at every level, and entries with any content."""
    root = os.geteuid() == 0
    folders: dict[str, Callable[[Path], None]] = {
        "anybody's": lambda top: _given(top, 0o777),
        "a group's": lambda top: _given(top, 0o775),
        "anybody's v1": lambda top: _given(top / f"v{cache.SCHEMA}", 0o777),
        "anybody's arch": lambda top: _given(top / f"v{cache.SCHEMA}" / "sm90", 0o777),
        "a link": lambda top: _linked(top, top.with_name("aside")),
        "a linked v1": lambda top: _linked(top / f"v{cache.SCHEMA}", top.with_name("aside")),
    }
    if root:
        folders["another's"] = lambda top: _given(top, owner=54321)
        folders["another's v1"] = lambda top: _given(top / f"v{cache.SCHEMA}", owner=54321)
        folders["another's arch"] = lambda top: _given(top / f"v{cache.SCHEMA}" / "sm90", owner=54321)
    os.environ[environment.DISABLE] = "1"
    for name, spoil in folders.items():
        config = _with_entry(row, f"B15 {name}", _entry, spoil)
        row.expect(config == FAR, f"B15 {name}: {config} of a folder that is not ours alone")
    deep = b"[" * 300 + b"]" * 300
    contents: dict[str, Callable[[cache.Key], bytes]] = {
        **{
            f"{n} levels": lambda key, n=n: _entry(key).replace(
                b'"mean_us": 1.0', b'"mean_us": ' + b"[" * n + b"]" * n
            )  # type: ignore[misc]
            for n in (200, 254, 255, 300, 1000, 1024, 2000)
        },
        "only brackets": lambda key: deep,
        "other constants": lambda key: _entry(key, config={"constants": {"a": 1}, "hints": {}}),
        "fewer constants": lambda key: _entry(key, config={"constants": {"tile_m": 32}, "hints": {}}),
        "zero": lambda key: _entry(key, config={"constants": {"tile_m": 0, "tile_n": 64}, "hints": {}}),
        "text": lambda key: _entry(key, config={"constants": {"tile_m": "x", "tile_n": 64}, "hints": {}}),
        "1e308": lambda key: _entry(key, config={"constants": {"tile_m": 1e308, "tile_n": 64}, "hints": {}}),
        "a list": lambda key: b"[]",
        "cut": lambda key: _entry(key)[:-20],
        "another's key": lambda key: _entry(key._replace(kernel="other")),
        "negative time": lambda key: _entry(key, mean_us=-1),
    }
    for name, content in contents.items():
        config = _with_entry(row, f"B15 entry {name}", content, lambda top: None)
        row.expect(config == FAR, f"B15 entry {name}: {config}")
    for name, make in (("FIFO", os.mkfifo), ("10 GB", _sparse(10 << 30)), ("folder", Path.mkdir)):
        config = _with_entry(row, f"B15 entry {name}", _entry, lambda top, make=make: _replaced(top, make))
        row.expect(config == FAR, f"B15 entry {name}: {config}")
    del os.environ[environment.DISABLE]


def _replaced(top: Path, make: Callable[[Path], object]) -> None:
    (path,) = top.rglob("*.json")
    path.unlink()
    make(path)


def _with_entry(
    row: Row, what: str, content: Callable[[cache.Key], bytes], spoil: Callable[[Path], object]
) -> tuple[int, int] | None:
    """What a launch takes where the cache holds this entry in a folder that is then spoilt."""
    top = row.place(what) / "cache"
    os.environ[environment.CACHE_DIR] = str(top)
    tuned = _tuned(row.place("tables"))
    _, key = _place(row, tuned)
    path = top / key.place
    for folder in reversed(path.relative_to(top).parents):
        (top / folder).mkdir(mode=0o755, exist_ok=True)
    path.write_bytes(content(key))
    path.chmod(0o600)
    spoil(top)
    row.injected()
    row.launched.clear()
    with row.no_loss(what):
        tuned.launch(*_tensors(4096))
    return row.launched[-1] if row.launched else None


def other_releases(row: Row) -> None:
    """B16: entries of a newer release lie beside ours, and where ours would be."""
    searches: list[Problem] = []
    _found_by_search(row, searches)
    os.environ[environment.SEARCH_SECONDS] = "10"
    top = row.place("cache")
    top.chmod(0o700)
    os.environ[environment.CACHE_DIR] = str(top)
    tuned = _tuned(row.place("tables"))
    _, key = _place(row, tuned)
    beside = top / f"v{cache.SCHEMA + 1}" / "sm90" / "newer.json"
    ours = top / key.place
    for path, content in ((beside, b'{"schema": 2}'), (ours, _entry(key, schema=cache.SCHEMA + 6))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        row.injected()
    for folder in (top / "v1", top / "v1" / "sm90", ours.parent):
        folder.chmod(0o700)
    newer = ours.read_bytes()
    with row.no_loss("B16"):
        tuned.launch(*_tensors(4096))
    row.expect(beside.read_bytes() == b'{"schema": 2}', "B16 the entry beside ours was touched")
    row.expect(ours.exists() and ours.read_bytes() == newer, "B16 a newer file at our path was overwritten")


def compiler_caches(row: Row) -> None:
    """B17: cuTile's own cache is a file, cannot be made, or holds garbage; it compiles all the same."""
    from cuda.tile._cext import TileContext, default_tile_context

    def a_file(folder: Path) -> None:
        folder.write_text("in the way")

    def garbage(folder: Path) -> None:
        folder.mkdir()
        for name in ("cache.db", "tile_cache.db", "index.sqlite"):
            (folder / name).write_bytes(os.urandom(4096))

    launches = _launch_for_real()
    for name, spoil in (("a file", a_file), ("garbage", garbage), ("nowhere", lambda folder: None)):
        folder = Path("/dev/null/cache") if name == "nowhere" else row.place("B17") / name.replace(" ", "_")
        spoil(folder)
        row.injected()
        tuned = _tuned(row.place(f"tables {name}"))
        kernel_type = type(dispatcher_of(tuned).kernels.of(AT_64))
        real = kernel_type._compile
        config = dataclasses.replace(default_tile_context.config, cache_dir=str(folder))

        def compile_there(
            self: Any,
            signature: Any,
            context: Any,
            capability: Any = None,
            real: Any = real,
            config: Any = config,
        ) -> Any:
            return real(self, signature, TileContext(config=config), capability)

        kernel_type._compile = compile_there
        before = len(launches)
        with row.no_loss(f"B17 {name}", limit_s=60):
            for _ in range(2):
                tuned.launch(*_tensors(64))
        kernel_type._compile = real
        row.tally.add("lost", before + 2 - len(launches), f"B17 {name}: launches are missing")


def refused_cubins(row: Row) -> None:
    """B18: the driver refuses an archive's cubins: one warning; they are compiled, or an error says so."""
    from aot_tune.nvidia import cutile
    from tests.support.sample_archive import packed, put

    launches, has_compiler = _launch_for_real(), cutile.may_have_compiler
    for code, compiler in itertools.product((200, 209, 218, 222, 500), (True, False)):
        name = f"B18 error {code}, compiler {compiler}"
        untuned = _tuned(row.place(name))
        path = put(row.place(name), packed())
        tuned = dataclasses.replace(untuned)
        row.injected()
        stand_in.DRIVER.refuses = lambda head, code=code: 0 if head == b"\x7fELF" else code
        stand_in.DRIVER.lazy = code == 500
        cutile.may_have_compiler = lambda compiler=compiler: compiler
        before, failures = len(launches), []
        with row.no_loss(name, limit_s=60), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                try:
                    tuned.launch(*_tensors(64))
                except LaunchError as error:
                    failures.append(str(error))
        told = [str(w.message) for w in caught if issubclass(w.category, CubinWarning)]
        named = ("scale", str(path), "sm90", "the driver", f"error {code}")
        row.expect(len(told) == 1, f"{name}: {len(told)} warnings")
        row.expect(all(word in text for word in named for text in (*told, *failures)), f"{name}: {failures}")
        row.expect(len(failures) == (0 if compiler else 2), f"{name}: {failures}")
        row.tally.add("lost", 2 * compiler - (len(launches) - before), f"{name}: launches are missing")
    cutile.may_have_compiler = has_compiler


_BROKEN = "import sys; sys.modules['aot_tune.replay.answer.searches'] = None"
_LAZY = """
import importlib.util as util, sys
spec = util.spec_from_file_location("lazy", sys.argv[1])
spec.loader = util.LazyLoader(spec.loader)
sys.modules["lazy"] = module = util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
_FAILS = """
import sys
class Fails:
    def find_spec(self, name, path, target=None):
        if name == "cuda.tile.tune._tune":
            sys.meta_path.remove(self)
            raise ImportError("once")
sys.meta_path.insert(0, Fails())
try:
    import cuda.tile
except ImportError:
    pass
"""
UNREPLAYED = {
    "an own sitecustomize raises": ("raise ValueError", ""),
    "an own sitecustomize is cut off": ("(", ""),
    "replay cannot be imported": (_BROKEN.replace("searches", "program"), ""),
    "its answers cannot be imported": ("", _BROKEN),
    "a lazy module is broken": ("", _LAZY),
    "a probe": ("", "import importlib.util; importlib.util.find_spec('cuda.tile.tune')"),
    "the first import fails": ("", _FAILS),
    "a reload": ("", "import cuda.tile.tune._tune as t, importlib; importlib.reload(t)"),
    "another import": ("", "import cuda.tile, sys; del sys.modules['cuda.tile.tune']"),
}
"""What stands in the way of replay: code of a start-up module, and code of the program."""

_SEARCHES = """
from importlib import import_module
from aot_tune.nvidia import cutile
names = "cuda.tile.tune", "cuda.tile.tune._tune"
print([cutile.stands_in(import_module(name).exhaustive_search) for name in names])
"""


def replays(row: Row) -> None:
    """B19: searches cannot be replaced, or cuTile is imported in another way."""
    from aot_tune.replay.answer.program import AT_START

    bad = row.place("replay") / "bad.py"
    bad.write_text("raise ImportError('loaded')")
    for name, (own, code) in UNREPLAYED.items():
        folder = row.place(f"replay {name}")
        (folder / "sitecustomize.py").write_text(own)
        for mode in ("search", "error"):
            row.injected()
            path = os.pathsep.join([str(AT_START), str(folder), os.environ["PYTHONPATH"]])
            more = {"PYTHONPATH": path, environment.START_OPTIONS: "{}", environment.ON_MISS: mode}
            words = [sys.executable, "-c", f"{code}\n{_SEARCHES}", str(bad)]
            done = subprocess.run(
                words, env={**os.environ, **more}, capture_output=True, text=True, timeout=60
            )
            replayed = done.returncode == 0 and done.stdout == "[True, True]\n"
            reported = re.findall("without replay|are not replayed", done.stderr) != []
            refused = (done.returncode != 0 and not done.stdout) if mode == "error" else done.returncode == 0
            row.expect(replayed or (reported and refused), f"B19 {name}, {mode}: {done.stderr[-200:]}")


def launched_ranks(row: Row) -> None:
    """B20: mpirun, srun or PMI started this process as one of several; AOT_TUNE_RANKED says otherwise."""
    searches: list[Problem] = []
    _found_by_search(row, searches)
    given = [dict.fromkeys([name], size) for name in environment.LAUNCHERS for size in ("2", "4096")]
    for variables in (*given, {"WORLD_SIZE": "1", "PMI_SIZE": "2"}):
        for own in ("", "1", "2"):
            name = f"B20 {variables} {own}"
            tuned = _tuned(row.place(name))
            os.environ.update({**variables, environment.CACHE_DIR: str(row.place(f"cache {name}"))})
            os.environ[environment.RANKED] = own
            row.injected()
            searches.clear()
            with row.no_loss(name):
                for _ in range(2):
                    tuned.launch(*_tensors(4096))
            searched = own == "1"
            row.expect(set(row.launched[-2:]) == {FOUND if searched else FAR}, f"{name}: {row.launched[-2:]}")
            row.expect(bool(searches) == searched, f"{name}: searched {searches}")
            for variable in (*variables, environment.RANKED):
                del os.environ[variable]


SCENARIOS: dict[str, Callable[[Row], None]] = {
    "B1": odd_tables,
    "B2": odd_texts,
    "B3": hostile_tables,
    "B4": bare_machines,
    "B5": unwritable_caches,
    "B6": cold_starts,
    "B7": held_locks,
    "B8": lying_locks,
    "B9": captures,
    "B10": ranks,
    "B11": failing_searches,
    "B12": many_shapes,
    "B13": layouts,
    "B14": names,
    "B15": foreign_caches,
    "B16": other_releases,
    "B17": compiler_caches,
    "B18": refused_cubins,
    "B19": replays,
    "B20": launched_ranks,
}
"""By row of the README's table."""

DEADLINE_S = 300.0
"""Seconds after which a row's process counts as hung."""


def run(name: str, folder: Path, tally: Tally, *, seed: int = 0, more: bool = False) -> None:
    """Do one row's faults in a process of its own."""
    from tests.faults.world import ROOT, patience

    folder.mkdir(parents=True)
    variables = {key: value for key, value in os.environ.items() if key not in environment.DESCRIPTIONS}
    for gone in (*environment.LAUNCHERS, injector.PLAN):
        variables.pop(gone, None)
    variables |= {
        "PYTHONPATH": str(ROOT),
        environment.CACHE_DIR: str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    words = [
        sys.executable,
        "-m",
        "tests.faults.serving",
        name,
        str(folder),
        str(seed),
        "full" if more else "",
    ]
    try:
        done = subprocess.run(
            words, cwd=folder, env=variables, capture_output=True, text=True, timeout=patience(DEADLINE_S)
        )
    except subprocess.TimeoutExpired:
        tally.add("hung", 1, f"{name}: no end within {DEADLINE_S:g} s, longer under load")
        return
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        tally.add("lost", 1, f"{name}: exit code {done.returncode}: {done.stderr[-500:]}")
        return
    tally.injected += told["injected"]
    for what in ("lost", "wrong", "hung"):
        tally.add(what, told[what], "; ".join(line for line in told["why"] if line.startswith(what))[:1500])


def main() -> None:
    """Do the row that the command line names, and print its tally."""
    name, folder, seed, more = sys.argv[1:5]
    row = Row(folder=Path(folder), seed=int(seed), more=bool(more))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not mix with the answer
    _stand_in(row)
    try:
        SCENARIOS[name](row)
    except Exception as error:
        row.tally.add("lost", 1, f"{name}: {traceback.format_exc()[-600:]}{error}")
    tally = row.tally
    told = {key: getattr(tally, key) for key in ("injected", "lost", "wrong", "hung", "why")}
    answers.write(json.dumps(told) + "\n")
    answers.flush()
    os._exit(0)  # threads that hang must not keep the process


if __name__ == "__main__":
    main()
