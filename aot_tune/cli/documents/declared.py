"""Table of a declared kernel, for the verbs. Imports no kernel."""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aot_tune import environment
from aot_tune.cli.documents.document import Document, FileState, Finding, Winner
from aot_tune.cli.documents.former import Form
from aot_tune.declare import checks
from aot_tune.declare.blanks import blank_mistakes
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint import hashing
from aot_tune.errors import StoreError, TableError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import Gpu
from aot_tune.serve import loader
from aot_tune.tables import reader, store, writer
from aot_tune.tables.fit import entry_complaints, mismatch, portfolio_complaints, undeclared
from aot_tune.tables.gpu_models import measured_on, other_gpu_model
from aot_tune.tables.states import first_state
from aot_tune.tables.table import Entry, Slopes, Table, entry_order, geometric_mean
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import axes_in_words
from aot_tune.values.config import Config
from aot_tune.values.text import aligned, counted

_MOST_ALIKE = 3
"""Most entries of one table with the same fault that are reported one by one."""


class DeclaredDocument(Document):
    """Table of a declared kernel and its file."""

    kind, noun, again = "declared", "table", "tune again"
    needs_declaration, baseline, place_name = True, "default", "bucket"
    heads = (
        *("arch", "kernel", "entries", "over default", "best", "worst regret", "evidence", "tuned on"),
        "file",
    )
    parse, dump = staticmethod(reader.parse), staticmethod(writer.dump)
    right_place = staticmethod(store.right_place)
    table: Table

    form = Form(
        shape=reader.TABLE,
        compared="config, mean_us, default_us, evidence",
        none={"error_margin_us": 0.0, "regret": 0.0, "points": []},
        values={"error_margin_us": 0.0, "regret": 0.0, "points": (), "disturbed": None, "states": {}},
        optional=frozenset(reader.OPTIONAL_ENTRY_FIELDS),
        whole={"check_hash": "0" * hashing.HEX_DIGITS},
        left_out=frozenset({"slopes"}),
    )

    @property
    def name(self) -> str:
        """See the base class."""
        return self.table.kernel

    @property
    def portfolio_regret(self) -> float:
        """See the base class."""
        return self.table.portfolio_regret

    # Showing ------------------------------------------------------------------------------------------------

    def overview(self) -> tuple[str, ...]:
        """See the base class."""
        entries = self.table.entries
        return (
            str(self.table.arch),
            self.name,
            str(len(entries)),
            f"{geometric_mean(self.gains):.2f}x",
            f"{max(self.gains, default=1.0):.2f}x",
            f"{max((entry.regret for entry in entries), default=0.0):.1%}",
            "+".join(sorted({entry.evidence for entry in entries})) or "none",
            self.table.built_with.device_name,
            str(self.path),
        )

    def lines(self) -> list[str]:
        """Return the GPU and versions, the portfolio as P0, P1 and so on, and the entries.

        Entries whose samples were disturbed, and times in the GPU's other states, follow.
        """
        table = self.table
        names = {config: f"P{place}" for place, config in enumerate(table.portfolio)}
        heads = ("bucket", "us", "+-", "default us", "gain", "regret", "evidence", "points", "config")
        return [
            f"{table.kernel} on {table.arch}: {self.path}",
            self.made_with(),
            f"portfolio of {counted(len(table.portfolio), 'config')}, "
            f"worst regret {table.portfolio_regret:.1%}"
            + ("" if table.slopes is None else f"; slopes {_slopes(table.slopes)}"),
            *(f"  {name}: {config}" for config, name in names.items()),
            *aligned([heads, *(_entry_row(entry, names) for entry in table.entries)]),
            *(f"disturbed: {entry.bucket}: {entry.disturbed}" for entry in table.entries if entry.disturbed),
            *(_states_line(entry) for entry in table.entries if entry.states),
            *self._batch_lines(),
        ]

    def _batch_lines(self) -> list[str]:
        """Return a line that names the command for batch invariance: tables have no batch axes."""
        if not environment.batch_invariant():
            return []
        return [
            f"{environment.BATCH_INVARIANT} is set: launches take one config of the portfolio for every "
            f"batch; aot-tune doctor {self.name} prints it"
        ]

    # Comparing ----------------------------------------------------------------------------------------------

    def in_names_of(self, new: Document) -> tuple[DeclaredDocument, tuple[str, ...]]:
        """See the base class. Only constants are renamed."""
        names = _renames(self.table, new.table)
        if not names:
            return self, ()
        entries = [replace(entry, config=_renamed(entry.config, names)) for entry in self.table.entries]
        portfolio = tuple(_renamed(config, names) for config in self.table.portfolio)
        renamed = DeclaredDocument(
            self.path, replace(self.table, portfolio=portfolio, entries=tuple(entries))
        )
        renamed.difference = self.difference
        return renamed, (
            f"constants renamed: {', '.join(f'{old} -> {name}' for old, name in names.items())}",
        )

    def winners(self, older: DeclaredDocument | None = None) -> Mapping[Hashable, Winner]:
        """See the base class. Two tables' axes may differ: each table sorts by its own."""
        axes = self.table.axes
        ordered = sorted(self.entries(older), key=lambda entry: entry_order(axes, entry.bucket))
        return {entry.bucket: _winner(entry) for entry in ordered}

    def remarks(self, old: DeclaredDocument) -> Iterator[str]:
        """See the base class."""
        yield from self.form_remarks(old)
        yield from self.source_remarks(old)
        yield from self.built_with_remarks(old)
        before, after = old.table, self.table
        if dict(before.axes) != dict(after.axes):
            yield f"axes {axes_in_words(before.axes)} -> {axes_in_words(after.axes)}"
        if before.portfolio != after.portfolio:
            kept = len({*before.portfolio} & {*after.portfolio})
            added, removed = len(after.portfolio) - kept, len(before.portfolio) - kept
            changes = f"{added} added, {removed} removed" if added or removed else "another order"
            yield f"portfolio of {counted(len(after.portfolio), 'config')}: {changes}"
        if before.portfolio_regret != after.portfolio_regret:
            yield f"portfolio regret {before.portfolio_regret:.1%} -> {after.portfolio_regret:.1%}"
        if before.slopes != after.slopes:
            yield "slopes of the estimates between sizes: other values"

    # Checking -----------------------------------------------------------------------------------------------

    def faults(self, kernel: FoundKernel | None, *, own: bool) -> Iterator[Finding]:
        """See the base class."""
        assert kernel is not None
        again = tune_step(kernel, str(self.table.arch))
        for entry in self.table.entries:
            if entry.disturbed is not None:
                what = f"its times were taken while the GPU was disturbed: {entry.disturbed}"
                yield self.finding(
                    str(entry.bucket), what, f"if they matter, {again} on a quiet GPU", remark=True
                )
        if own:
            yield from declaration_remarks(self.path, kernel.tunable, self.table.arch)
        yield from itertools.starmap(self.finding, self._complaints(kernel.tunable, again, own=own))

    def _complaints(self, tunable: Declaration, again: str, *, own: bool) -> Iterator[tuple[str, str, str]]:
        """Yield every fault: its place in the file, its description, and the next step."""
        table = self.table
        if blank := blank_mistakes(tunable):
            for mistake in blank:
                yield "", f"{tunable.name}: {mistake.text}", "correct the declaration"
            return
        if list(table.axes.items()) != list(tunable.axes.items()):
            yield "axes", f"the declaration has {axes_in_words(tunable.axes)}", again
            return
        if table.source_hash != (fresh := hashing.source_hash(tunable)):
            yield (
                "source_hash",
                f"the kernel's code has changed: the table has {table.source_hash}, the code has {fresh}",
                again,
            )
        if table.check_hash != (check := hashing.check_hash(tunable)):
            yield (
                "check_hash",
                f"make_args or reference has changed: the table has {table.check_hash}, the code has {check}",
                f"{again} --only-stale",
            )
        for problem in checks.declaration_problems(tunable, table.arch):
            yield "", problem, "correct the declaration"
        for what, fix in portfolio_complaints(table, tunable):
            yield "portfolio", what, fix or again
        alike: dict[tuple[str, str], list[str]] = {}
        for entry in table.entries:
            for what, fix in entry_complaints(table, tunable, entry, own=own):
                alike.setdefault((what, fix or again), []).append(str(entry.bucket))
        for (what, fix), buckets in alike.items():
            if len(buckets) <= _MOST_ALIKE:
                yield from ((bucket, what, fix) for bucket in buckets)
            else:
                yield f"{len(buckets)} entries, the first of {buckets[0]}", what, fix
        for bucket in tunable.buckets:
            if table.entry(bucket) is None:
                yield str(bucket), "a declared shape has no entry", again


def tune_step(kernel: FoundKernel, arch: str) -> str:
    """Return the step that makes a kernel's table anew."""
    return f"run aot-tune tune {kernel.tunable.name} --arch {arch}{kernel.module_option}"


def declaration_remarks(path: Path, kernel: Declaration, arch: Arch) -> Iterator[Finding]:
    """Yield probable mistakes of a declaration, as remarks on its table's file."""
    for text in checks.declaration_remarks(kernel, arch):
        yield Finding(path=str(path), what=text, fix="", remark=True)


def _entry_row(entry: Entry, names: dict[Config, str]) -> tuple[str, ...]:
    inside = " ".join("x".join(str(size) for size in point.size.values()) for point in entry.points[:-1])
    return (
        str(entry.bucket),
        f"{entry.mean_us:.2f}",
        f"{entry.error_margin_us:.2f}",
        f"{entry.default_us:.2f}",
        f"{entry.gain:.2f}x",
        f"{entry.regret:.1%}",
        entry.evidence,
        inside or "-",
        f"{names.get(entry.config, 'default')}: {entry.config}",
    )


def _states_line(entry: Entry) -> str:
    """Return an entry's times in the GPU's other states."""
    states = ", ".join(
        f"{name} {times.mean_us:.2f} us, default {times.default_us:.2f} us"
        for name, times in entry.states.items()
    )
    return f"in other states: {entry.bucket}: {states}"


def _winner(entry: Entry) -> Winner:
    data = {
        "config": entry.config,
        "mean_us": entry.mean_us,
        "default_us": entry.default_us,
        "evidence": entry.evidence,
    }
    named = {} if entry.config.kernel is None else {"kernel": entry.config.kernel}
    values = {**named, **entry.config.constants, **entry.config.hints}
    parts = {name: str(value) for name, value in values.items()}
    return Winner(entry, parts, entry.bucket, str(entry.config), data, entry.evidence)


def _slopes(slopes: Slopes) -> str:
    return ", ".join(f"{name} {' '.join(map(str, own))}" for name, own in slopes._asdict().items())


def _renames(old: Table, new: Table) -> dict[str, str]:
    """Return the constants that a new table names otherwise: old name -> new name.

    Most entries whose configs are otherwise equal must have equal values under both names.
    """
    pairs = [(entry.config, other.config) for entry in old.entries if (other := new.entry(entry.bucket))]
    before, after = ({name for pair in pairs for name in pair[side].constants} for side in (0, 1))
    kept = before & after
    alike = [
        (one.constants, other.constants)
        for one, other in pairs
        if one.hints == other.hints and all(one.constants.get(n) == other.constants.get(n) for n in kept)
    ]
    names: dict[str, str] = {}
    for name in sorted(before - kept):
        for later in sorted(after - kept - {*names.values()}):
            equal = sum(name in one and one[name] == other.get(later) for one, other in alike)
            if 2 * equal > len(alike):
                names[name] = later
                break
    return names


def _renamed(config: Config, names: Mapping[str, str]) -> Config:
    constants = {names.get(name, name): value for name, value in config.constants.items()}
    return Config(constants=constants, hints=config.hints, kernel=config.kernel)


# Which of a kernel's tables a launch would use --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TableState(FileState):
    """File that may hold a declared kernel's table."""

    measured_on: str | None = None
    """Model of the GPU that the table was measured on; None where it is not used or predicted."""


def table_states(tunable: Declaration, arch: Arch) -> Iterator[TableState]:
    """Yield the files that may hold a kernel's table for an arch, in reading order, with their state."""
    for folder, named in loader.folders(tunable):
        path = store.table_path(folder, arch, tunable.name)
        state, table = _table_state(path, tunable, arch, named=named)
        gpu_models = measured_on(() if table is None else (table,))
        usable = table is not None and bool(table.entries)
        yield TableState(
            kernel=tunable.name,
            path=path,
            state=state,
            usable=usable,
            measured_on=next(iter(gpu_models), None),
        )


def gpu_model_remarks(tables: Sequence[TableState], gpus: Sequence[Gpu], arch: Arch) -> Iterator[str]:
    """Yield a remark for each GPU model of the tables that differs from this machine's."""
    measured = dict.fromkeys(table.measured_on for table in tables if table.measured_on is not None)
    present = dict.fromkeys(gpu.name for gpu in gpus if gpu.arch == arch)
    for model, name in itertools.product(measured, present):
        if message := other_gpu_model(model, name):
            yield message


def _table_state(path: Path, tunable: Declaration, arch: Arch, *, named: bool) -> tuple[str, Table | None]:
    """Return the state in words, and the table where a launch would use it."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return "no table", None
    except OSError as error:
        return f"not used: {error.strerror}", None
    try:
        table = store.read_table(path)
    except (TableError, StoreError) as error:
        return f"not used: {error}", None
    if reason := mismatch(tunable, arch, table):
        return f"not used: {reason}", None
    if table.entries and not named and all(entry.evidence == "predicted" for entry in table.entries):
        entries = counted(len(table.entries), "entry", "entries")
        return f"not used: {entries}, predicted, are read only from a folder in {environment.TABLES}", None
    evidence = "+".join(sorted({entry.evidence for entry in table.entries})) or "empty"
    fresh = table.source_hash == hashing.source_hash(tunable)
    outside = len(undeclared(tunable, table))
    spoilt = f"; {counted(outside, 'config')} in no search space and left out: tune again" if outside else ""
    disturbed = sum(entry.disturbed is not None for entry in table.entries)
    spoilt += f"; {disturbed} measured while disturbed" if disturbed else ""
    stale = "" if fresh else "; the kernel's code has changed since: tune again"
    made, here = table.built_with.tileiras, cutile.compiler_version()
    other = "" if here in (None, made) else f"; times of code of tileiras {made}, {here} is installed"
    timed = sorted({name for entry in table.entries for name in entry.states})
    states = f", in the states {first_state(timed)} {' '.join(timed)}" if timed else ""
    entries = counted(len(table.entries), "entry", "entries")
    device = table.built_with.device_name
    return f"{entries}, {evidence}, {device}{states}{spoilt}{stale}{other}", table
