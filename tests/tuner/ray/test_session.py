"""A measuring session elsewhere: it acts as one of this machine, and outcomes come as they stand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import AotTuneError, DeclarationError, TuneError
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.request import (
    Conditions,
    Finals,
    Measure,
    OnOutcome,
    Recheck,
    Reported,
    Request,
    Spent,
    TimeInState,
)
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped, ProblemFailedError
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.ray import host as hosts
from aot_tune.tuner.ray.host import GpuHost
from aot_tune.tuner.ray.session import RemoteSession
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import other_source
from tests.support.ray_hosts import NearHost
from tests.support.samples import MODULE, SM90, SPACE, scale

FOUND = FoundKernel(module=MODULE, tunable=scale)
PROBLEM = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
CONFIGS = SPACE[:3]


def _time(config: Config, us: float = 10.0) -> Measurement:
    return Measurement(config=config, mean_us=us, error_margin_us=0.1, num_samples=5)


def _spent(**seconds: float) -> Spent:
    conditions = Conditions(before=GpuState(), after=GpuState())
    return Spent(conditions=(conditions,), **seconds)  # type: ignore[arg-type]


class Session:
    """A session that a test scripts: `does` is called for each config of a request."""

    def __init__(self, on_event: Callable[[str], None], fault_counts: FaultCounts) -> None:
        self.on_event, self.fault_counts = on_event, fault_counts
        self.spent = Spent()
        self.paths: list[Path | None] = []
        self.measured: list[tuple[float, int]] = []
        self.stopped = threading.Event()
        self.closed, self.turned = False, MODULE
        on_event("another process computes on the GPU")

    def does(self, config: Config) -> Outcome:
        return _time(config)

    def identity(self) -> dict[str, str]:
        return {"gpu": "NVIDIA H200", "uuid": "GPU-7"}

    def device(self) -> Device:
        self.spent += Spent(start_s=3.0)
        return Device.reference(SM90)

    def answer(self, request: Request, on_outcome: OnOutcome) -> list[Outcome]:
        match request:
            case Measure():
                self.paths += request.configs.values()
                self.spent += _spent(verify_s=0.5)
                self.measured.append((request.least_us, len(request.known)))
                outcomes = []
                for config in request.configs:
                    outcomes.append(self.does(config))
                    on_outcome(Reported(outcome=outcomes[-1]))
                return outcomes
            case Finals():
                for number in range(2):
                    for config in request.configs:
                        if len(request.taken.get(config, ())) <= number:
                            on_outcome(Reported(outcome=_time(config, 10.0 + number), number=number))
                outcomes = [_time(config) for config in request.configs]
                for outcome in outcomes:
                    on_outcome(Reported(outcome=outcome))
                return outcomes
            case TimeInState():
                for config in request.configs:
                    on_outcome(Reported(outcome=_time(config, {"written": 30.0}[request.state])))
                return [_time(config, 30.0) for config in request.configs]
        return [Failure(config=next(iter(request.configs)), stage="verify", message="half of it is NaN")]

    def turn_to(self, found: FoundKernel, fault_counts: FaultCounts) -> None:
        self.turned, self.fault_counts = found.module, fault_counts

    def interrupt(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed = True


class ScriptedHost(GpuHost):
    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Session] = []

    def _start(
        self, found: FoundKernel, on_event: Callable[[str], None], fault_counts: FaultCounts
    ) -> Session:
        assert (found.module, found.tunable.name) == (MODULE, "scale")
        self.sessions.append(Session(on_event, fault_counts))
        return self.sessions[-1]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(hosts, "node_folder", lambda: tmp_path / "node")


@pytest.fixture
def there() -> SimpleNamespace:
    """A session, its host, the driver's fault counts, and the lines for a person."""
    near, said, excluded = NearHost(ScriptedHost()), list[str](), FaultCounts(lambda line: None)
    session = RemoteSession(FOUND, near, on_event=said.append, fault_counts=excluded)
    return SimpleNamespace(session=session, near=near, said=said, fault_counts=excluded, host=near.host)


def _configs(folder: Path | None = None) -> dict[Config, Path | None]:
    return dict.fromkeys(CONFIGS)


def test_a_request_has_the_outcomes_conditions_and_times_of_the_session_there(there: Any) -> None:
    session, told = there.session, list[Any]()
    assert session.identity() == {"gpu": "NVIDIA H200", "uuid": "GPU-7"}
    assert session.device() == Device.reference(SM90)
    known = {CONFIGS[0]: _time(CONFIGS[0])}
    request = Measure(PROBLEM, _configs(), known=known, least_us=2.0)
    found = session.answer(request, told.append)
    assert found == [one.outcome for one in told] == [_time(config) for config in CONFIGS]
    assert there.host.sessions[0].measured == [(2.0, 1)]
    assert session.spent == Spent(start_s=3.0) + _spent(verify_s=0.5)
    assert there.said == ["another process computes on the GPU"]

    rounds = list[Any]()
    taken = {CONFIGS[0]: [_time(CONFIGS[0])]}
    session.answer(Finals(PROBLEM, _configs(), taken=taken), rounds.append)
    assert [one.number for one in rounds] == [0, 0, 1, 1, 1, None, None, None]
    session.answer(TimeInState(PROBLEM, _configs(), state="written"), told.append)
    assert told[-1].outcome.mean_us == 30.0
    (failure,) = session.answer(Recheck(PROBLEM, _configs()))
    assert failure.stage == "verify"


def test_an_outcome_comes_while_the_next_one_is_being_measured(
    there: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = threading.Event()

    def does(session: Session, config: Config) -> Outcome:
        assert config == CONFIGS[0] or came.wait(20)
        return _time(config)

    monkeypatch.setattr(Session, "does", does)
    there.session.answer(Measure(PROBLEM, _configs()), lambda reported: came.set())
    assert came.is_set()


@pytest.mark.parametrize(
    "error",
    [
        ProblemFailedError(PROBLEM, "its arguments cannot be made"),
        DeclarationError("it changes x"),
        GpuLostError("three workers in a row"),
    ],
)
def test_an_error_arrives_under_its_own_type(
    there: Any, monkeypatch: pytest.MonkeyPatch, error: AotTuneError
) -> None:
    def does(session: Session, config: Config) -> Outcome:
        raise error

    monkeypatch.setattr(Session, "does", does)
    with pytest.raises(type(error)) as raised:
        there.session.answer(Measure(PROBLEM, _configs()))
    assert str(raised.value) == str(error)
    assert there.session.spent.conditions, "what it took is told too"


def test_a_host_that_ends_is_a_lost_gpu_and_one_that_is_ended_is_none() -> None:
    near = NearHost(ScriptedHost(), lost_after=2)
    session = RemoteSession(
        FOUND, near, on_event=lambda line: None, fault_counts=FaultCounts(lambda line: None)
    )
    told: list[Reported] = []
    with pytest.raises(GpuLostError, match="its node is lost: its process has ended"):
        session.answer(Measure(PROBLEM, _configs()), told.append)
    assert len(told) == 2, "what came before is kept"
    session.close()

    near = NearHost(ScriptedHost())
    session = RemoteSession(
        FOUND, near, on_event=lambda line: None, fault_counts=FaultCounts(lambda line: None)
    )
    with pytest.raises(MeasuringStopped):
        session.answer(Measure(PROBLEM, _configs()), lambda reported: session.interrupt())


def test_an_error_of_the_driver_ends_what_is_measured_and_the_next_request_begins_anew(
    there: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def does(session: Session, config: Config) -> Outcome:
        if config == CONFIGS[1] and len(there.host.sessions) == 1:
            assert session.stopped.wait(20), "nobody ends it"
            raise MeasuringStopped
        return _time(config)

    def full(reported: Reported) -> None:
        raise TuneError("the disk is full")

    monkeypatch.setattr(Session, "does", does)
    with pytest.raises(TuneError, match="the disk is full"):
        there.session.answer(Measure(PROBLEM, _configs()), full)
    assert [session.closed for session in there.host.sessions] == [True]
    assert len(there.session.answer(Measure(PROBLEM, _configs()))) == 3
    assert [session.closed for session in there.host.sessions] == [True, False]


def test_faults_of_all_gpus_are_known_there_and_new_ones_here(
    there: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that faulted on two problems is excluded, whichever GPUs they were on."""
    seen: list[bool] = []

    def does(session: Session, config: Config) -> Outcome:
        seen.append(session.fault_counts.excluded(config) is not None)
        if config == CONFIGS[0]:
            session.fault_counts.count(PROBLEM, config, "fault")
        if config == CONFIGS[1]:
            session.fault_counts.wrong.add(config)
        return _time(config)

    monkeypatch.setattr(Session, "does", does)
    other, third = (Problem({**PROBLEM, "M": size}) for size in (128, 256))
    there.fault_counts.remember(other, CONFIGS[2], "fault")
    there.fault_counts.remember(third, CONFIGS[2], "fault")
    there.fault_counts.remember(other, CONFIGS[0], "fault")
    there.session.answer(Measure(PROBLEM, _configs()))
    assert seen == [False, False, True], "it is told what the driver knows"
    assert there.fault_counts.excluded(CONFIGS[0]) is not None
    assert there.fault_counts.wrong == {CONFIGS[1]}

    there.fault_counts.forget(PROBLEM)
    monkeypatch.setattr(Session, "does", lambda session, config: _time(config))
    there.session.answer(Measure(PROBLEM, _configs()))
    assert there.fault_counts.excluded(CONFIGS[0]) is None, "what was forgotten does not come back"


def test_a_session_turns_to_another_kernel_with_its_own_faults(
    there: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FoundKernel(module=other_source.MODULE, tunable=other_source.other)
    fault_counts = FaultCounts(lambda line: None)
    there.fault_counts.remember(PROBLEM, CONFIGS[0], "fault")
    there.session.turn_to(other, fault_counts)
    (session,) = there.host.sessions
    assert session.turned == other_source.MODULE
    seen: list[bool] = []

    def does(session: Session, config: Config) -> Outcome:
        seen.append(session.fault_counts.suspect(config))
        session.fault_counts.count(PROBLEM, config, "fault")
        return _time(config)

    monkeypatch.setattr(Session, "does", does)
    there.session.answer(Measure(PROBLEM, _configs()))
    assert seen == [False] * 3
    assert [fault_counts.suspect(config) for config in CONFIGS] == [True] * 3
    assert [there.fault_counts.suspect(config) for config in CONFIGS] == [True, False, False]


def test_a_cubin_is_sent_once_and_is_written_by_its_content(there: Any, tmp_path: Path) -> None:
    files = [tmp_path / "a.cubin", tmp_path / "b.cubin"]
    for path, content in zip(files, (b"code", b"other code"), strict=True):
        path.write_bytes(content)
    configs = dict(zip(CONFIGS, (*files, None), strict=True))
    there.session.answer(Measure(PROBLEM, configs))
    there.session.answer(Measure(PROBLEM, configs))
    assert there.near.cubins == [b"code", b"other code"]
    (session,) = there.host.sessions
    a, b, none = session.paths[:3]
    assert (a.read_bytes(), b.read_bytes(), none) == (b"code", b"other code", None)
    assert session.paths[3:] == [a, b, None]
    files[0].write_bytes(b"newer code")
    there.session.answer(Measure(PROBLEM, configs))
    assert session.paths[6].read_bytes() == b"newer code"
    files[1].unlink()
    with pytest.raises(TuneError, match=r"b\.cubin cannot be read"):
        there.session.answer(Measure(PROBLEM, configs))
