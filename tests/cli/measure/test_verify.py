"""`aot-tune verify` on the real compiler; sessions that time by the sample's table replace the GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.cli.measure import verify
from aot_tune.declare import discovery
from aot_tune.errors import TuneError
from aot_tune.nvidia.nvml import Gpu
from aot_tune.tables.table import Table
from aot_tune.tuner.measure.request import OnOutcome, Request, ignore
from aot_tune.tuner.measure.supervise import GpuLostError, ProblemFailedError
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.sweep import resources
from aot_tune.values.bucket import Exact
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import recorded_tables
from tests.support.hashed_sessions import HashedSession, measuring
from tests.support.samples import DEFAULT, SM90, scale_in, scale_table, with_entry, write

pytestmark = pytest.mark.process  # a sample compiles, but where an earlier run left its cubins

TABLE = scale_table()


class Session(HashedSession):
    """Times as the table has them, but for what a test sets."""

    factors: ClassVar[dict[tuple[int, Config], float]] = {}
    """What a config's time at this M is multiplied by."""

    in_states: ClassVar[dict[tuple[int, Config, str], float]] = {}
    """The same for a state of the GPU, in its place."""

    outcomes: ClassVar[dict[tuple[int, Config], Failure]] = {}
    disturbed: ClassVar[dict[int, str]] = {}
    fails: ClassVar[dict[int, Exception]] = {}
    """What happens to all requests at this M."""

    taken: ClassVar[list[str]] = []
    """Why no session can be opened."""

    seeds: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self, *args: Any, **more: Any) -> None:
        if self.taken:
            raise TuneError(self.taken[0])
        super().__init__(*args, **more)

    def answer(self, request: Request, on_outcome: OnOutcome = ignore) -> list[Outcome]:
        self.seeds.add(request.seeds)
        if request.problem.size("M") in self.fails:
            raise self.fails[request.problem.size("M")]
        return super().answer(request, on_outcome)

    def _outcome(self, problem: Problem, config: Config, when: str = "") -> Outcome:
        return self.outcomes.get((problem.size("M"), config)) or self._measured(problem, config, when)

    def _measured(self, problem: Problem, config: Config, when: str = "") -> Measurement:
        entry = next(entry for entry in TABLE.entries if entry.bucket == problem)
        us = entry.mean_us if config == entry.config else entry.default_us
        m = problem.size("M")
        return Measurement(
            config=config,
            mean_us=us * self.in_states.get((m, config, when), self.factors.get((m, config), 1.0)),
            error_margin_us=0.01,
            num_samples=5,
            disturbed=self.disturbed.get(m),
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the sample's table, on a machine with an H200."""
    found = scale_in(tmp_path)
    monkeypatch.setattr(discovery, "survey", lambda modules=(): discovery.Survey(found=found, broken=()))
    monkeypatch.setattr(
        verify, "visible_gpus", lambda: (Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="a"),)
    )
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    write(tmp_path, TABLE)
    with measuring(monkeypatch):
        monkeypatch.setattr(resources, "MeasureSession", Session)
        for kept in (
            Session.factors,
            Session.in_states,
            Session.outcomes,
            Session.disturbed,
            Session.fails,
            Session.taken,
            Session.seeds,
        ):
            kept.clear()
        yield tmp_path


def _verify(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["verify", "--folder", str(folder), "--seed", "7", *words])


def _wrong(m: int, config: Config, stage: Any = "verify") -> None:
    Session.outcomes[m, config] = Failure(config=config, stage=stage, message="half of it is NaN\nat 0")


def test_a_table_that_holds(folder: Path) -> None:
    first = _verify(folder)
    assert (first.exit_code, first.stdout) == (
        0,
        "NVIDIA H200, driver 580.1: the GPU model of the tables\n"
        "3 of 3 entries, seed 7\n"
        "kernel  entries  fails  slower  weaker  beaten  unknown  gain here  in the table  time here / table"
        "\n"
        "scale   3        -      -       -       -       -        1.31x      1.31x         1.00\n"
        "3 entries: none fails, and none is slower than its default in every state; with 95% confidence "
        "fewer than 1 of the 3 (33.3%) do\n"
        "the tables hold here\n",
    )
    assert Session.seeds == {(11, 12)}  # none that a sweep uses
    assert _verify(folder).stdout == first.stdout


def test_json_has_the_sample_the_gpu_and_both_gains(folder: Path) -> None:
    report = json.loads(_verify(folder, "--json").stdout)
    assert (report["gpu"], report["seed"], report["holds"], report["less_than"]) == (
        "NVIDIA H200",
        7,
        True,
        1,
    )
    assert [(entry["gain"], entry["table_gain"]) for entry in report["entries"]][1] == (1.5, 1.5)


@pytest.mark.parametrize(
    ("stage", "finding"), [("verify", "fails"), ("timeout", "fails"), ("memory", "unknown")]
)
def test_a_winner_that_fails(folder: Path, stage: str, finding: str) -> None:
    _wrong(64, TABLE.entries[1].config, stage)
    result = _verify(folder)
    assert result.exit_code == (1 if finding == "fails" else 3)
    assert f"{finding}: scale dtype=bfloat16 M=64 N=1024: its winner (" in result.stdout
    assert f"): {stage}: half of it is NaN\n" in result.stdout
    assert ("the tables do not hold here" in result.stdout) == (finding == "fails")


def test_one_slower_entry_is_enough(folder: Path) -> None:
    Session.factors[64, TABLE.entries[1].config] = 1.6
    result = _verify(folder)
    assert result.exit_code == 1
    assert (
        "slower: scale dtype=bfloat16 M=64 N=1024: in every state at least 6.7% slower than" in result.stdout
    )
    assert "do not hold here, by 3 entries; tune again: aot-tune tune\n" in result.stdout


def test_a_winner_that_is_far_behind_is_timed_in_every_state(folder: Path) -> None:
    winner = TABLE.entries[1].config
    Session.factors[64, winner] = 3.0  # no sweep would time it in the other states
    assert _verify(folder).exit_code == 1
    Session.in_states[64, winner, "tight"] = 1.0
    result = _verify(folder)
    assert result.exit_code == 0
    assert "slower: " not in result.stdout


def test_weaker_and_beaten_entries_are_named_and_hold(folder: Path) -> None:
    table = with_entry(
        TABLE, 1,
        points=tuple(replace(point, us=(10.0, 10.5, 15.0)) for point in TABLE.entries[1].points),
    )  # fmt: skip
    write(folder, table)
    Session.factors[64, TABLE.portfolio[1]] = 10.0 / 15.0
    Session.factors[64, TABLE.entries[1].config] = 1.2
    result = _verify(folder)
    assert result.exit_code == 0
    assert "weaker: scale dtype=bfloat16 M=64 N=1024: 1.25x here, 1.50x in the table\n" in result.stdout
    assert "beaten: scale dtype=bfloat16 M=64 N=1024: 20.0% slower in its worst state than" in result.stdout


def test_nothing_can_be_said_of_disturbed_samples(folder: Path) -> None:
    Session.disturbed[64] = "another process on the GPU: 17"
    Session.fails[256] = ProblemFailedError(TABLE.entries[2].bucket, "out of memory")
    result = _verify(folder)
    assert result.exit_code == 3
    assert "M=64 N=1024: its samples are disturbed: another process on the GPU: 17" in result.stdout
    assert "M=256 N=1024: out of memory" in result.stdout
    assert "1 entry: none fails" in result.stdout
    assert "nothing can be said of 2 entries: run it again on an idle GPU\n" in result.stdout


def test_another_gpu_model_is_told_apart_from_a_worse_table(folder: Path) -> None:
    name = "NVIDIA H100 80GB HBM3"
    Session.devices[0] = Device.reference(SM90).with_sm_count(name, 132)
    for entry in TABLE.entries:  # another clock
        Session.factors |= {(entry.bucket.size("M"), config): 1.4 for config in (DEFAULT, *TABLE.portfolio)}
    result = _verify(folder)
    assert result.exit_code == 0
    assert result.stdout.startswith(
        f"{name}, driver 580.1: not the GPU model of the tables (NVIDIA H200): gains are compared, times are "
        "not\n"
    )
    assert "1.31x      1.31x         -\n" in result.stdout
    Session.factors[64, TABLE.entries[1].config] = 2.5
    assert (
        "it says nothing of the tables' own GPU model; tune for this: aot-tune tune" in _verify(folder).stdout
    )


@pytest.mark.parametrize("lost", [False, True])
def test_without_an_idle_gpu_nothing_can_be_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    if lost:
        Session.fails[64] = GpuLostError("the GPU is lost")
    else:
        Session.taken.append("GPU a is taken by process 3")
    result = _verify(folder)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "aot-tune: " in result.stderr
    monkeypatch.setattr(verify, "visible_gpus", lambda: None)
    result = _verify(folder)
    assert (result.exit_code, result.stderr) == (
        3,
        "aot-tune: nothing is measured: this process may use no GPU that cuTile compiles for; run it "
        "where one is. aot-tune check needs none\n",
    )


def test_a_config_that_may_not_run_here_fails(folder: Path) -> None:
    other = Config(constants={"tile_m": 8, "tile_n": 8}, hints={"occupancy": 1, "num_ctas": 1})
    portfolio = (other, TABLE.portfolio[1])
    table: Table = replace(with_entry(TABLE, 1, config=other), portfolio=portfolio)
    table = replace(table, entries=table.entries[:2])
    write(folder, table)
    result = _verify(folder)
    assert result.exit_code == 1
    assert "legal: it is in no search space" in result.stdout


def test_recorded_tables_are_left_to_their_library(folder: Path) -> None:
    recorded_tables.write(folder, recorded_tables.TABLE)
    result = _verify(folder)
    assert result.exit_code == 0
    assert "is not verified: only its library can search again: aot-tune verify --program" in result.stderr
    assert _verify(folder, "mylib.ops.scale_kernel").exit_code == 2


def test_a_table_that_launches_do_not_read_is_refused(folder: Path) -> None:
    write(folder, TABLE).rename(folder / "sm90" / "other.json")
    assert _verify(folder).exit_code == 1
    (folder / "sm90" / "other.json").unlink()
    exact = [replace(entry, points=(replace(entry.points[-1], size={}),)) for entry in TABLE.entries]
    write(folder, replace(TABLE, axes={"M": Exact(), "N": Exact()}, entries=tuple(exact)))
    result = _verify(folder)
    assert result.exit_code == 1
    assert "aot-tune check says more" in result.stderr
    assert _verify(folder, "scala").exit_code == 2
