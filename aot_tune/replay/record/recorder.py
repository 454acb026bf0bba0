"""Record every search of a process: search, write the table, answer the library, note what to tell."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from aot_tune.declare.fingerprint.hashing import kernel_hash
from aot_tune.errors import (
    AotTuneError,
    JournalMismatchError,
    NewerSchemaError,
    NotRecordableError,
    StoreError,
)
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.replay.answer.searches import SearchCall, answer, answer_of, why_not_searched
from aot_tune.replay.document import MOST_LAUNCHED, dump
from aot_tune.replay.files import read_recorded
from aot_tune.replay.nearest import sizes_of
from aot_tune.replay.problem import Fixed, Problem
from aot_tune.replay.record.ahead import Ahead, Tried
from aot_tune.replay.record.journal import SearchJournal, accepts
from aot_tune.replay.record.launches import Launches
from aot_tune.replay.record.search import (
    Identified,
    LibrarySearch,
    Searched,
    as_result,
    identified,
    raise_as_cutile,
)
from aot_tune.replay.record.turn import turn
from aot_tune.replay.spelling import space_hash, spelled, texts_of
from aot_tune.replay.table import Launched, Library, RecordedEntry, RecordedTable, file_name
from aot_tune.serve.runtime import runtime
from aot_tune.tables.files import check_replaceable, check_writable, write_atomic
from aot_tune.tables.store import folder_of_package
from aot_tune.tables.table import BuiltWith
from aot_tune.tuner.choose.times import is_tie
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.tuner.measure.worker.backend import TIMING
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.values.device import Device
from aot_tune.values.text import counted, error_in_words

JOURNALS = Path("build/record")
"""The folder of journals by default: that of a kernel is ``<arch>/<module>.<kernel>.jsonl`` below it."""

MOST_SEARCHES_OF_ONE_PROBLEM = 3
"""How often one problem is searched in a process. A library that asks twice may do so because the contents of
an index tensor matter; from then on it is answered with the winner that is known."""


@dataclass(kw_only=True)
class Site:
    """What was recorded at one place of a library, for its author."""

    place: str
    """The file and the line of the call."""

    kernel: str
    """The kernel's module and name."""

    problems: int = 0
    """The number of different problems."""

    searches: int = 0
    """The number of searches, those that were not recorded among them."""

    gains: list[float] = field(default_factory=list)
    """For each recorded search, how many times as fast as the first config its winner is."""

    failures: int = 0
    """The number of configs that failed, over all searches."""

    wrong: int = 0
    """The number of configs that computed something else than the first one."""

    remarks: dict[str, None] = field(default_factory=dict)
    """What the author may want to know, each once, in order."""


@dataclass(frozen=True, kw_only=True)
class _Won:
    """The winner of one search, and the times behind it."""

    entry: RecordedEntry
    times: dict[str, Measurement]

    def regret(self, text: str) -> float:
        """How many times as long as the winner a config took in this search; infinite where it failed."""
        time = self.times.get(text)
        return time.mean_us / self.entry.mean_us if time is not None else math.inf


def ahead_of(index: int, cubins: Path) -> Ahead | None:
    """What tries configs on a GPU ahead, with a folder for their cubins; None without a GPU."""
    return Ahead(index, cubins) if visible_gpus() else None


class Recorder:
    """Records the searches of this process.

    Args:
        out: The folder of tables; None for that of each library's own package.
        package: Record only kernels of this top-level package; None for all.
        journals: The folder of journals, the same for all processes of a program, wherever they stand.
        ahead: Makes what tries configs of a GPU before this process runs them, from its number and a folder
            for cubins; None where there is nothing to try them on.
    """

    def __init__(
        self,
        *,
        out: Path | None = None,
        package: str | None = None,
        journals: Path = JOURNALS,
        ahead: Callable[[int, Path], Ahead | None] = ahead_of,
    ) -> None:
        self._out = out.absolute() if out is not None else None
        self._package = package
        self._journals = journals.absolute()
        self._ahead_of = ahead
        self._ahead: dict[int, Ahead | None] = {}
        self._counts: dict[str, int] = {}
        self._won: dict[str, list[_Won]] = {}
        self._problems: dict[str, list[Identified]] = {}
        self._launches = Launches(self._remark_on_launch, self._note_launch)
        self._paths: dict[Any, Path] = {}
        self._launched: dict[Path, set[Launched]] = {}
        self._turns: dict[Path, str] = {}
        self.sites: dict[str, Site] = {}
        """What was recorded, by place in the library."""
        self.tables: dict[Path, RecordedTable] = {}
        """The tables that were written."""

    def __call__(self, call: SearchCall) -> Any:
        """Search, record and answer. A search that cannot be recorded is cuTile's own, with a remark."""
        if not len(call.space):
            return answer(call)
        site = self._site(call)
        site.searches += 1
        if (reason := why_not_searched()) is not None:
            site.remarks[f"answered and not searched: {reason}"] = None
            return answer(call)
        try:
            kernel, path, library = self._destination(call)
            texts = texts_of(call.space)
            here = runtime()
            index = here.current_device()
            device = here.device(index)
            known = identified(call, texts, device)
            digest, obstacles = kernel_hash(kernel)
            if obstacles:
                raise NotRecordableError(f"its code cannot be hashed: {obstacles[0]}")
        except Exception as error:  # the library's own function failed, or no GPU: cuTile's search meets it
            site.remarks[f"not recorded: {error_in_words(error)}"] = None
            return call.search()
        folder = path / str(device.arch)
        gpu = gpu_state.identity(index)
        try:
            with turn(self._journals, _turn_of(gpu, index)):
                return self._recorded(call, site, kernel, folder, library, known, digest, index, device)
        except NotRecordableError as error:
            site.remarks[f"not recorded: {error}"] = None
            return call.search()

    def end(self) -> None:
        """Look at launches no longer, write those that no table has yet, and end what tries configs ahead."""
        self._launches.end()
        for path in self._launched:
            self._write_launched(path)
        for ahead in self._ahead.values():
            if ahead is not None:
                ahead.close()

    def _remark_on_launch(self, function: Any, remark: str) -> None:
        """Tell it at each place that searched the kernel."""
        for site in self.sites.values():
            if site.kernel == f"{function.__module__}.{function.__qualname__}":
                site.remarks[remark] = None

    def _note_launch(self, function: Any, launched: Launched) -> None:
        """Keep what a recorded kernel was launched with for the next writing of its table."""
        path = self._paths.get(function)
        if path is not None and len(self._launched[path]) < MOST_LAUNCHED:
            self._launched[path].add(launched)

    def _write_launched(self, path: Path) -> None:
        """Add launches to a table that was written before they were made."""
        try:
            with turn(self._journals, self._turns[path]):
                table = _present(path)
                if table is None or self.tables.get(path) is None:
                    return
                added = self._with_launched(table, path)
                if added != table and _same_code(table, self.tables[path]):
                    write_atomic(path, dump(added))
        except AotTuneError:  # such as a full disk: the launches compile when they are replayed
            return

    def _with_launched(self, table: RecordedTable, path: Path) -> RecordedTable:
        winners = set(dataclasses.replace(table, launched=()).compilations)
        launched = {*table.launched, *self._launched[path]} - winners
        return dataclasses.replace(table, launched=tuple(sorted(launched)[:MOST_LAUNCHED]))

    def _site(self, call: SearchCall) -> Site:
        frame = sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("aot_tune."):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        try:
            function = cutile.python_function(call.kernel_of(call.space[0]))
            name = f"{function.__module__}.{function.__qualname__}"
        except Exception:  # not a kernel: the search itself reports that
            name = "?"
        return self.sites.setdefault(f"{place} {name}", Site(place=place, kernel=name))

    def _destination(self, call: SearchCall) -> tuple[Any, Path, Library]:
        """The kernel, the folder of its table, and the library that it is from.

        Raises:
            NotRecordableError: It is no kernel, is not of the package that is to be recorded, or is of none
                and no folder is named.
            StoreError: The folder cannot be written in.
        """
        kernel = call.kernel_of(call.space[0])
        if not cutile.is_kernel(kernel):
            raise NotRecordableError(f"the kernel is a {type(kernel).__name__}, not a ct.kernel")
        module = cutile.python_function(kernel).__module__
        top = module.partition(".")[0]
        if self._package is not None and top != self._package:
            raise NotRecordableError(f"it is not of the package {self._package}")
        folder = self._out
        if folder is None:
            try:
                folder = folder_of_package(top)
            except StoreError:
                raise NotRecordableError(
                    f"the kernel's module {module} is in no package, so its tables need a folder: "
                    "aot-tune record --out DIR"
                ) from None
        check_writable(folder)
        return kernel, folder, _library(top)

    def _recorded(
        self, call: SearchCall, site: Site, kernel: Any, folder: Path, library: Library,
        known: Identified, digest: str, index: int, device: Device,
    ) -> Any:  # fmt: skip
        function = cutile.python_function(kernel)
        path = folder / file_name(function.__module__, function.__qualname__)
        self._paths[function] = path
        self._launched.setdefault(path, set())
        key = _key(path, known)
        number = self._counts[key] = self._counts.get(key, 0) + 1
        if number == 1:
            site.problems += 1
            self._remark_on(site, path, known)
            if function.__module__ == "__main__":
                site.remarks[
                    "it will be replayed without cubins, since nothing else imports a main module: put the "
                    "kernel into a module"
                ] = None
        gpu = gpu_state.identity(index)
        self._turns[path] = _turn_of(gpu, index)
        won = self._won.setdefault(key, [])
        if number > MOST_SEARCHES_OF_ONE_PROBLEM and won:
            safest = _joined(won)[0]
            return answer_of(call.space[known.texts.index(safest.text)], safest)
        identity = {
            **{name: value for name, value in gpu.items() if name != "uuid"},
            "cuda_tile": cutile.version(),
            "tileiras": cutile.compiler_version() or "",
            "timing": TIMING,
            "source_hash": digest,
        }
        try:
            check_replaceable(path)
            _present(path)
            journal_path = self._journals / str(device.arch) / path.with_suffix(".jsonl").name
            with _journal(journal_path, identity) as journal:
                outcomes = SearchJournal(journal, f"{key}.{number}")
                tried = partial(self._tried, call, site, kernel, digest, device, index)
                search = LibrarySearch(call, known, outcomes, index, tried)
                found = search.run()
        except AotTuneError as error:
            site.remarks[f"not recorded: {error}"] = None
            return call.search()
        site.failures += len(found.failures) - len(found.wrong)
        site.wrong += len(found.wrong)
        for at, message in found.wrong.items():
            site.remarks[f"config {known.texts[at]} is passed over: {message}"] = None
        if not found.times:
            raise_as_cutile(call, found.failures)
        timed = [cutile.hints_of(search.kernel(at), device.arch) for at in found.times]
        self._launches.searched(kernel, timed, known.problem)
        try:
            entry = self._entry(call, known, search, found, device)
        except AotTuneError as error:  # such as an argument that has no signature
            site.remarks[f"not recorded: {error}"] = None
            return as_result(call, found)
        times = {known.texts[at]: time for at, time in found.times.items()}
        won.append(_Won(entry=entry, times=times))
        site.gains.append(entry.gain or 1.0)
        table = RecordedTable(
            module=function.__module__,
            kernel=function.__qualname__,
            arch=device.arch,
            source_hash=digest,
            library=library,
            built_with=_built_with(device, gpu),
            entries=_joined(won),
        )
        try:
            self._write(path, table, won, site)
        except AotTuneError as error:  # such as a full disk
            site.remarks[f"not recorded: {error}"] = None
        return as_result(call, found)

    def _tried(
        self, call: SearchCall, site: Site, kernel: Any, digest: str, device: Device, index: int,
        places: Sequence[int],
    ) -> Mapping[int, Tried]:  # fmt: skip
        """Try configs ahead; where that is not possible, the author is told why."""
        if index not in self._ahead:
            self._ahead[index] = self._ahead_of(index, self._journals / "cubins")
        ahead = self._ahead[index]
        if ahead is None or not places:
            return {}
        try:
            return ahead.tried(call, kernel, digest, device.arch, places)
        except NotRecordableError as error:
            site.remarks[f"its configs are not tried in another process first: {error}"] = None
            return {}

    def _entry(
        self, call: SearchCall, known: Identified, search: LibrarySearch, found: Searched, device: Device
    ) -> RecordedEntry:
        at = found.winner
        time, first = found.times[at], found.times.get(0)
        kernel = search.kernel(at)
        return RecordedEntry(
            space=space_hash(known.texts),
            problem=known.problem,
            config=spelled(call.space[at]),
            hints=cutile.hints_of(kernel, device.arch),
            grid=tuple(int(size) for size in call.grid_fn(call.space[at])),
            mean_us=time.mean_us,
            error_margin_us=time.error_margin_us,
            num_samples=time.num_samples,
            first_us=first.mean_us if first is not None else None,
            signature=cutile.signature_of(kernel, search.args(at)),
        )

    def _write(self, path: Path, table: RecordedTable, won: Sequence[_Won], site: Site) -> None:
        """Put the winners into the table that is there; entries of other problems stay."""
        present = _present(path)  # another process of the program may have written meanwhile
        there = present.entries if present is not None and _same_code(present, table) else ()
        if present is not None and present.entries and not _same_code(present, table):
            site.remarks[
                f"{path.name} begins anew, without the {counted(len(present.entries), 'entry', 'entries')} "
                f"that it had: {_differing(present, table)}"
            ] = None
        others = [one for one in there if not _same_problem(one, won[0].entry)]
        earlier = [one for one in there if _same_problem(one, won[0].entry)]
        entries = table.entries
        if len(won) == 1 and earlier:
            entries = (_incumbent(earlier[0], won[0]),)
        if len(entries) > 1:
            site.remarks[
                f"{len(won)} searches of one problem had {len(entries)} winners: the contents of an argument "
                "matter; the safest of them is replayed"
            ] = None
        launched = present.launched if there and present is not None else ()
        table = dataclasses.replace(table, entries=(*others, *entries), launched=launched)
        table = self._with_launched(table, path)
        write_atomic(path, dump(table))
        self.tables[path] = table

    def _remark_on(self, site: Site, path: Path, known: Identified) -> None:
        if known.same_launches:
            count = len(known.texts)
            site.remarks[
                f"{known.same_launches} of {count} configs are the same launch as another: same grid, hints "
                "and arguments; leave them out"
            ] = None
        others = self._problems.setdefault(f"{path} {space_hash(known.texts)}", [])
        for other in others:
            for name in following(other.problem, known.problem):
                site.remarks[
                    f"{name} is a Constant and follows a size: each size compiles and is a problem of its own"
                ] = None
        others.append(known)


def following(one: Problem, other: Problem) -> list[str]:
    """The compiled-in arguments of two problems that follow a size: they differ, and equal it in both."""
    pairs = set(zip(sizes_of(one.arguments), sizes_of(other.arguments), strict=False))
    found = []
    for name, here, there in zip(one.names, one.arguments, other.arguments, strict=True):
        if isinstance(here, Fixed) and isinstance(there, Fixed) and here != there:
            values = json.loads(here.text), json.loads(there.text)
            if all(type(value) is int for value in values) and values in pairs:
                found.append(name)
    return found


def _journal(path: Path, identity: dict[str, str]) -> Journal:
    """Open a kernel's journal; one for other code, another GPU or another compiler is set aside.

    Raises:
        TuneError: Another process records this kernel, or the journal cannot be written.
    """
    try:
        return Journal.open(path, identity, accepts=accepts)
    except JournalMismatchError:
        return Journal.open(path, identity, fresh=True, accepts=accepts)


def _turn_of(gpu: Mapping[str, str], index: int) -> str:
    """What tells a GPU from others of this host."""
    return gpu["uuid"] or f"cuda-{index}"


def _key(path: Path, known: Identified) -> str:
    text = f"{path.name}\n{space_hash(known.texts)}\n{known.problem!r}"
    return sha256(text.encode()).hexdigest()[:24]


def _library(top: str) -> Library:
    """The distribution that a top-level package is of."""
    for name in metadata.packages_distributions().get(top, ()):
        return Library(name=name, version=metadata.version(name))
    return Library(name="", version="")


def _built_with(device: Device, gpu: dict[str, str]) -> BuiltWith:
    return BuiltWith(
        device_name=device.name,
        sm_count=device.sm_count,
        cuda_tile=cutile.version(),
        tileiras=cutile.compiler_version() or "",
        driver=gpu.get("driver", ""),
    )


def _present(path: Path) -> RecordedTable | None:
    """The table that is there; None where there is none.

    Raises:
        NotRecordableError: It cannot be read, so that what it holds would be lost.
    """
    if not os.path.lexists(path):
        return None
    try:
        return read_recorded(path)
    except NewerSchemaError as error:
        raise NotRecordableError(str(error)) from error
    except AotTuneError as error:
        raise NotRecordableError(f"{error}; restore that table, or remove it") from error


def _differing(one: RecordedTable, other: RecordedTable) -> str:
    """What two tables of one kernel were made with that differs, in words."""
    pairs = {"library": (one.library.version, other.library.version)}
    for field_ in dataclasses.fields(BuiltWith):
        pairs[field_.name] = getattr(one.built_with, field_.name), getattr(other.built_with, field_.name)
    told = [f"{name} was {was}, now {now}" for name, (was, now) in pairs.items() if was != now]
    return ", ".join([*(["the code is another"] if one.source_hash != other.source_hash else []), *told])


def _same_code(one: RecordedTable, other: RecordedTable) -> bool:
    return (one.source_hash, one.library, one.built_with) == (
        other.source_hash,
        other.library,
        other.built_with,
    )


def _same_problem(one: RecordedEntry, other: RecordedEntry) -> bool:
    return (one.space, one.problem) == (other.space, other.problem)


def _incumbent(there: RecordedEntry, won: _Won) -> RecordedEntry:
    """The entry to keep: the one that is there where its config still ties with the winner."""
    if there.text == won.entry.text:
        return there
    time = won.times.get(there.text)
    return there if time is not None and is_tie(time, won.times[won.entry.text]) else won.entry


def _joined(won: Sequence[_Won]) -> tuple[RecordedEntry, ...]:
    """One entry for each winner of one problem, the safest first: that whose worst regret is least."""
    by_text: dict[str, list[RecordedEntry]] = {}
    for one in won:
        by_text.setdefault(one.entry.text, []).append(one.entry)
    joined = [dataclasses.replace(same[0], count=len(same)) for same in by_text.values()]
    return tuple(sorted(joined, key=lambda entry: max(one.regret(entry.text) for one in won)))
