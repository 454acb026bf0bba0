"""`aot-tune verify --program` on recorded tables: real processes, the stand-in driver."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aot_tune import environment
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


def _verify(
    monkeypatch: pytest.MonkeyPatch, folder: Path | None, *words: str, name: str = "NVIDIA H200"
) -> Result:
    monkeypatch.setattr(verify, "visible_gpus", lambda: (Gpu(index=0, name=name, arch=SM90, uuid="a"),))
    monkeypatch.setattr(verify, "driver_version", lambda: "580.1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    there = ["--folder", str(folder)] if folder is not None else []
    return CliRunner().invoke(app, ["verify", *there, *words])


LOOP = "    for rows in map("


def _program(*sizes: str, before: str = "", after: str = "") -> tuple[str, str]:
    """The option with a program that searches at some sizes, with statements before and after them."""
    assert ONCE.count(LOOP) == 1
    code = ONCE.replace(LOOP, "".join(f"    {line}\n" for line in before.splitlines()) + LOOP) + after
    return "--program", shlex.join([sys.executable, "-c", code, *sizes])


LATER_IS_SLOWER = """
from tests.support.driver import DRIVER
DRIVER.elapsed_ms = lambda symbol: 0.5 * 1.05 ** DRIVER.last_kernel
"""

WIDE_FAILS = """
own = tuned_once.hints_of
tuned_once.hints_of = lambda config: own(config) if config.TILE != 64 else 1 / 0
"""

ALL_FAIL = """
tuned_once.hints_of = lambda config: {"occupancy": 1000}
"""


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
        entry["hints"] = {"opt_level": 3}
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
    ("before", "finding"),
    [(LATER_IS_SLOWER, "slower"), (WIDE_FAILS, "fails"), (ALL_FAIL, "fails")],
    ids=["slower", "fails", "all fail"],
)
def test_a_table_whose_winners_lose_or_fail_here_does_not_hold(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, before: str, finding: str
) -> None:
    result = _verify(monkeypatch, recorded, *_program("256", before=before))
    assert result.exit_code == 1, result.output
    assert f"{finding}: tests.support.tuned_once.scale_kernel" in result.stdout
    assert "the tables do not hold here, by 1 entry; record again: aot-tune record" in result.stdout


def test_a_program_that_ends_early_says_nothing_of_the_rest(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for after, ended in (("sys.exit(7)", "exit code is 7"), ("os.kill(os.getpid(), 15)", "SIGTERM")):
        result = _verify(monkeypatch, recorded, *_program("256", after=f"\nimport os, sys\n{after}\n"))
        assert result.exit_code == 3, result.output
        assert ended in result.stdout.splitlines()[-1]


def test_a_search_that_several_processes_make_counts_once(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = [sys.executable, "-c", ONCE, "256"]
    two = f"import subprocess\nfor _ in range(2): subprocess.run({one!r}, check=True)"
    result = _verify(monkeypatch, recorded, "--program", shlex.join([sys.executable, "-c", two]))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1] == "1 of 2 entries, which the program searched"


@pytest.mark.parametrize("how", ["first", "alone"])
def test_a_table_of_other_code_or_another_library_is_not_compared(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (path,) = recorded.rglob("*.json")
    stale = tmp_path / "stale" / "sm90" / path.name
    stale.parent.mkdir(parents=True)
    changed = json.loads(path.read_text()) | {"source_hash": "0" * 16}
    changed["built_with"]["device_name"] = "NVIDIA H100 PCIe"
    stale.write_text(json.dumps(changed))
    folders = [tmp_path / "stale", *([recorded] if how == "first" else [])]
    monkeypatch.setenv(environment.TABLES, os.pathsep.join(map(str, folders)))
    result = _verify(monkeypatch, None, *_program("256"))
    assert result.exit_code == (0 if how == "first" else 3), result.output
    if how == "first":
        assert result.stdout.splitlines()[0].endswith("the GPU model of the tables")
    else:
        assert "a search is not compared with a table: " in result.stderr
        assert "changed since it was recorded" in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (_program("1024"), 3, "the program searched no problem of a recorded table"),
        (_program("1024"), 3, "a search is not compared with a table: the problem is not in it"),
        (("--program", "no-such-program"), 2, "no-such-program"),
        (("--program", "python -c 'x"), 2, "--program: No closing quotation"),
        (("--program", ""), 2, "--program is empty"),
        ((*_program("256"), "--seed", "1"), 2, "leave out --entries and --seed"),
        (("matmul", *_program("256")), 2, "matmul is the name of a declared kernel: leave out --program"),
        (("mylib.ops.none", *_program("256")), 2, "mylib.ops.none has no recorded table for sm90 there"),
    ],
)
def test_what_cannot_be_verified_is_told(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, told: str
) -> None:
    result = _verify(monkeypatch, recorded, *words)
    assert result.exit_code == code, result.output
    assert told in result.stderr
