"""The shipped kernels on the launch path: each is followed, so that its launches cost one look-up; whatever
size a launch has in a declared bucket, what `aot-tune compile` makes serves it without a compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aot_tune
from aot_tune import environment
from aot_tune.cubins.size_classes import ODD_SEED
from aot_tune.errors import CubinWarning, MissWarning, TableWarning
from aot_tune.kernels import TUNABLES, attention_decode_tunable, matmul_fp8_tunable
from aot_tune.nvidia import cutile
from aot_tune.serve import rank
from aot_tune.serve.launch.dispatch import Dispatcher
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Pow2
from aot_tune.values.problem import Problem
from tests.support.driver import Driver
from tests.support.shipped import SHIPPED, with_cubins

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _not_primed() -> Iterator[None]:
    yield
    rank.set_primed(False)


def test_no_first_launch_reads_source_for_what_a_shipped_kernel_writes() -> None:
    assert [tunable.name for tunable in SHIPPED if tunable.outputs is None] == []


@pytest.mark.process
@pytest.mark.parametrize("tunable", SHIPPED, ids=lambda tunable: tunable.name)
def test_a_shipped_kernel_is_launched_from_the_memo_without_asking_its_declaration(
    tunable: Tunable, driver: Driver
) -> None:
    dispatcher = Dispatcher(tunable)  # of our own: the declaration's is shared with other tests
    args = tunable.make_args(tunable.typical_problems[0], "meta", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissWarning)
        dispatcher.launch(*args)
    assert dispatcher._pattern is not None
    assert dispatcher._pattern.layout is not None
    # By its value only what is one of few: an eps or a scale would make a plan of each.
    assert not any(isinstance(args[at], float) for at, what in dispatcher._pattern.reads if what == "value")
    assert len(dispatcher._memo) == 1
    dispatcher._plans.clear()
    dispatcher.launch(*args)
    assert dispatcher._plans == {}
    first, second = driver.launches
    assert first == second


@pytest.mark.process
def test_every_shipped_kernel_is_primed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aot_tune.serve.prime.for_all_posed", lambda device: contextlib.nullcontext())

    def on_meta(tunable: Tunable) -> Tunable:
        return dataclasses.replace(
            tunable, make_args=lambda problem, device, seed: tunable.make_args(problem, "meta", seed)
        )

    shipped = [on_meta(tunable) for tunable in TUNABLES]
    primed = set()
    done = aot_tune.prime(
        *shipped,
        problems={tunable.name: [tunable.typical_problems[0]] for tunable in shipped},
        progress=lambda progress: primed.add(progress.kernel),
    )
    assert done.plans == len(shipped) == 16
    assert primed == {tunable.name for tunable in shipped}


# Without a compiler -----------------------------------------------------------------------------------------


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is not in an archive cannot be launched, or by the weakest cubin, which is told and an error."""
    monkeypatch.setattr(cutile, "may_have_compiler", lambda: False)
    monkeypatch.setenv(environment.DISABLE, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # of a kernel that was changed and not swept yet
        warnings.simplefilter("ignore", MissWarning)
        warnings.simplefilter("error", CubinWarning)
        yield


def inside(bucket: Problem, tunable: Tunable, below: Callable[[int], int]) -> Problem:
    """A problem of a bucket, so much below its edges."""
    pow2 = [name for name, axis in tunable.axes.items() if isinstance(axis, Pow2)]
    return bucket.replaced(**{name: bucket.size(name) - below(bucket.size(name)) for name in pow2})


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize(
    "tunable",
    [
        one if one.name in ("matmul", "softmax", "rope") else pytest.param(one, marks=pytest.mark.slow)
        for one in SHIPPED
    ],
    ids=lambda one: one.name,
)
def test_any_size_in_a_declared_bucket_launches_without_a_compiler(
    tunable: Tunable, driver: Driver, tmp_path: Path
) -> None:
    served, draw = with_cubins(tunable, tmp_path / "tables"), random.Random(tunable.name)
    for bucket in draw.sample(served.buckets, 12):
        for problem in (
            bucket,
            *(inside(bucket, served, lambda edge: draw.randrange(edge // 2 or 1)) for _ in "abcd"),
        ):
            served.launch(*served.make_args(problem, "meta", 0))
    assert len(driver.launches) == 60


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize(
    "tunable",
    [
        one if one.name in ("linear", "rms_norm") else pytest.param(one, marks=pytest.mark.slow)
        for one in SHIPPED
    ],
    ids=lambda one: one.name,
)
def test_every_declared_shape_launches_without_a_compiler(
    tunable: Tunable, driver: Driver, tmp_path: Path
) -> None:
    served = with_cubins(tunable, tmp_path / "tables")
    for problem in served.typical_problems:
        for seed in (0, ODD_SEED):
            served.launch(*served.make_args(problem, "meta", seed))
    assert len(driver.launches) == 2 * len(served.typical_problems)


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize(
    "tunable",
    [pytest.param(attention_decode_tunable, marks=pytest.mark.slow), matmul_fp8_tunable],
    ids=lambda one: one.name,
)
def test_one_config_for_every_batch_launches_without_a_compiler(
    tunable: Tunable, driver: Driver, tmp_path: Path
) -> None:
    """Of these kernels it is a default that no table holds, or one that was not timed at every size."""
    few = [dict(problem) for problem in tunable.typical_problems[::5]]
    served = dataclasses.replace(with_cubins(tunable, tmp_path / "tables"), typical=few)
    for problem in served.typical_problems:
        served.launch(*served.make_args(problem, "meta", 0), batch_invariant=True)
    assert len(driver.launches) == len(served.typical_problems)


WIDTHS_LESS = (0, 1, 2, 3, 4, 6, 8, 12)


@pytest.mark.usefixtures("_no_compiler")
def test_block_tables_of_any_width_launch_without_a_compiler(driver: Driver, tmp_path: Path) -> None:
    served = with_cubins(attention_decode_tunable, tmp_path / "tables")
    declared = [
        problem
        for problem in served.typical_problems
        if not problem["windowed"]
        and problem.size("context") > 2 * max(WIDTHS_LESS) * problem.size("page_size")
    ][::4]
    for problem in declared:
        for less in WIDTHS_LESS:
            shorter = problem.size("context") - less * problem.size("page_size")
            args = served.make_args(problem.replaced(context=shorter), "meta", 0)
            assert args[3].shape[1] == problem.size("context") // problem.size("page_size") - less
            served.launch(*args)
    assert len(driver.launches) == len(declared) * len(WIDTHS_LESS)


@pytest.mark.usefixtures("_no_compiler")
def test_after_prime_block_tables_of_any_width_load_nothing(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The memory in which blocks meet is apart from this, and the stand-in has none.
    monkeypatch.setattr("aot_tune.serve.prime.for_all_posed", lambda device: contextlib.nullcontext())
    few = [problem for problem in attention_decode_tunable.typical_problems if problem["context"] == 2048][
        2:4
    ]
    primed = dataclasses.replace(
        with_cubins(attention_decode_tunable, tmp_path / "tables"),
        typical=[dict(problem) for problem in few],
        make_args=lambda problem, device, seed: attention_decode_tunable.make_args(problem, "meta", seed),
    )
    done = aot_tune.prime(primed)
    loaded = len(driver.compiled)
    assert done.compiled == 0 < done.loaded == loaded
    for problem in few:
        for less in WIDTHS_LESS:
            primed.launch(*primed.make_args(problem.replaced(context=2048 - 16 * less), "meta", 0))
    assert len(driver.compiled) == loaded
    assert len(driver.launches) == loaded + len(few) * len(WIDTHS_LESS)
