"""The clock of a row of launches, on a GPU that is played: it must not time the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.tuner.measure.worker import clock

FILL_US, KERNEL_US = 120.0, 4.0


class Played:
    """A GPU and a host with clocks of their own: each launch takes the host `host_us`, one is slower once."""

    def __init__(self, host_us: float, slow_once_us: float = 0.0) -> None:
        self.host, self.gpu = 0.0, 0.0
        self.host_us, self.slow_once_us = host_us, slow_once_us
        self.fills = 0

    def fill(self) -> None:
        self.fills += 1
        self.gpu = max(self.gpu, self.host) + FILL_US

    def launch(self) -> None:
        self.host += self.host_us + self.slow_once_us
        self.slow_once_us = 0.0
        self.gpu = max(self.gpu, self.host) + KERNEL_US

    def record(self) -> float:
        """When the GPU comes to what is queued now."""
        self.gpu = max(self.gpu, self.host)
        return self.gpu

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)


class PlayedEvent:
    def __init__(self, played: Played) -> None:
        self.played, self.at = played, 0.0

    def record(self) -> None:
        self.at = self.played.record()

    def query(self) -> bool:
        return self.at <= self.played.host

    def elapsed_time(self, end: PlayedEvent) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    def begin(host_us: float, slow_once_us: float = 0.0) -> tuple[Played, clock.EventRound]:
        one = Played(host_us, slow_once_us)
        cuda = SimpleNamespace(
            Event=lambda enable_timing: PlayedEvent(one),
            synchronize=one.synchronize,
        )
        buffer = SimpleNamespace(sum=one.fill, fill_=lambda value: one.fill())
        monkeypatch.setattr(clock, "torch", SimpleNamespace(cuda=cuda, ones=lambda size, device: buffer))
        return one, clock.EventRound()

    return begin


def row(one: Played, timed: clock.EventRound) -> float:
    return timed.tight([(lambda: None, one.launch)] * 3)


def test_a_row_that_the_host_queues_in_time_is_timed_once(played: Any) -> None:
    one, timed = played(20.0)
    assert row(one, timed) == pytest.approx(KERNEL_US)
    assert one.fills == 1


def test_a_row_that_loads_its_kernel_is_queued_again(played: Any) -> None:
    one, timed = played(20.0, slow_once_us=5000.0)
    assert row(one, timed) == pytest.approx(KERNEL_US)
    assert one.fills == 2
    assert row(one, timed) == pytest.approx(KERNEL_US)
    assert one.fills == 3  # no more goes before later rows


def test_a_slow_host_gets_as_much_time_as_it_needs_and_keeps_it(played: Any) -> None:
    one, timed = played(150.0)
    assert row(one, timed) == pytest.approx(KERNEL_US)
    before = one.fills
    assert row(one, timed) == pytest.approx(KERNEL_US)
    assert one.fills - before == 4


def test_a_host_that_is_never_fast_enough_ends_the_attempts(played: Any) -> None:
    one, timed = played(5000.0)
    assert row(one, timed) > KERNEL_US
    assert one.fills <= 2 + 2 + 4 + 8 + 16
