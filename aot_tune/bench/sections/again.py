"""Sweep some problems of unchanged kernels again, over a copy of their tables, and report what changes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aot_tune.bench.gpu import shipped
from aot_tune.bench.sections.part import Part, Request
from aot_tune.declare.discovery import FoundKernel
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tables import store
from aot_tune.tables.table import Entry
from aot_tune.tuner.plan.sizes import spread
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepRequest
from aot_tune.values.arch import Arch

PROBLEMS = 20
"""Problems of each kernel, evenly spread."""


def run(request: Request) -> Iterator[Part]:
    """Count and name the entries that changed, kernel by kernel."""
    arch = next(gpu.arch for gpu in visible_gpus() or () if gpu.arch is not None)
    with tempfile.TemporaryDirectory() as folder:
        for name, found in shipped().items():
            yield Part(name=name, kernels=(name,), figures=_again(arch, found, Path(folder)))


def _again(arch: Arch, found: FoundKernel, folder: Path) -> dict[str, Any]:
    tunable = found.tunable
    old_path = store.table_path(store.package_folder(tunable), arch, tunable.name)
    target = store.table_path(folder, arch, tunable.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(old_path, target)
    chosen = spread(tunable.buckets, PROBLEMS)
    sweep.run(
        SweepRequest(
            kernels=(found,),
            arch=arch,
            gpus=(0,),
            problems={tunable.name: chosen},
            out=folder,
            journal=folder / "journal",
        ),
        PlainProgress(),
    )
    old, new = store.read_table(old_path), store.read_table(target)
    changed = [
        _change(before, entry)
        for entry in new.entries
        if (before := old.entry(entry.bucket)) is not None and before != entry
    ]
    return {
        "problems": len(chosen),
        "changed entries": len(changed),
        "empty diff": old_path.read_bytes() == target.read_bytes(),
        "changes": changed,
    }


def _change(before: Entry, entry: Entry) -> dict[str, Any]:
    return {
        "bucket": str(entry.bucket),
        "from": _entry_text(before),
        "to": _entry_text(entry),
        "config changed": before.config != entry.config,
    }


def _entry_text(entry: Entry) -> str:
    gain = entry.gain
    return f"{entry.config}: {entry.mean_us} us, {gain:.3f}x the default"
