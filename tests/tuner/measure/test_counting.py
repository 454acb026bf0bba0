"""Counters through a real child process that fails as scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from aot_tune.declare.discovery import FoundKernel
from aot_tune.tuner.measure import counting, gpu_lock
from aot_tune.tuner.measure.counting import CountingSession
from aot_tune.tuner.measure.request import Measure
from aot_tune.tuner.measure.supervise import Limits
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.problem import Problem
from tests.support.gpu_locks import shared_folder
from tests.support.scripted_backend import Does, Script, config, events, plain

pytestmark = pytest.mark.process

ONE = Problem({"M": 16})
Start = Callable[[Does], CountingSession]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(gpu_lock, "FOLDERS", (shared_folder(tmp_path / "lock"),))
    sessions: list[CountingSession] = []

    def started(does: Does) -> CountingSession:
        found = FoundKernel(module="scripted", tunable=SimpleNamespace(name="scripted"))  # type: ignore[arg-type]
        session = CountingSession(
            found,
            0,
            Limits(start_s=15, canary_s=5, open_s=5, config_s=5, patience_s=0.0, pause_s=0.1),
            backend="tests.support.scripted_backend:ScriptedBackend",
            arguments={"script": plain(Script(folder=tmp_path, configs={"a": does}))},
        )
        sessions.append(session)
        return session

    yield started
    for session in sessions:
        session.close()


def _measures(session: CountingSession) -> bool:
    (outcome,) = session.answer(Measure(ONE, {config("a"): None}))
    return isinstance(outcome, Measurement)


def test_a_process_that_has_read_counters_measures_nothing(start: Start, tmp_path: Path) -> None:
    session = start(Does())
    assert _measures(session)
    read = session.counters(ONE, config("a"), None)
    assert (read.passes, read.refusal, dict(read.values)) == (3, "", {"gpu__time_duration.sum": 10_000.0})
    assert _measures(session)
    assert events(tmp_path).count("start") == 2


@pytest.mark.parametrize(
    ("fault", "why"),
    [("hang", "no answer to counters within"), ("crash", "SIGSEGV"), ("poison", "illegal memory")],
)
def test_counters_that_hang_or_crash_are_refused_and_the_process_is_replaced(
    start: Start, monkeypatch: pytest.MonkeyPatch, fault: str, why: str
) -> None:
    monkeypatch.setattr(counting, "COUNTERS_SECONDS", 0.6)
    session = start(Does(fault=fault, only_in="counters", times=1))
    assert _measures(session)
    read = session.counters(ONE, config("a"), None)
    assert read.refusal.startswith("the process that read them failed: ")
    assert why in read.refusal
    assert not read.values
    assert _measures(session)
