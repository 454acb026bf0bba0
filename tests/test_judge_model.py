"""The model is judged on measured tables, by the choices that a prediction would make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from aot_tune.choose.points import PREDICTED_GAIN
from aot_tune.declare.discovery import OWN_KERNELS, FoundKernel, find_tunables
from aot_tune.nvidia.cubin import Resources
from aot_tune.tables.table import Point, Table
from aot_tune.tuner.compile.job import Compiled, CompileResult
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.plan.candidates import SweepPlan
from aot_tune.tuner.plan.judged import FILE
from aot_tune.values.config import Config
from tests import judge_model
from tests.judge_model import MOST_BEHIND, Chosen, apart, choices, gate, judgement, parsed
from tests.support import samples

SCALE = FoundKernel(module=samples.MODULE, tunable=samples.scale)


def test_a_gate_needs_a_gain_in_the_mean_and_few_sizes_behind() -> None:
    assert gate([0.9] * 10) == PREDICTED_GAIN
    assert gate([0.9] * 47 + [1.021] * 3) == PREDICTED_GAIN
    assert gate([0.9] * 46 + [1.021] * 4) is None
    assert gate([1.0] * 10) is None
    assert gate([0.99] * 19 + [1.5]) is None


def _chosen(shape: str, ratios: Sequence[float]) -> list[Chosen]:
    return [Chosen(shape=(shape,), ratio=ratio, leaves=True) for ratio in ratios]


def test_each_half_of_the_shapes_takes_the_gate_of_the_other() -> None:
    good, bad = [0.9, 0.8], [1.2, 1.3]
    assert apart([*_chosen("a", good), *_chosen("b", good)]) == [*good, *good]
    # What was good in one half is left in the other, and what was bad is not.
    assert apart([*_chosen("a", good), *_chosen("b", bad)]) == [1.0, 1.0, *bad]


def _measured(table: Table, us: dict[Config, float]) -> Table:
    """The table with these times at every point; the default's is 10 us."""
    columns = [us.get(config, 10.0) for config in table.portfolio]
    entries = [
        dataclasses.replace(
            entry, points=tuple(Point(size=point.size, us=(*columns, 10.0)) for point in entry.points)
        )
        for entry in table.entries
    ]
    return dataclasses.replace(table, entries=tuple(entries))


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config of the sample's table of which the model promises a quarter of the default's time."""
    config = samples.scale_table().portfolio[0]

    def times_at(
        planned: SweepPlan, plan: object, problem: object, configs: list[Config], *_: object
    ) -> object:
        return {
            each: Measurement(
                config=each, mean_us=1.0 if each == config else 4.0, error_margin_us=0.0, num_samples=0
            )
            for each in configs
        }

    def compiled(planned: SweepPlan, folder: Path) -> dict[str, CompileResult]:
        held = Resources(registers=128, stack_bytes=0, shared_bytes=1000, threads=128)
        results: dict[str, CompileResult] = {}
        for job in planned.jobs:
            of_job = {"key": job.key, "code": job.key, "resources": held}
            results[job.key] = Compiled(path=folder, loop=None, seconds=1.0, cached=False, **of_job)
        return results

    monkeypatch.setattr(judge_model, "times_at", times_at)
    monkeypatch.setattr(judge_model, "_compiled", compiled)
    return config


@pytest.mark.parametrize(("us", "kept"), [(8.0, PREDICTED_GAIN), (12.0, None)])
def test_what_the_model_promises_is_judged_by_the_measured_times(
    promised: Config, us: float, kept: float | None
) -> None:
    table = _measured(samples.scale_table(), {promised: us})
    line = judgement(SCALE, table, choices(SCALE, table))
    sizes = sum(len(entry.points) for entry in table.entries)
    assert (line.gate, line.sizes, line.leaves) == (kept, sizes, sizes)
    assert (line.time, line.worst) == (us / 10, us / 10)
    assert line.behind == (1.0 if us > 10 else 0.0)


def test_a_config_without_a_measured_time_is_not_chosen(promised: Config) -> None:
    table = samples.scale_table()
    lacking = [
        dataclasses.replace(
            entry,
            points=tuple(dataclasses.replace(point, us=(None, *point.us[1:])) for point in entry.points),
        )
        for entry in table.entries
    ]
    chosen = choices(SCALE, dataclasses.replace(table, entries=tuple(lacking)))
    assert chosen
    assert {each.ratio for each in chosen} == {1.0}
    assert not any(each.leaves for each in chosen)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["attention", "cross_entropy", "softmax"])
def test_a_committed_line_is_what_judging_again_gives(name: str, tmp_path: Path) -> None:
    committed = {line.kernel: line for line in map(parsed, FILE.read_text().splitlines())}[name]
    anew = judge_model.judged(find_tunables([OWN_KERNELS])[name], tmp_path)
    if anew.hash == committed.hash:
        assert anew == committed
    assert anew.apart_time <= 1.005  # each half takes the gate of the other, which may err
    loses = anew.time >= 1.0 or anew.behind > MOST_BEHIND or anew.apart_time > 1.0
    assert (anew.gate is None) == loses
