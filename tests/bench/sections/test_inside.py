"""The bench of sizes inside declared buckets, without a GPU: its problems and sums. Times are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.bench.gpu import Timed, shipped
from aot_tune.bench.sections import inside
from aot_tune.bench.sections.part import Request
from aot_tune.errors import UsageError
from aot_tune.tuner.plan.candidates import DeviceKernel, plan_only
from aot_tune.tuner.plan.shortlist import Shortlist
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device

KERNELS = shipped()


@pytest.mark.parametrize("name", KERNELS)
def test_problems_lie_inside_declared_buckets_at_sizes_not_swept(name: str) -> None:
    tunable = KERNELS[name].tunable
    drawn = inside.problems(KERNELS[name], 8)
    assert drawn == inside.problems(KERNELS[name], 8)
    assert len(set(drawn)) == 8
    buckets = set(tunable.buckets)
    assert {tunable.bucket_of(problem) for problem in drawn} <= buckets
    swept = {size for bucket in buckets for size in (bucket, *sizes_inside(tunable.axes, bucket))}
    assert not swept & set(drawn)
    kernel: Any = SimpleNamespace(tunable=tunable)
    assert 3 <= sum(inside._ragged(kernel, problem) for problem in drawn) <= 6


def test_a_size_is_in_its_bucket_whatever_the_edge() -> None:
    import random

    for edge in (2**power for power in range(15)):
        for whole in (False, True):
            sizes = {inside._size_inside(edge, random.Random(seed), whole=whole) for seed in range(50)}
            assert all(edge // 2 < size <= edge for size in sizes), (edge, whole, sizes)
            if edge >= 16:
                assert {size % 16 == 0 for size in sizes} == {whole}, (edge, whole, sizes)


def timed(kernel: DeviceKernel) -> tuple[Any, Timed]:
    """A softmax problem of which three configs ran: the second of the model's order is the fastest."""
    problem = inside.problems(KERNELS["softmax"], 1)[0]
    default = kernel.tunable.default_config(kernel.arch, problem)
    portfolio = [config for config in kernel.tunable.candidates(kernel.arch, problem) if config != default]
    configs = [portfolio[0], portfolio[1], default]
    us = dict(zip(configs, (12.0, 10.0, 15.0), strict=True))
    listed = Shortlist(configs=tuple(configs), twins={}, failures=(), predicted_us=us)
    return plan_only(kernel, problem, configs), Timed(problem=problem, us=us, listed=listed)


def test_regrets_are_against_the_fastest_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = Arch.parse("sm90")
    kernel = DeviceKernel(KERNELS["softmax"], arch)
    each, one = timed(kernel)
    chosen = SimpleNamespace(choice=lambda *_, **__: SimpleNamespace(config=next(iter(one.us))))
    monkeypatch.setattr(inside, "dispatcher_of", lambda _: chosen)
    gpu: Any = SimpleNamespace(arch=arch, device=Device.reference(arch))
    figures = inside.of_resolver(gpu, kernel, [each], [one])
    assert figures["resolver"] == {
        "geometric mean %": 20.0, "95th percentile %": 20.0, "worst %": 20.0,
    }  # fmt: skip
    assert figures["default"]["worst %"] == 50.0
    model = inside.of_model([one])
    assert [model[f"best of top {top}"]["worst %"] for top in (1, 3, 5)] == [20.0, 0.0, 0.0]


def test_an_unknown_kernel_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(UsageError, match="no kernel is called softmix; there is"):
        next(inside.run(Request(kernels=("softmix",))))


def test_a_kernel_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class StandInGpu:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def plans(self, found: Any, problems: Any) -> Any:
            assert len(problems) == 2
            return SimpleNamespace(tunable=found.tunable), ()

    def measured(gpu: Any, kernel: Any, plans: Any) -> dict[str, Any]:
        if kernel.tunable.name == "rope":
            raise RuntimeError("out of memory")
        return {"problems": 2}

    monkeypatch.setattr(inside, "this_gpu", StandInGpu)
    monkeypatch.setattr(inside, "_measured", measured)
    parts = list(inside.run(Request(kernels=("rope", "softmax"), sizes=2)))
    assert [(part.name, part.figures) for part in parts] == [
        ("rope", {"failed": "RuntimeError: out of memory"}),
        ("softmax", {"problems": 2}),
    ]
    assert list(inside.run(Request(kernels=("rope",), sizes=2, limit_s=-1.0))) == []
