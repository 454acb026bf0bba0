"""What `aot-tune check` demands of one recorded table. Imports its kernel; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aot_tune.errors import StoreError, TableError, UsageError
from aot_tune.replay.document import dump, parse
from aot_tune.replay.files import right_place_of
from aot_tune.replay.fit import hash_now, kernel_of, misfit, other_library, why_local
from aot_tune.replay.table import RecordedTable, name_of
from aot_tune.tables import files


class Complaint(NamedTuple):
    """Something to know of a recorded table."""

    place: str
    """The place in the file; empty for all of it."""

    what: str
    """What is wrong."""

    fix: str
    """What to do about it."""

    remark: bool = False
    """Whether it is no fault."""


def complaints(path: Path, *, place: bool) -> Iterator[Complaint]:
    """Every fault of a recorded table's file.

    Args:
        path: The file.
        place: Whether its name and folder must agree with its content.
    """
    try:
        data = files.read_bytes(path)
        table = parse(data)
    except (TableError, StoreError) as error:
        where, what = (error.path, error.problem) if isinstance(error, TableError) else ("", str(error))
        yield Complaint(where, what, "restore it from version control, or record again: aot-tune record")
        return
    canonical = dump(table)
    if canonical != data:
        pairs = zip(data.splitlines(True), canonical.splitlines(True), strict=False)
        line = next((i for i, (one, other) in enumerate(pairs, 1) if one != other), None)
        where = f"line {line}" if line else "the end"
        what = f"not the bytes that aot-tune writes, from {where} on"
        yield Complaint("", what, "do not edit tables; record again: aot-tune record")
    if place and (right := right_place_of(path, table)) is not None:
        name = name_of(table.module, table.kernel)
        yield Complaint("", f"it is the recorded table of {name} on {table.arch}", f"move it to {right}")
    yield from _of_kernel(table)


def _of_kernel(table: RecordedTable) -> Iterator[Complaint]:
    again = "record again (aot-tune record), or remove the table"
    if (reason := other_library(table.library)) is not None:
        yield Complaint("library", reason, f"install that version, {again}")
        return
    if (reason := why_local(table)) is not None:
        what = f"{reason}, so its code cannot be compared here"
        yield Complaint("kernel", what, "replaying compares it", remark=True)
        return
    try:
        kernel = kernel_of(table.module, table.kernel)
    except UsageError as error:
        yield Complaint("kernel", str(error), f"install the library as it was recorded, {again}")
        return
    if (reason := misfit(table, kernel, table.arch, hash_now(kernel))) is not None:
        yield Complaint("source_hash", reason, again)
