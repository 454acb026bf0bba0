"""What the real backend launches for counters, and in which order, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.nvidia.cupti import CountersError, Read
from aot_tune.tuner.measure.worker import counting
from aot_tune.tuner.measure.worker.backend import Counters, Trial
from aot_tune.tuner.measure.worker.counting import CountingBackend
from aot_tune.values.config import Config

TRIAL = Trial(config=Config(constants={"tile": 4}))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order; CUPTI runs the launch twice."""
    log: list[str] = []

    class Cupti:
        def counters(self, launch: Callable[[], None], prepare: Callable[[], None], device: int) -> Read:
            for _ in range(2):
                prepare()
                log.append(f"start on {device}")
                launch()
                log.append("stop")
            return Read(values={"a": 1.0}, passes=3, version=24)

    monkeypatch.setattr(counting, "Cupti", Cupti)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("wait"))
    return log


def _backend(done: list[str]) -> CountingBackend:
    backend: Any = CountingBackend.__new__(CountingBackend)
    case = SimpleNamespace(prepare=lambda: done.append("poison"), renew=lambda: done.append("renew"))
    backend._cases, backend._torch_device = [case], torch.device("cuda", 0)
    backend._round = SimpleNamespace(flush=lambda: done.append("flush"))
    backend._launch = lambda trial, case: done.append("launch")
    made: CountingBackend = backend
    return made


def test_only_the_launch_is_counted_with_the_cache_read_before(done: list[str]) -> None:
    assert _backend(done).counters(TRIAL) == Counters(values={"a": 1.0}, passes=3)
    counted = ["renew", "flush", "wait", "start on 0", "launch", "wait", "stop"]
    assert done == ["poison", "launch", "wait", *counted, *counted]


def test_a_refusal_is_the_answer(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Read:
        raise CountersError("error 35")

    monkeypatch.setattr(counting.Cupti, "counters", refuse)
    assert _backend(done).counters(TRIAL) == Counters(refusal="error 35")
