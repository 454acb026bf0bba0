"""Find stale kernels and buckets: by source, compiler and declaration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint.hashing import check_hash, source_hash, unhashable
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
    """Return the stale part of a request, and report each reason.

    Kernels without a stale bucket are left out, maybe all of them. A request that predicts is compared with
    the measured tables, which it never replaces; stale buckets that were already predicted are not predicted
    again.

    Raises:
        TuneError: An existing table cannot be read.
    """
    kernels, problems = [], dict(request.problems)
    for kernel in request.kernels:
        tunable, name = kernel.tunable, kernel.tunable.name
        measured = store.table_path(store.package_folder(tunable), request.arch, name)
        table = publish.present_table(measured if request.predicts else request.table_path(kernel))
        reason, stale = _stale(request, kernel, table)
        if request.predicts and (reason is not None or stale):
            reason, stale = _unpredicted(request, kernel, reason, stale, progress)
        if reason is not None:
            progress.note(f"{name}: all of it is stale: {reason}")
            kernels.append(kernel)
            continue
        for bucket, bucket_reason in stale.items():
            progress.note(f"{name} {bucket} is stale: {bucket_reason}")
        unverified = not request.predicts and table is not None and table.check_hash != check_hash(tunable)
        if unverified:
            progress.note(f"{name}: make_args or reference has changed: its configs are verified again")
        if stale or unverified:
            kernels.append(kernel)
            if len(stale) < len(tunable.buckets):
                problems[name] = tuple(stale)
    return dataclasses.replace(request, kernels=tuple(kernels), problems=problems)


def _stale(
    request: SweepRequest, kernel: FoundKernel, table: Table | None, *, may_be_predicted: bool = False
) -> tuple[str | None, Mapping[Problem, str]]:
    """Return why the whole kernel is stale; otherwise the reasons of the request's stale buckets."""
    reason = whole_reason(kernel.tunable, request.arch, table, may_be_predicted=may_be_predicted)
    if reason is not None or table is None:
        return reason, {}
    requested = set(request.buckets(kernel))
    reasons = stale_buckets(kernel.tunable, table)
    return None, {bucket: text for bucket, text in reasons.items() if bucket in requested}


def _unpredicted(
    request: SweepRequest,
    kernel: FoundKernel,
    reason: str | None,
    stale: Mapping[Problem, str],
    progress: Progress,
) -> tuple[str | None, Mapping[Problem, str]]:
    """Return the result of `_stale` without the buckets that are already predicted."""
    path = request.table_path(kernel)
    all_of_it, missing = _stale(request, kernel, predict.earlier(path), may_be_predicted=True)
    if all_of_it is not None:
        return reason, stale
    left = missing if reason is not None else {key: stale[key] for key in stale if key in missing}
    if not left:
        reasons = reason or "; ".join(dict.fromkeys(stale.values()))
        progress.note(f"{kernel.tunable.name}: {reasons}; the stale buckets are already predicted in {path}")
    return None, left


def whole_reason(
    tunable: Declaration, arch: Arch, table: Table | None, *, may_be_predicted: bool = False
) -> str | None:
    """Return why the whole kernel must be swept again; None where at most some buckets must.

    Args:
        tunable: The kernel's declaration.
        arch: The arch.
        table: The table to be replaced; None where there is none.
        may_be_predicted: Whether predicted entries suffice.
    """
    if table is None:
        return "it has no table"
    if (fault := mismatch(tunable, arch, table)) is not None:
        return fault
    if unhashable(tunable) or table.source_hash != source_hash(tunable):
        return "its source has changed"
    built = table.built_with
    for tool, then, now in (
        ("cuda-tile", built.cuda_tile, cutile.version()),
        ("the compiler", built.tileiras, cutile.compiler_version() or ""),
    ):
        if then != now:
            return f"{tool} was {then}, is {now}"
    if not may_be_predicted and any(entry.evidence != "measured" for entry in table.entries):
        return "its table was predicted"
    complaint = next(portfolio_complaints(table, tunable), None)
    return f"portfolio: {complaint[0]}" if complaint is not None else None


def stale_buckets(tunable: Declaration, table: Table) -> dict[Problem, str]:
    """Return the declared buckets without a fitting entry, each with the reason."""
    stale = {}
    for bucket in tunable.buckets:
        entry = table.entry(bucket)
        if entry is None:
            stale[bucket] = "it has no entry"
        elif (complaint := next(entry_complaints(table, tunable, entry, own=False), None)) is not None:
            stale[bucket] = complaint[0]
    return stale
