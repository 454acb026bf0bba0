"""Find what a sweep must measure again: what source, compiler or declaration made stale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import source_hash, unhashable
from aot_tune.nvidia import cutile
from aot_tune.tables import store
from aot_tune.tables.fit import entry_complaints, mismatch, portfolio_complaints
from aot_tune.tables.table import Table
from aot_tune.tuner import publish
from aot_tune.tuner.sweep import predict
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.tuner.sweep.report import SweepRequest
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem


def only_stale(request: SweepRequest, progress: Progress) -> SweepRequest:
    """The part of a request that source, compiler or declaration made stale; each reason is told.

    The kernels of which nothing is stale are left out, maybe all of them. A request that predicts is compared
    with the measured tables, which it never replaces; what was predicted already of what is stale there is
    not predicted again.

    Raises:
        TuneError: A table that is there cannot be read.
    """
    kernels, problems = [], dict(request.problems)
    for found in request.kernels:
        tunable, name = found.tunable, found.tunable.name
        measured = store.table_path(store.package_folder(tunable), request.arch, name)
        table = publish.present_table(measured if request.predicts else request.table_path(found))
        reason, stale = _stale(request, found, table)
        if request.predicts and (reason is not None or stale):
            reason, stale = _unpredicted(request, found, reason, stale, progress)
        if reason is not None:
            progress.note(f"{name}: all of it is stale: {reason}")
            kernels.append(found)
            continue
        for bucket, why in stale.items():
            progress.note(f"{name} {bucket} is stale: {why}")
        if stale:
            kernels.append(found)
            if len(stale) < len(tunable.buckets):
                problems[name] = tuple(stale)
    return dataclasses.replace(request, kernels=tuple(kernels), problems=problems)


def _stale(
    request: SweepRequest, found: FoundKernel, table: Table | None, *, may_be_predicted: bool = False
) -> tuple[str | None, Mapping[Problem, str]]:
    """Why all of a kernel is stale, and where not all is, why each stale bucket that is asked for is."""
    reason = whole_reason(found.tunable, request.arch, table, may_be_predicted=may_be_predicted)
    if reason is not None or table is None:
        return reason, {}
    asked = set(request.buckets(found))
    return None, {
        bucket: why for bucket, why in stale_buckets(found.tunable, table).items() if bucket in asked
    }


def _unpredicted(
    request: SweepRequest,
    found: FoundKernel,
    reason: str | None,
    stale: Mapping[Problem, str],
    progress: Progress,
) -> tuple[str | None, Mapping[Problem, str]]:
    """What is left of a kernel's stale part, in the same form, without that which is predicted already."""
    path = request.table_path(found)
    all_of_it, missing = _stale(request, found, predict.earlier(path), may_be_predicted=True)
    if all_of_it is not None:
        return reason, stale
    left = missing if reason is not None else {one: why for one, why in stale.items() if one in missing}
    if not left:
        reasons = reason or "; ".join(dict.fromkeys(stale.values()))
        progress.note(f"{found.tunable.name}: {reasons}; what is stale is predicted already in {path}")
    return None, left


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
