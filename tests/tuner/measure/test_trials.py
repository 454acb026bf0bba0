"""What a worker may say, message by message: whatever it says, trials end with outcomes and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aot_tune.tuner.measure.blame import FaultCounts, Pace
from aot_tune.tuner.measure.request import Measure
from aot_tune.tuner.measure.supervise import Limits, ProblemFailedError
from aot_tune.tuner.measure.trials import TrialRun
from aot_tune.tuner.measure.worker.backend import Done, Running
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Measurement
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

PROBLEM = Problem({"M": 16})
A, B = (Config(constants={"name": name}) for name in "ab")
STATES = [GpuState(), GpuState()]


def time_of(config: Config) -> Measurement:
    return Measurement(config=config, mean_us=10.0, error_margin_us=0.1, num_samples=5)


class Supervised:
    """A supervisor whose workers say what a test tells them to, one list of messages for each request."""

    unused = False

    def __init__(self, *requests: tuple[list[object], object]) -> None:
        self.requests = list(requests)
        self.replaced: list[str] = []
        self.discarded: list[str] = []

    def ready(self, problem: Problem, seeds: tuple[int, ...]) -> Supervised:
        return self

    def check(self) -> None:
        pass

    def request(
        self, method: str, payload: object, timeout_s: object, heard: Callable[[object], None]
    ) -> object:
        messages, answer = self.requests.pop(0)
        for message in messages:
            heard(message)
        return answer

    def worked(self) -> None:
        pass

    def replace(self, reason: str) -> None:
        self.replaced.append(reason)

    def discard(self, problem: Problem, reason: str) -> None:
        self.discarded.append(reason)
        if len(self.discarded) == 3:
            raise ProblemFailedError(problem, reason)


def run(supervised: Any, *configs: Config) -> dict[Config, Any]:
    trials = TrialRun(Measure(PROBLEM, dict.fromkeys(configs)), FaultCounts(lambda line: None), Pace())
    while trials.pending:
        trials.attempt(supervised, Limits())
    return trials.outcomes


RIGHT = ([Running(config=A), Done(outcome=time_of(A))], STATES)


@pytest.mark.parametrize(
    "messages",
    [
        [Running(config=A), "text"],
        [Running(config=A), None],
        [Running(config=A), Running(config=B)],  # which was not asked for
        [Running(config=A), Done(outcome=time_of(B))],
        [Running(config=A), Done(outcome=Failure(config=B, stage="memory", message=""))],
        [Running(config=A), STATES],
    ],
)
def test_what_it_should_not_say_is_a_fault_of_the_config_that_runs(messages: list[object]) -> None:
    assert run(Supervised((messages, STATES), RIGHT), A) == {A: time_of(A)}  # forgiven once
    outcome = run(Supervised((messages, STATES), (messages, STATES)), A)[A]
    assert isinstance(outcome, Failure)
    assert outcome.stage == "fault"
    assert outcome.message.startswith("unexpected message from the worker: ")


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([Done(outcome=time_of(A))], STATES),  # before it runs
        ([Running(config=B)], STATES),
        ([], STATES),  # an answer before anything ran: it would be asked again for ever
        ([], "text"),
    ],
)
def test_nonsense_while_nothing_runs_is_the_problems_failure(messages: list[object], answer: object) -> None:
    supervised = Supervised(*[(messages, answer)] * 3)
    with pytest.raises(ProblemFailedError):
        run(supervised, A)


@pytest.mark.parametrize("answer", ["text", [], [GpuState()], [GpuState(), 1], {}])
def test_an_answer_that_is_no_two_states_costs_the_worker_and_no_outcome(answer: object) -> None:
    supervised = Supervised((RIGHT[0], answer))
    assert run(supervised, A) == {A: time_of(A)}
    assert len(supervised.discarded) == 1
