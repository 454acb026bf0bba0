"""A recorded table, and entries to make others of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from aot_tune.replay.document import dump
from aot_tune.replay.problem import Array, Fixed, Problem, Real, Varying, Whole
from aot_tune.replay.table import Library, RecordedEntry, RecordedTable, file_name
from aot_tune.tables.table import BuiltWith
from aot_tune.values.arch import Arch


def problem(rows: int = 1024) -> Problem:
    tensor = Array(dtype="float16", shape=(rows,), layout="contiguous", aligned=True)
    return Problem(
        names=("x", "out", "n", "factor", "flag", "TILE"),
        arguments=(tensor, tensor, Whole(rows), Real(), Fixed("true"), Varying()),
        sm_count=132,
    )


def entry(**changes: Any) -> RecordedEntry:
    values: dict[str, Any] = {
        "space": "0123456789abcdef",
        "problem": problem(),
        "config": {"SimpleNamespace": {"TILE": 64, "occupancy": None}},
        "hints": {"num_ctas": 1, "occupancy": 2},
        "grid": (16, 1, 1),
        "mean_us": 12.5,
        "error_margin_us": 0.25,
        "num_samples": 40,
        "first_us": 20.0,
        "signature": "scale_kernel_Kt1_A1f16",
        "count": 1,
    }
    return RecordedEntry(**{**values, **changes})


TABLE = RecordedTable(
    module="mylib.ops",
    kernel="scale_kernel",
    arch=Arch(9, 0),
    source_hash="feedfacefeedface",
    library=Library(name="mylib", version="1.2"),
    built_with=BuiltWith(
        device_name="NVIDIA H200", sm_count=132, cuda_tile="1.7.0", tileiras="13.4.92", driver="580.159.04"
    ),
    entries=(entry(), entry(problem=problem(4096), mean_us=30.125, first_us=None)),
)


def with_entries(*entries: RecordedEntry) -> RecordedTable:
    return dataclasses.replace(TABLE, entries=entries)


def write(folder: Path, table: RecordedTable) -> Path:
    """Write a table into a folder of tables; return its file."""
    path = folder / str(table.arch) / file_name(table.module, table.kernel)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump(table))
    return path
