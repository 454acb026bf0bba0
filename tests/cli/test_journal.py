"""What `aot-tune journal` shows of a sweep's journal, and how it exports every record."""

from __future__ import annotations

import csv
import io
import json
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.tuner.compile.job import CompileFailure
from aot_tune.tuner.outcome import Failure, Measurement
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SPACE

IDENTITY = {"kernel": "scale", "arch": "sm90", "driver": "580.1"}
PROBLEM = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
TALL, WRONG = SPACE[8], SPACE[9]


def _run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["journal", *map(str, words)])


def _time(us: float, *, provisional: bool = False) -> Measurement:
    return Measurement(config=TALL, mean_us=us, error_margin_us=0.1, num_samples=5, provisional=provisional)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of every kind of record."""
    path = tmp_path / "build" / "journal" / "sm90" / "scale.jsonl"
    with Journal.open(path, IDENTITY, accepts=accepts) as journal:
        results = SweepResults(journal)
        refused = CompileFailure(key="abc", message="no such tile", seconds=1.0)
        results.write_compiled("candidates", PROBLEM, DEFAULT, refused, gpu="GPU-1")
        results.write("candidates", PROBLEM, _time(13.0, provisional=True), gpu="GPU-1")
        results.write("candidates", PROBLEM, _time(12.5), gpu="GPU-1")
        results.write(
            "candidates", PROBLEM, Failure(config=WRONG, stage="verify", message='half,\n"NaN"'), gpu="GPU-1"
        )
        results.write("candidate states", PROBLEM, _time(14.0), gpu="GPU-1", state="written")
        results.write("candidate finals", PROBLEM, _time(12.25), 0, gpu="GPU-1")
        results.write("candidate finals", PROBLEM, _time(12.75), 1, gpu="GPU-1")
        results.write_recheck(PROBLEM, TALL, None, gpu="GPU-1")
        also = {"start_s": 4.0, "open_s": 0.0, "waited_s": 2.5, "idle_s": 0.0}
        spent = {"measure_s": 20.0, "verify_s": 0.5, **also}
        results.write_spent("candidates", PROBLEM, conditions=[], gpu="GPU-1", **spent)
    return path


def test_a_journal_is_summed_up_by_problem_and_step(path: Path) -> None:
    result = _run(path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{path}:"
    assert lines[1] == "made with kernel scale, arch sm90, driver 580.1"
    assert lines[2] == (
        "6 results, 1 failure, 1 compilation (1 failed) in 1 s of cores; 20 s timing, 0.5 s verifying, "
        "4 s starting processes, 2 s waiting for compilers; on GPU-1"
    )
    cells = [line.split("  ") for line in lines[4:]]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in cells]
    assert rows[0] == [str(PROBLEM), "candidates", "1", "1", "-", "-", "12.50", str(TALL)]
    assert rows[1] == [str(PROBLEM), "candidate states: written", "1", "0", "-", "-", "14.00", str(TALL)]
    assert rows[2] == [str(PROBLEM), "candidate finals", "0", "0", "2", "-", "-", "-"]
    assert rows[3] == [str(PROBLEM), "recheck", "1", "0", "-", "-", "-", "-"]


def test_journals_are_found_by_kernel_arch_and_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parents[3])
    other = path.with_name("scale.0123abcd.done")
    other.write_bytes(path.read_bytes())
    for words in ([], ["scale"], ["--arch", "sm90"], ["--journal", path.parents[1]], [path.parents[1]]):
        heads = [line for line in _run(*words).stdout.splitlines() if line.endswith(":")]
        assert len(heads) == 2, words
    assert _run("scale", "--arch", "sm100").exit_code == 2
    assert _run("scal").exit_code == 2


def test_json_has_each_record_as_a_line_with_its_conditions(path: Path) -> None:
    rows = [json.loads(line) for line in _run(path, "--json").stdout.splitlines()]
    assert len(rows) == 9
    assert {row["journal"] for row in rows} == {str(path)}
    assert all(row["made_with"] == IDENTITY and row["gpu"] == "GPU-1" for row in rows)
    assert rows[2]["mean_us"] == 12.5
    assert rows[6]["round"] == 1
    assert [row.get("state") for row in rows[3:6]] == [None, "written", None]


def test_csv_has_each_record_as_a_row(path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(_run(path, "--csv").stdout)))
    assert len(rows) == 9
    assert rows[2]["problem"] == "dtype=bfloat16,M=64,N=1024"
    assert (rows[2]["config"], rows[2]["mean_us"]) == (str(TALL), "12.5")
    assert (rows[3]["stage"], rows[3]["message"]) == ("verify", 'half,\n"NaN"')


def test_damage_is_told_and_the_file_left_as_it_is(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"rubbish")
    before = path.read_bytes()
    result = _run(path)
    assert result.exit_code == 0
    assert "damaged in 1 place: the next sweep sets 7 bytes aside" in result.stdout
    assert "damaged in 1 place" in _run(path, "--json").stderr
    assert path.read_bytes() == before


def test_a_journal_of_another_release_is_exit_code_1_and_the_others_are_shown(path: Path) -> None:
    body = b'0123456789abcdef {"made_with":{"driver":"580.1"}}'
    old = path.with_name("older.jsonl")
    old.write_bytes(b"%08x %d %b\n" % (zlib.crc32(body), len(body), body))
    result = _run(path.parent)
    assert result.exit_code == 1
    assert f"{path}:" in result.stdout
    assert result.stderr.startswith(f"aot-tune: {old}: this journal was written by another release")
    assert result.stderr.count("\n") == 1
