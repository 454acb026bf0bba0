"""The bench of undeclared problems without a GPU: several calls add up. Samples are made up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.bench.sections import regret
from aot_tune.bench.sections.part import Part, Request
from aot_tune.bench.undeclared.figures import RUNS
from aot_tune.bench.undeclared.journal import Samples
from aot_tune.bench.undeclared.problems import drawn
from aot_tune.errors import UsageError
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.samples import SM90

Measured = list[tuple[str, Problem]]


class PlayedGpu:
    """An H200 that compiles nothing: a plan is the configs that were asked for."""

    arch = SM90
    device = Device.reference(SM90)

    def plan_served(self, kernel: DeviceKernel, problem: Problem, configs: tuple[Config, ...]) -> Any:
        default = kernel.tunable.default_config(SM90, problem)
        return SimpleNamespace(problem=problem, candidates=tuple(configs), default=default)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """The problems that were measured; the choice takes 11 us, all others 10, and the default 20."""
    done: Measured = []

    @contextmanager
    def this_gpu() -> Any:
        yield PlayedGpu()

    def samples(gpu: Any, clock: Any, kernel: Any, one: Any, plan: Any) -> Samples:
        done.append((kernel.tunable.name, one.problem))
        if one.problem == drawn("rms_norm")[2].problem:
            raise RuntimeError("out of memory")
        chosen = plan.candidates[0]
        us = {config: 20.0 if config == plan.default else 10.0 for config in plan.candidates}
        us[chosen] = 11.0
        states = ("read", "tight", "read, loaded") if one.capped else ("read", "tight")
        return {str(config): {state: [time] * 11 for state in states} for config, time in us.items()}

    monkeypatch.setattr(regret, "this_gpu", this_gpu)
    monkeypatch.setattr(regret, "StateClock", lambda: None)
    monkeypatch.setattr(regret, "samples", samples)
    return done


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., list[Part]]:
    def call(*kernels: str, problems: int = 4, limit_s: float = 1e9) -> list[Part]:
        journal = str(tmp_path / "regret.jsonl")
        request = Request(kernels=kernels, problems=problems, limit_s=limit_s, journal=journal)
        return list(regret.run(request))

    return call


def test_each_problem_is_measured_in_two_runs_and_the_runs_are_apart(
    measured: Measured, bench: Callable[..., list[Part]]
) -> None:
    first, second, together = bench("softmax", "matmul")
    assert [part.name for part in (first, second, together)] == ["softmax", "matmul", "all kernels"]
    assert len(measured) == RUNS * 8
    assert measured[:8] == measured[8:]
    assert together.figures["problems"] == 8
    assert second.figures["regret"]["worst state"]["worst %"] in (0.0, 10.0)
    assert second.figures["not divisible by 16"] == 3


def test_calls_add_up_and_measure_nothing_twice(
    measured: Measured, bench: Callable[..., list[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr(regret, "time", SimpleNamespace(monotonic=lambda: next(now)))
    counts = []
    while len(measured) < RUNS * 6:
        [part] = bench("softmax", problems=6, limit_s=4)
        counts.append(part.figures["problems"])
        assert len(counts) < 20
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 6
    assert len(set(measured)) == 6
    [part] = bench("softmax", problems=6)
    assert len(measured) == RUNS * 6
    assert (part.figures["problems"], part.figures["runs"]) == (6, RUNS)


def held_up(samples: Samples) -> Samples:
    """The same with most launches of the first config held up in a state, as where the core was taken."""
    first, *others = samples
    return {
        first: {**samples[first], "tight": [10.0] * 5 + [400.0] * 6},
        **{other: samples[other] for other in others},
    }


def test_launches_that_were_held_up_are_taken_again(
    measured: Measured, bench: Callable[..., list[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, disturbed = regret.samples, drawn("softmax")[1].problem
    left = {"times": 1}

    def samples(gpu: Any, clock: Any, kernel: Any, one: Any, plan: Any) -> Samples:
        taken = own(gpu, clock, kernel, one, plan)
        if one.problem != disturbed or not left["times"]:
            return taken
        left["times"] -= 1
        return held_up(taken)

    monkeypatch.setattr(regret, "samples", samples)
    [part] = bench("softmax")
    assert len(measured) == RUNS * 4 + 1
    assert measured.count(("softmax", disturbed)) == RUNS + 1
    assert (part.figures["problems"], part.figures["runs"]) == (4, RUNS)


def test_a_machine_that_never_rests_is_told_and_the_next_call_goes_on(
    measured: Measured, bench: Callable[..., list[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = regret.samples
    with monkeypatch.context() as never_at_rest:
        never_at_rest.setattr(regret, "samples", lambda *args: held_up(own(*args)))
        [part] = bench("softmax", problems=1)
    assert part.figures["problems"] == 0
    assert part.figures["not measured"] == [f"{drawn('softmax')[0].problem}: {regret._DISTURBED}"]
    assert len(measured) == RUNS * regret._TRIES
    [part] = bench("softmax", problems=1)
    assert (part.figures["problems"], part.figures["runs"]) == (1, RUNS)
    assert len(measured) == RUNS * (regret._TRIES + 1)


def test_a_run_that_was_held_up_is_left_out_where_another_was_not_and_a_failure_hides_no_samples(
    measured: Measured, bench: Callable[..., list[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = regret.samples, iter(range(10**6))

    def samples(*args: Any) -> Samples:
        number = next(calls)
        if number == 1:
            raise RuntimeError("out of memory")
        return held_up(own(*args)) if number < regret._TRIES else own(*args)

    monkeypatch.setattr(regret, "samples", samples)
    [part] = bench("softmax", problems=1)
    assert (part.figures["problems"], part.figures["runs"]) == (1, 1)
    assert "not measured" not in part.figures
    [part] = bench("softmax", problems=1)
    assert (part.figures["problems"], part.figures["runs"]) == (1, RUNS), "it was no failure"


def test_a_problem_that_fails_loses_no_other_and_is_told(
    measured: Measured, bench: Callable[..., list[Part]]
) -> None:
    [part] = bench("rms_norm")
    assert (part.figures["problems"], part.figures["drawn"]) == (3, 4)
    assert part.figures["not measured"] == [f"{drawn('rms_norm')[2].problem}: RuntimeError: out of memory"]


def test_a_choice_that_was_not_measured_is_measured_and_others_are_not(
    measured: Measured, bench: Callable[..., list[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that was tuned anew chooses otherwise; what the journal holds of other problems counts."""
    bench("softmax")
    measured.clear()
    other = Config(constants={"new": 1}, hints={})
    own, changed = regret._Kernel.chosen, drawn("softmax")[1]

    def chosen(kernel: Any, one: Any) -> Config:
        return other if one is changed else own(kernel, one)

    monkeypatch.setattr(regret._Kernel, "chosen", chosen)
    [part] = bench("softmax")
    assert measured == [("softmax", changed.problem)] * RUNS
    assert part.figures["problems"] == 4


def test_what_is_measured_against_is_what_serving_could_take(measured: Measured) -> None:
    """The whole space besides, where a problem was drawn for that."""
    kernel = regret._Kernel(PlayedGpu(), None, regret.shipped()["matmul"], drawn("matmul"))  # type: ignore[arg-type]
    for one in (next(one for one in drawn("matmul") if one.whole), drawn("matmul")[0]):
        configs = kernel.configs(one)
        assert configs[0] == kernel.chosen(one)
        assert kernel._default(one) in configs
        space = kernel.declared.tunable.candidates(SM90, one.problem)
        assert (set(space) <= set(configs)) is one.whole


def test_a_kernel_of_which_nothing_is_drawn_is_refused() -> None:
    with pytest.raises(UsageError, match="no problems are drawn of copy; there is matmul linear matmul_fp8"):
        next(regret.run(Request(kernels=("copy",))))
