"""Find what a sweep must measure again: what source, compiler or declaration made stale."""

from __future__ import annotations

from aot_tune.declare.declaration import Declaration
from aot_tune.declare.fingerprint.hashing import source_hash, unhashable
from aot_tune.nvidia import cutile
from aot_tune.tables.fit import entry_complaints, mismatch, portfolio_complaints
from aot_tune.tables.table import Table
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem


def whole_reason(
    tunable: Declaration, arch: Arch, table: Table | None, *, may_be_predicted: bool = False
) -> str | None:
    """Why all of a kernel must be swept again; None where at most some of its buckets must.

    Args:
        tunable: The kernel's declaration.
        arch: The arch.
        table: The table to be replaced; None where there is none.
        may_be_predicted: Whether predicted entries are as good as measured ones.
    """
    if table is None:
        return "it has no table"
    if (fault := mismatch(tunable, arch, table)) is not None:
        return fault
    if unhashable(tunable) or table.source_hash != source_hash(tunable):
        return "its source has changed"
    built = table.built_with
    for what, then, now in (
        ("cuda-tile", built.cuda_tile, cutile.version()),
        ("the compiler", built.tileiras, cutile.compiler_version() or ""),
    ):
        if then != now:
            return f"{what} was {then}, is {now}"
    if not may_be_predicted and any(entry.evidence != "measured" for entry in table.entries):
        return "its table was predicted"
    complaint = next(portfolio_complaints(table, tunable), None)
    return f"portfolio: {complaint[0]}" if complaint is not None else None


def stale_buckets(tunable: Declaration, table: Table) -> dict[Problem, str]:
    """The declared buckets whose entries are missing or do not fit the declaration any more, and why."""
    found = {}
    for bucket in tunable.buckets:
        entry = table.entry(bucket)
        if entry is None:
            found[bucket] = "it has no entry"
        elif (complaint := next(entry_complaints(table, tunable, entry, own=False), None)) is not None:
            found[bucket] = complaint[0]
    return found
