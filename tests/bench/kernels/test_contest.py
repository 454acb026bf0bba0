"""Alternating rounds with a scripted clock, and what of the contenders is timed at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, cycle

import pytest
import torch

from aot_tune.bench.kernels import shapes
from aot_tune.bench.kernels.contest import LEAST_ROUNDS, ROUNDS, Call, contest
from aot_tune.bench.kernels.standing import DEFAULT, TUNED


class Clock:
    """A round whose samples are scripted by what each call returns; remembers the orders."""

    def __init__(self, **us: Sequence[float]) -> None:
        self._us = {name: cycle(values) for name, values in us.items()}
        self.rounds: list[tuple[object, ...]] = []

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        names = [str(call()) for call in calls]
        self.rounds.append(tuple(names))
        return [next(self._us[name]) for name in names]


def named(*names: str) -> dict[str, Call]:
    return {name: partial(str, name) for name in names}


def test_the_median_counts_and_orders_change() -> None:
    clock = Clock(a=[10, 11, 12], b=[20, 20, 200])
    assert contest(named("a", "b"), clock) == {"a": 11, "b": 20}
    assert len(clock.rounds) == ROUNDS
    assert clock.rounds[:2] == [("a", "b"), ("b", "a")]
    assert all(
        later == earlier[::-1] for earlier, later in zip(clock.rounds[::2], clock.rounds[1::2], strict=False)
    )


def test_calls_that_take_long_have_fewer_rounds_but_some() -> None:
    clock = Clock(slow=[1e6])
    contest(named("slow"), clock)
    assert len(clock.rounds) == LEAST_ROUNDS
    clock = Clock(medium=[50_000.0])
    contest(named("medium"), clock)
    assert len(clock.rounds) == 8


@pytest.fixture(autouse=True)
def _no_gpu_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(shapes, "SETTLE_S", 0.0)


def made(*names: str) -> dict[str, Callable[[], Call]]:
    return {name: partial(partial, str, name) for name in names}


def test_a_contender_that_cannot_be_made_or_called_costs_the_others_nothing() -> None:
    def refuses() -> Call:
        raise NotImplementedError("takes no window")

    def breaks() -> object:
        raise RuntimeError("no kernel\n  image")

    failed: dict[str, str] = {}
    clock = Clock(tuned=[5])
    us = shapes.timed({**made(TUNED), "one": refuses, "two": lambda: breaks}, clock, failed)
    assert us == {TUNED: 5}
    assert failed == {"one": "NotImplementedError: takes no window", "two": "RuntimeError: no kernel image"}


def test_rounds_count_only_when_the_gpu_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SETTLE_S", 0.05)
    monkeypatch.setattr(shapes.time, "monotonic", partial(next, count(0.0, 0.02)))
    clock = Clock(tuned=[99, 99] + [10] * ROUNDS)
    assert shapes.timed(made(TUNED), clock, {}) == {TUNED: 10}
    assert len(clock.rounds) == 2 + ROUNDS
    clock = Clock(tuned=[99] * 20 + [10] * 40)
    monkeypatch.setattr(shapes.time, "monotonic", partial(next, count(0.0, 0.0025)))
    assert shapes.timed(made(TUNED), clock, {}) == {TUNED: 10}, "and those before are not in the median"


def test_what_looks_slower_than_its_default_is_timed_longer() -> None:
    clock = Clock(tuned=[12] * ROUNDS + [10] * shapes.MORE_ROUNDS, default=[10])
    us = shapes.timed(made(TUNED, DEFAULT), clock, {})
    assert len(clock.rounds) == ROUNDS + shapes.MORE_ROUNDS
    assert us[DEFAULT] == us[TUNED] == 10
    clock = Clock(tuned=[10.1], default=[10])
    shapes.timed(made(TUNED, DEFAULT), clock, {})
    assert len(clock.rounds) == ROUNDS
