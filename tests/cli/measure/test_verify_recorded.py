"""`aot-tune verify --program` on recorded tables: real processes, the stand-in driver."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.cli.measure import verify
from aot_tune.nvidia.nvml import Gpu
from tests.support.samples import SM90
from tests.support.tuned_programs import ONCE, ROOT, aot_tune

pytestmark = pytest.mark.process

SEARCHED = ("256", "512")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of two problems."""
    folder = tmp_path_factory.mktemp("recorded")
    done = aot_tune(folder, "record", "--out", "tables", "--", sys.executable, "-c", ONCE, *SEARCHED)
    assert done.returncode == 0, done.stderr
    return folder / "tables"


def _verify(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str, name: str = "NVIDIA H200") -> Result:
    monkeypatch.setattr(verify, "visible_gpus", lambda: (Gpu(index=0, name=name, arch=SM90, uuid="a"),))
    monkeypatch.setattr(verify, "driver_version", lambda: "580.1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return CliRunner().invoke(app, ["verify", "--folder", str(folder), *words])


def _program(*sizes: str) -> tuple[str, str]:
    return "--program", shlex.join([sys.executable, "-c", ONCE, *sizes])


def test_the_winners_that_a_program_searches_again_hold(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in recorded.rglob("*.json")}
    result = _verify(monkeypatch, recorded, *_program("256"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:2] == [
        "NVIDIA H200, driver 580.1: the GPU model of the tables",
        "1 of 2 entries, which the program searched",
    ]
    assert lines[-2:] == [
        "1 entry: none fails, and none is slower than the library's first config",
        "the tables hold here",
    ]
    assert {path: path.read_bytes() for path in recorded.rglob("*.json")} == before


def test_a_winner_that_others_beat_is_told_with_its_times(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = recorded.rglob("*.json")
    table = json.loads(path.read_text())
    for entry in table["entries"]:  # the space's first config, of which later ones are faster here
        entry["config"] = {"SimpleNamespace": {"TILE": 16, "occupancy": None}}
        entry["first_us"] = 10 * entry["mean_us"]
    other = tmp_path / "sm90" / path.name
    other.parent.mkdir()
    other.write_text(json.dumps(table))
    result = _verify(monkeypatch, tmp_path, *_program(*SEARCHED), "--json", name="NVIDIA H100")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["holds"], report["seed"]) == (0, True, None)
    assert report["measured_on"] == ["NVIDIA H200"]
    assert [sorted(entry["findings"]) for entry in report["entries"]] == [["beaten", "weaker"]] * 2
    assert all(entry["gain"] == 1.0 and entry["table_gain"] == 10.0 for entry in report["entries"])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (_program("1024"), 3, "the program searched no problem of a recorded table"),
        (("--program", "no-such-program"), 2, "no-such-program"),
        ((*_program("256"), "--seed", "1"), 2, "leave out --entries and --seed"),
        (("mylib.ops.none", *_program("256")), 2, "mylib.ops.none has no recorded table for sm90"),
    ],
)
def test_what_cannot_be_verified_is_told(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, told: str
) -> None:
    result = _verify(monkeypatch, recorded, *words)
    assert result.exit_code == code, result.output
    assert told in result.stderr
