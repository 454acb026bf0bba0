"""Decide whether a table may replace the present table, and replace it under a lock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aot_tune.declare.declaration import Declaration
from aot_tune.declare.fingerprint.hashing import source_hash, unhashable
from aot_tune.errors import StoreError, TuneError
from aot_tune.tables import files, store, writer
from aot_tune.tables.fit import entry_complaints, portfolio_complaints
from aot_tune.tables.states import edge_times
from aot_tune.tables.table import Entry, Table, geometric_mean
from aot_tune.tuner.choose.gpu_models import CLOCKS
from aot_tune.tuner.choose.incumbent import had_another_default
from aot_tune.tuner.choose.times import TIE
from aot_tune.values.bucket import axes_in_words
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

PATIENCE_S = 60.0
"""Longest wait for another writer, seconds. Replacing a table takes milliseconds, at worst seconds."""


def refusals(
    new: Table,
    old: Table | None,
    tunable: Declaration,
    *,
    wrong: Collection[Config] = (),
    unreached: Collection[Problem] = (),
    allow_worse: bool = False,
) -> list[str]:
    """Return the reasons why a table must not be published; empty when it may be.

    1. It has no entries.
    2. It belongs to another kernel, arch or axes, or the kernel's code has changed since the sweep.
    3. It lacks an entry of the old table whose shape is still declared.
    4. It mixes predictions with measurements, or replaces measurements by predictions.
    5. An entry is slower than its default, or has a config that is illegal, outside the search space, or
       neither in the portfolio nor the default; or the portfolio has a config that no entry may run.
    6. An entry's gain over its default, or its time where the default was another, is worse than the old
       table's, beyond the tie band, without a reason (`worse_entries`).

    Args:
        new: The table to be published.
        old: The present table, if any.
        tunable: The kernel's declaration.
        wrong: Configs that were found to compute wrong results. An entry that had one may become slower.
        unreached: Buckets skipped when the time budget ran out. They may lack an entry where the old entry
            does not fit any more.
        allow_worse: Whether entries may become slower.
    """
    if not new.entries:
        return ["it has no entries: the default has no time in any bucket; see the failures above"]
    if new.kernel != tunable.name:
        return [f"it is the table of {new.kernel}, not of {tunable.name}"]
    if dict(new.axes) != dict(tunable.axes):
        return [f"its axes are {axes_in_words(new.axes)}, the declaration has {axes_in_words(tunable.axes)}"]
    return [
        *_against_code(new, tunable),
        *_against_old(new, old, tunable, unreached),
        *_against_declaration(new, tunable),
        *(
            f"{bucket}: {change}, with the same source, device, compiler and driver; check the GPU's state "
            "and tune it again, or publish it with --allow-worse"
            for bucket, change in worse_entries(new, old, tunable, wrong).items()
            if not allow_worse
        ),
    ]


def check_place(path: Path, table: Table) -> None:
    """Refuse, before any work is done, to replace the table of another kernel or arch.

    Raises:
        TuneError: The table's file is in the wrong place.
    """
    if (right := store.right_place(path, table)) is not None:
        raise TuneError(
            f"{path} is the table of {table.kernel} on {table.arch}; move it to {right}, or remove it"
        )


def present_table(path: Path) -> Table | None:
    """Read the table to be replaced; None where there is none.

    Raises:
        TuneError: The table cannot be read, or is the table of another kernel or arch.
    """
    if not path.exists():
        return None
    try:
        table = store.read_table(path)
    except Exception as error:
        raise TuneError(f"{error}; restore it, or remove it to start over: {path}") from error
    check_place(path, table)
    return table


def publish(path: Path, table: Table) -> bool:
    """Replace a table's file by a complete new one; a crash leaves the old bytes or the new ones.

    Call `refusals` first. A file that already holds these bytes is not touched.

    Returns:
        Whether the file changed.

    Raises:
        TableError: Reading the table's text would not give the same table; nothing was written.
        StoreError: The file cannot be written; it is as it was.
    """
    data = writer.dump(table)
    if path.is_file() and files.read_bytes(path) == data:
        return False
    files.write_atomic(path, data)
    return True


@dataclass(frozen=True, kw_only=True)
class Published:
    """The result of an attempt to publish a table."""

    table: Table
    """The table that was decided."""

    old: Table | None
    """The present table from which it was decided, if any."""

    refusals: tuple[str, ...]
    """The reasons why it was not published; empty when it was."""


def decide_and_publish(
    path: Path,
    old: Table | None,
    *,
    read: Callable[[Path], Table | None],
    decide: Callable[[Table | None], tuple[Table, list[str]]],
) -> Published:
    """Decide a table from the present table, and replace exactly the present table.

    The present table is read again under the folder's lock. If another tune has replaced it meanwhile, the
    new table is decided again from the replacement, so that neither tune's entries are lost.

    Args:
        path: The table's file.
        old: The table at the start of the sweep.
        read: Reads the table's file.
        decide: Takes the present table; returns the new table and the reasons why it must not be published.

    Raises:
        TuneError: The present table does not fit the new results, or the folder cannot be locked.
        TableError, StoreError: As `publish`.
    """
    present = old
    while True:
        table, reasons = decide(present)
        if reasons:
            break
        with locked(path):
            now = read(path)
            if now == present:
                publish(path, table)
                break
        present = now
    return Published(table=table, old=present, refusals=tuple(reasons))


def _against_code(new: Table, tunable: Declaration) -> Iterator[str]:
    if obstacles := unhashable(tunable):
        yield f"the kernel's code cannot be hashed, so a table never fits it: {obstacles[0]}"
    elif new.source_hash != (fresh := source_hash(tunable)):
        yield f"the kernel's code has changed since it was swept: the table's {new.source_hash}, now {fresh}"


def _against_old(
    new: Table, old: Table | None, tunable: Declaration, unreached: Collection[Problem]
) -> Iterator[str]:
    predicted = [entry.bucket for entry in new.entries if entry.evidence == "predicted"]
    measured = [entry.bucket for entry in new.entries if entry.evidence == "measured"]
    if predicted and measured:
        yield f"it mixes {len(predicted)} predictions with measurements, first {predicted[0]}"
    if old is None:
        return
    if old.arch != new.arch:
        yield f"it is for {new.arch}, and would replace a table for {old.arch}"
    if predicted and any(entry.evidence == "measured" for entry in old.entries):
        yield f"it replaces measurements by predictions, first {predicted[0]}"
    declared = set(tunable.buckets) - set(unreached)
    present = {entry.bucket for entry in new.entries}
    lost = [entry.bucket for entry in old.entries if entry.bucket in declared and entry.bucket not in present]
    if lost:
        yield (
            f"it lacks {len(lost)} of the {len(old.entries)} entries of the present table, still declared: "
            f"{lost[0]}"
        )


def _against_declaration(new: Table, tunable: Declaration) -> Iterator[str]:
    for entry in new.entries:
        for complaint, _ in entry_complaints(new, tunable, entry, own=False):
            yield f"{entry.bucket}: {complaint}"
    for complaint, _ in portfolio_complaints(new, tunable):
        yield f"portfolio: {complaint}"


def changed_entries(old: Table | None, new: Table) -> int:
    """Count the entries that were added, removed or changed."""
    before = {entry.bucket: entry for entry in old.entries} if old is not None else {}
    return sum(before.pop(entry.bucket, None) != entry for entry in new.entries) + len(before)


def removed_entries(old: Table | None, new: Table) -> tuple[str, ...]:
    """List the removed entries, one line each; `refusals` allows only entries of undeclared problems."""
    return tuple(
        f"{entry.bucket}: its entry is removed: no declared problem needs it; to keep it, add it to "
        "`typical` and tune it again"
        for entry in (old.entries if old is not None else ())
        if new.entry(entry.bucket) is None
    )


# Worse entries ----------------------------------------------------------------------------------------------


def worse_entries(
    new: Table, old: Table | None, tunable: Declaration, wrong: Collection[Config] = ()
) -> dict[Problem, str]:
    """Describe the entries that are worse than in the old table, by bucket.

    Gains over the default are compared, because clocks change all times of a problem together; where the
    default was another config (`had_another_default`), times. They are geometric means over the states of
    the GPU that both entries have: ``read`` is always one of them. They tie within the tie band or within the
    winners' error margins, times also within the range of clocks. Nothing is compared where source, device,
    compiler, driver or evidence differ, nor an entry whose old winner is not in the search space any more.
    Every other old winner is a candidate of each sweep, and was timed again together with the new winner.

    Args:
        new: The table to be published.
        old: The present table, if any.
        tunable: The kernel's declaration.
        wrong: Configs that were found to compute wrong results; entries that had one are not compared.
    """
    if old is None or (old.source_hash, old.built_with) != (new.source_hash, new.built_with):
        return {}
    worse = {}
    for entry in new.entries:
        before = old.entry(entry.bucket)
        if before is None or before.evidence != entry.evidence or before.config in wrong:
            continue
        try:
            is_candidate = before.config in tunable.candidates(new.arch, entry.bucket)
            default = tunable.default_config(new.arch, entry.bucket)
        except Exception:  # whatever the author's functions raise: `entry_complaints` gives it
            continue
        if not is_candidate:
            continue
        if change := _worsened(before, entry, in_time=had_another_default(before, old.portfolio, default)):
            worse[entry.bucket] = change
    return worse


def _worsened(old: Entry, new: Entry, *, in_time: bool) -> str | None:
    """Describe how much longer an entry takes, or how much less it gains over its default; None for a tie."""
    runs = [edge_times(entry) for entry in (old, new)]
    both = runs[0].keys() & runs[1].keys()
    (old_us, old_default_us), (us, default_us) = (
        [geometric_mean(run[state][place] for state in both) for place in (0, 1)] for run in runs
    )
    noise = sum(entry.error_margin_us / entry.mean_us for entry in (old, new))
    if in_time:
        what, was, now = "time rises", f"{old_us:.4g} us", f"{us:.4g} us"
        is_worse = us / old_us - 1 > max(CLOCKS, noise)
    else:
        gain, new_gain = old_default_us / old_us, default_us / us
        what, was, now = "gain over the default falls", f"{gain:.2f}x", f"{new_gain:.2f}x"
        is_worse = gain / new_gain - 1 > max(TIE, noise)
    return f"its {what} from {was} with {old.config} to {now} with {new.config}" if is_worse else None


# Locking ------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Lock a table's folder while the table is read and replaced (`files.locked_folder`).

    Args:
        path: The table's file.
        patience_s: Longest wait for another writer, seconds.

    Raises:
        TuneError: Another process does not release the lock, or the folder cannot be created or opened.
    """
    folder = path.parent
    with ExitStack() as stack:
        try:
            is_held = stack.enter_context(files.locked_folder(folder, patience_s))
        except StoreError as error:
            raise TuneError(
                f"{folder}: cannot be opened to write {path.name} ({error}); free the path, or name another "
                "folder with --out; the measured times are kept"
            ) from error
        if not is_held:
            raise TuneError(
                f"{folder}: another process has held these tables for {patience_s:g} s; wait for it or stop "
                "it, and run the same command again: the measured times are kept"
            )
        yield
