"""Record every search and launch of a process: search, write the table, answer, collect remarks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from aot_tune.declare.fingerprint.hashing import kernel_hash
from aot_tune.environment import RANKED
from aot_tune.errors import (
    AotTuneError,
    JournalMismatchError,
    NewerSchemaError,
    NotRecordableError,
    StoreError,
)
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.replay.answer.cubins import LaunchCall
from aot_tune.replay.answer.searches import SearchCall, answer, answer_of, why_not_searched
from aot_tune.replay.document import MOST_LAUNCHED, dump
from aot_tune.replay.files import is_shipped, read_recorded, right_place_of
from aot_tune.replay.fit import kernel_of, misfit, why_local
from aot_tune.replay.nearest import sizes_of
from aot_tune.replay.problem import Fixed, Problem
from aot_tune.replay.record.again import again
from aot_tune.replay.record.ahead import Ahead, Tried
from aot_tune.replay.record.journal import SearchJournal, accepts
from aot_tune.replay.record.launches import Launches
from aot_tune.replay.record.search import (
    Identified,
    LibrarySearch,
    PassedOverError,
    Searched,
    as_result,
    identified,
    raise_as_cutile,
)
from aot_tune.replay.record.turn import turn
from aot_tune.replay.spelling import Space
from aot_tune.replay.table import Launched, Library, RecordedEntry, RecordedTable, file_name, name_of
from aot_tune.serve.rank import ranked_by
from aot_tune.serve.runtime import runtime
from aot_tune.tables.files import check_replaceable, check_writable, write_atomic
from aot_tune.tables.store import folder_of_package
from aot_tune.tables.table import BuiltWith
from aot_tune.tuner.choose.times import is_tie
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.tuner.measure.worker.backend import TIMING
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.publish import locked
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device
from aot_tune.values.text import counted, error_in_words, shortened

JOURNALS = Path("build/record")
"""Default folder of journals. A kernel's journal is ``<arch>/<module>.<kernel>.jsonl`` below it."""

UNFINISHED = ".unfinished"
"""End of the name of a run's file in the folder of journals. The run removes the file where the program ends
by itself: a config that was begun then and has no outcome ended the program, and is passed over."""

_NAME_FOLDER = "aot-tune record --out DIR"
"""Remedy where a library's own package can hold no tables."""

_NOT_COMPARED = "a search is not compared with a table"

_NOT_ENDED = "a search had not ended: its outcomes are kept, and the same command goes on with it"

IN_PARTS = "gets other parts of the same sums from other configs: they add up, and no config is passed over"
"""Remark on a workspace of split-K configs, after the names of the parameters."""

MOST_SEARCHES_OF_ONE_PROBLEM = 3
"""Most searches of one problem in a process. A library may ask again because the contents of an index tensor
matter. After these searches it is answered from their winners."""


@dataclass(kw_only=True)
class Site:
    """Recordings at one place of a library, for its author."""

    place: str
    """File and line of the call."""

    kernel: str
    """Kernel's module and name."""

    problems: dict[str, None] = field(default_factory=dict)
    """Searches of different problems, each by `search_key`."""

    searches: int = 0
    """Number of searches, recorded or not."""

    gains: list[float] = field(default_factory=list)
    """First config's time / the winner's time, for each recorded search."""

    failures: int = 0
    """Number of configs that failed, over all searches."""

    wrong: int = 0
    """Number of configs that computed something else than the first one."""

    remarks: dict[str, None] = field(default_factory=dict)
    """Remarks for the author, each once, in order."""

    again: list[dict[str, Any]] = field(default_factory=list)
    """Recorded winners that are judged by these searches, each an `Again` as a dictionary."""


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """Kernel that is recorded on a GPU."""

    site: Site
    """Place that searched or launched."""

    kernel: Any
    """Library's kernel."""

    path: Path
    """File of the kernel's table."""

    library: Library
    """Distribution of the kernel."""

    digest: str
    """Kernel's source hash."""

    index: int
    """GPU's number."""

    device: Device
    """GPU."""

    gpu: Mapping[str, str]
    """GPU's identity, as `gpu_state.identity` gives it."""

    @property
    def gpu_name(self) -> str:
        """Return the GPU's name, unique on this host."""
        return self.gpu["uuid"] or f"cuda-{self.index}"

    @property
    def empty(self) -> RecordedTable:
        """Return the kernel's table without recordings."""
        function = cutile.python_function(self.kernel)
        return RecordedTable(
            module=function.__module__,
            kernel=function.__qualname__,
            arch=self.device.arch,
            source_hash=self.digest,
            library=self.library,
            built_with=_built_with(self),
            entries=(),
        )


@dataclass(frozen=True, kw_only=True)
class _Task(_Kernel):
    """Search that is to be recorded."""

    call: SearchCall
    """Library's search."""

    known: Identified
    """Problem of the search."""

    space: Space
    """Search space."""

    @property
    def key(self) -> str:
        """Return the `search_key` of this search."""
        return search_key(self.path, self.space.hashes[0], self.known.problem)


@dataclass(frozen=True, kw_only=True)
class _Won:
    """Winner of one search."""

    entry: RecordedEntry
    """Winner, as a table's entry."""

    times: dict[str, Measurement]
    """Times of all right configs, by spelling."""

    def regret(self, text: str) -> float:
        """Return a config's time / the winner's time in this search; infinite where the config failed."""
        time = self.times.get(text)
        return time.mean_us / self.entry.mean_us if time is not None else math.inf


def search_key(path: Path, space: str, problem: Problem) -> str:
    """Return the hash of a table's name, a search space and a problem."""
    return sha256(f"{path.name}\n{space}\n{problem!r}".encode()).hexdigest()[:24]


def ahead_of(index: int, cubins: Path) -> Ahead | None:
    """Make what tries configs ahead on a GPU, with a folder of cubins; None without a GPU."""
    return Ahead(index, cubins) if visible_gpus() else None


class Recorder:
    """Records the searches and launches of this process.

    Args:
        out: The folder of tables; None for the one in each library's own package.
        package: Record only kernels of this top-level package; None for all.
        journals: The folder of journals, the same for all processes of a program.
        ahead: Makes what tries configs ahead, from a GPU's number and a folder for cubins; gives None where
            there is no GPU.
        run: The run of `aot-tune record` that this process belongs to: the name of its file in `journals`, if
            it did not end by itself (`UNFINISHED`).
        begun: Called when a search begins.
        against: Recorded tables whose winners the searches judge, in the order in which they are read.
    """

    def __init__(
        self,
        *,
        out: Path | None = None,
        package: str | None = None,
        journals: Path = JOURNALS,
        ahead: Callable[[int, Path], Ahead | None] = ahead_of,
        run: str = "",
        begun: Callable[[], None] = lambda: None,
        against: Sequence[Path] = (),
    ) -> None:
        self._run, self._begun = run, begun
        self._against, self._read_against = against, cache(read_recorded)
        self._out = out.absolute() if out is not None else None
        self._package = package
        self._journals = journals.absolute()
        self._ahead_of = ahead
        self._ahead: dict[int, Ahead | None] = {}
        self._counts: dict[str, int] = {}
        self._won: dict[str, list[_Won]] = {}
        self._problems: dict[str, list[Identified]] = {}
        self._launches = Launches(self._remark_on_launch, self._launched_elsewhere)
        self._known: set[tuple[Path, Launched]] = set()
        self._measured: set[tuple[str, Launched]] = set()
        self.sites: dict[str, Site] = {}
        """Recordings, by place in the library."""
        self.tables: dict[Path, RecordedTable] = {}
        """Tables that were written."""

    def __call__(self, call: SearchCall | LaunchCall) -> Any:
        """Search, record and answer. CuTile makes searches that cannot be recorded; a remark says why."""
        if isinstance(call, LaunchCall):
            return self._launch(call)
        if not len(call.space):
            return answer(call)
        site = self._site(call.kernel_name() or "?")
        site.searches += 1
        if (reason := why_not_searched()) is not None:
            if by := ranked_by():
                reason = f"this process is a rank by {by}; each rank records with {RANKED}=1"
            site.remarks[f"answered and not searched: {reason}"] = None
            return answer(call)
        try:
            task = self._task(call, site)
        except Exception as error:  # the library's own function failed, or no GPU: cuTile's search raises too
            site.remarks[f"not recorded: {error_in_words(error)}"] = None
            return call.search()
        site.remarks[_NOT_ENDED] = None
        self._begun()
        try:
            self._compile(task)
            with turn(self._journals, task.gpu_name):
                return self._recorded(task)
        except NotRecordableError as error:
            site.remarks.pop(_NOT_ENDED, None)
            site.remarks[f"not recorded: {error}"] = None
            return call.search()

    def forget_counts(self) -> None:
        """Count from 0 in a forked child: its parent reports what it recorded itself."""
        self.sites = {key: Site(place=site.place, kernel=site.kernel) for key, site in self.sites.items()}

    def end(self) -> None:
        """Stop watching launches, and end the children."""
        self._launches.end()
        for ahead in self._ahead.values():
            if ahead is not None:
                ahead.close()

    def _remark_on_launch(self, function: Any, remark: str) -> None:
        """Add a remark at each place that searched the kernel."""
        for site in self.sites.values():
            if site.kernel == name_of(function.__module__, function.__qualname__):
                site.remarks[remark] = None

    def _launch(self, call: LaunchCall) -> None:
        """Write a launch that was compiled into its kernel's table; where it cannot be, add a remark."""
        if str(_caller().f_globals.get("__name__")).startswith("cuda.tile.tune"):
            return  # a search that cuTile makes
        function = cutile.python_function(call.kernel)
        site = Site(place="", kernel=name_of(function.__module__, function.__qualname__))
        try:
            if self._package not in (None, str(function.__module__).partition(".")[0]):
                return
            kernel = self._kernel(call.kernel, site)
            if kernel.device.arch != call.arch:
                raise NotRecordableError(f"it is for {call.arch}, and the current GPU is not")
            if (local := why_local(kernel.empty)) is not None:
                raise NotRecordableError(local)
            kernel_of(function.__module__, function.__qualname__)
            if (kernel.path, call.launched) in self._known or (site.kernel, call.launched) in self._measured:
                return  # the table has it, or it lost a search
            with locked(kernel.path):
                table = self._table(kernel, times=False)
                launched = {*table.launched, call.launched} - set(table.won)
                if len(launched) > MOST_LAUNCHED:
                    raise NotRecordableError(f"its table holds {MOST_LAUNCHED} launches already")
                self._write(kernel, dataclasses.replace(table, launched=tuple(sorted(launched))))
            self._known.add((kernel.path, call.launched))
        except Exception as error:  # the launch was made, and the program goes on
            site.remarks[f"a launch of {site.kernel} gets no cubin: {error_in_words(error)}"] = None
        if site.remarks:
            self._site(site.kernel).remarks |= site.remarks

    def _launched_elsewhere(self, kernel: Any, args: Sequence[Any], arch: Arch) -> None:
        """Write a launch of a problem that no search was for, though a search had its hints and signature."""
        function = cutile.python_function(kernel)
        hints = tuple(cutile.hints_of(kernel, arch).items())
        launched = Launched(hints, cutile.signature_of(kernel, args))
        measured = name_of(function.__module__, function.__qualname__), launched
        if measured in self._measured:
            self._measured.discard(measured)
            self._launch(LaunchCall(kernel=kernel, arch=arch, launched=launched))

    def _site(self, kernel: str) -> Site:
        frame = _caller()
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self.sites.setdefault(f"{place} {kernel}", Site(place=place, kernel=kernel))

    def _task(self, call: SearchCall, site: Site) -> _Task:
        """Read what is needed to record a search.

        Raises:
            NotRecordableError: As of `_kernel`, or the search cannot be identified.
            StoreError: The folder cannot be written in.
        """
        kernel = self._kernel(call.kernel_of(call.space[0]), site)
        space = call.space_on(kernel.device.arch)
        known = identified(call, space.texts, kernel.device)
        return _Task(**vars(kernel), call=call, known=known, space=space)

    def _kernel(self, kernel: Any, site: Site) -> _Kernel:
        """Read what is needed to record a kernel.

        Raises:
            NotRecordableError: The kernel is none, has no module, is of another package, or cannot be hashed;
                or its tables have no folder.
            StoreError: The folder cannot be written in.
        """
        if not cutile.is_kernel(kernel):
            raise NotRecordableError(f"the kernel is a {type(kernel).__name__}, not a ct.kernel")
        function = cutile.python_function(kernel)
        if not function.__module__:
            raise NotRecordableError("its function was made without a module")
        top = function.__module__.partition(".")[0]
        if self._package is not None and top != self._package:
            raise NotRecordableError(f"it is not of the package {self._package}")
        folder = self._folder(function.__module__)
        here = runtime()
        index = here.current_device()
        device = here.device(index)
        digest, obstacles = kernel_hash(kernel)
        if obstacles:
            raise NotRecordableError(f"its code cannot be hashed: {obstacles[0]}")
        return _Kernel(
            site=site,
            kernel=kernel,
            path=folder / str(device.arch) / file_name(function.__module__, function.__qualname__),
            library=_library(top),
            digest=digest,
            index=index,
            device=device,
            gpu=gpu_state.identity(index),
        )

    def _folder(self, module: str) -> Path:
        """Return the folder for the tables of a module's kernels, after a check that it can be written in."""
        if self._out is not None:
            check_writable(self._out)
            return self._out
        try:
            folder = folder_of_package(module)
        except StoreError:
            raise NotRecordableError(
                f"the kernel's module {module} is in no package, so its tables need a folder: {_NAME_FOLDER}"
            ) from None
        try:
            check_writable(folder)
        except StoreError as error:
            raise NotRecordableError(f"{error}: {_NAME_FOLDER}") from None
        return folder

    def _recorded(self, task: _Task) -> Any:
        """Search and write the table, or answer a problem that was searched often enough."""
        call, site, known = task.call, task.site, task.known
        number = self._counts[task.key] = self._counts.get(task.key, 0) + 1
        if number == 1:
            site.problems[task.key] = None
            self._remark_on(task)
        won = self._won.setdefault(task.key, [])
        if number > MOST_SEARCHES_OF_ONE_PROBLEM and won:
            site.remarks.pop(_NOT_ENDED, None)
            safest = _joined(won)[0]
            return answer_of(call.space[known.texts.index(safest.text)], safest)
        try:
            search, results = self._searched(task, number)
        except AotTuneError as error:
            site.remarks.pop(_NOT_ENDED)
            site.remarks[f"not recorded: {error}"] = None
            return call.search()
        site.remarks.pop(_NOT_ENDED)
        site.failures += len(results.failures) - len(results.wrong)
        site.wrong += len(results.wrong)
        for at, message in results.wrong.items():
            site.remarks[f"config {known.texts[at]} is passed over: {message}"] = None
        if results.in_parts:
            site.remarks[f"{', '.join(sorted(results.in_parts))} {IN_PARTS}"] = None
        site.remarks |= dict.fromkeys(_failures_in_words(known.texts, results))
        if self._against and number == 1:
            self._judge(task, results)
        if not results.times:
            raise_as_cutile(call, results.failures)
        timed = [cutile.hints_of(search.kernel(at), task.device.arch) for at in results.times]
        self._launches.searched(task.kernel, timed, known.problem, results.in_parts)
        try:
            launches = {at: search.launched(at, task.device.arch) for at in results.times}
            self._measured |= {(site.kernel, launched) for launched in launches.values()}
            entry = _entry(task, results, launches[results.winner])
            times = {known.texts[at]: time for at, time in results.times.items()}
            won.append(_Won(entry=entry, times=times))
            site.gains.append(entry.gain or 1.0)
            with locked(task.path):
                self._write(task, self._with_winners(task, won))
        except AotTuneError as error:  # such as an argument that has no signature, or a full disk
            site.remarks[f"not recorded: {error}"] = None
        return as_result(call, results)

    def _judge(self, task: _Task, results: Searched) -> None:
        """Judge the winner that the first table of `against` has for a search that replaying would answer."""
        texts, reasons = task.known.texts, list[str]()
        for path in self._against:
            if path.name != task.path.name:
                continue
            table = self._read_against(path)
            same = next((e for e in table.of(task.space) if e.problem == task.known.problem), None)
            reason = _why_not_compared(path, table, task)
            if reason is None and same is not None:
                at = texts.index(same.text)
                failed = results.wrong.get(at) or results.failures.get(at, (None, "it was not timed"))[1]
                times = {texts[place]: time for place, time in results.times.items()}
                judged = again(task.key, path, same, task.site.kernel, texts[0], times, failed)
                task.site.again.append(dataclasses.asdict(judged))
                return
            reasons.append(reason or "the problem is not in it")
        for reason in reasons or ["there is none"]:
            task.site.remarks[f"{_NOT_COMPARED}: {reason}"] = None

    def _searched(self, task: _Task, number: int) -> tuple[LibrarySearch, Searched]:
        """Search, with the kernel's journal; `number` counts the searches of the problem."""
        check_replaceable(task.path)
        _existing(task.path)
        path = self._journals / str(task.device.arch) / task.path.with_suffix(".jsonl").name
        with turn(path.parent, path.stem), _journal(path, task) as journal:  # others have GPUs of their own
            interrupted = {path.stem for path in self._journals.glob(f"*{UNFINISHED}")} - {self._run}
            outcomes = SearchJournal(journal, f"{task.key}.{number}", run=self._run, interrupted=interrupted)
            search = LibrarySearch(task.call, task.known, outcomes, task.index, partial(self._tried, task))
            return search, search.run()

    def _ahead_on(self, index: int) -> Ahead | None:
        """Return what tries configs ahead on a GPU."""
        if index not in self._ahead:
            self._ahead[index] = self._ahead_of(index, self._journals / "cubins")
        return self._ahead[index]

    def _compile(self, task: _Task) -> None:
        """Compile all configs of a problem's first search, while another process may search."""
        ahead = self._ahead_on(task.index)
        if ahead is not None and task.key not in self._counts:
            with suppress(NotRecordableError):  # `_tried` reports the reason
                places = range(len(task.call.space))
                ahead.compile(task.call, task.kernel, task.digest, task.device.arch, places)

    def _tried(self, task: _Task, places: Sequence[int]) -> Mapping[int, Tried]:
        """Try configs ahead; where that is not possible, add a remark with the reason."""
        ahead = self._ahead_on(task.index)
        if ahead is None or not places:
            return {}
        try:
            return ahead.tried(task.call, task.kernel, task.digest, task.device.arch, places)
        except NotRecordableError as error:
            task.site.remarks[f"its configs are not tried in another process first: {error}"] = None
            return {}

    def _table(self, kernel: _Kernel, *, times: bool = True) -> RecordedTable:
        """Return a kernel's table to add to. Another process of the program may have written it meanwhile.

        A launch has no time, so that only other code or another version of the library drops it. As in
        tables of declared kernels, the driver may change.
        """
        existing, empty = _existing(kernel.path), kernel.empty
        if existing is None:
            return empty
        same_code = (existing.source_hash, existing.library) == (empty.source_hash, empty.library)
        built = dataclasses.replace(existing.built_with, driver=empty.built_with.driver)
        if same_code and (built == empty.built_with or not times):
            return existing
        launched = existing.launched if same_code else ()
        if count := len(existing.entries) + len(existing.launched) - len(launched):
            kernel.site.remarks[
                f"{kernel.path.name} begins anew, without the {counted(count, 'entry', 'entries')} that it "
                f"had: {_differing(existing, empty)}"
            ] = None
        return dataclasses.replace(empty, launched=launched)

    def _with_winners(self, task: _Task, won: Sequence[_Won]) -> RecordedTable:
        """Return a table with a problem's winners; entries of other problems stay."""
        table, entries = self._table(task), _joined(won)
        earlier = [entry for entry in table.entries if _same_problem(entry, won[0].entry)]
        if len(won) == 1 and earlier:
            entries = (_incumbent(earlier[0], won[0]),)
        if len(entries) > 1:
            task.site.remarks[
                f"{len(won)} searches of one problem had {len(entries)} winners: the contents of an argument "
                "matter; the safest of them is replayed"
            ] = None
        others = [entry for entry in table.entries if not _same_problem(entry, won[0].entry)]
        built = table.built_with if [*entries] == earlier else _built_with(task)
        table = dataclasses.replace(table, entries=(*others, *entries), built_with=built)
        launched = tuple(one for one in table.launched if one not in table.won)
        return dataclasses.replace(table, launched=launched)

    def _write(self, kernel: _Kernel, table: RecordedTable) -> None:
        write_atomic(kernel.path, dump(table))
        self.tables[kernel.path] = table

    def _remark_on(self, task: _Task) -> None:
        """Add remarks on a new problem: configs with one launch, constants that follow a size, its module."""
        remarks, known = task.site.remarks, task.known
        if known.same_launches:
            count = len(known.texts)
            remarks[
                f"{known.same_launches} of {count} configs are the same launch as another: same grid, hints "
                "and arguments; leave them out"
            ] = None
        others = self._problems.setdefault(f"{task.path} {task.space.hashes[0]}", [])
        equal = equal_to_a_size(known.problem)
        if not others:
            remarks |= {_may_follow(name): None for name in equal}
        for name in {*known.problem.names} - {*equal}:  # another size shows that it does not follow
            remarks.pop(_may_follow(name), None)
        for other in others:
            for name in following(other.problem, known.problem):
                remarks.pop(_may_follow(name), None)
                remarks[
                    f"{name} is a Constant and follows a size: each size compiles and is a problem of its own"
                ] = None
        others.append(known)


def _caller() -> FrameType:
    """Return the frame of a library that searches or launches."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("aot_tune."):
        frame = frame.f_back
    return frame


def _failures_in_words(texts: Sequence[str], results: Searched) -> Iterator[str]:
    """Yield a remark for each message of failed configs."""
    by_message: dict[str, list[int]] = {}
    for at, (kind, message) in results.failures.items():
        if at not in results.wrong:
            named = "" if kind in (PassedOverError, RuntimeError) else f"{kind.__name__}: "
            by_message.setdefault(shortened(named + message.strip().partition("\n")[0]), []).append(at)
    for message, places in by_message.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield f"config {texts[places[0]]}{more} failed: {message}"


def equal_to_a_size(problem: Problem) -> list[str]:
    """Return the compiled-in arguments that equal a size of a tensor above 1, and may follow it."""
    sizes = {str(size) for size in sizes_of(problem.arguments) if size > 1}
    pairs = zip(problem.names, problem.arguments, strict=True)
    return [name for name, argument in pairs if isinstance(argument, Fixed) and argument.text in sizes]


def _may_follow(name: str) -> str:
    return f"{name} is a Constant and equals a size: where it follows it, every other size is a miss"


def following(earlier: Problem, later: Problem) -> list[str]:
    """Return the compiled-in arguments that differ, and equal the same size in both problems."""
    sizes = set(zip(sizes_of(earlier.arguments), sizes_of(later.arguments), strict=False))
    names = []
    for name, old, new in zip(earlier.names, earlier.arguments, later.arguments, strict=True):
        if isinstance(old, Fixed) and isinstance(new, Fixed) and old != new:
            values = json.loads(old.text), json.loads(new.text)
            if all(type(value) is int for value in values) and values in sizes:
                names.append(name)
    return names


def _entry(task: _Task, results: Searched, launched: Launched) -> RecordedEntry:
    """Return a table's entry for the winner of a search, and its launch."""
    at, call = results.winner, task.call
    time, first = results.times[at], results.times.get(0)
    return RecordedEntry(
        space=task.space.hashes[0],
        problem=task.known.problem,
        config=json.loads(task.known.texts[at]),  # the library's functions may have changed it since
        hints=dict(launched.hints),
        grid=tuple(int(size) for size in call.grid_fn(call.space[at])),
        mean_us=time.mean_us,
        error_margin_us=time.error_margin_us,
        num_samples=time.num_samples,
        first_us=first.mean_us if first is not None else None,
        signature=launched.signature,
    )


def _journal(path: Path, task: _Task) -> Journal:
    """Open a kernel's journal. A journal for other code, another GPU or another compiler is set aside.

    Raises:
        TuneError: Another process records this kernel, or the journal cannot be written.
    """
    identity = {
        **{name: value for name, value in task.gpu.items() if name != "uuid"},
        "cuda_tile": cutile.version(),
        "tileiras": cutile.compiler_version() or "",
        "timing": TIMING,
        "source_hash": task.digest,
    }
    try:
        return Journal.open(path, identity, accepts=accepts)
    except JournalMismatchError:
        return Journal.open(path, identity, fresh=True, accepts=accepts)


@cache
def _library(top: str) -> Library:
    """Return the distribution of a top-level package; empty where several share it."""
    names = set(metadata.packages_distributions().get(top, ()))
    if len(names) != 1:  # of a namespace package, or of none
        return Library(name="", version="")
    name = names.pop()
    return Library(name=name, version=metadata.version(name))


def _why_not_compared(path: Path, table: RecordedTable, task: _Task) -> str | None:
    """Return why no entry of a table can answer a search; None where one may."""
    if (right := right_place_of(path, table)) is not None:
        return f"it belongs in {right}"
    reason = misfit(table, task.kernel, task.device.arch, task.digest, any_version=is_shipped(path))
    of_space = [*table.of(task.space)]
    if reason is None and not of_space:
        return "its search space is another"
    if reason is None and all(entry.problem.sm_count != task.device.sm_count for entry in of_space):
        return "it is of GPUs of another size"
    return reason


def _built_with(kernel: _Kernel) -> BuiltWith:
    return BuiltWith(
        device_name=kernel.device.name,
        sm_count=kernel.device.sm_count,
        cuda_tile=cutile.version(),
        tileiras=cutile.compiler_version() or "",
        driver=kernel.gpu.get("driver", ""),
    )


def _existing(path: Path) -> RecordedTable | None:
    """Return the table at a path; None where there is none.

    Raises:
        NotRecordableError: The table cannot be read, so that its contents would be lost.
    """
    if not os.path.lexists(path):
        return None
    try:
        return read_recorded(path)
    except NewerSchemaError as error:
        raise NotRecordableError(str(error)) from error
    except AotTuneError as error:
        raise NotRecordableError(f"{error}; restore that table, or remove it") from error


def _differing(old: RecordedTable, new: RecordedTable) -> str:
    """Return in words how the code, library, GPU and software of two tables of one kernel differ."""
    pairs = {"library": (old.library.version, new.library.version)}
    for field_ in dataclasses.fields(BuiltWith):
        pairs[field_.name] = getattr(old.built_with, field_.name), getattr(new.built_with, field_.name)
    changes = [f"{name} was {was}, now {now}" for name, (was, now) in pairs.items() if was != now]
    return ", ".join([*(["the code is another"] if old.source_hash != new.source_hash else []), *changes])


def _same_problem(old: RecordedEntry, new: RecordedEntry) -> bool:
    return (old.space, old.problem) == (new.space, new.problem)


def _incumbent(existing: RecordedEntry, won: _Won) -> RecordedEntry:
    """Return the entry to keep: the existing one while its config ties with the winner."""
    if existing.text == won.entry.text:
        return existing
    time = won.times.get(existing.text)
    return existing if time is not None and is_tie(time, won.times[won.entry.text]) else won.entry


def _joined(won: Sequence[_Won]) -> tuple[RecordedEntry, ...]:
    """Return an entry for each winner of one problem, the smallest worst regret first."""
    by_text: dict[str, list[RecordedEntry]] = {}
    for win in won:
        by_text.setdefault(win.entry.text, []).append(win.entry)
    joined = [dataclasses.replace(same[0], count=len(same)) for same in by_text.values()]
    return tuple(sorted(joined, key=lambda entry: max(win.regret(entry.text) for win in won)))
