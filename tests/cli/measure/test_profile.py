"""`aot-tune profile` on the real compiler: without a GPU, and with a session that stands in for one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.cli.measure import profile
from aot_tune.declare import discovery
from aot_tune.declare.declaration import Work
from aot_tune.errors import TuneError
from aot_tune.nvidia.nvml import Gpu
from aot_tune.tuner.measure.request import Finals, Measure, Request, TimeInState
from aot_tune.tuner.measure.worker.backend import Counters
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.plan.model import Launched
from aot_tune.tuner.profile import facts as f
from aot_tune.tuner.profile import run
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SM90, entry, scale_in, scale_table, write

pytestmark = pytest.mark.process  # it compiles, but where an earlier run left its cubins

WINNER = scale_table().entries[2].config


class Session:
    """Times all configs as a test says."""

    us: ClassVar[dict[Config, float]] = {}
    fails: ClassVar[set[Config]] = set()
    read: ClassVar[Counters] = Counters()
    asked: ClassVar[list[str]] = []

    def __init__(self, *args: Any, **more: Any) -> None:
        self.asked.append("start")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.append("close")

    def device(self) -> Device:
        return Device.reference(SM90)

    def answer(self, request: Request) -> list[Outcome]:
        assert isinstance(request, Measure | Finals | TimeInState)
        self.asked.append(type(request).__name__)
        return [self._outcome(config) for config in request.configs]

    def _outcome(self, config: Config) -> Outcome:
        if config in self.fails:
            return Failure(config=config, stage="verify", message="half of it is NaN\nat 0")
        us = self.us.get(config, 40.0)
        return Measurement(config=config, mean_us=us, error_margin_us=0.01, num_samples=5)

    def counters(self, problem: Problem, config: Config, cubin: Path | None) -> Counters:
        assert cubin is not None
        assert cubin.read_bytes()[:4] == b"\x7fELF"
        self.asked.append("counters")
        return self.read


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sample's table, on a machine without a GPU."""
    found = scale_in(tmp_path)
    monkeypatch.setattr(discovery, "survey", lambda modules=(): discovery.Survey(found=found, broken=()))
    monkeypatch.setattr(profile, "visible_gpus", lambda: None)
    monkeypatch.setattr(profile, "PROFILES", tmp_path / "profiles")
    monkeypatch.setattr(run, "CUBINS", Path("build/test-cubins").absolute())
    monkeypatch.setattr(run, "CountingSession", Session)
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    for kept in (Session.us, Session.fails, Session.asked):
        kept.clear()
    monkeypatch.setattr(Session, "read", Counters(refusal="error 35"))
    write(tmp_path, scale_table())
    return tmp_path


@pytest.fixture
def gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same on a machine with an H200."""
    monkeypatch.setattr(
        profile, "visible_gpus", lambda: (Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="a"),)
    )
    return folder


def _profile(*words: str, m: int = 256) -> Result:
    problem = f"dtype=bfloat16,M={m},N=1024"
    return CliRunner().invoke(app, ["profile", "scale", "--arch", "sm90", "--problem", problem, *words])


def _kept(result: Result) -> Path:
    return Path(result.stderr.splitlines()[-1].removeprefix("kept as "))


def test_without_a_gpu_the_page_has_what_can_be_proved(folder: Path) -> None:
    result = _profile()
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == "scale dtype=bfloat16 M=256 N=1024 on NVIDIA H200"
    assert lines[1].startswith(f"  config:    {WINNER} (bucket dtype=bfloat16 M=256 N=1024 of ")
    assert lines[2:4] == [
        "  counters:  none: there is no GPU of the arch here; static facts only",
        "  overall:   blocks-bound, by static facts; 40.00 us in the table",
    ]
    text = result.stdout
    assert "  roofline:  memory 1%; at least 0.22 us by the datasheet (memory)\n" in text
    assert "registers, stack of 0 bytes" in text
    assert "  blocks:    64 for 64 tiles in 0." in text
    assert "  compiler:  Load instruction selected" in text
    assert "    [CRITICAL] too few blocks: 64 blocks, where the GPU holds " in text
    assert "  change:    tile_m 64 -> 32 (for too few blocks: more blocks)\n" in text
    assert "not measured: there is no GPU of the arch here\n" in text
    assert lines[-1] == "  decision:  continue on a GPU: it measures tile_m 64 -> 32"
    assert Session.asked == []


def test_a_launch_that_reads_arguments_in_part_may_be_bound_by_the_memory() -> None:
    launched = Launched(work=Work(), tiles=8448, blocks=8448, ctas=1, memory_bytes=4.8e7)
    facts = f.facts_of(launched, Device.reference(SM90), None, None, us=9.0)
    result = run.Profile(
        kernel="scale", arch=SM90, problem=scale_table().entries[0].bucket, config=DEFAULT, device="H200",
        facts=facts, bound=f.classify(facts), findings=(), table_us=9.0,
    )  # fmt: skip
    lines = profile.profile_lines(result, "", None)
    assert lines[3] == "  overall:   latency- or memory-bound, by static facts; 9.00 us in the table"
    assert lines[4] == "  roofline:  memory unknown: arguments read in part"


def test_what_the_model_expects_is_quoted_with_what_it_is_worth(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run, "predictions", lambda kernel, plan, configs, compiled: dict.fromkeys(configs, 1.0)
    )
    text = _profile().stdout
    assert "  change:    tile_m 64 -> 32 (for too few blocks: more blocks; the model expects +0.0%)\n" in text
    assert "             the model's choices for this kernel: not judged on a measured table\n" in text


def test_the_change_is_measured_at_once_and_taken_where_it_is_faster(gpu: Path) -> None:
    Session.us[_with(WINNER, tile_m=32)] = 30.0
    result = _profile()
    assert Session.asked == [
        *("start", "Measure", "counters", "Measure", "Finals", "TimeInState", "TimeInState", "close")
    ]
    assert "measured in turn, each in its worst state: 40.00 -> 30.00 us, -25.0%\n" in result.stdout
    assert "decision:  continue: take tile_m 64 -> 32, profile it with --config" in result.stdout


def _with(config: Config, **constants: int) -> Config:
    return Config(constants={**config.constants, **constants}, hints=config.hints)


HALF, QUARTER = _with(WINNER, tile_m=32), _with(WINNER, tile_m=16)
CLUSTERED = Config(constants=WINNER.constants, hints={**WINNER.hints, "num_ctas": 2})


@pytest.mark.parametrize(
    ("timed", "change", "decision"),
    [
        ((CLUSTERED, HALF), "tile_m 64 -> 16 (for too few blocks: more blocks)", "continue on a GPU"),
        (
            (CLUSTERED, QUARTER, HALF),
            "tile_m 64 -> 32 (for too few blocks: more blocks; the table expects +50.0%)",
            "stop: the table has tile_m 64 -> 32 slower",
        ),
    ],
)
def test_a_change_that_the_table_has_slower_comes_last(
    folder: Path, timed: tuple[Config, ...], change: str, decision: str
) -> None:
    table, portfolio = scale_table(), (WINNER, *timed)
    winners = (DEFAULT, HALF, WINNER)
    entries = tuple(
        entry(each.bucket, winner, portfolio, us=each.mean_us)
        for each, winner in zip(table.entries, winners, strict=True)
    )
    write(folder, replace(table, portfolio=portfolio, entries=entries))
    text = _profile().stdout
    assert f"  change:    {change}\n" in text
    assert f"  decision:  {decision}" in text


@pytest.mark.parametrize("us", [39.8, 50.0])
def test_a_change_that_is_not_better_is_rolled_back(gpu: Path, us: float) -> None:
    Session.us[_with(WINNER, tile_m=32)] = us
    result = _profile()
    assert result.exit_code == 0
    assert "decision:  roll back tile_m 64 -> 32: it is not better\n" in result.stdout


def test_a_change_that_computes_a_wrong_result_is_rolled_back(gpu: Path) -> None:
    Session.fails.add(_with(WINNER, tile_m=32))
    result = _profile()
    assert result.exit_code == 0
    assert "             half of it is NaN\n" in result.stdout
    assert "roll back tile_m 64 -> 32" in result.stdout


def test_a_config_that_fails_here_is_exit_code_1(gpu: Path) -> None:
    Session.fails.add(WINNER)
    result = _profile()
    assert result.exit_code == 1
    assert "it does not run here: half of it is NaN\n" in result.stdout
    assert "decision:  roll back: this config does not run here" in result.stdout


def test_without_privileges_it_says_so_and_goes_on(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "cuptiRangeProfilerEnable: error 35 (needs root)"
    monkeypatch.setattr(Session, "read", Counters(refusal=refusal))
    result = _profile()
    assert result.exit_code == 0
    assert f"  counters:  none: {refusal}; static facts only\n" in result.stdout
    assert "blocks-bound, by static facts; 40.00 us here, 40.00 us in the table\n" in result.stdout


def _counted(values: Mapping[str, float]) -> Counters:
    return Counters(values=values, passes=3)


def test_counters_decide_where_they_are_read(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "read", _counted({f.DRAM: 88.0, f.TENSOR: 0.0}))
    result = _profile()
    assert "  counters:  2 metrics in 3 passes, L2 read before" in result.stdout
    assert "overall:   memory-bound; 40.00 us here" in result.stdout
    assert "    [CEILING] memory roof: 88% of the memory's rate\n" in result.stdout
    assert result.stdout.endswith("  decision:  at the ceiling: stop\n")
    assert Session.asked[-2:] == ["counters", "close"]  # no change is measured


def test_a_later_profile_is_compared_with_an_earlier_one(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "read", _counted({f.DRAM: 40.0, f.L2: 20.0}))
    first = _kept(_profile())
    same = _profile("--diff", str(first))
    assert "    time 40.00 -> 40.00 us, +0.0%\n    findings gone: none; new: none\n" in same.stdout
    monkeypatch.setattr(Session, "read", _counted({f.DRAM: 80.0, f.L2: 20.0}))
    Session.us[_with(WINNER, tile_m=32)] = 20.0
    better = _profile("--config", "tile_m=32", "--diff", str(first))
    assert "(as named by --config)" in better.stdout
    assert f"  against:   {first}: {WINNER}\n    time 40.00 -> 20.00 us, -50.0%\n" in better.stdout
    assert "new: memory roof" in better.stdout
    assert f"    {f.DRAM} 40 -> 80\n" in better.stdout
    assert f.L2 not in better.stdout
    Session.us[_with(WINNER, tile_m=32)] = 60.0
    worse = _profile("--config", "tile_m=32", "--diff", str(first))
    assert worse.stdout.endswith(f"  decision:  roll back: {WINNER} was faster\n")


def test_json_is_what_is_kept(folder: Path) -> None:
    result = _profile("--json")
    report = json.loads(result.stdout)
    kept = json.loads(_kept(result).read_bytes())
    assert kept.pop("text") == str(WINNER)
    assert kept == report
    assert (report["bound"], report["findings"][0]["rule"]) == ("blocks", "too few blocks")


def test_a_size_without_a_time_gets_no_class(folder: Path) -> None:
    result = _profile(m=200)
    assert result.exit_code == 0
    assert "overall:   unknown: no time, here or in the table; aot-tune show has the sizes" in result.stdout
    assert "decision:  continue on a GPU" in result.stdout
    assert "decision:  profile on a GPU, or a size with a time in the table" in _profile(m=4096).stdout


def test_what_cannot_be_profiled_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, why in (
        (["--config", "tile_k=3"], "scale has no tile_k; it has tile_m tile_n"),
        (["--config", "tile_m=48 tile_n=64"], "it has tile_m 16 32 64, tile_n 64 128"),
        (["--config", "tile_m=64,tile_n=128"], "64 x 128 does not fit"),
    ):
        result = _profile(*words)
        assert result.exit_code == 2
        assert why in result.stderr
    (folder / "other.json").write_text("{}")
    result = _profile("--diff", str(folder / "other.json"))
    assert (result.exit_code, "it is no profile" in result.stderr) == (2, True)
    kept = _kept(_profile(m=64))
    assert "of another kernel or problem" in _profile("--diff", str(kept)).stderr
    many = CliRunner().invoke(app, ["profile", "scale", "--arch", "sm90", "--problem", "N=1024"])
    assert (many.exit_code, "3 problems agree" in many.stderr) == (2, True)


def test_a_gpu_that_is_taken_is_an_error(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*args: Any, **more: Any) -> None:
        raise TuneError("GPU a is taken by process 3")

    monkeypatch.setattr(run, "CountingSession", taken)
    result = _profile()
    assert (result.exit_code, result.stdout) == (1, "")
    assert DEFAULT != WINNER
