"""Sweeps on one, two and four named GPUs, each in a process of its own; their times are a hash."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aot_tune.bench.sections import scaling
from aot_tune.bench.sections.part import Request
from aot_tune.bench.sections.scaling import Run, Sweeps, widths
from aot_tune.errors import TuneError, UsageError
from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.nvml import Gpu
from aot_tune.tuner.compile.job import Compiled
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import SM90, SPACE, entry, scale_table

GPUS = tuple(Gpu(index=n, name="NVIDIA H200", arch=SM90, uuid=f"GPU-{n}") for n in range(4))


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "visible_gpus", lambda: GPUS)
    monkeypatch.setattr(scaling, "shipped", lambda: {"short": None, "middle": None})
    command = (sys.executable, "-m", "tests.support.children.hashed_tune")
    monkeypatch.setattr(Sweeps, "tune", command)


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes on GPU 3, as NVML would tell, and on no other."""
    with subprocess.Popen(["sleep", "600"]) as process:

        class Monitor:
            def __init__(self, uuid: str) -> None:
                self.uuid = uuid

            def processes(self) -> frozenset[int]:
                return frozenset({process.pid} if self.uuid == "GPU-3" else ())

        monkeypatch.setattr(scaling, "GpuMonitor", Monitor)
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.process
def test_each_number_of_gpus_is_told_with_its_efficiency_and_the_same_winners(
    victim: subprocess.Popen[bytes],
) -> None:
    parts = {part.name: part.figures for part in scaling.run(Request(kernels=("short", "middle")))}
    assert list(parts) == ["1 GPU", "2 GPUs", "4 GPUs", "4 GPUs, one worker killed"]
    assert victim.wait(0) == -signal.SIGKILL
    alone = parts["1 GPU"]
    for name, figures in parts.items():
        gpus = int(name[0])
        assert list(figures["kernels"]) == ["middle", "short"]
        assert figures["kernels"] == alone["kernels"]
        assert figures["efficiency"] == pytest.approx(alone["sweep_s"] / gpus / figures["sweep_s"], abs=0.01)
        seconds = figures["GPUs' seconds"]
        assert seconds["in all"] == pytest.approx(gpus * figures["sweep_s"], abs=gpus / 10)
        assert sum(seconds.values()) == pytest.approx(2 * seconds["in all"], abs=0.5)
        assert figures["winners"] == {"entries": sum(alone["kernels"].values()), "differ": 0,
                                      "of these tie": 0, "apart": []}  # fmt: skip


def test_the_widths_are_the_powers_of_two_and_all() -> None:
    assert [widths(gpus) for gpus in (1, 2, 3, 4, 6, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8],
    ]  # fmt: skip


@pytest.mark.process
def test_a_sweep_has_the_cores_of_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One core of four is left where there are fewer cores than GPUs: all of them, then."""
    told = "import os, sys; print(sorted(os.sched_getaffinity(0)), sys.argv[1:]); sys.exit(3)"
    monkeypatch.setattr(Sweeps, "tune", (sys.executable, "-c", told))
    mine = sorted(os.sched_getaffinity(0))
    share = max(1, len(mine) // 2)
    with pytest.raises(TuneError, match="on 1 GPU ended with status 3") as raised:
        Sweeps(["short"], GPUS[:2], tmp_path).swept(1, 1)
    assert f"{mine[share : 2 * share] or mine} ['short'" in str(raised.value)
    assert f"'--jobs', '{share}', '--gpus', '1'" in str(raised.value)
    assert sorted(os.sched_getaffinity(0)) == mine


def test_an_unknown_kernel_is_refused_before_anything_is_swept() -> None:
    with pytest.raises(UsageError, match="no shipped kernel is called shrot; there is short middle"):
        next(scaling.run(Request(kernels=("shrot",))))


# Winners ----------------------------------------------------------------------------------------------------

FAST, OTHER = SPACE[4], SPACE[1]


def swept(
    folder: Path,
    gpus: int,
    winner: Config,
    us: dict[Config, float],
    codes: dict[Config, str] | None = None,
    **steps_us: dict[Config, float],
) -> Run:
    """A sweep of one bucket in 20 seconds of all GPUs, with the times of its candidates.

    `steps_us` are those of other steps, by the steps' names; a step of states is of a tight row.
    """
    bucket = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
    folder.mkdir(exist_ok=True)
    with Journal.open(folder / f"{gpus}.jsonl", {"kernel": "scale"}, accepts=accepts) as journal:
        results = SweepResults(journal)
        for config, mean in us.items():
            time = Measurement(config=config, mean_us=mean, error_margin_us=0.01, num_samples=5)
            results.write("candidates", bucket, time, gpu="GPU-0")
        for name, times in steps_us.items():
            step: Any = name.replace("_", " ")
            for config, mean in times.items():
                time = Measurement(config=config, mean_us=mean, error_margin_us=0.01, num_samples=5)
                state: Any = "tight" if "states" in name else None
                results.write(step, bucket, time, gpu="GPU-0", state=state)
        for config, code in (codes or {}).items():
            used = Resources(registers=8, stack_bytes=0, shared_bytes=0, threads=32)
            compiled = Compiled(
                key=str(config), path=folder, code=code, resources=used, loop=None, seconds=0.25, cached=False
            )
            results.write_compiled("candidates", bucket, config, compiled, gpu="GPU-0")
        results.write_spent("candidates", bucket, measure_s=2.0, verify_s=1.0, open_s=0.5, start_s=4.0,
                            waited_s=1.5, conditions=[], gpu="GPU-0")  # fmt: skip
    portfolio = (FAST, OTHER)
    won = dataclasses.replace(scale_table(), portfolio=portfolio, entries=(entry(bucket, winner, portfolio),))
    records = journals.read(folder / f"{gpus}.jsonl", accepts).records
    return Run(gpus=gpus, cores=gpus, seconds=20.0 / gpus, tables={"scale": won}, records={"scale": records})


@pytest.mark.parametrize(("slower", "ties"), [(1.015, 1), (1.05, 0)])
def test_winners_that_differ_are_told_and_those_that_do_not_tie_listed(
    tmp_path: Path, slower: float, ties: int
) -> None:
    alone = swept(tmp_path, 1, FAST, {FAST: 10.0, OTHER: 10.0 * slower})
    both = swept(tmp_path, 2, OTHER, {FAST: 10.0 * slower, OTHER: 10.0})
    told = scaling.figures(both, alone)
    assert told["winners"]["differ"] == 1
    assert told["winners"]["of these tie"] == ties
    if not ties:
        [apart] = told["winners"]["apart"]
        assert apart["winners"] == [str(OTHER), str(FAST)]
        assert apart["us"] == [[10.0, 10.5], [10.5, 10.0]]
        assert apart["in both portfolios"]
    assert told["GPUs' seconds"] == {
        "in all": 20.0, "measuring": 3.5, "starting processes": 4.0, "waiting for compilers": 1.5,
        "idle": 11.0,
    }  # fmt: skip
    assert told["compile-bound part"] == 0.075
    assert told["efficiency"] == 1.0


@pytest.mark.parametrize("which", ["candidate", "portfolio"])
def test_winners_are_compared_in_their_worst_states(tmp_path: Path, which: str) -> None:
    """On two GPUs the winner is 10 % slower alone, and the other one in a tight row."""
    times = {FAST: 10.0, OTHER: 11.0}
    step = "portfolio" if which == "portfolio" else "candidates"
    states = f"{which}_states"
    alone = swept(tmp_path, 1, FAST, times, **{step: times, states: {FAST: 10.0, OTHER: 10.0}})
    both = swept(tmp_path, 2, OTHER, times, **{step: times, states: {FAST: 11.0, OTHER: 10.0}})
    assert scaling.figures(both, alone)["winners"]["of these tie"] == 1
    in_one_state = swept(tmp_path, 4, OTHER, times, **{step: times})
    assert scaling.figures(in_one_state, alone)["winners"]["of these tie"] == 0


@pytest.mark.parametrize("later", ["candidate_finals", "portfolio", "portfolio_finals"])
def test_of_several_times_the_later_ones_count(tmp_path: Path, later: str) -> None:
    """The candidates' times do not tie; those that were taken after them do, or the other way round."""
    for first, then, ties in ((11.0, 10.1, 1), (10.1, 11.0, 0)):
        candidates = {FAST: 10.0, OTHER: first, SPACE[2]: 10.0}
        steps = {later: {FAST: 10.0, OTHER: then, SPACE[2]: 10.0}}
        if later == "portfolio_finals":
            steps["portfolio"] = candidates
        runs = [
            swept(tmp_path / str(then), gpus, winner, candidates, **steps)
            for gpus, winner in ((1, FAST), (2, OTHER))
        ]
        assert scaling.figures(runs[1], runs[0])["winners"]["of these tie"] == ties


def test_a_winner_that_is_no_member_of_the_other_portfolio_is_told_as_such(tmp_path: Path) -> None:
    alone = swept(tmp_path, 1, FAST, {FAST: 10.0, SPACE[2]: 12.0})
    both = swept(tmp_path, 2, SPACE[2], {FAST: 10.0, SPACE[2]: 12.0})
    [apart] = scaling.figures(both, alone)["winners"]["apart"]
    assert apart["us"] == [[12.0, 10.0], [12.0, 10.0]]
    assert not apart["in both portfolios"]


@pytest.mark.parametrize("same", [True, False])
def test_winners_of_the_same_code_tie_though_one_of_them_was_never_timed(tmp_path: Path, same: bool) -> None:
    codes = {FAST: "a code", OTHER: "a code" if same else "another"}
    alone = swept(tmp_path, 1, FAST, {FAST: 10.0}, codes)
    both = swept(tmp_path, 2, OTHER, {OTHER: 15.0}, codes)
    told = scaling.figures(both, alone)
    assert told["winners"]["of these tie"] == (1 if same else 0)
    if not same:
        assert told["winners"]["apart"][0]["us"] == [None, None]
    assert told["compiling, seconds of cores"] == 0.5


def test_an_entry_that_one_gpu_alone_lacks_is_told(tmp_path: Path) -> None:
    alone = swept(tmp_path, 1, FAST, {FAST: 10.0})
    table = dataclasses.replace(alone.tables["scale"], entries=())
    told = scaling.figures(
        swept(tmp_path, 2, FAST, {FAST: 10.0}), dataclasses.replace(alone, tables={"scale": table})
    )
    [apart] = told["winners"]["apart"]
    assert apart["winners"] == [str(FAST), "no entry"]
