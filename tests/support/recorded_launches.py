"""A recorded table of `tests.support.tuned_once`, as recording it on one H200 would write it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from aot_tune.declare.fingerprint.hashing import kernel_hash
from aot_tune.nvidia import cutile
from aot_tune.replay.problem import read_problem
from aot_tune.replay.spelling import space_hash, spelled, texts_of
from aot_tune.replay.table import Library, RecordedEntry, RecordedTable, name_of
from aot_tune.values.arch import Arch
from tests.support import recorded_tables, tuned_once
from tests.support.tuned_once import SPACE, hints_of, scale_kernel

MODULE = tuned_once.__name__
NAME = name_of(MODULE, "scale_kernel")
SM90 = Arch(9, 0)
PARAMETERS = [("x", False), ("out", False), ("n", False), ("factor", False), ("TILE", True)]


def entry(rows: int, winner: SimpleNamespace = SPACE[7], **changes: Any) -> RecordedEntry:
    """The winner of the search for a vector of `rows` float16."""
    x = torch.empty(rows, dtype=torch.float16, device="meta")
    args = (x, x, rows, 2.0, winner.TILE)
    kernel = scale_kernel.replace_hints(**hints_of(winner))
    values: dict[str, Any] = {
        "space": space_hash(texts_of(SPACE), cutile.hints_of(scale_kernel, SM90)),
        "config": spelled(winner),
        "problem": read_problem(PARAMETERS, args, (4,), 132),
        "grid": (-(-rows // winner.TILE), 1, 1),
        "hints": cutile.hints_of(kernel, SM90),
        "signature": cutile.signature_of(kernel, args),
    }
    return recorded_tables.entry(**{**values, **changes})


def table(*entries: RecordedEntry, **changes: Any) -> RecordedTable:
    values: dict[str, Any] = {
        "module": MODULE,
        "kernel": "scale_kernel",
        "source_hash": kernel_hash(scale_kernel)[0],
        "library": Library(name="", version=""),
        "entries": entries or (entry(1024), entry(4096, SPACE[3])),
    }
    return dataclasses.replace(recorded_tables.TABLE, **{**values, **changes})


def write(folder: Path, one: RecordedTable | None = None) -> Path:
    """Write a table into a folder of tables; return its file."""
    return recorded_tables.write(folder, one or table())
