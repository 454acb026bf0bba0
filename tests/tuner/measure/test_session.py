"""A MeasureSession over real child processes that fail as scripted: who is blamed, and what is kept."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import DeclarationError, JournalMismatchError, TuneError
from aot_tune.tables.states import State
from aot_tune.tuner.measure import gpu_lock
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.request import Finals, Measure, Recheck, Reported, TimeInState
from aot_tune.tuner.measure.rounds import LEAST_ROUNDS, MOST_ROUNDS
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.supervise import GpuLostError, Limits, ProblemFailedError
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.tuner.measure.worker.backend import LAUNCHES
from aot_tune.tuner.measure.worker.runner import (
    BUSY_BETWEEN_S,
    BUSY_FIRST_S,
    LEAST_LAUNCHES,
    MOST_STATE_SAMPLES,
    MOST_TEXT,
    SAMPLES,
    STATE_SAMPLES,
)
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import named_backend
from tests.support.gpu_locks import shared_folder
from tests.support.scripted_backend import Does, Script, config, events, plain

pytestmark = pytest.mark.process

QUICK = Limits(start_s=15, canary_s=5, open_s=5, config_s=0.6, patience_s=0.0, pause_s=0.1)
ONE, TWO, THREE = (Problem({"M": m}) for m in (16, 32, 64))

Start = Callable[..., MeasureSession]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_lock, "FOLDERS", (shared_folder(tmp_path / "lock"),))
    return tmp_path


@pytest.fixture
def told() -> list[str]:
    """What the sessions' `on_event` was told."""
    return []


@pytest.fixture
def start(folder: Path, told: list[str]) -> Iterator[Start]:
    sessions: list[MeasureSession] = []

    def started(
        configs: dict[str, Does],
        limits: Limits = QUICK,
        fault_counts: FaultCounts | None = None,
        **script: Any,
    ) -> MeasureSession:
        found = FoundKernel(module="scripted", tunable=SimpleNamespace(name="scripted"))  # type: ignore[arg-type]
        session = MeasureSession(
            found,
            0,
            limits,
            on_event=told.append,
            backend="tests.support.scripted_backend:ScriptedBackend",
            arguments={"script": plain(Script(folder=folder, configs=configs, **script))},
            fault_counts=fault_counts,
        )
        sessions.append(session)
        return session

    yield started
    for session in sessions:
        session.close()


def test_a_journal_of_samples_taken_in_another_way_is_not_resumed(start: Start, tmp_path: Path) -> None:
    session = start({})
    now = session.identity()
    with Journal.open(tmp_path / "kernel.jsonl", {**now, "timing": "L2 written"}):
        pass
    with pytest.raises(JournalMismatchError, match="L2 written"):
        Journal.open(tmp_path / "kernel.jsonl", now)


def of(*names: str) -> dict[Config, Path | None]:
    return {config(name): None for name in names}


def by_name(outcomes: list[Outcome]) -> dict[str, str]:
    """Each config's stage of failure, or ``ok``."""
    return {str(o.config["name"]): o.stage if isinstance(o, Failure) else "ok" for o in outcomes}


# Several kernels --------------------------------------------------------------------------------------------


def _found(name: str) -> Any:
    return FoundKernel(module="named", tunable=SimpleNamespace(name=name))  # type: ignore[arg-type]


@pytest.fixture
def named(folder: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasureSession]:
    """A session of the kernel `one`."""
    monkeypatch.setenv(named_backend.LOG, str(folder / "named.log"))
    backend = "tests.support.named_backend:NamedBackend"
    with MeasureSession(_found("one"), 0, QUICK, on_event=told.append, backend=backend) as session:
        yield session


def _us(session: MeasureSession, problem: Problem = ONE) -> float:
    [outcome] = session.answer(Measure(problem, of("a")))
    assert isinstance(outcome, Measurement)
    return outcome.mean_us


def _log(folder: Path) -> list[tuple[int, str]]:
    """What the processes did, each with the number of its process, from 0."""
    lines = [line.split(" ", 1) for line in (folder / "named.log").read_text().splitlines()]
    pids = list(dict.fromkeys(pid for pid, _ in lines))
    return [(pids.index(pid), what) for pid, what in lines]


def test_a_process_lives_on_when_its_session_turns_to_another_kernel(
    named: MeasureSession, folder: Path, told: list[str]
) -> None:
    assert _us(named) == 3.0
    for name, us in (("other", 5.0), ("one", 3.0)):
        named.turn_to(_found(name), FaultCounts(told.append))
        assert _us(named) == us, "of that kernel, although the problem is the same"
    assert {number for number, _ in _log(folder)} == {0}
    assert [what for _, what in _log(folder) if what.startswith("opens")] == [
        f"opens {name} M=16" for name in ("one", "other", "one")
    ]
    assert told == []


def test_a_kernel_that_goes_with_no_other_is_measured_in_a_process_of_its_own(
    named: MeasureSession, folder: Path, told: list[str]
) -> None:
    assert _us(named) == 3.0
    named.turn_to(_found("alone"), FaultCounts(told.append))
    assert _us(named) == 5.0
    named.turn_to(_found("another"), FaultCounts(told.append))
    assert _us(named) == 7.0
    log = _log(folder)
    assert [entry for entry in log if not entry[1].startswith("opens")] == [
        (0, "imports"), (0, "builds one"), (1, "imports"), (1, "builds alone"), (1, "turns to another"),
    ]  # fmt: skip
    assert told == [
        "worker replaced: it cannot go on with another kernel: ImportError: two versions of one library"
    ]


# Measuring --------------------------------------------------------------------------------------------------


def test_configs_are_verified_and_timed_one_after_another_in_their_order(start: Start, folder: Path) -> None:
    session = start({"a": Does(us=[12.0]), "b": Does(us=[11.0], margin_us=0.2)})
    assert session.answer(Measure(ONE, of("a", "b"))) == [
        Measurement(config=config("a"), mean_us=12.0, error_margin_us=0.01, num_samples=5),
        Measurement(config=config("b"), mean_us=11.0, error_margin_us=0.2, num_samples=5),
    ]
    assert events(folder) == [
        *("start", "canary", "open M=16", "verify a", "time a", "verify b", "time b"),
        "time b",  # it leads
    ]


def test_a_problem_that_is_open_is_not_opened_again(start: Start, folder: Path) -> None:
    session = start({"a": Does()})
    session.answer(Measure(ONE, of("a")))
    session.answer(Finals(ONE, of("a")))
    session.answer(Measure(TWO, of("a")))
    assert [line for line in events(folder) if line.startswith(("start", "open"))] == [
        "start",
        "open M=16",
        "open M=32",
    ]


def test_clocks_and_whether_they_are_locked_are_recorded_before_and_after(start: Start) -> None:
    session = start({"a": Does()})
    session.answer(Measure(ONE, of("a")))
    (conditions,) = session.spent.conditions
    assert conditions.before.sm_clock_mhz == conditions.after.sm_clock_mhz == 1980
    assert conditions.after.as_record()["clocks_locked"] is False


def test_the_device_is_the_childs(start: Start) -> None:
    assert start({}).device().sm_count == 132


# A1: poisoned contexts and crashes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "launch"),
    [("poison", 1), ("poison", 2), ("poison", 6), ("quiet poison", 10), ("crash", 1)],  # ten launches each
)
def test_a_faulting_config_is_retried_then_recorded_and_no_other_is_blamed(
    start: Start, folder: Path, fault: str, launch: int
) -> None:
    bad = Does(fault=fault, at_launch=launch)
    session = start({"a": Does(), "bad": bad, "b": Does(), "c": Does()})
    assert by_name(session.answer(Measure(ONE, of("a", "bad", "b", "c")))) == {
        "a": "ok",
        "bad": "fault",
        "b": "ok",
        "c": "ok",
    }
    log = events(folder)
    assert log.count("start") == 3  # the first, the one that tries again, the one that goes on
    assert log.count("verify bad") == 2
    assert [log.count(f"time {name}") for name in "abc"] == [1, 1, 1]
    # Each fresh worker proves the GPU, opens the problem, and runs the suspect before any other.
    told_apart = [line for line in log if line != "time bad"]
    assert told_apart[told_apart.index("verify bad") + 1 :][:4] == [
        "start",
        "canary",
        "open M=16",
        "verify bad",
    ]


def test_a_crash_is_recorded_with_its_signal(start: Start) -> None:
    (failure,) = start({"bad": Does(fault="crash")}).answer(Measure(ONE, of("bad")))
    assert isinstance(failure, Failure)
    assert "SIGSEGV" in failure.message


def test_a_config_that_faults_once_and_passes_in_a_fresh_worker_counts(start: Start, told: list[str]) -> None:
    session = start({"flaky": Does(fault="poison", times=1), "b": Does()})
    assert by_name(session.answer(Measure(ONE, of("flaky", "b")))) == {"flaky": "ok", "b": "ok"}
    assert len(told) == 1
    assert "illegal memory access" in told[0]


def test_a_config_that_faulted_on_two_problems_is_struck(start: Start, folder: Path, told: list[str]) -> None:
    session = start({"bad": Does(fault="poison"), "b": Does()})
    for problem in (ONE, TWO):
        session.answer(Measure(problem, of("bad", "b")))
    ran = events(folder).count("verify bad")
    outcomes = session.answer(Measure(THREE, of("bad", "b")))
    assert by_name(outcomes) == {"bad": "fault", "b": "ok"}
    assert isinstance(outcomes[0], Failure)
    assert outcomes[0].message == "excluded: it faulted on M=16 and on M=32"
    assert events(folder).count("verify bad") == ran
    assert told[-1] == "excluded after faults on 2 problems: name=bad"


def test_a_config_that_faulted_on_one_problem_runs_on_the_next(start: Start) -> None:
    session = start({"bad": Does(fault="poison", only_on=16)})
    assert by_name(session.answer(Measure(ONE, of("bad")))) == {"bad": "fault"}
    assert by_name(session.answer(Measure(TWO, of("bad")))) == {"bad": "ok"}


def test_faults_remembered_from_a_journal_strike_too(start: Start, folder: Path) -> None:
    fault_counts = FaultCounts(print)
    session = start({"bad": Does()}, fault_counts=fault_counts)
    for problem in (ONE, TWO):
        fault_counts.remember(problem, config("bad"), "fault")
    assert by_name(session.answer(Measure(THREE, of("bad")))) == {"bad": "fault"}
    assert events(folder) == []  # nothing left to run: no worker was started


# A2: hangs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", [1, 6])
def test_a_hang_at_any_launch_is_killed_and_the_sweep_goes_on(
    start: Start, folder: Path, launch: int
) -> None:
    session = start({"a": Does(), "bad": Does(fault="hang", at_launch=launch), "b": Does()})
    outcomes = session.answer(Measure(ONE, of("a", "bad", "b")))
    assert by_name(outcomes) == {"a": "ok", "bad": "timeout", "b": "ok"}
    assert events(folder).count("verify bad") == 2


def test_a_lost_gpu_stops_the_sweep_with_its_outcomes_kept(start: Start) -> None:
    session = start(
        {"wrong": Does(fault="launch"), "a": Does(), "bad": Does(fault="hang")}, bad_canaries=[*range(1, 99)]
    )
    stood: list[Reported] = []
    with pytest.raises(GpuLostError, match=r"3 fresh workers in a row.*device unavailable.*nvidia-smi"):
        session.answer(Measure(ONE, of("wrong", "a", "bad")), stood.append)
    outcomes = [one.outcome for one in stood]
    assert by_name(outcomes) == {"wrong": "launch", "a": "ok"}
    assert [one.provisional for one in outcomes if isinstance(one, Measurement)] == [True]


@pytest.mark.parametrize("bad", ["kill", "raise", "arguments"])
def test_a_problem_whose_arguments_cannot_be_made_fails_and_not_the_gpu(start: Start, bad: str) -> None:
    session = start({"a": Does()}, bad_opens={32: bad})
    session.answer(Measure(ONE, of("a")))
    for kind in (Measure, Finals, Recheck):
        with pytest.raises(
            ProblemFailedError, match=r"M=32 cannot be measured, while the GPU works"
        ) as failed:
            session.answer(kind(TWO, of("a")))
        assert failed.value.problem == TWO
        assert ("SIGKILL" if bad == "kill" else "no such size") in failed.value.reason
    assert by_name(session.answer(Measure(THREE, of("a")))) == {"a": "ok"}


def test_a_problem_whose_arguments_take_for_ever_fails_too(start: Start, folder: Path) -> None:
    session = start({"a": Does()}, replace(QUICK, open_s=0.5), bad_opens={32: "hang"})
    with pytest.raises(ProblemFailedError, match=r"no answer to open within 0\.5 s"):
        session.answer(Measure(TWO, of("a")))
    assert events(folder).count("canary") == 4  # the last one shows that the GPU is well
    assert by_name(session.answer(Measure(ONE, of("a")))) == {"a": "ok"}


def test_where_the_gpu_is_lost_by_making_arguments_no_problem_is_blamed(start: Start) -> None:
    session = start({"a": Does()}, bad_opens={32: "kill"}, bad_canaries=[*range(1, 99)])
    with pytest.raises(GpuLostError):
        session.answer(Measure(TWO, of("a")))


def test_two_failed_recoveries_are_survived(start: Start) -> None:
    session = start({"a": Does()}, bad_canaries=range(2))
    assert by_name(session.answer(Measure(ONE, of("a")))) == {"a": "ok"}


def test_no_child_is_left_after_a_hang_and_close(start: Start) -> None:
    session = start({"bad": Does(fault="hang")})
    session.answer(Measure(ONE, of("bad")))
    session.close()
    children = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
    ).stdout
    assert "worker_main" not in children


# A4: slow starts --------------------------------------------------------------------------------------------


def test_a_slow_start_is_tried_again_and_no_config_is_blamed(start: Start, folder: Path) -> None:
    limits = Limits(start_s=2.0, canary_s=5, open_s=5, config_s=0.6)
    session = start({"a": Does()}, limits, slow_starts=2)
    assert by_name(session.answer(Measure(ONE, of("a")))) == {"a": "ok"}
    assert events(folder).count("start") == 3


def test_a_worker_killed_while_starting_is_tried_again(start: Start) -> None:
    assert by_name(start({"a": Does()}, dead_starts=1).answer(Measure(ONE, of("a")))) == {"a": "ok"}


# A5: wrong results ------------------------------------------------------------------------------------------


def test_a_wrong_config_is_listed_and_not_timed_however_fast_it_is(start: Start, folder: Path) -> None:
    session = start(
        {"a": Does(), "wrong": Does(us=[0.1], wrong="out: 3 of 64 elements are wrong", wrong_for_seed=1)}
    )
    outcomes = session.answer(Measure(ONE, of("a", "wrong")))
    assert by_name(outcomes) == {"a": "ok", "wrong": "verify"}
    assert "time wrong" not in events(folder)


def test_a_winner_is_checked_again_in_a_fresh_process_on_other_seeds(start: Start, folder: Path) -> None:
    session = start({"a": Does(wrong="nan", wrong_for_seed=3), "b": Does()})
    assert by_name(session.answer(Measure(ONE, of("a", "b")))) == {"a": "ok", "b": "ok"}
    (failure,) = session.answer(Recheck(ONE, of("a", "b")))
    assert (failure.config, failure.stage) == (config("a"), "verify")
    assert events(folder).count("start") == 3  # the second finds it wrong, the third confirms it


def test_rechecks_in_a_row_share_a_process_that_has_measured_nothing(start: Start, folder: Path) -> None:
    session = start({"a": Does()})
    session.answer(Measure(ONE, of("a")))
    assert session.answer(Recheck(ONE, of("a"))) == []
    assert session.answer(Recheck(TWO, of("a"))) == []
    assert events(folder).count("start") == 2
    session.answer(Measure(TWO, of("a")))
    session.answer(Recheck(TWO, of("a")))
    assert events(folder).count("start") == 3


def test_a_config_that_crashes_when_checked_again_is_a_failure(start: Start) -> None:
    session = start({"a": Does(fault="crash")})
    (failure,) = session.answer(Recheck(ONE, of("a")))
    assert failure.stage == "fault"


# A6, A7 -----------------------------------------------------------------------------------------------------


def test_an_undeclared_mutation_stops_with_its_message(start: Start) -> None:
    session = start({"a": Does(fault="undeclared")})
    with pytest.raises(DeclarationError, match="changes its argument weight"):
        session.answer(Measure(ONE, of("a")))


def test_out_of_memory_is_retried_in_a_fresh_worker(start: Start, folder: Path) -> None:
    session = start({"a": Does(fault="oom", times=1), "b": Does()})
    assert by_name(session.answer(Measure(ONE, of("a", "b")))) == {"a": "ok", "b": "ok"}
    assert events(folder).count("start") == 2


def test_out_of_memory_on_an_empty_gpu_is_recorded_and_never_strikes(start: Start) -> None:
    session = start({"a": Does(fault="oom"), "b": Does()})
    for problem in (ONE, TWO, THREE):
        # A config that faulted on two problems would be refused on the third, at stage "fault".
        assert by_name(session.answer(Measure(problem, of("a", "b")))) == {"a": "memory", "b": "ok"}


def test_a_problem_that_needs_the_last_ones_memory_gets_a_fresh_worker(start: Start, folder: Path) -> None:
    session = start({"a": Does()}, short_opens=[1])
    session.answer(Measure(ONE, of("a")))
    assert by_name(session.answer(Measure(TWO, of("a")))) == {"a": "ok"}
    assert events(folder).count("start") == 2


def test_a_problem_that_fits_nowhere_fails_and_no_config_is_blamed(start: Start) -> None:
    session = start({"a": Does(), "b": Does()}, short_opens=[*range(3)])
    stood: list[Reported] = []
    with pytest.raises(ProblemFailedError, match=r"M=16 .*arguments and reference: .*96 GiB"):
        session.answer(Measure(ONE, of("a", "b")), stood.append)
    assert stood == []
    assert by_name(session.answer(Measure(TWO, of("a", "b")))) == {"a": "ok", "b": "ok"}


def test_a_fresh_worker_that_is_short_of_memory_once_blames_nobody(start: Start, folder: Path) -> None:
    """The memory of a killed worker is not free at once."""
    session = start({"a": Does(), "bad": Does(fault="crash"), "b": Does()}, short_opens=[0, 2, 3])
    assert by_name(session.answer(Measure(ONE, of("a", "bad", "b")))) == {
        "a": "ok",
        "bad": "fault",
        "b": "ok",
    }
    log = events(folder)
    assert log.count("start") == 6
    session.answer(Recheck(ONE, of("a")))


def test_a_recheck_that_is_short_of_memory_once_fails_no_winner(start: Start) -> None:
    session = start({"a": Does()}, short_opens=[1, 2])
    session.answer(Measure(ONE, of("a")))
    assert session.answer(Recheck(ONE, of("a"))) == []


def test_a_pause_comes_before_a_problem_is_opened_again(start: Start) -> None:
    session = start({"a": Does()}, replace(QUICK, pause_s=1.5), short_opens=[0])
    began = time.monotonic()
    session.answer(Measure(ONE, of("a")))
    assert time.monotonic() - began > 1.5


@pytest.mark.parametrize("fault", ["compile", "launch"])
def test_what_raises_at_the_launch_fails_alone_in_the_same_worker(
    start: Start, folder: Path, fault: str
) -> None:
    session = start({"bad": Does(fault=fault), "b": Does()})
    outcomes = session.answer(Measure(ONE, of("bad", "b")))
    assert by_name(outcomes) == {"bad": fault, "b": "ok"}
    assert events(folder).count("start") == 1
    assert isinstance(outcomes[0], Failure)
    assert len(outcomes[0].message) <= MOST_TEXT  # of 27 MB


# A12: sharing -----------------------------------------------------------------------------------------------


def test_a_second_tuner_on_a_gpu_is_refused_with_the_holders_name(start: Start, folder: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from aot_tune.tuner.measure import gpu_lock\n"
        "gpu_lock.FOLDERS = (Path(sys.argv[1]),)\n"
        "lock = gpu_lock.GpuLock('cuda-0', 'tuning matmul'); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(folder / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(TuneError, match=f"cuda-0 is taken by process {other.pid}, tuning matmul"):
            start({})
        other.kill()
    start({"a": Does()})  # the system freed it with its holder


def test_a_session_that_is_closed_lets_the_next_have_the_gpu(start: Start) -> None:
    start({}).close()
    start({})


def test_samples_taken_while_throttled_are_taken_again(start: Start, folder: Path) -> None:
    limits = Limits(start_s=5, canary_s=5, open_s=5, config_s=2, patience_s=5.0)
    session = start({"a": Does(us=[99.0, 10.0])}, limits, disturbances=["throttled: thermal (hardware)"])
    (outcome,) = session.answer(Measure(ONE, of("a")))
    assert isinstance(outcome, Measurement)
    assert outcome.mean_us == 10.0
    assert events(folder).count("time a") == 2
    assert outcome.disturbed is None


def test_a_lasting_disturbance_is_waited_for_once_and_then_recorded(start: Start, folder: Path) -> None:
    limits = Limits(start_s=5, canary_s=5, open_s=5, config_s=2, patience_s=1.0)
    other = "another process on the GPU: 4711"
    session = start({"a": Does(), "b": Does()}, limits, disturbances=[other] * 100)
    outcomes = session.answer(Measure(ONE, of("a", "b")))
    assert by_name(outcomes) == {"a": "ok", "b": "ok"}
    assert [event for event in events(folder) if event.startswith("time ")] == ["time a"] * 3 + ["time b"]
    assert [isinstance(one, Measurement) and one.disturbed for one in outcomes] == [other] * 2


# A13: impossible times --------------------------------------------------------------------------------------


@pytest.mark.parametrize("us", [0.0, -3.0, math.nan, math.inf])
def test_a_time_that_cannot_be_is_discarded_and_taken_again(start: Start, us: float) -> None:
    (outcome,) = start({"a": Does(us=[us, 10.0])}).answer(Measure(ONE, of("a")))
    assert isinstance(outcome, Measurement)
    assert outcome.mean_us == 10.0


@pytest.mark.parametrize("us", [0.0, -3.0, math.nan, math.inf])
def test_a_config_whose_every_time_cannot_be_fails_and_cannot_win(start: Start, us: float) -> None:
    (outcome,) = start({"a": Does(us=[us])}).answer(Measure(ONE, of("a")))
    assert isinstance(outcome, Failure)
    assert outcome.stage == "timing"
    assert "3 tries" in outcome.message


def test_a_jump_of_the_wall_clock_neither_ends_nor_prolongs_a_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter(range(1_000_000))
    monkeypatch.setattr(time, "time", lambda: 3600.0 * next(hours))
    session = start({"a": Does(), "bad": Does(fault="hang")})
    assert by_name(session.answer(Measure(ONE, of("a", "bad")))) == {"a": "ok", "bad": "timeout"}


# Finals -----------------------------------------------------------------------------------------------------


def test_finalists_that_are_clearly_apart_take_three_interleaved_rounds(start: Start, folder: Path) -> None:
    session = start({"a": Does(us=[10.0]), "b": Does(us=[12.0])})
    a, b = session.answer(Finals(ONE, of("a", "b")))
    assert (a.mean_us, a.num_samples, b.mean_us) == (10.0, 15, 12.0)  # type: ignore[union-attr]
    lines = [line for line in events(folder) if line.startswith(("time", "sample"))]
    assert lines[:4] == ["time a", "time b", "time b", "time a"]
    assert sorted(lines[4:]) == ["time a", "time b"]


def test_finalists_inside_the_noise_are_timed_until_the_limit(start: Start, folder: Path) -> None:
    noisy = [10.0, 10.3, 9.8, 10.4]
    session = start({"a": Does(us=noisy), "b": Does(us=noisy[::-1])})
    outcomes = session.answer(Finals(ONE, of("a", "b")))
    assert events(folder).count("time a") == MOST_ROUNDS
    assert all(isinstance(outcome, Measurement) for outcome in outcomes)


def test_one_round_that_is_far_off_is_left_out_and_replaced(start: Start, folder: Path) -> None:
    session = start({"a": Does(us=[10.0, 1000.0, 10.0, 10.0]), "b": Does(us=[12.0])})
    a, _ = session.answer(Finals(ONE, of("a", "b")))
    assert isinstance(a, Measurement)
    assert (a.mean_us, a.num_samples) == (10.0, 15)
    assert events(folder).count("time a") == 4


def test_so_is_a_round_of_what_takes_long(start: Start, folder: Path) -> None:
    rounds = [1000.0, 9000.0, 1000.0, 1000.0]
    script = Does(us=[1000.0], in_turn=[us for us in rounds for _ in range(SAMPLES)])
    session = start({"a": script, "b": Does(us=[1200.0])})
    a, _ = session.answer(Finals(ONE, of("a", "b")))
    assert isinstance(a, Measurement)
    assert (a.mean_us, a.num_samples) == (1000.0, 3 * SAMPLES)
    assert events(folder).count("sample a") == 4 * SAMPLES


def test_a_finalist_that_faults_every_other_round_is_forgiven_once_only(start: Start, folder: Path) -> None:
    session = start({"a": Does(), "bad": Does(us=[5.0], fault="poison", at_launch=9)})
    told: list[Reported] = []
    outcomes = session.answer(Finals(ONE, of("a", "bad")), told.append)
    assert by_name(outcomes) == {"a": "ok", "bad": "fault"}
    assert [one.outcome for one in told if one.number is None] == outcomes[:1]
    assert [one.outcome for one in told if isinstance(one.outcome, Failure)] == outcomes[1:]
    assert events(folder).count("time bad") == 4  # right, faulting, right again, faulting
    assert events(folder).count("start") <= 3


# What takes long --------------------------------------------------------------------------------------------


def test_what_takes_long_is_timed_launch_by_launch_in_turn(start: Start, folder: Path) -> None:
    """Alone the first is too fast, as after a pause; in turn the second is."""
    session = start(
        {
            "a": Does(us=[1000.0], in_turn=[1100.0]),
            "b": Does(us=[1050.0], in_turn=[1080.0, 1080.0, 1080.0, 9000.0]),
            "lost": Does(us=[1300.0]),
        }
    )
    a, b, lost = session.answer(Measure(ONE, of("a", "b", "lost")))
    assert isinstance(a, Measurement)
    assert isinstance(b, Measurement)
    assert isinstance(lost, Measurement)
    assert (a.mean_us, a.num_samples, a.error_margin_us) == (1100.0, SAMPLES, 0.0)
    assert (b.mean_us, b.num_samples) == (1080.0, SAMPLES)
    assert b.error_margin_us == 0.0  # interrupted launches move neither
    assert (lost.mean_us, lost.num_samples) == (1300.0, 5)
    sampled = [line.split()[1] for line in events(folder) if line.startswith("sample")]
    assert sampled[:4] == ["a", "b", "b", "a"]
    assert (sampled.count("a"), sampled.count("b")) == (SAMPLES, SAMPLES)


def test_before_each_launch_in_turn_the_gpu_is_kept_busy_and_for_longer_before_the_first(
    start: Start, folder: Path
) -> None:
    session = start({"a": Does(us=[1000.0]), "b": Does(us=[1050.0], in_turn=[math.nan, 1050.0])})
    session.answer(Finals(ONE, of("a", "b")))
    log = [line.split()[0] for line in events(folder) if line.startswith(("busy", "sample", "compare"))]
    rounds = "".join("b" if each == "busy" else "s" for each in log).split("bb")
    assert rounds[0] == ""
    assert len(rounds) == 1 + LEAST_ROUNDS
    assert {each[0] for each in rounds[1:]} == {"s"}
    assert all("ss" not in each for each in rounds)
    assert {line for line in events(folder) if line.startswith("busy")} == {
        f"busy {BUSY_FIRST_S}",
        f"busy {BUSY_BETWEEN_S}",
    }
    assert BUSY_FIRST_S >= 0.1 > BUSY_BETWEEN_S > 0


def test_the_finals_of_what_takes_long_are_in_turn_from_the_start(start: Start, folder: Path) -> None:
    session = start({"a": Does(us=[1000.0], in_turn=[1100.0]), "b": Does(us=[1050.0], in_turn=[900.0])})
    session.answer(Measure(ONE, of("a", "b")))
    a, b = session.answer(Finals(ONE, of("a", "b")))
    assert (a.mean_us, b.mean_us) == (1100.0, 900.0)  # type: ignore[union-attr]
    assert events(folder).count("time b") == 1
    assert events(folder).count("sample a") == SAMPLES * (1 + LEAST_ROUNDS)


def test_finals_in_a_worker_that_has_measured_nothing_find_out_what_takes_long(start: Start) -> None:
    session = start({"a": Does(us=[1000.0], in_turn=[1100.0]), "b": Does(us=[1050.0], in_turn=[900.0])})
    a, b = session.answer(Finals(ONE, of("a", "b")))
    assert (a.mean_us, b.mean_us) == (1100.0, 900.0)  # type: ignore[union-attr]


def test_beside_one_that_is_short_nobody_takes_turns(start: Start, folder: Path) -> None:
    session = start({"a": Does(us=[190.0]), "b": Does(us=[201.0], in_turn=[1.0]), "c": Does(us=[202.0])})
    outcomes = [
        *session.answer(Measure(ONE, of("a", "b", "c"))),
        *session.answer(Finals(ONE, of("a", "b", "c"))),
    ]
    assert [o.mean_us for o in outcomes if isinstance(o, Measurement)] == 2 * [190.0, 201.0, 202.0]
    assert not any(line.startswith(("sample", "busy")) for line in events(folder))


def test_one_that_takes_long_alone_has_nobody_to_take_turns_with(start: Start, folder: Path) -> None:
    session = start({"a": Does(us=[1000.0], in_turn=[1.0]), "short": Does(us=[10.0])})
    a, short = session.answer(Measure(ONE, of("a", "short")))
    assert (a.mean_us, short.mean_us) == (1000.0, 10.0)  # type: ignore[union-attr]
    assert not any(line.startswith("sample") for line in events(folder))


def test_configs_are_timed_in_a_state_in_turn_after_one_warm_up_each(start: Start, folder: Path) -> None:
    session = start({"a": Does(in_states={"written": 15.0}), "b": Does(us=[9.0, 12.4, 12.5, 12.5, 99.0])})
    a, b = session.answer(TimeInState(ONE, of("a", "b"), state="written"))
    assert isinstance(a, Measurement)
    assert isinstance(b, Measurement)
    assert (a.mean_us, a.num_samples, a.provisional) == (15.0, STATE_SAMPLES, False)
    assert (b.mean_us, b.num_samples) == (12.5, STATE_SAMPLES), "the warm-up of 9 us does not count"
    sampled = [line.split()[1:] for line in events(folder) if line.startswith("sample")]
    assert [name for name, _ in sampled[:6]] == ["a", "b", "a", "b", "b", "a"]
    assert len(sampled) == 2 * (1 + STATE_SAMPLES)
    assert {state for _, state in sampled} == {"written"}
    assert not any(line.startswith(("verify", "time", "busy")) for line in events(folder))


def test_a_time_in_a_state_with_a_wide_margin_is_taken_further(start: Start, folder: Path) -> None:
    """Half of its first launches were hit; those of the others stand."""
    hit = [9.0, 12.0, 33.0, 12.0, 33.0, *[12.0] * 8]
    session = start({"a": Does(us=[10.0]), "b": Does(us=hit), "c": Does(us=[10.0, 20.0, 30.0])})
    a, b, c = session.answer(TimeInState(ONE, of("a", "b", "c"), state="written"))
    assert isinstance(a, Measurement)
    assert isinstance(b, Measurement)
    assert isinstance(c, Measurement)
    assert (a.mean_us, a.num_samples) == (10.0, STATE_SAMPLES)
    assert (b.mean_us, b.error_margin_us, b.num_samples) == (12.0, 0.0, 2 * STATE_SAMPLES)
    assert c.num_samples == MOST_STATE_SAMPLES, "what stays wide is not timed for ever"
    sampled = [line.split()[1] for line in events(folder) if line.startswith("sample")]
    assert [sampled.count(name) for name in "abc"] == [5, 9, 13]
    assert "a" not in sampled[3 * (1 + STATE_SAMPLES) :]


def test_what_fails_in_a_further_turn_keeps_the_time_that_it_had(start: Start) -> None:
    """A clock that gives no usable sample any more costs no config its time; a launch that fails does."""
    unusable = [9.0, 10.0, 20.0, 10.0, 20.0, *[0.0] * 20]
    session = start({"a": Does(us=unusable), "b": Does(us=[9.0, 10.0, 20.0, 10.0, 20.0, 14.0])})
    a, b = session.answer(TimeInState(ONE, of("a", "b"), state="written"))
    assert isinstance(a, Measurement)
    assert isinstance(b, Measurement)
    assert (a.mean_us, a.num_samples) == (15.0, STATE_SAMPLES)
    assert b.num_samples == MOST_STATE_SAMPLES


def test_a_disturbance_in_a_further_turn_is_told_of_those_that_it_met_and_ends_their_turns(
    start: Start, folder: Path
) -> None:
    quiet = [""] * (1 + STATE_SAMPLES)
    session = start(
        {"a": Does(us=[10.0]), "b": Does(us=[10.0, 20.0, 30.0])},
        replace(QUICK, patience_s=0.0),
        disturbances=[*quiet, "throttled", *quiet],
    )
    a, b = session.answer(TimeInState(ONE, of("a", "b"), state="written"))
    assert isinstance(a, Measurement)
    assert isinstance(b, Measurement)
    assert (a.disturbed, b.disturbed) == (None, "throttled")
    assert b.num_samples == 2 * STATE_SAMPLES


def test_a_tight_row_needs_no_warm_up_of_its_own(start: Start, folder: Path) -> None:
    session = start({"a": Does(in_states={"tight": 7.0})})
    [a] = session.answer(TimeInState(ONE, of("a"), state="tight"))
    assert a.mean_us == 7.0  # type: ignore[union-attr]
    assert events(folder).count("sample a tight") == STATE_SAMPLES


def test_times_in_a_state_leave_the_others_as_they_are(start: Start) -> None:
    """As for a GPU that was brought into a state: what is measured afterwards is measured as before."""
    session = start({"a": Does(us=[12.0], in_states={"written": 15.0, "tight": 7.0, "read": 12.5})})
    first = session.answer(Measure(ONE, of("a")))
    for state in ("written", "tight", "read"):
        session.answer(TimeInState(ONE, of("a"), state=state))
    assert session.answer(Measure(ONE, of("a"))) == first
    assert [one.mean_us for one in session.answer(Finals(ONE, of("a"))) if isinstance(one, Measurement)] == [
        12.0
    ]


@pytest.mark.parametrize("fault", ["poison", "crash", "hang"])
def test_one_that_breaks_in_a_state_is_blamed_and_the_others_are_timed(start: Start, fault: str) -> None:
    session = start({"a": Does(), "bad": Does(fault=fault, at_launch=3), "b": Does()})
    told: list[Reported] = []
    outcomes = session.answer(TimeInState(ONE, of("a", "bad", "b"), state="read"), told.append)
    assert by_name(outcomes) == {"a": "ok", "bad": "timeout" if fault == "hang" else "fault", "b": "ok"}
    assert by_name([one.outcome for one in told]) == by_name(outcomes)
    assert len(told) == 3, "each is told once, as soon as it stands"


@pytest.mark.parametrize("fault", ["poison", "crash", "hang"])
def test_one_that_breaks_in_its_turn_is_blamed_and_the_others_are_timed(start: Start, fault: str) -> None:
    session = start(
        {"a": Does(us=[1000.0]), "bad": Does(us=[1001.0], fault=fault, at_launch=12), "b": Does(us=[1002.0])}
    )
    outcomes = session.answer(Measure(ONE, of("a", "bad", "b")))
    assert by_name(outcomes) == {"a": "ok", "bad": "timeout" if fault == "hang" else "fault", "b": "ok"}
    assert [o.num_samples for o in outcomes if isinstance(o, Measurement)] == [SAMPLES] * 2


def test_one_that_fails_in_its_turn_costs_the_others_nothing(start: Start) -> None:
    session = start(
        {
            "a": Does(us=[1000.0]),
            "bad": Does(us=[1001.0], fault="launch", at_launch=12),
            "b": Does(us=[999.0]),
        }
    )
    outcomes = session.answer(Measure(ONE, of("a", "bad", "b")))
    assert by_name(outcomes) == {"a": "ok", "bad": "launch", "b": "ok"}


def test_a_turn_whose_time_can_be_none_is_taken_again(start: Start) -> None:
    session = start(
        {"a": Does(us=[1000.0], in_turn=[math.nan, 1000.0]), "b": Does(us=[1000.0], in_turn=[-1.0])}
    )
    outcomes = session.answer(Measure(ONE, of("a", "b")))
    assert by_name(outcomes) == {"a": "ok", "b": "timing"}
    assert outcomes[0].mean_us == 1000.0  # type: ignore[union-attr]


def test_one_that_runs_out_of_memory_in_its_turn_is_timed_again_with_all(start: Start) -> None:
    """Its time alone would be too fast beside those that were timed in turn."""
    never = {"a": Does(us=[1000.0], in_turn=[1100.0]), "b": Does(us=[1010.0], in_turn=[1090.0])}
    session = start({**never, "c": Does(us=[1020.0], in_turn=[1120.0], fault="oom", times=1, at_launch=12)})
    outcomes = session.answer(Measure(ONE, of("a", "b", "c")))
    assert [o.mean_us for o in outcomes if isinstance(o, Measurement)] == [1100.0, 1090.0, 1120.0]


def test_where_nobody_is_left_to_take_turns_nothing_is_waited_for(start: Start, told: list[str]) -> None:
    """A worker that waits in silence is taken for one that hangs."""
    limits = replace(QUICK, patience_s=60.0)
    session = start(
        {"a": Does(), "b": Does(us=[12.0])}, limits=limits, disturbances=[*[""] * 4, *["hot"] * 3]
    )
    session.answer(Measure(ONE, of("a", "b")))
    failing = Does(us=[1000.0], fault="launch", at_launch=9)
    assert by_name(session.answer(Finals(ONE, of("a", "b")))) == {"a": "ok", "b": "ok"}
    session.close()
    other = start({"a": failing, "b": failing}, limits=limits, disturbances=["", "", *["hot"] * 3])
    assert by_name(other.answer(Measure(ONE, of("a", "b")))) == {"a": "launch", "b": "launch"}
    assert not any("replaced" in line for line in told)


def test_what_disturbed_any_turn_is_told(start: Start) -> None:
    session = start({"a": Does(us=[1000.0]), "b": Does(us=[1000.0])}, disturbances=["", "", "", "hot", ""])
    outcomes = session.answer(Measure(ONE, of("a", "b")))
    assert [isinstance(one, Measurement) and one.disturbed for one in outcomes] == ["hot"] * 2


def test_a_turn_that_was_disturbed_is_taken_again(start: Start, folder: Path) -> None:
    limits = replace(QUICK, patience_s=2.0)
    session = start(
        {"a": Does(us=[1000.0], in_turn=[5000.0, 1000.0]), "b": Does(us=[1000.0])},
        limits=limits,
        disturbances=["", "", "throttled"],
    )
    session.answer(Measure(ONE, of("a", "b")))
    assert events(folder).count("sample a") == SAMPLES + 1


# Interruptions ----------------------------------------------------------------------------------------------


def test_an_interrupted_request_leaves_no_worker_to_the_next_request(
    start: Start, folder: Path, told: list[str]
) -> None:
    """Else the next request would be sent to a busy worker, and read what that one answers to the first."""
    session = start({"a": Does(fault="hang"), "c": Does()}, replace(QUICK, config_s=30.0))
    session.answer(Measure(ONE, of("c")))

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            session.answer(Measure(ONE, of("a")))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert by_name(session.answer(Measure(ONE, of("c")))) == {"c": "ok"}
    assert events(folder).count("start") == 2
    assert told == []  # no worker had to be replaced for its silence


# Wrong results are confirmed --------------------------------------------------------------------------------


def test_a_wrong_result_counts_only_when_a_fresh_worker_confirms_it(start: Start, folder: Path) -> None:
    session = start(
        {"a": Does(), "once": Does(wrong="out: 3 are wrong", wrong_times=1), "bad": Does(wrong="nan")}
    )
    stood: list[Reported] = []
    outcomes = session.answer(Measure(ONE, of("a", "once", "bad")), stood.append)
    assert by_name(outcomes) == {"a": "ok", "once": "ok", "bad": "verify"}
    assert [o.outcome.stage for o in stood if isinstance(o.outcome, Failure)] == ["verify"]
    assert events(folder).count("start") == 2  # both are checked in the same fresh worker
    assert events(folder).count("again once") == LAUNCHES  # one that is wrong now and then is found


def test_a_config_that_is_wrong_in_few_launches_is_not_forgiven(start: Start) -> None:
    flaky = Does(wrong="nan", wrong_times=1, wrong_again="nan")
    assert by_name(start({"flaky": flaky}).answer(Measure(ONE, of("flaky")))) == {"flaky": "verify"}


def test_a_config_confirmed_wrong_is_believed_to_be_on_other_problems(start: Start, folder: Path) -> None:
    session = start({"a": Does(), "bad": Does(wrong="nan")})
    for problem in (ONE, TWO, THREE):
        assert by_name(session.answer(Measure(problem, of("a", "bad")))) == {"a": "ok", "bad": "verify"}
    assert events(folder).count("start") == 2


@pytest.mark.parametrize("launch", [1, 6], ids=["verifying", "timing"])
def test_one_that_damages_the_check_is_blamed_and_innocents_are_not(start: Start, launch: int) -> None:
    culprit = Does(us=[1.0], fault="damage", at_launch=launch)
    session = start({"a": Does(), "culprit": culprit, "b": Does(), "c": Does()})
    outcomes = session.answer(Measure(ONE, of("a", "culprit", "b", "c")))
    assert by_name(outcomes) == {"a": "ok", "culprit": "verify", "b": "ok", "c": "ok"}
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].message == (
        "the kernel writes outside of its arguments: the expected out changed, seed 0"
    )


def test_one_that_damaged_the_check_before_has_no_second_try(start: Start, folder: Path) -> None:
    session = start({"a": Does(), "culprit": Does(fault="damage")})
    for problem in (ONE, TWO):
        assert by_name(session.answer(Measure(problem, of("culprit", "a")))) == {
            "culprit": "verify",
            "a": "ok",
        }
    assert events(folder).count("verify culprit") == 3


def test_a_wrong_result_remembered_from_a_journal_needs_no_confirmation(start: Start, folder: Path) -> None:
    fault_counts = FaultCounts(print)
    session = start({"a": Does(), "bad": Does(wrong="nan")}, fault_counts=fault_counts)
    fault_counts.remember(ONE, config("bad"), "verify")
    assert by_name(session.answer(Measure(TWO, of("a", "bad")))) == {"a": "ok", "bad": "verify"}
    assert events(folder).count("start") == 1


def test_one_that_damages_the_check_in_its_turn_is_found(start: Start) -> None:
    long = {name: Does(us=[1000.0]) for name in "abc"}
    culprit = Does(us=[1000.0], fault="damage", only_in="sample")
    outcomes = start({**long, "culprit": culprit}).answer(Measure(ONE, of("a", "culprit", "b", "c")))
    assert by_name(outcomes) == {"a": "ok", "culprit": "verify", "b": "ok", "c": "ok"}


def test_one_that_damages_the_check_once_is_forgiven(start: Start) -> None:
    session = start({"a": Does(), "once": Does(fault="damage", times=1), "b": Does()})
    assert by_name(session.answer(Measure(ONE, of("a", "once", "b")))) == {"a": "ok", "once": "ok", "b": "ok"}


def test_a_config_that_is_wrong_in_timed_launches_alone_cannot_win(start: Start) -> None:
    session = start({"a": Does(), "bad": Does(us=[1.0], wrong_timed="out: 64 are wrong")})
    outcomes = session.answer(Measure(ONE, of("a", "bad")))
    assert by_name(outcomes) == {"a": "ok", "bad": "verify"}
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].message == "out: 64 are wrong, after timed launches"
    assert by_name(session.answer(Finals(ONE, of("a", "bad")))) == {"a": "ok", "bad": "verify"}


@pytest.mark.parametrize("state", ["read", "written", "tight"])
def test_a_config_that_is_wrong_in_a_state_alone_has_no_time_there(
    start: Start, folder: Path, state: State
) -> None:
    session = start({"a": Does(), "bad": Does(us=[1.0], wrong_in={state: "out: 64 are wrong"})})
    assert by_name(session.answer(Measure(ONE, of("a", "bad")))) == {"a": "ok", "bad": "ok"}
    assert by_name(session.answer(TimeInState(ONE, of("a", "bad"), state=state))) == {
        "a": "ok",
        "bad": "verify",
    }
    compared = [line.split()[1] for line in events(folder) if line.startswith("compare")]
    assert compared == ["a", "bad", "bad"], "once each, and once to confirm it"


def test_a_config_that_is_wrong_under_load_alone_has_no_time(start: Start) -> None:
    wrong = Does(us=[1000.0], wrong_in={"load": "out: 64 are wrong"})
    session = start({"a": Does(us=[1010.0]), "bad": wrong, "b": Does(us=[1020.0])})
    outcomes = session.answer(Measure(ONE, of("a", "bad", "b")))
    assert by_name(outcomes) == {"a": "ok", "bad": "verify", "b": "ok"}
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].message == "out: 64 are wrong, under load, at launch 1 that is compared"
    assert by_name(session.answer(Finals(ONE, of("a", "b")))) == {"a": "ok", "b": "ok"}


def test_a_config_that_is_wrong_in_a_state_once_is_launched_many_times_there(
    start: Start, folder: Path
) -> None:
    session = start({"a": Does(wrong_in={"written": "out: 64 are wrong"}, wrong_times=1)})
    assert by_name(session.answer(TimeInState(ONE, of("a"), state="written"))) == {"a": "ok"}
    assert LEAST_LAUNCHES < events(folder).count("compare a written") <= 1 + LAUNCHES


@pytest.mark.parametrize("launch", [1, 6], ids=["verifying", "timing"])
def test_an_undeclared_mutation_names_the_config_that_ran_last(start: Start, launch: int) -> None:
    session = start({"a": Does(), "last": Does(fault="undeclared", at_launch=launch)})
    with pytest.raises(DeclarationError, match=r"argument weight \(the config that ran last: name=last\)"):
        session.answer(Measure(ONE, of("a", "last")))


# Winners are launched many times ----------------------------------------------------------------------------


def test_a_winner_is_launched_many_times_before_it_counts(start: Start, folder: Path) -> None:
    session = start({"a": Does(), "flaky": Does(wrong_again="out: 1 is wrong")})
    session.answer(Measure(ONE, of("a", "flaky")))
    (failure,) = session.answer(Recheck(ONE, of("a", "flaky")))
    assert (str(failure.config["name"]), failure.stage) == ("flaky", "verify")
    assert failure.message == "out: 1 is wrong, at launch 1 after a correct one"
    assert events(folder).count("again a") == LAUNCHES


def test_many_launches_that_take_long_are_fewer_and_no_hang(start: Start, folder: Path) -> None:
    session = start({"a": Does(seconds_again=0.02)})
    assert session.answer(Recheck(ONE, of("a"))) == []
    assert LEAST_LAUNCHES <= events(folder).count("again a") < LAUNCHES
    assert QUICK.config_s < 0.02 * LEAST_LAUNCHES


def test_a_recheck_launches_as_often_as_it_is_told(start: Start, folder: Path) -> None:
    start({"a": Does()}).answer(Recheck(ONE, of("a"), launches=0))
    assert events(folder).count("again a") == 0


# What a hang costs ------------------------------------------------------------------------------------------


FAST = replace(QUICK, config_s=30.0, least_s=0.5)


def with_cubins(*names: str) -> dict[Config, Path | None]:
    """The scripted backend reads none; a config without one may compile in the worker, which takes long."""
    return {config(name): Path("its.cubin") for name in names}


def test_a_hang_costs_what_its_neighbours_take_and_has_no_second_try(start: Start, folder: Path) -> None:
    session = start({name: Does() for name in "abcd"} | {"bad": Does(fault="hang")}, FAST)
    names = with_cubins("a", "b", "c", "bad", "d")
    outcomes = session.answer(Measure(ONE, names))
    assert by_name(outcomes) == {"a": "ok", "b": "ok", "c": "ok", "bad": "timeout", "d": "ok"}
    (hung,) = (one for one in outcomes if isinstance(one, Failure))
    allowed_s = float(hung.message.removesuffix(" s").rpartition(" within ")[2])
    assert allowed_s < FAST.config_s
    assert events(folder).count("verify bad") == 1
    session.answer(Measure(TWO, names))
    assert events(folder).count("verify bad") == 2
    assert by_name(session.answer(Measure(THREE, names)))["bad"] == "fault"  # excluded
    assert events(folder).count("verify bad") == 2


def test_a_slow_config_is_not_taken_for_a_hang(start: Start) -> None:
    """Neighbours take 0.6 s: twice that is allowed, however low the least limit is."""
    slow = {name: Does(seconds=0.6) for name in "abc"} | {"slower": Does(seconds=1.0)}
    outcomes = start(slow, FAST).answer(Measure(ONE, with_cubins("a", "b", "c", "slower")))
    assert set(by_name(outcomes).values()) == {"ok"}


def test_a_hang_not_much_longer_than_usual_has_a_second_try(start: Start, folder: Path) -> None:
    session = start({name: Does(seconds=0.1) for name in "abc"} | {"once": Does(fault="hang", times=1)}, FAST)
    assert by_name(session.answer(Measure(ONE, with_cubins("a", "b", "c", "once"))))["once"] == "ok"


def test_the_first_config_of_a_problem_has_the_whole_limit(start: Start) -> None:
    session = start({"a": Does(seconds=1.0)}, FAST)
    assert by_name(session.answer(Measure(ONE, with_cubins("a")))) == {"a": "ok"}


def test_a_config_that_compiles_in_the_worker_has_the_whole_limit(start: Start) -> None:
    session = start({**{name: Does() for name in "abc"}, "compiles": Does(seconds=1.5)}, FAST)
    assert by_name(session.answer(Measure(ONE, of("a", "b", "c", "compiles"))))["compiles"] == "ok"


def test_one_that_hung_before_runs_last_and_has_one_try(start: Start, folder: Path) -> None:
    session = start({"a": Does(), "b": Does(), "bad": Does(fault="hang")}, replace(FAST, config_s=2.0))
    names = with_cubins("bad", "a", "b")
    assert by_name(session.answer(Measure(ONE, names))) == {"bad": "timeout", "a": "ok", "b": "ok"}
    assert events(folder).count("verify bad") == 2  # nobody had told yet what is usual
    session.answer(Measure(TWO, names))
    ran = [line for line in events(folder) if line.startswith("verify")]
    assert ran[-3:] == ["verify a", "verify b", "verify bad"]
    assert ran.count("verify bad") == 3


# Provisional times, and going on ----------------------------------------------------------------------------


def test_each_time_is_reported_as_provisional_when_it_is_taken(start: Start) -> None:
    session = start({"a": Does(us=[1000.0], in_turn=[1100.0]), "b": Does(us=[1005.0], in_turn=[1090.0])})
    stood: list[Any] = []
    session.answer(Measure(ONE, of("a", "b")), lambda reported: stood.append(reported.outcome))
    assert [(str(one.config["name"]), one.mean_us, one.provisional) for one in stood] == [
        ("a", 1000.0, True),
        ("b", 1005.0, True),
        ("a", 1100.0, False),
        ("b", 1090.0, False),
    ]


def test_a_fault_throws_no_time_of_a_long_kernel_away(start: Start, folder: Path) -> None:
    long = {f"c{number}": Does(us=[1000.0 + number]) for number in range(10)}
    bad = {f"bad{number}": Does(us=[1000.0], fault="crash") for number in range(2)}
    names = [*list(long)[:5], "bad0", *list(long)[5:], "bad1"]
    outcomes = start({**long, **bad}).answer(Measure(ONE, of(*names)))
    assert [o.stage for o in outcomes if isinstance(o, Failure)] == ["fault", "fault"]
    log = events(folder)
    assert [log.count(f"verify {name}") for name in long] == [1] * 10
    assert sum(line.startswith("sample") for line in log) == 10 * SAMPLES


def test_times_of_an_earlier_run_are_not_taken_again(start: Start, folder: Path) -> None:
    session = start({"a": Does(us=[999.0], in_turn=[1100.0]), "b": Does(us=[1005.0], in_turn=[1090.0])})
    known = {
        config("a"): Measurement(
            config=config("a"), mean_us=1000.0, error_margin_us=0.1, num_samples=5, provisional=True
        )
    }
    a, b = session.answer(Measure(ONE, of("a", "b"), known=known))
    assert (a.mean_us, b.mean_us) == (1100.0, 1090.0)  # type: ignore[union-attr]
    assert not a.provisional  # type: ignore[union-attr]
    log = events(folder)
    assert (log.count("verify a"), log.count("time a"), log.count("verify b")) == (0, 0, 1)


def test_known_times_of_short_rivals_spare_long_ones_their_turns(start: Start, folder: Path) -> None:
    short = Measurement(config=config("short"), mean_us=10.0, error_margin_us=0.1, num_samples=5)
    session = start({"a": Does(us=[1000.0], in_turn=[1.0])})
    (a,) = session.answer(Measure(ONE, of("a"), known={config("short"): short}))
    assert a.mean_us == 1000.0  # type: ignore[union-attr]


@pytest.mark.parametrize("cut", [0, 1, 7, 2 * MOST_ROUNDS])
def test_finals_report_each_round_and_go_on_from_any_point(start: Start, folder: Path, cut: int) -> None:
    script = {"a": Does(us=[10.0, 10.2, 9.9, 10.1]), "b": Does(us=[10.3, 9.8, 10.2, 10.0])}
    seen: list[Any] = []
    session = start(script)
    whole = session.answer(Finals(ONE, of("a", "b")), seen.append)
    rounds = [number for number in range(MOST_ROUNDS) for _ in range(2)]
    assert [one.number for one in seen] == [*rounds, None, None]
    assert [one.outcome for one in seen[-2:]] == whole, "the medians come last"
    assert not any(one.outcome.provisional for one in seen)
    session.close()
    taken: dict[Config, list[Measurement]] = {}
    for one in seen[:cut]:
        taken.setdefault(one.outcome.config, []).append(one.outcome)
    for name in "ab":  # the backend goes on where it stopped, as a GPU that has not changed would
        (folder / f"rounds of {name}").write_bytes(b"." * len(taken.get(config(name), ())))
    more: list[Any] = []
    resumed = start(script).answer(Finals(ONE, of("a", "b"), taken=taken), more.append)
    assert resumed == whole
    assert seen[:cut] + more == seen


# Times too good to be true ----------------------------------------------------------------------------------


@pytest.mark.parametrize("us", [1e-9, 1e-320, 4.9])
def test_an_impossible_time_is_taken_again_and_one_that_stays_fails(start: Start, us: float) -> None:
    session = start({"once": Does(us=[us, 10.0]), "always": Does(us=[us])})
    outcomes = session.answer(Measure(ONE, of("once", "always"), least_us=5.0))
    assert by_name(outcomes) == {"once": "ok", "always": "timing"}
    assert outcomes[0].mean_us == 10.0  # type: ignore[union-attr]
    assert isinstance(outcomes[1], Failure)
    assert "less than 5 us is impossible" in outcomes[1].message


@pytest.mark.parametrize("factor", [0.8, 0.5, 1e-4])
def test_one_time_that_is_too_fast_leads_nobody_astray(start: Start, factor: float) -> None:
    session = start(
        {"glitch": Does(us=[12.0 * factor, 12.0, 12.0]), "best": Does(us=[10.0]), "b": Does(us=[10.1])}
    )
    glitch, best, _ = session.answer(Measure(ONE, of("glitch", "best", "b")))
    assert (glitch.mean_us, best.mean_us) == (12.0, 10.0)  # type: ignore[union-attr]


def test_a_leader_that_ties_with_the_next_is_not_timed_again(start: Start, folder: Path) -> None:
    start({"a": Does(us=[10.0]), "b": Does(us=[10.1])}).answer(Measure(ONE, of("a", "b")))
    assert (events(folder).count("time a"), events(folder).count("time b")) == (1, 1)


# What the worker says is not trusted ------------------------------------------------------------------------


def test_garbage_on_the_pipe_is_the_fault_of_the_config_that_ran(start: Start) -> None:
    session = start({"a": Does(), "bad": Does(fault="garbage"), "b": Does()}, replace(QUICK, config_s=5.0))
    outcomes = session.answer(Measure(ONE, of("a", "bad", "b")))
    assert by_name(outcomes) == {"a": "ok", "bad": "fault", "b": "ok"}
    assert isinstance(outcomes[1], Failure)
    assert "sent an invalid message" in outcomes[1].message


# Disturbances are carried -----------------------------------------------------------------------------------


def test_a_time_taken_beside_another_process_carries_it(start: Start) -> None:
    other = "another process on the GPU: 4711"
    session = start({"a": Does(), "b": Does(us=[10.1])}, disturbances=[other])
    a, b = session.answer(Measure(ONE, of("a", "b")))
    assert (a.disturbed, b.disturbed) == (other, None)  # type: ignore[union-attr]


def test_the_median_of_rounds_carries_what_disturbed_one_of_them(start: Start) -> None:
    session = start({"a": Does(), "b": Does(us=[12.0])}, disturbances=["", "hot"])
    a, b = session.answer(Finals(ONE, of("a", "b")))
    assert (a.disturbed, b.disturbed) == (None, "hot")  # type: ignore[union-attr]


def test_another_process_on_the_gpu_is_told_at_the_start(
    start: Start, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_state.GpuMonitor, "processes", lambda self: frozenset({4711, 12}))
    start({})
    (line,) = told
    assert line.startswith(
        "other processes compute on the GPU (12, 4711): times taken while they run are marked"
    )
