"""A sweep's results in its journal: found by place, cut where too long, and judged when they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from aot_tune.nvidia.cubin import Resources
from aot_tune.tuner.compile.job import Compiled, CompileFailure
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.sweep.journal import MOST_RECORD_BYTES, Journal
from aot_tune.tuner.sweep.results import (
    MESSAGE_BYTES,
    PASSES,
    TIMINGS,
    Listed,
    Pass,
    Step,
    SweepResults,
    Timing,
    accepts,
)
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import SPACE

IDENTITY = {"driver": "580.1"}
PROBLEM = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
ONE, OTHER = SPACE[0], SPACE[1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scale.jsonl"


class Opened:
    """The results of one run; a new one resumes the journal."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal.open(path, IDENTITY, accepts=accepts)
        self.results = SweepResults(self.journal)

    def __enter__(self) -> SweepResults:
        return self.results

    def __exit__(self, *_: object) -> None:
        self.journal.close()


def _time(us: float, config: Config = ONE, **values: Any) -> Measurement:
    return Measurement(config=config, mean_us=us, error_margin_us=0.1, num_samples=5, **values)


def _compiled(key: str, message: str) -> CompileFailure:
    return CompileFailure(key=key, message=message, seconds=1.0)


def test_each_result_is_found_by_its_place_alone(path: Path) -> None:
    wrong = Failure(config=OTHER, stage="verify", message="NaN")
    with Opened(path) as results:
        results.write("candidates", PROBLEM, _time(12.0, disturbed="throttling"), gpu="GPU-1")
        results.write("candidates", PROBLEM, wrong, gpu="GPU-1")
        results.write("candidate finals", PROBLEM, _time(11.0), 0, gpu="GPU-1")
        results.write("candidate finals", PROBLEM, _time(13.0), 1, gpu="GPU-1")
    with Opened(path) as results:
        assert results.outcome("candidates", PROBLEM, ONE) == _time(12.0, disturbed="throttling")
        assert results.outcome("candidates", PROBLEM, OTHER) == wrong
        assert results.outcome("portfolio", PROBLEM, ONE) is None
        assert results.outcome("candidate finals", PROBLEM, ONE) is None
        assert results.rounds("candidate finals", PROBLEM, ONE) == [_time(11.0), _time(13.0)]
        assert results.resumed == 3


def test_a_provisional_time_stands_aside_for_the_final_one(path: Path) -> None:
    with Opened(path) as results:
        results.write("candidates", PROBLEM, _time(12.0, provisional=True), gpu="GPU-1")
        assert results.outcome("candidates", PROBLEM, ONE) is None
        results.write("candidates", PROBLEM, _time(11.0), gpu="GPU-1")
    with Opened(path) as results:
        assert results.outcome("candidates", PROBLEM, ONE) == _time(11.0)
        assert results.provisional("candidates", PROBLEM, ONE) == _time(12.0, provisional=True)


def test_a_recheck_that_failed_is_not_taken_for_one_that_passed(path: Path) -> None:
    wrong = Failure(config=OTHER, stage="verify", message="a race")
    with Opened(path) as results:
        results.write_recheck(PROBLEM, ONE, None, gpu="GPU-1")
        results.write_recheck(PROBLEM, OTHER, wrong, gpu="GPU-1")
    with Opened(path) as results:
        assert results.is_rechecked(PROBLEM, ONE)
        assert results.recheck_failure(PROBLEM, ONE) is None
        assert results.recheck_failure(PROBLEM, OTHER) == wrong


def test_the_disk_keeps_a_failure_before_it_is_told_and_times_with_what_they_took(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    sync = Journal.sync
    monkeypatch.setattr(Journal, "sync", lambda journal: (kept.append(len(journal.records)), sync(journal)))
    wrong = Failure(config=OTHER, stage="verify", message="NaN")
    with Opened(path) as results:
        results.write("candidates", PROBLEM, _time(12.0), gpu="GPU-1")
        assert kept == []
        results.write("candidates", PROBLEM, wrong, gpu="GPU-1")
        results.write_compiled("candidates", PROBLEM, OTHER, _compiled("2", "no"), gpu="GPU-1")
        results.write_recheck(PROBLEM, OTHER, wrong, gpu="GPU-1")
        assert len(kept) == 3
        results.write_recheck(PROBLEM, ONE, None, gpu="GPU-1")
        assert len(kept) == 3
        results.write_spent("candidates", PROBLEM, measure_s=1.0, verify_s=0.5, conditions=[], gpu="GPU-1")
        assert len(kept) == 4


def test_each_record_says_its_gpu_and_its_place(path: Path) -> None:
    with Opened(path) as results:
        results.write("candidate finals", PROBLEM, _time(12.0), 4, gpu="GPU-1")
    record = json.loads(path.read_bytes().splitlines()[1].split(b" ", 3)[3])
    assert record["gpu"] == "GPU-1"
    assert (record["step"], record["problem"], record["round"]) == ("candidate finals", dict(PROBLEM), 4)
    assert record["config"] == ONE.document


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f600", "\x00", "\udc80"])
def test_a_message_is_cut_to_what_a_record_may_hold(path: Path, letter: str) -> None:
    long = Failure(config=ONE, stage="compile", message=letter * 10_000_000)
    with Opened(path) as results:
        results.write("candidates", PROBLEM, long, gpu="GPU-1")
    assert len(path.read_bytes()) < MESSAGE_BYTES + 1000 < MOST_RECORD_BYTES
    with Opened(path) as results:
        found: Outcome | None = results.outcome("candidates", PROBLEM, ONE)
        assert isinstance(found, Failure)
        assert found.message.endswith(" [cut]")
        assert found.message.startswith(letter * 300)


def test_a_compilation_that_was_killed_or_short_of_memory_is_tried_again(path: Path) -> None:
    messages = {
        "a": "the compiler was killed by SIGKILL.",
        "b": "std::bad_alloc",
        "c": "LLVM ERROR: out of memory",
        "d": "error: tile of 3 is no power of two",
        "e": "no answer within 120 s: killed",
    }
    compiled = Compiled(
        key="f",
        path=path,
        code="0123",
        resources=Resources(registers=8, stack_bytes=0, shared_bytes=0, threads=32),
        loop=None,
        seconds=1.0,
        cached=False,
    )
    with Opened(path) as results:
        for key, message in messages.items():
            results.write_compiled("candidates", PROBLEM, ONE, _compiled(key, message), gpu="GPU-1")
        results.write_compiled("candidates", PROBLEM, ONE, compiled, gpu="GPU-1")
        results.write_compiled("candidates", PROBLEM, ONE, compiled, gpu="GPU-1")
    assert len(path.read_bytes().splitlines()) == 1 + len(messages) + 1
    with Opened(path) as results:
        kept = {key: results.compile_failure(key) for key in (*messages, "f", "g")}
    assert {key for key, failure in kept.items() if failure} == {"d", "e"}


def test_the_time_spent_is_summed_over_runs(path: Path) -> None:
    states = [{"before": {"n": number}, "after": {}} for number in range(100)]
    for _ in range(2):
        with Opened(path) as results:
            results.write_spent(
                "candidates", PROBLEM, measure_s=2.0, verify_s=0.5, conditions=states, gpu="GPU-1"
            )
    with Opened(path) as results:
        assert (results.measure_s, results.verify_s) == (4.0, 1.0)


# Several GPUs -----------------------------------------------------------------------------------------------


def test_times_of_two_gpus_are_not_mixed_and_the_file_keeps_both(path: Path) -> None:
    def first(results: SweepResults) -> None:
        results.write("candidates", PROBLEM, _time(12.0), gpu="GPU-1")
        results.write("candidate finals", PROBLEM, _time(12.0), 0, gpu="GPU-1")
        results.write("portfolio", PROBLEM, _time(12.5), gpu="GPU-1")

    with Opened(path) as results:
        first(results)
        results.release("candidates", PROBLEM)
        assert results.owner("candidates", PROBLEM) is None
        results.write("candidates", PROBLEM, _time(20.0, OTHER), gpu="GPU-2")
    with Opened(path) as results:
        assert results.owner("candidate finals", PROBLEM) == "GPU-2"
        assert results.outcome("candidates", PROBLEM, ONE) is None
        assert results.rounds("candidate finals", PROBLEM, ONE) == []
        assert results.outcome("candidates", PROBLEM, OTHER) == _time(20.0, OTHER)
        assert results.owner("portfolio", PROBLEM) == "GPU-1", "another pass is another matter"
        assert results.outcome("portfolio", PROBLEM, ONE) == _time(12.5)
        assert len(results_of(path)) == 4


def test_a_wrong_result_counts_whichever_gpu_found_it(path: Path) -> None:
    wrong = Failure(config=ONE, stage="verify", message="NaN")
    hung = Failure(config=OTHER, stage="timeout", message="hung")
    with Opened(path) as results:
        results.write("candidates", PROBLEM, wrong, gpu="GPU-1")
        results.write("candidates", PROBLEM, hung, gpu="GPU-1")
        results.release("candidates", PROBLEM)
        results.write("candidates", PROBLEM, _time(20.0, SPACE[2]), gpu="GPU-2")
    with Opened(path) as results:
        assert results.outcome("candidates", PROBLEM, ONE) == wrong
        assert results.outcome("candidates", PROBLEM, OTHER) is None


def test_no_earlier_result_of_a_disowned_gpu_counts_and_later_ones_do(path: Path) -> None:
    wrong = Failure(config=ONE, stage="verify", message="NaN")
    other = PROBLEM.replaced(M=128)
    with Opened(path) as results:
        results.write("candidates", PROBLEM, wrong, gpu="GPU-1")
        results.write_recheck(PROBLEM, OTHER, wrong, gpu="GPU-1")
        results.write("candidates", other, _time(12.0), gpu="GPU-2")
        assert results.found_wrong(ONE) == ("candidates", PROBLEM, "GPU-1")
        results.write_disowned("candidates", PROBLEM, "it is wrong", gpu="GPU-1")
        results.write("candidates", PROBLEM, _time(20.0, OTHER), gpu="GPU-1")
    with Opened(path) as results:
        assert results.found_wrong(ONE) is None
        assert results.outcome("candidates", PROBLEM, ONE) is None
        assert not results.is_rechecked(PROBLEM, OTHER)
        assert results.outcome("candidates", PROBLEM, OTHER) == _time(20.0, OTHER)
        assert results.outcome("candidates", other, ONE) == _time(12.0)
        assert results.resumed == 2


def test_a_shortlist_is_found_where_the_candidates_are_the_same(path: Path) -> None:
    listed = Listed(configs=(OTHER, ONE), twins={SPACE[2]: ONE})
    with Opened(path) as results:
        results.write_listed(PROBLEM, SPACE, listed, exhaustive=False, gpu="GPU-1")
    with Opened(path) as results:
        assert results.listed(PROBLEM, SPACE, exhaustive=False) == listed
        assert results.listed(PROBLEM, SPACE, exhaustive=True) is None
        assert results.listed(PROBLEM, SPACE[1:], exhaustive=False) is None


def test_a_problem_that_could_not_be_opened_is_told_until_it_was(path: Path) -> None:
    with Opened(path) as results:
        results.write_unopened("candidates", PROBLEM, "no memory", gpu="GPU-1")
    with Opened(path) as results:
        assert results.unopened(PROBLEM) == "no memory"
        results.write("candidates", PROBLEM, _time(12.0), gpu="GPU-1")
        assert results.unopened(PROBLEM) is None


def test_every_step_times_something_and_is_of_a_pass_but_the_recheck() -> None:
    assert set(TIMINGS) == set(get_args(Step)) == {*PASSES, "recheck"}
    assert set(TIMINGS.values()) == set(get_args(Timing))
    assert set(PASSES.values()) == set(get_args(Pass))


def results_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()[1:]


GOOD: dict[str, Any] = {
    "kind": "result",
    "gpu": "GPU-1",
    "step": "candidates",
    "problem": {"M": 1},
    "config": {"constants": {"tile": 1}, "hints": {}},
    "round": None,
    "state": None,
    "mean_us": 1.0,
    "error_margin_us": 0.1,
    "num_samples": 5,
    "provisional": False,
    "disturbed": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "page"},
        {"step": "lunch"},
        {"state": "read"},
        {"step": "candidate states"},
        {"step": "candidate states", "state": "warm"},
        {"gpu": None},
        {"problem": {}},
        {"problem": [1]},
        {"problem": {"M": [1]}},
        {"config": None},
        {"config": {"constants": {"tile": [1]}}},
        {"config": {"constants": {}, "hints": {"warps": 1}}},
        {"config": {"constants": {}, "hints": {}, "colour": 1}},
        {"round": "1"},
        {"round": True},
        {"mean_us": "1"},
        {"mean_us": 0.0},
        {"mean_us": -1.0},
        {"mean_us": 10**400},
        {"num_samples": 0},
        {"provisional": 1},
        {"disturbed": 1},
        {"stage": "verify"},
        {"stage": "hunger", "message": "x"},
        {"stage": None},
        {"kind": "compile"},
        {"kind": "spent"},
    ],
)
def test_a_record_of_other_content_is_damage(path: Path, change: dict[str, Any]) -> None:
    assert accepts(GOOD)
    bad = {**GOOD, **change}
    assert not accepts(bad)
    with Journal.open(path, IDENTITY) as journal:
        journal.append(bad)
        journal.append(GOOD)
    with Journal.open(path, IDENTITY, accepts=accepts) as journal:
        assert journal.records == [GOOD]
        assert journal.damage is not None
