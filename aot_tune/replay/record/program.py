"""Run a program in which every search and launch of a library is recorded, and report the recordings."""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune import environment
from aot_tune.errors import AotTuneError, StoreError, UsageError
from aot_tune.replay.answer.cubins import LaunchCall
from aot_tune.replay.answer.program import run
from aot_tune.replay.answer.searches import SearchCall
from aot_tune.replay.files import read_recorded
from aot_tune.replay.record.recorder import JOURNALS, UNFINISHED, Recorder, Site, search_key
from aot_tune.tables.files import check_writable, write_atomic


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Recordings of a program, over all its processes."""

    exit_code: int
    """Program's exit code."""

    sites: tuple[Site, ...]
    """Recordings at each place of a library."""

    tables: tuple[str, ...]
    """Tables that were written."""

    pythons: int
    """Number of Python processes that would have recorded a search."""

    interrupted: str
    """Name of the signal that ended the program; empty where it ended by itself."""


def record(
    command: Sequence[str],
    *,
    out: Path | None,
    package: str | None,
    journals: Path = JOURNALS,
    against: Sequence[Path] = (),
) -> Recording:
    """Run a program and record its searches.

    Args:
        command: The program and its arguments.
        out: The folder of tables; None for the one in each library's own package.
        package: Record only kernels of this top-level package; None for all.
        journals: The folder of journals.
        against: Recorded tables whose winners the searches judge. The program then prints to stderr, since
            the verdict goes to stdout.

    Raises:
        UsageError: There is no such program, a variable has a wrong value or forbids searches, or `package`
            is part of a package.
        StoreError: A folder cannot be written in.
    """
    environment.check()
    if environment.search_disabled():
        raise UsageError(
            f"{environment.DISABLE} or {environment.DISABLE_OURS} is set, so nothing would be searched: "
            "unset it"
        )
    if package is not None and "." in package:
        raise UsageError(f"--package takes a top-level package: --package {package.partition('.')[0]}")
    for place in (journals, *([out] if out is not None else [])):
        check_writable(place)
    with tempfile.TemporaryDirectory(prefix="aot-tune-record-") as folder:
        code, interrupted = run(
            command,
            stdout=2 if against else None,
            recorder=["aot_tune.replay.record.program:recorder"],
            out=[str(out.absolute())] if out is not None else [],
            package=[package] if package is not None else [],
            journals=[str(journals.absolute())],
            against=[str(path.absolute()) for path in against],
            reports=[folder],
        )
        if not interrupted:
            _unfinished(journals, Path(folder)).unlink(missing_ok=True)
        pythons = len(list(Path(folder).glob("*.began")))
        sites: dict[tuple[str, str], Site] = {}
        tables: dict[str, None] = {}
        for path in sorted(Path(folder).glob("*.json")):
            report = json.loads(path.read_text())
            tables |= dict.fromkeys(report["tables"])
            for site in report["sites"]:
                _add(sites, Site(**site))
    held = set(_keys_of(map(Path, tables)))
    for total in sites.values():
        total.problems = {key: None for key in total.problems if key in held}
    return Recording(
        exit_code=code,
        sites=tuple(sites.values()),
        tables=tuple(tables),
        pythons=pythons,
        interrupted=interrupted,
    )


def _unfinished(journals: Path, reports: Path) -> Path:
    return journals / f"{reports.name}{UNFINISHED}"


def _keys_of(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the keys of the searches in tables. A table that is gone or damaged holds none."""
    for path in paths:
        with suppress(AotTuneError):
            yield from (search_key(path, one.space, one.problem) for one in read_recorded(path).entries)


def _add(sites: dict[tuple[str, str], Site], site: Site) -> None:
    """Add another process's recordings at one place."""
    total = sites.setdefault((site.place, site.kernel), site)
    if total is not site:
        total.problems |= site.problems
        total.searches += site.searches
        total.gains += site.gains
        total.failures += site.failures
        total.wrong += site.wrong
        total.remarks |= site.remarks
        total.again += site.again


def recorder(passed: Mapping[str, Sequence[str]]) -> Callable[[SearchCall | LaunchCall], Any]:
    """Return what records a call of this process and reports to the parent. Made at the first call.

    Args:
        passed: The options that `record` passed to the program.
    """
    folder, journals = Path(passed["reports"][0]), Path(passed["journals"][0])
    recording = Recorder(
        out=Path(passed["out"][0]) if passed.get("out") else None,
        package=passed["package"][0] if passed.get("package") else None,
        journals=journals,
        run=folder.name,
        begun=lambda: _report(recording, folder),
        against=[*map(Path, passed.get("against", ()))],
    )

    def record_and_report(call: SearchCall | LaunchCall) -> Any:
        try:
            return recording(call)
        finally:
            _report(recording, folder)  # at once: a program that is killed reports nothing at its end

    with suppress(OSError):  # without the file a config that is interrupted counts as failed
        journals.mkdir(parents=True, exist_ok=True)
        _unfinished(journals, folder).touch()
    os.register_at_fork(after_in_child=recording.forget_counts)  # the parent reports them
    atexit.register(_end, recording, folder)
    return record_and_report


def _end(recorder: Recorder, folder: Path) -> None:
    recorder.end()
    _report(recorder, folder)


def _report(recorder: Recorder, folder: Path) -> None:
    if not (recorder.sites or recorder.tables) or not folder.is_dir():  # the parent may be gone
        return
    sites = [vars(site) for site in list(recorder.sites.values())]  # another thread may add to them meanwhile
    tables = [str(path) for path in list(recorder.tables)]
    text = json.dumps({"sites": sites, "tables": tables})
    try:
        write_atomic(folder / f"{os.getpid()}.json", text.encode(), durable=False)
    except StoreError as error:
        sys.stderr.write(f"aot-tune: cannot report the recording to the parent: {error}\n")
