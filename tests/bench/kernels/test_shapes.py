"""The shapes of a kernel, one after another, on a stand-in GPU: what is timed and what is noted of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_tune.bench.kernels import shapes
from aot_tune.bench.kernels.contest import Call
from aot_tune.bench.kernels.shapes import KernelBench
from aot_tune.bench.kernels.standard import Standard
from aot_tune.bench.kernels.standing import COPY, FLOOR, READ, Demand, lines
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, plan_only
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SM90, scale_in, scale_table, write


class StandInGpu:
    """Compiles nothing and launches nothing; a launch's name is its config."""

    arch, device, torch_device = SM90, Device.reference(SM90), torch.device("cpu")

    def plan_configs(self, kernel: DeviceKernel, problem: Problem, configs: Sequence[Config]) -> ProblemPlan:
        return plan_only(kernel, problem, configs)

    def cubins(self, each: ProblemPlan) -> dict[Config, Path]:
        return {config: Path("a.cubin") for config in each.jobs}

    def launcher(
        self, kernel: DeviceKernel, problem: Problem, config: Config, cubin: Path, args: Any
    ) -> Call:
        return partial(str, config)


@pytest.fixture(autouse=True)
def _no_gpu_that_settles_or_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SETTLE_S", 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def bench_of(folder: Path, standard: Standard) -> tuple[KernelBench, tuple[Problem, ...]]:
    """A kernel with a table in `folder`, on the stand-in GPU, and its declared problems."""
    write(folder, scale_table())
    found = scale_in(folder)["scale"]
    gpu: Any = StandInGpu()
    ceilings = {"copy": 1e12, "bfloat16": 1e15}
    bench = KernelBench(
        gpu=gpu, kernel=DeviceKernel(found, SM90), standard=standard, rounds=rounds, ceilings=ceilings
    )
    return bench, tuple(found.tunable.typical_problems)


def rounds(calls: Sequence[Call]) -> list[float]:
    """The default takes 20 us, every other config 10 and a rival 15."""
    return [{str(DEFAULT): 20.0, "rival": 15.0}.get(str(call()), 10.0) for call in calls]


def refusing(*args: Any) -> Call:
    raise NotImplementedError("not for this shape")


def test_the_tuned_config_meets_the_default_and_the_rivals_on_every_shape(tmp_path: Path) -> None:
    standard = Standard(
        rivals={"theirs": lambda *args: partial(str, "rival"), "none": refusing},
        demands=(),
        flops=lambda problem, *args: 1e6 * problem.size("M"),
    )
    bench, problems = bench_of(tmp_path, standard)
    small, medium, large = bench.shapes(problems, time.monotonic() + 60)
    # The table's winners: the default at M = 1, a config of the portfolio elsewhere.
    assert small.us == {"tuned": 20.0, "default": 20.0, "theirs": 15.0}
    assert medium.us == large.us == {"tuned": 10.0, "default": 20.0, "theirs": 15.0}
    assert small.failed == {"none": "NotImplementedError: not for this shape"}
    assert large.problem == {"dtype": "bfloat16", "M": 256, "N": 1024}
    assert (large.bytes, large.flops) == (2 * 256 * 1024 * 2, 256e6)
    assert large.roofline_us == pytest.approx(1.048576)  # the bytes: the flops take 0.256
    assert list(bench.shapes(problems, time.monotonic() - 1)) == []


def test_what_reads_meets_a_copy_and_a_sum_of_as_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of: list[tuple[tuple[object, ...], str]] = []
    monkeypatch.setattr(torch, "ones", lambda *size, **more: Bytes(size))

    class Bytes:
        def __init__(self, size: tuple[object, ...]) -> None:
            self.size = size

        def copy_(self, source: Bytes) -> None:
            of.append((source.size, "copied"))

        def sum(self) -> None:
            of.append((self.size, "summed"))

    monkeypatch.setattr(torch, "empty_like", lambda other: other)
    demand = Demand(text="a copy", over=(COPY,), worst=0.5)
    standard = Standard(rivals={}, demands=(demand,), moved=lambda *args: 10000.0, reads=True)
    bench, problems = bench_of(tmp_path, standard)
    shape = next(bench.shapes(problems, time.monotonic() + 60))
    assert shape.us[COPY] == shape.us[READ] == 10.0
    # Half of the bytes are read, rounded up to what is copied without a rest; numbers of float32.
    assert set(of) == {((8192,), "copied"), ((2500,), "summed")}
    assert "over torch.sum" in "\n".join(lines([shape], []))


def test_the_reading_alone_of_the_tuned_config_is_timed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = scale_in(tmp_path)["scale"]
    floor = replace(scale, tunable=replace(scale.tunable, name="floor"))
    bench, problems = bench_of(tmp_path, Standard(rivals={}, demands=(), floor=floor))
    launched: list[tuple[str, str]] = []

    def launcher(kernel: DeviceKernel, problem: Problem, config: Config, cubin: Path, args: Any) -> Call:
        launched.append((kernel.tunable.name, str(config)))
        return partial(str, config)

    monkeypatch.setattr(bench.gpu, "launcher", launcher)
    small, medium, large = bench.shapes(problems, time.monotonic() + 60)
    assert [shape.us[FLOOR] for shape in (small, medium, large)] == [20.0, 10.0, 10.0]
    tuned = [("floor", shape.config) for shape in (small, medium, large)]
    assert [one for one in launched if one[0] == "floor"] == tuned
    assert "over reading alone" in "\n".join(lines([small, medium, large], []))
