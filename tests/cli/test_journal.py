"""What `aot-tune journal` shows of the journal of a sweep or a recording, and how it exports every record."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner, Result

import aot_tune
from aot_tune.cli.app import app
from aot_tune.cli.seconds import COLUMNS
from aot_tune.replay.record.journal import SearchJournal
from aot_tune.tuner.compile.job import CompileFailure
from aot_tune.tuner.outcome import Failure, Measurement
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.tuner.sweep.results import ALSO, Step, SweepResults, Timing, accepts
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
        "6 results, 1 failure, 1 compilation (1 failed) in 1 s of cores; 20 s timing (20 s candidates), "
        "0.5 s verifying, 4 s starting processes, 2 s waiting for compilers; on GPU-1"
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


# Recordings -------------------------------------------------------------------------------------------------


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A journal of two recorded searches: one done, one whose process was killed at its second config."""
    path = tmp_path / "build" / "record" / "sm90" / "mylib.ops.scale_kernel.jsonl"
    with Journal.open(path, {"gpu": "NVIDIA H200", "driver": "580.1"}) as journal:
        first, second = SearchJournal(journal, "feed.1"), SearchJournal(journal, "beef.1")
        for at, us in enumerate((14.0, 12.5)):
            first.begin(at)
            first.write(at, _time(us))
        first.write(1, _time(12.25), number=0)
        first.begin(2)
        first.write(2, Failure(config=WRONG, stage="verify", message="half NaN"))
        second.begin(0)
        second.abandon(0)
        second.begin(1)
    return path


def test_a_journal_of_a_recording_is_summed_up_by_search(recording: Path) -> None:
    result = _run(recording.parents[1])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        f"{recording}:",
        "made with gpu NVIDIA H200, driver 580.1",
        "a journal of aot-tune record: 2 searches, 2 configs timed, 1 failed",
    ]
    assert [line.split() for line in lines[4:]] == [
        ["feed.1", "2", "1", "1", "-", "12.50", "1"],
        ["beef.1", "0", "0", "-", "1", "-", "-"],
    ]
    assert _run("mylib.ops.scale_kernel", "--journal", recording.parents[1]).stdout == result.stdout


def test_records_of_a_recording_are_exported_and_tell_no_seconds(recording: Path, path: Path) -> None:
    rows = [json.loads(line) for line in _run(recording, "--json").stdout.splitlines()]
    assert (len(rows), rows[1]["search"], rows[1]["mean_us"]) == (10, "feed.1", 14.0)
    result = _run(recording, path, "--seconds")
    assert (result.exit_code, result.stdout) == (0, _run(path, "--seconds").stdout)
    assert result.stderr == f"{recording}: left out: a journal of aot-tune record has no seconds\n"


def test_damage_of_a_recording_is_told_as_such(recording: Path) -> None:
    with Journal.open(recording, {"gpu": "NVIDIA H200", "driver": "580.1"}) as journal:
        number = {"mean_us": 10**400, "error_margin_us": 0.0, "num_samples": 5}
        journal.append({"search": "feed.1", "config": 3, "what": "timed", "round": None, **number})
    assert "damaged in 1 place" in _run(recording).stdout
    recording.write_bytes(recording.read_bytes() + b"rubbish")
    lines = _run(recording).stdout.splitlines()
    assert "damaged in 1 place: the next recording sets" in lines[3]


# Seconds ----------------------------------------------------------------------------------------------------

HEADS = ["kernel", *get_args(Timing), "verifying", "arguments", "compilers, starts, idle", "sum"]

EACH_STEP: Mapping[Step, float] = {
    "candidates": 1.0,
    "candidate states": 2.0,
    "candidate finals": 4.0,
    "portfolio": 80.0,
    "portfolio states": 16.0,
    "portfolio finals": 32.0,
    "recheck": 0.0,
}
"""Seconds of timing by which each step is told from any sum of the others."""


def _spent(path: Path, measured: Mapping[Step, float], *, verify_s: float = 0.0, **also_s: float) -> Path:
    """A journal in which each step took these seconds of timing, and the other ones."""
    arch, kernel = path.parent.name, path.name.partition(".")[0]
    with Journal.open(path, {"kernel": kernel, "arch": arch}, accepts=accepts) as journal:
        results = SweepResults(journal)
        for step, seconds in measured.items():
            results.write_spent(
                step, PROBLEM, measure_s=seconds, verify_s=verify_s, conditions=[], gpu="GPU-1", **also_s
            )
    return path


def _table(*words: str | Path) -> list[list[str]]:
    result = _run(*words, "--seconds")
    assert result.exit_code == 0
    return [re.split("  +", line) for line in result.stdout.splitlines()]


def test_seconds_of_timing_are_split_by_what_was_timed(tmp_path: Path) -> None:
    path = _spent(tmp_path / "sm90" / "scale.jsonl", EACH_STEP)
    timing = "2 min timing (36 s finals, 80 s points, 18 s states, 1 s candidates), 0.0 s verifying; on GPU-1"
    assert _run(path).stdout.splitlines()[2].endswith(f"; {timing}")
    short = _spent(tmp_path / "sm90" / "short.jsonl", {"portfolio": 0.25})
    assert "; 0.2 s timing (0.2 s points), 0.0 s verifying;" in _run(short).stdout


def test_seconds_have_a_row_for_each_kernel_and_one_for_all(tmp_path: Path) -> None:
    also = {"open_s": 3.0, "start_s": 10.0, "waited_s": 20.0, "idle_s": 40.0}
    _spent(tmp_path / "sm90" / "scale.done", EACH_STEP)
    _spent(tmp_path / "sm90" / "other.done", {**EACH_STEP, "portfolio": 8.0}, verify_s=1.0, **also)
    assert _table("--journal", tmp_path) == [
        HEADS,
        ["other", "36", "8", "18", "1", "7", "21", "490", "581"],
        ["scale", "36", "80", "18", "1", "0", "-", "-", "135"],
        ["all", "72", "88", "36", "2", "7", "21", "490", "716"],
    ]
    assert _table("scale", "--journal", tmp_path)[1:] == [
        ["scale", "36", "80", "18", "1", "0", "-", "-", "135"],
        ["all", "36", "80", "18", "1", "0", "-", "-", "135"],
    ]


def test_seconds_of_a_problem_and_of_a_journal_are_added(tmp_path: Path) -> None:
    path = _spent(tmp_path / "sm90" / "scale.jsonl", {"portfolio": 0.4})
    _spent(path, {"portfolio": 0.4})
    _spent(path, {"portfolio finals": 2.0})
    _spent(path.with_name("scale.0123abcd.jsonl"), {"portfolio": 0.4}, idle_s=5.0)
    assert _table(tmp_path)[1] == ["scale (2 journals)", "2", "1", "-", "-", "0", "-", "5", "8"]
    _spent(tmp_path / "sm100" / "scale.jsonl", {"candidates": 1.0})
    assert [row[0] for row in _table(tmp_path)] == [
        "kernel",
        "sm90/scale (2 journals)",
        "sm100/scale",
        "all",
    ]


def test_a_journal_that_tells_no_seconds_is_not_told_to_have_taken_none(path: Path) -> None:
    older = path.with_name("older.done")
    with Journal.open(older, {"kernel": "older", "arch": "sm90"}, accepts=accepts) as journal:
        SweepResults(journal).write("candidates", PROBLEM, _time(12.5), gpu="GPU-1")
    assert _run(older).stdout.splitlines()[2] == (
        "1 result, 0 failures, 0 compilations (0 failed) in 0.0 s of cores; "
        "the GPUs' time is not recorded; on GPU-1"
    )
    assert _table(older)[1:] == [["older", *"--------"], ["all", *"--------"]]
    assert _table(path, older)[1:] == [
        ["scale", "-", "-", "-", "20", "0", "0", "6", "27"],
        ["older", *"--------"],
        ["all", "-", "-", "-", "20", "0", "0", "6", "27"],
    ]


def test_every_second_that_a_record_tells_has_a_column() -> None:
    names = [name for column in COLUMNS.values() for name in column]
    assert sorted(names) == sorted([*get_args(Timing), "verify_s", *ALSO])
    readme = Path(aot_tune.__file__).with_name("tuner") / "README.md"
    assert f"| {' | '.join(HEADS)} |" in readme.read_text(encoding="utf-8").splitlines()


def test_json_has_each_record_as_a_line_with_its_conditions(path: Path) -> None:
    rows = [json.loads(line) for line in _run(path, "--json").stdout.splitlines()]
    assert len(rows) == 9
    assert {row["journal"] for row in rows} == {str(path)}
    assert all(row["made_with"] == IDENTITY and row["gpu"] == "GPU-1" for row in rows)
    assert rows[2]["mean_us"] == 12.5
    assert rows[6]["round"] == 1
    assert [row.get("state") for row in rows[3:6]] == [None, "written", None]


def test_damage_is_told_and_the_file_left_as_it_is(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"rubbish")
    before = path.read_bytes()
    result = _run(path)
    assert result.exit_code == 0
    assert "damaged in 1 place: the next sweep sets 7 bytes aside" in result.stdout
    assert "damaged in 1 place" in _run(path, "--json").stderr
    assert "damaged in 1 place" in _run(path, "--seconds").stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("data", [b"rubbish", b'{\n  "schema": 2,\n  "kernel": "scale"\n}\n'])
def test_a_file_that_is_no_journal_is_exit_code_1(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    result = _run(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{path} is no journal: it has no intact line" in result.stderr
    path.write_bytes(b"")
    assert _run(path).exit_code == 0, "a sweep that has just begun"


def test_a_journal_of_another_release_is_exit_code_1_and_the_others_are_shown(path: Path) -> None:
    body = b'0123456789abcdef {"made_with":{"driver":"580.1"},"schema":2}'
    old = path.with_name("older.jsonl")
    old.write_bytes(b"%08x %d %b\n" % (zlib.crc32(body), len(body), body))
    result = _run(path.parent)
    assert result.exit_code == 1
    assert f"{path}:" in result.stdout
    assert result.stderr.startswith(f"aot-tune: {old}: this journal was written by another release")
    assert result.stderr.count("\n") == 1
    assert _run(old, "--seconds").exit_code == 1
    assert _run(old, "--seconds").stdout == ""
