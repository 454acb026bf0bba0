"""Find the tables of a report, and what their kernels say of them. Writes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from aot_tune.cli.diff import diff_paths
from aot_tune.cli.documents import find
from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.documents.document import Document
from aot_tune.cli.report.page import Shown
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import AotTuneError
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

Pair = tuple[Document | None, Document]
"""A table, and the table before where there is one."""


def shown_tables(
    paths: Sequence[Path], arch: Arch | None, modules: Sequence[str]
) -> tuple[list[Shown], list[str], list[AotTuneError]]:
    """Return the tables of a report, remarks on what it lacks, and an error for each unreadable file.

    Args:
        paths: A folder of tables, or the former and the present one; empty for the tables that are installed.
        arch: Show this arch's tables only.
        modules: Modules that declare kernels.

    Raises:
        UsageError: There is no such table.
    """
    unreadable: list[AotTuneError] = []
    remarks: list[str] = []
    if len(paths) == 2:
        pairs: list[Pair] = []
        diffs = diff_paths(*paths)
        if same := sum(diff.empty for diff in diffs):
            remarks.append(f"Not drawn, as they are equal on both sides: {counted(same, 'table')}.")
        for diff in diffs:
            if diff.new is None:
                remarks.append(f"{diff.either.table.arch}/{diff.either.name} was removed.")
            elif arch in (None, diff.new.table.arch) and not diff.empty:
                pairs.append((diff.old, diff.new))
    else:
        tables, unreadable = find.tables_found(None, arch, modules, *paths)
        pairs = [(None, table) for table in tables]
    declared, undeclared = _declared(modules)
    drawn = [(old, new) for old, new in pairs if isinstance(new, DeclaredDocument)]
    if len(drawn) < len(pairs):
        remarks.append("Recorded tables are not drawn.")
    lacking: dict[str, list[str]] = defaultdict(list)
    shown = []
    for old, new in drawn:
        kernel = declared.get(new.name)
        least_us, reason = _least_us(new, kernel) if kernel is not None else (None, undeclared)
        if reason:
            lacking[reason].append(f"{new.table.arch}/{new.name}")
        before = old if isinstance(old, DeclaredDocument) else None
        shown.append(Shown(new=new, old=before, least_us=least_us))
    remarks += [
        f"Without the memory's share ({reason}): {', '.join(names)}." for reason, names in lacking.items()
    ]
    return shown, remarks, unreadable


def _declared(modules: Sequence[str]) -> tuple[Mapping[str, FoundKernel], str]:
    """Return the declarations, and why others are missing; none where no kernel can be imported."""
    try:
        return find.declared(modules), "no such kernel is declared here"
    except AotTuneError as error:
        if modules:
            raise
        return {}, str(error)


def _least_us(document: DeclaredDocument, kernel: FoundKernel) -> tuple[Mapping[Problem, float] | None, str]:
    """Return the times in which the memory moves each bucket's arguments once, or the reason for none."""
    table = document.table
    device = Device.reference(table.arch)
    if table.built_with.device_name != device.name:
        return None, f"the bandwidth of {table.built_with.device_name} is not known"
    try:
        launched = DeviceKernel(kernel, table.arch, device).launched
        moved = {entry.bucket: launched(entry.bucket, entry.config).memory_bytes for entry in table.entries}
    except AotTuneError as error:
        return None, str(error)
    least_us = {bucket: count / (device.memory_gbps * 1e3) for bucket, count in moved.items()}
    if any(least_us[entry.bucket] > entry.mean_us for entry in table.entries):
        return None, "a launch reads only a part of the arguments"
    return least_us, ""
