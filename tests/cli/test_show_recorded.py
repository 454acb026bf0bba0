"""Recorded tables in `aot-tune show`: one line each, one row a problem when named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from tests.support import recorded_tables
from tests.support.recorded_tables import TABLE, write
from tests.support.samples import scale_table
from tests.support.samples import write as write_declared


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    write(tmp_path, TABLE)
    write_declared(tmp_path, scale_table())
    return tmp_path


def show(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["show", "--folder", str(folder), *words])


def test_the_overview_has_a_line_for_each_recorded_table(folder: Path) -> None:
    result = show(folder)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split("  ") for line in result.stdout.splitlines()]
    cells = [cell.strip() for cell in lines[-1] if cell.strip()]
    path = folder / "sm90" / "mylib.ops.scale_kernel.json"
    assert cells == [
        "sm90", "mylib.ops.scale_kernel", "mylib 1.2", "2", "2", "1.60x", "1.60x", "NVIDIA H200", str(path)
    ]  # fmt: skip
    assert any("scale.json" in cell for line in lines for cell in line)


@pytest.mark.parametrize("words", [["mylib.ops.scale_kernel"], ["-v"]])
def test_a_named_table_has_a_row_for_each_problem(folder: Path, words: list[str]) -> None:
    rows = show(folder, *words).stdout.splitlines()[-2:]
    assert rows[0].startswith(
        "x=float16[1024] out=float16[1024] n=1024 factor=float flag=true  12.50  0.25  20.00     1.60x  1"
    )
    assert rows[0].endswith('{"SimpleNamespace":{"TILE":64,"occupancy":null}} (num_ctas=1 occupancy=2)')
    assert "  30.12  0.25  failed    -" in rows[1]


def test_json_has_the_document(folder: Path) -> None:
    (table,) = json.loads(show(folder, "mylib.ops.scale_kernel", "--json").stdout)
    assert (table["kind"], table["kernel"], len(table["entries"])) == ("recorded", "scale_kernel", 2)


def test_a_broken_recorded_table_is_named_and_fails(folder: Path) -> None:
    (folder / "sm90" / "mylib.ops.scale_kernel.json").write_text("{")
    result = show(folder)
    assert result.exit_code == 1
    assert "mylib.ops.scale_kernel.json: not JSON" in result.stderr


def test_other_multiprocessors_than_the_table_s_are_told(tmp_path: Path) -> None:
    problem = recorded_tables.problem()._replace(sm_count=114)
    write(tmp_path, recorded_tables.with_entries(recorded_tables.entry(problem=problem)))
    assert "114 SMs: x=float16[1024]" in show(tmp_path, "-v").stdout
