"""`aot-tune verify` on a real GPU: the shipped tables, worse winners, and winners that tie."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aot_tune.cli.app import app
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tables import store
from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import Entry, Table
from aot_tune.values.config import Config
from tests.support.samples import write

pytestmark = pytest.mark.gpu

SHIPPED = Path(__file__).parents[3] / "tuned_configs"
SEED = "20261128"


def _verify(*words: str) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, ["verify", "--seed", SEED, "--json", *words])
    print(result.stderr)
    assert result.exit_code in (0, 1), result.stderr
    return result.exit_code, json.loads(result.stdout)


def _other(table: Table, entry: Entry, fits: Callable[[float, float, float], bool]) -> Config | None:
    """A member of the portfolio by its time, the default's and the winner's in their worst states."""
    edge = entry.points[-1]
    us, default = in_worst_state(edge).us, in_worst_state(edge).us[-1]
    times = {config: time for config, time in zip(table.portfolio, us, strict=False) if time is not None}
    mine = times.get(entry.config, default)
    if default is None or mine is None:
        return None
    return next((c for c, time in times.items() if c != entry.config and fits(time, default, mine)), None)


def _changed(folder: Path, fits: Callable[[float, float, float], bool]) -> int:
    """Write the shipped tables with other winners; return how many changed."""
    changed = 0
    for path in store.listed_in(SHIPPED / "sm90"):
        table = store.read_table(path)
        others = {entry.bucket: _other(table, entry, fits) for entry in table.entries}
        entries = [replace(entry, config=others[entry.bucket] or entry.config) for entry in table.entries]
        changed += sum(other is not None for other in others.values())
        write(folder, replace(table, entries=tuple(entries)))
    return changed


def test_the_shipped_tables_hold_and_two_runs_agree() -> None:
    started = time.monotonic()
    code, first = _verify("--entries", "57")
    print(f"57 entries in {time.monotonic() - started:.0f} s")
    assert code == 0
    assert _verify("--entries", "57")[0] == 0
    gpu = (visible_gpus() or ())[0].name
    assert first["gpu"] == gpu
    assert first["measured_on"] == ["NVIDIA H200"]


def test_worse_winners_are_found(tmp_path: Path) -> None:
    assert _changed(tmp_path, lambda time, default, mine: time > 1.1 * default) > 500
    code, report = _verify("--entries", "57", "--folder", str(tmp_path))
    assert (code, report["holds"], report["less_than"]) == (1, False, None)


def test_winners_that_tie_are_as_good(tmp_path: Path) -> None:
    assert _changed(tmp_path, lambda time, default, mine: 0.99 < time / mine < 1.01) > 100
    code, _ = _verify("--entries", "57", "--folder", str(tmp_path))
    assert code == 0
