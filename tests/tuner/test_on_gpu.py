"""A1, A2, A5, A6 with kernels that are really broken, on a real GPU; this process gets no CUDA context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import DeclarationError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tables.states import State
from aot_tune.tunable import Tunable
from aot_tune.tuner.choose.states import LONG_US
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.request import Finals, Measure, Recheck, TimeInState
from aot_tune.tuner.measure.rounds import LEAST_ROUNDS
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.supervise import Limits
from aot_tune.tuner.measure.worker.gpu_state import GpuMonitor
from aot_tune.tuner.measure.worker.runner import MOST_STATE_SAMPLES, SAMPLES, STATE_SAMPLES
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import broken_kernels as broken
from tests.support.shipped import FOUND

pytestmark = pytest.mark.gpu

SMALL, LARGE, HUGE = (Problem({"n": n}) for n in (1 << 16, 1 << 20, 1 << 29))
QUICK = Limits(config_s=8.0, patience_s=5.0)
"""A compilation in the worker, where a test gives no cubin, takes up to 1 s."""

Start = Callable[..., MeasureSession]


@pytest.fixture
def start() -> Iterator[Start]:
    sessions: list[MeasureSession] = []

    def started(tunable: Tunable, on_event: Callable[[str], None] = print) -> MeasureSession:
        own = FoundKernel(module="tests.support.broken_kernels", tunable=tunable)
        found = FOUND.get(tunable.name, own)
        sessions.append(MeasureSession(found, 0, QUICK, on_event=on_event))
        return sessions[-1]

    yield started
    for session in sessions:
        session.close()
    assert not torch.cuda.is_initialized(), "the tuner's own process must stay free of CUDA"


def modes(*values: int) -> dict[Config, Path | None]:
    return {broken.config(mode): None for mode in values}


def by_mode(outcomes: list[Outcome]) -> dict[int, str]:
    return {int(o.config["mode"]): o.stage if isinstance(o, Failure) else "ok" for o in outcomes}


def compiled(config: Config, problem: Problem, folder: Path) -> Path:
    tunable = broken.add_one
    signature = cutile.signature_of(
        tunable.kernel, tunable.args_fn(config, *tunable.make_args(problem, torch.device("meta"), 0))
    )
    arch = (visible_gpus() or ())[0].arch
    assert arch is not None
    path = folder / f"{'-'.join(str(config).split())}.cubin"
    path.write_bytes(cutile.compile_cubin(tunable.kernel, config.hints, signature, arch))
    return path


def test_an_illegal_access_is_blamed_on_its_config_which_is_struck(start: Start) -> None:
    session = start(broken.add_one)
    right_again = broken.config(broken.RIGHT, occupancy=2)
    configs = {**modes(broken.RIGHT, broken.FAULTS), right_again: None}
    for problem in (SMALL, LARGE):
        first, bad, last = session.answer(Measure(problem, configs))
        assert isinstance(first, Measurement)
        assert isinstance(last, Measurement)
        assert isinstance(bad, Failure)
        assert bad.stage == "fault"
        print(bad.message)
    (excluded,) = session.answer(Measure(HUGE, modes(broken.FAULTS)))
    assert isinstance(excluded, Failure)
    assert excluded.message.startswith("excluded: it faulted on ")


def test_a_kernel_that_never_ends_is_killed_and_the_sweep_goes_on(start: Start) -> None:
    session = start(broken.add_one)
    began = time.monotonic()
    right_again = broken.config(broken.RIGHT, occupancy=2)
    outcomes = session.answer(Measure(SMALL, {**modes(broken.HANGS), right_again: None}))
    assert [o.stage if isinstance(o, Failure) else "ok" for o in outcomes] == ["timeout", "ok"]
    print(f"two time-outs of {QUICK.config_s} s and three starts: {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < 90


def test_wrong_results_cannot_win(start: Start) -> None:
    outcomes = start(broken.add_one).answer(
        Measure(SMALL, modes(broken.PARTIAL, broken.RIGHT, broken.NOTHING, broken.NAN))
    )
    assert by_mode(outcomes) == {
        broken.PARTIAL: "verify", broken.RIGHT: "ok", broken.NOTHING: "verify", broken.NAN: "verify",
    }  # fmt: skip
    partial = outcomes[0]
    assert isinstance(partial, Failure)
    assert partial.message.startswith(f"out: {broken.TILE} of 65536 elements are wrong, first out[0] is nan")


def test_a_winner_passes_its_second_check_in_a_fresh_process(start: Start) -> None:
    session = start(broken.add_one)
    session.answer(Measure(SMALL, modes(broken.RIGHT)))
    assert session.answer(Recheck(SMALL, modes(broken.RIGHT))) == []
    (failure,) = session.answer(Recheck(LARGE, modes(broken.PARTIAL)))
    assert failure.stage == "verify"


def test_a_write_beside_the_arguments_is_blamed_on_its_config_alone(start: Start) -> None:
    """What lies there, an expected value or a saved copy, is what later configs would be judged by."""
    session = start(broken.add_one)
    right_again = broken.config(broken.RIGHT, occupancy=2)
    outcomes = session.answer(Measure(SMALL, {**modes(broken.RIGHT, broken.BESIDE), right_again: None}))
    assert [o.stage if isinstance(o, Failure) else "ok" for o in outcomes] == ["ok", "verify", "ok"]
    assert isinstance(outcomes[1], Failure)
    print(outcomes[1].message)
    assert session.answer(Recheck(SMALL, modes(broken.RIGHT))) == []


def test_a_problem_is_opened_right_after_a_worker_was_killed(start: Start) -> None:
    """The killed worker held most of the memory, which is not free at once."""
    events: list[str] = []
    session = start(broken.add_one, on_event=events.append)
    for _ in range(3):
        outcomes = session.answer(Measure(HUGE, modes(broken.RIGHT)))
        assert by_mode(outcomes) == {broken.RIGHT: "ok"}
        session._supervisor.replace("for this test")
    print(events)


def test_the_many_launches_of_a_winner_take_a_fraction_of_a_second(start: Start) -> None:
    session = start(broken.add_one)
    session.answer(Recheck(LARGE, modes(broken.RIGHT)))  # the start and the compilation are not counted
    for problem in (SMALL, LARGE, HUGE):
        session.answer(Recheck(problem, modes(broken.RIGHT), launches=0))
        began = time.monotonic()
        assert session.answer(Recheck(problem, modes(broken.RIGHT))) == []
        seconds = time.monotonic() - began
        print(f"{problem}: {seconds:.2f} s")
        if problem != HUGE:
            assert seconds < 1.0


def test_an_undeclared_mutation_is_a_hard_error_that_names_the_argument(start: Start) -> None:
    with pytest.raises(DeclarationError, match="changes its argument x, which the declaration does not name"):
        start(broken.undeclared).answer(Measure(SMALL, modes(broken.RIGHT)))


def test_an_in_place_kernel_gets_fresh_inputs_for_each_trial(start: Start) -> None:
    session = start(broken.in_place)
    (outcome,) = session.answer(Measure(SMALL, modes(broken.RIGHT)))
    assert isinstance(outcome, Measurement)
    (again,) = session.answer(
        Measure(SMALL, modes(broken.RIGHT))
    )  # after ten launches and more on the same tensors
    assert isinstance(again, Measurement)


def test_one_process_measures_two_kernels_in_turn(start: Start) -> None:
    replaced: list[str] = []
    session = start(broken.add_one, replaced.append)
    for tunable in (broken.in_place, broken.add_one):
        (outcome,) = session.answer(Measure(SMALL, modes(broken.RIGHT)))
        assert isinstance(outcome, Measurement)
        own = FoundKernel(module="tests.support.broken_kernels", tunable=tunable)
        found = FOUND.get(tunable.name, own)
        session.turn_to(found, FaultCounts(replaced.append))
    assert by_mode(session.answer(Measure(SMALL, modes(broken.RIGHT)))) == {broken.RIGHT: "ok"}
    assert replaced == []


def test_the_process_that_forks_workers_is_not_on_the_gpu(start: Start) -> None:
    session = start(broken.add_one)
    monitor = GpuMonitor(session.identity()["uuid"])
    session.answer(Measure(SMALL, modes(broken.RIGHT)))
    before = monitor.processes()
    assert len(before) == 1
    assert session.answer(Recheck(SMALL, modes(broken.RIGHT))) == []
    assert len(monitor.processes()) == 1


def test_a_cubin_compiled_elsewhere_is_what_runs(start: Start, tmp_path: Path) -> None:
    session, config = start(broken.add_one), broken.config(broken.RIGHT)
    good = compiled(config, SMALL, tmp_path)
    (outcome,) = session.answer(Measure(SMALL, {config: good}))
    assert isinstance(outcome, Measurement)
    # One that has the right name inside and nothing else cannot be loaded: had cuTile compiled, it would run.
    other = broken.config(broken.RIGHT, occupancy=2)
    damaged = tmp_path / "damaged.cubin"
    whole = compiled(other, SMALL, tmp_path).read_bytes()
    damaged.write_bytes(b"\x7fNOT" + whole[4:])
    (failed,) = session.answer(Measure(SMALL, {other: damaged}))
    assert isinstance(failed, Failure)
    assert failed.stage == "launch"


def test_finals_tell_the_order_and_the_conditions(start: Start) -> None:
    session = start(broken.add_one)
    configs = {broken.config(broken.RIGHT, occupancy): None for occupancy in (1, 2, 4)}
    session.answer(Measure(LARGE, configs))
    outcomes = session.answer(Finals(LARGE, configs))
    for outcome in outcomes:
        assert isinstance(outcome, Measurement)
        assert outcome.num_samples >= 15
        print(f"{outcome.config}: {outcome.mean_us:.2f} us ± {outcome.error_margin_us:.2f}")
    conditions = session.spent.conditions[-1]
    print(conditions.before, conditions.after, session.identity(), session.device())
    assert conditions.after.sm_clock_mhz


def test_what_takes_long_is_timed_launch_by_launch_in_turn(start: Start) -> None:
    session = start(broken.add_one)
    configs = {broken.config(broken.RIGHT, occupancy): None for occupancy in (1, 2)}
    measured = session.answer(Measure(HUGE, configs))
    finals = session.answer(Finals(HUGE, configs))
    for first, final in zip(measured, finals, strict=True):
        assert isinstance(first, Measurement)
        assert isinstance(final, Measurement)
        assert first.num_samples == SAMPLES
        assert final.num_samples >= LEAST_ROUNDS * SAMPLES
        # 4 GiB are read and written: no GPU does it in 200 us, and in turn takes what it takes alone.
        assert first.mean_us > LONG_US
        assert abs(final.mean_us / first.mean_us - 1) < 0.1


def test_what_the_cache_holds_changes_a_memory_bound_kernel_and_is_over_afterwards(start: Start) -> None:
    """On an H200 this table's configs take 11 % less with their data in the cache, 17 % more after writes."""
    sizes = {"tokens": 2549, "heads": 32, "kv_heads": 8, "head_dim": 128, "rotary_dim": 128}
    problem = Problem({"dtype": "bfloat16", "interleaved": True, **sizes})
    tunable, arch = FOUND["rope"].tunable, (visible_gpus() or ())[0].arch
    assert arch is not None
    session, configs = start(tunable), {tunable.default_config(arch, problem): None}
    [before] = session.answer(Measure(problem, configs))
    times: dict[str, list[float]] = {}
    states: tuple[State, ...] = ("read", "written", "tight", "read")
    for state in states:
        [one] = session.answer(TimeInState(problem, configs, state=state))
        assert isinstance(one, Measurement)
        assert one.num_samples in range(STATE_SAMPLES, MOST_STATE_SAMPLES + 1, STATE_SAMPLES)
        print(f"{state}: {one.mean_us:.2f} us ± {one.error_margin_us:.2f}")
        times.setdefault(state, []).append(one.mean_us)
    first, again = times["read"]
    assert times["tight"][0] < 0.98 * first, "its data is in the cache"
    assert times["written"][0] > 1.05 * first, "what is there must go to memory first"
    assert abs(again / first - 1) < 0.1
    [after] = session.answer(Measure(problem, configs))
    assert isinstance(before, Measurement)
    assert isinstance(after, Measurement)
    assert abs(after.mean_us / before.mean_us - 1) < 0.1


def test_thirty_candidates_with_cubins_take_at_most_a_second_and_a_half(start: Start, tmp_path: Path) -> None:
    session = start(broken.add_one)
    configs: dict[Config, Path | None] = {
        broken.config(broken.RIGHT, occupancy): compiled(
            broken.config(broken.RIGHT, occupancy), LARGE, tmp_path
        )
        for occupancy in range(1, 31)
    }
    session.answer(Measure(LARGE, modes(broken.RIGHT)))  # the worker's start is not counted
    began = time.monotonic()
    outcomes = session.answer(Measure(LARGE, configs))
    seconds = time.monotonic() - began
    print(f"30 candidates: {seconds:.2f} s, {session.spent.verify_s:.2f} s of it verifying")
    assert all(isinstance(outcome, Measurement) for outcome in outcomes)
    assert seconds < 1.5
