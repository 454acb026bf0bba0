"""Launching whole through the stand-in driver: real signatures, real compiling, recorded grids."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import sqlite3
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
import torch
from torch.autograd import forward_ad

from aot_tune import environment
from aot_tune.declare.checks import declaration_problems
from aot_tune.errors import (
    CompilerMissingError,
    DeclarationError,
    LaunchError,
    MissError,
    MissWarning,
    TableWarning,
    UsageError,
)
from aot_tune.nvidia import cutile
from aot_tune.serve import loader
from aot_tune.serve.launch import dispatch, messages
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.serve.runtime import TorchRuntime
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.driver import Driver, FakeTensor, ForeignArray, stream_on
from tests.support.samples import DEFAULT, SM90, SPACE, equally_fast, loading_more, scale, scale_table, write
from tests.support.wide_samples import double, row_sum, scale_each, table_of

AT_64, AT_256 = scale_table().portfolio
OTHER = next(c for c in SPACE if c not in (AT_64, AT_256, DEFAULT))
Launched = Callable[[], list[tuple[int, ...]]]


def tensors(
    rows: int, cols: int = 1024, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, cols, dtype=dtype, device="meta"), torch.empty(
        rows, cols, dtype=dtype, device="meta"
    )


@pytest.fixture
def tuned(driver: Driver, tmp_path: Path) -> Tunable:
    """The sample with its table: the default at M=1, its two portfolio configs at M=64 and 256."""
    write(tmp_path, scale_table())
    return dataclasses.replace(scale, tables=tmp_path)


def blocks(rows: int, cols: int, config: Config) -> tuple[int, int, int]:
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    return -(-rows // tile_m), -(-cols // tile_n), 1


def counted(tunable: Tunable, **changes: Any) -> tuple[Tunable, list[str]]:
    """A copy that notes each call of its functions."""
    calls: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name == "problem":

            def problem(source: Any, target: Any) -> Any:
                calls.append(name)
                return function(source, target)

            return problem

        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    names = ("problem", "grid_fn", "args_fn", "legal")
    copy = dataclasses.replace(tunable, **{n: noting(n, changes.get(n, getattr(tunable, n))) for n in names})
    calls.clear()
    return copy, calls


# What is launched ------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(("rows", "winner"), [(1, DEFAULT), (64, AT_64), (256, AT_256)])
def test_a_tuned_problem_launches_its_entry_s_config(
    tuned: Tunable, launched: Launched, rows: int, winner: Config
) -> None:
    tuned.launch(*tensors(rows))
    assert launched() == [blocks(rows, 1024, winner)]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")  # its grid is other source
@pytest.mark.parametrize("says", ["grid_fn", "fits", "fits, without a word"])
def test_a_config_that_this_gpu_is_too_small_for_is_passed_over_and_so_is_such_a_default(
    says: str, tuned: Tunable, launched: Launched
) -> None:
    too_large: set[Config] = set()

    def grid(config: Config, device: Any, problem: Problem) -> tuple[int, ...]:
        if config in too_large:
            raise LaunchError(f"{config} needs more than {device.sm_count} multiprocessors")
        return tuned.grid_fn(config, device, problem)

    def fits(config: Config, device: Any, problem: Problem) -> bool | str:
        reason = f"{config} needs more than {device.sm_count} multiprocessors"
        return config not in too_large or (reason if says == "fits" else False)

    small = dataclasses.replace(tuned, **({"grid_fn": grid} if says == "grid_fn" else {"fits": fits}))
    message = "fits.. refuses it" if says.endswith("word") else "needs more than 132 multiprocessors"
    too_large.add(AT_64)
    small.launch(*tensors(64))
    [first] = launched()
    assert first != blocks(64, 1024, AT_64)
    too_large.update(SPACE)
    too_large.discard(OTHER)
    small.launch(*tensors(63))  # the default, too, is too large
    assert launched() == [blocks(63, 1024, OTHER)]
    too_large.add(OTHER)
    with pytest.raises(LaunchError, match=message):
        small.launch(*tensors(62))
    with pytest.raises(LaunchError, match=message):
        small.launch(*tensors(64), config=AT_64)


@pytest.mark.process
def test_a_winner_that_is_no_longer_legal_is_warned_of_once(tuned: Tunable, launched: Launched) -> None:
    changed = dataclasses.replace(tuned, legal=lambda config, arch, problem: config != AT_64 or "too wide")
    with pytest.warns(
        TableWarning, match=r"its table's winner, .* may not run: too wide; .* tune again"
    ) as told:
        changed.launch(*tensors(64))
    assert len(told) == 1
    assert launched()[0] != blocks(64, 1024, AT_64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed.launch(*tensors(64))
        changed.launch(*tensors(256))


@pytest.mark.process
def test_a_winner_that_no_space_holds_any_more_is_warned_of_when_it_is_read(
    tuned: Tunable, launched: Launched
) -> None:
    def space(arch: Arch, problem: Problem) -> list[Config]:
        return [config for config in tuned.search_space(arch, problem) if config != AT_64]

    with pytest.warns(TableWarning, match="1 config in no search space of scale, left out") as told:
        changed = dataclasses.replace(tuned, search_space=space)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed.launch(*tensors(64))
        changed.launch(*tensors(256))
    assert launched()[0] != blocks(64, 1024, AT_64)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")  # what counts the calls is other source
@pytest.mark.parametrize("config", [None, OTHER], ids=["chosen", "given"])
def test_the_second_launch_of_a_shape_calls_nothing_of_the_declaration(
    config: Config | None, tuned: Tunable, launched: Launched
) -> None:
    tunable, calls = counted(tuned)
    tunable.launch(*tensors(64), config=config)
    assert calls
    calls.clear()
    tunable.launch(*tensors(64), config=config)
    assert calls == []
    grids = launched()
    assert len(grids) == 2
    assert grids[0] == grids[1]


@pytest.mark.process
def test_a_given_config_is_launched_and_not_taken_for_other_calls(tuned: Tunable, launched: Launched) -> None:
    for config, runs in ((OTHER, OTHER), (None, AT_64), (AT_256, AT_256), (OTHER, OTHER), (None, AT_64)):
        tuned.launch(*tensors(64), config=config)
        assert launched() == [blocks(64, 1024, runs)]


def test_a_given_config_that_is_not_legal_is_refused(tuned: Tunable, launched: Launched) -> None:
    illegal = Config(constants={"tile_m": 64, "tile_n": 128}, hints={"occupancy": 1, "num_ctas": 1})
    with pytest.raises(LaunchError, match="64 x 128 does not fit"):
        tuned.launch(*tensors(64), config=illegal)
    assert launched() == []


def test_a_given_config_with_other_constants_is_refused_by_name(tuned: Tunable) -> None:
    with pytest.raises(LaunchError, match=r"has the constants tile_k; .* tile_m tile_n"):
        tuned.launch(*tensors(64), config=Config(constants={"tile_k": 64}))


@pytest.mark.process
def test_more_arguments_than_it_takes_are_refused(tuned: Tunable, launched: Launched) -> None:
    message = r"launch takes source, target, and config= .* pass an aot_tune\.Config, not 64"
    for _ in range(2):
        with pytest.raises(LaunchError, match=message):
            tuned.launch(*tensors(64), 64)
        with pytest.raises(LaunchError, match=message):
            tuned.launch(*tensors(64), config=64)  # type: ignore[arg-type]  # that is what is tested
        with pytest.raises(LaunchError, match="not a Tensor"):
            tuned.launch(*tensors(64), torch.zeros(1))
        tuned.launch(*tensors(64))
    assert launched() == [blocks(64, 1024, AT_64)] * 2


@pytest.mark.process
def test_the_default_is_launched_where_the_environment_asks_for_it(
    tuned: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.CONFIG, "default")
    tuned.launch(*tensors(256))
    assert launched() == [blocks(256, 1024, DEFAULT)]


@pytest.fixture
def batched(tuned: Tunable) -> Tunable:
    """The tuned sample with a batch: AT_256 costs the least over every batch."""
    return dataclasses.replace(tuned, batch_axes=("M",))


@pytest.mark.process
def test_the_environment_gives_every_batch_one_config(
    batched: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.BATCH_INVARIANT, "1")
    for rows in (1, 64, 256):
        batched.launch(*tensors(rows))
        batched.launch(*tensors(rows))
        assert batched.config_for(*tensors(rows)) == AT_256
    assert launched() == [blocks(rows, 1024, AT_256) for rows in (1, 1, 64, 64, 256, 256)]


@pytest.mark.process
def test_a_call_may_ask_for_one_config_or_not_whatever_the_environment_says(
    batched: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked in ("", "1"):
        monkeypatch.setenv(environment.BATCH_INVARIANT, asked)
        for rows in (64, 256, 64):
            batched.launch(*tensors(rows), batch_invariant=True)
            batched.launch(*tensors(rows), batch_invariant=False)
            assert batched.config_for(*tensors(rows), batch_invariant=True) == AT_256
        assert batched.config_for(*tensors(64), batch_invariant=False) == AT_64
        batched.launch(*tensors(64), config=OTHER, batch_invariant=True)
    one, tuned_there = blocks(64, 1024, AT_256), blocks(64, 1024, AT_64)
    own = [one, tuned_there, *[blocks(256, 1024, AT_256)] * 2, one, tuned_there, blocks(64, 1024, OTHER)]
    assert launched() == own * 2


@pytest.mark.process
def test_a_call_that_says_so_asks_the_declaration_once_for_a_shape(
    batched: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched.launch(*tensors(64), batch_invariant=True)
    monkeypatch.setattr(dispatch, "follow_problem", lambda *args: pytest.fail("the slow path was taken"))
    batched.launch(*tensors(64), batch_invariant=True)
    assert launched() == [blocks(64, 1024, AT_256)] * 2


@pytest.mark.process
def test_a_declaration_without_a_batch_cannot_be_asked_for_one_config(
    tuned: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match="scale: batch_invariant=True, but its declaration has no batch_ax"):
        tuned.launch(*tensors(64), batch_invariant=True)
    monkeypatch.setenv(environment.BATCH_INVARIANT, "1")
    tuned.launch(*tensors(64))
    assert launched() == [blocks(64, 1024, AT_64)]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")
def test_no_search_is_made_for_one_config(
    batched: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.BATCH_INVARIANT, "1")
    monkeypatch.setattr(dispatch.Dispatcher, "_search", property(lambda self: pytest.fail("it was asked")))
    batched.launch(*tensors(64, 65536))
    assert launched() == [blocks(64, 65536, AT_256)]


def test_without_a_compiler_one_config_is_not_replaced_by_the_default(
    batched: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*args: Any) -> None:
        raise CompilerMissingError("no compiler")

    monkeypatch.setattr(dispatch.cutile, "launching", lambda: no_compiler)
    with pytest.raises(CompilerMissingError):
        batched.launch(*tensors(64), batch_invariant=True)


@pytest.mark.process
def test_b20_the_first_miss_of_a_rank_says_what_made_it_one(
    tuned: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_RANK_REPORTED", [])
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    for rows, count in ((4096, 1), (16384, 0)):
        with pytest.warns(MissWarning) as caught:
            tuned.launch(*tensors(rows))
        assert str(caught[0].message).count("this process is a rank by SLURM_STEP_NUM_TASKS=16, and") == count


def test_a_size_of_zero_is_not_launched(tuned: Tunable, launched: Launched) -> None:
    tuned.launch(*tensors(0))
    tuned.launch(*tensors(0))
    row_sum.launch(torch.empty(0, 0, device="meta"), torch.empty(0, device="meta"), None)
    assert launched() == []


@ct.kernel
def _sums_kernel(a, b, c, tile: ct.Constant[int]):
    m, n = ct.bid(0), ct.bid(1)
    total = ct.zeros((tile, tile), ct.float32)
    for k in range(ct.cdiv(a.shape[1], tile)):
        total = ct.mma(ct.load(a, (m, k), (tile, tile)), ct.load(b, (k, n), (tile, tile)), total)
    ct.store(c, (m, n), total.astype(c.dtype))


def test_a_sum_of_nothing_is_refused_by_its_axis_and_no_output_is_left_as_it_was(
    driver: Driver, launched: Launched, tmp_path: Path
) -> None:
    product = Tunable(
        name="product",
        package="tests",
        tables=tmp_path,
        kernel=_sums_kernel,
        axes={"M": Pow2(), "N": Exact(), "K": Exact()},
        problem=lambda a, b, c: {"dtype": a.dtype, "M": a.shape[0], "N": b.shape[1], "K": a.shape[1]},
        search_space=[Config(constants={"tile": 32}, hints={})],
        grid_fn=lambda config, device, problem: (-(-problem.M // 32), -(-problem.N // 32)),
        args_fn=lambda config, a, b, c: (a, b, c, config["tile"]),
        make_args=lambda problem, device, seed: (),
        reference=lambda a, b, c: a @ b,
        typical=[{"dtype": "bfloat16", "M": 32, "N": 64, "K": 64}],
    )
    a, b, c = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((32, 0), (0, 64), (32, 64))
    )
    for call in (product.launch, product.config_for):
        with pytest.raises(
            LaunchError, match=r"product.launch: the size of K is 0, .* c\.zero_\(\), without"
        ):
            call(a, b, c)
    with pytest.raises(LaunchError, match="the size of cols is 0, so nothing is summed, but out is not"):
        row_sum.launch(torch.empty(64, 0, device="meta"), torch.empty(64, device="meta"), None)
    product.launch(a[:0], b, c[:0])
    assert launched() == []


@pytest.mark.process
def test_arguments_may_be_given_by_name(tuned: Tunable, launched: Launched) -> None:
    source, target = tensors(64)
    tuned.launch(target=target, source=source)
    assert launched() == [blocks(64, 1024, AT_64)]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")
def test_a_declaration_that_nobody_holds_is_freed_and_its_kernels_are_kept(
    tuned: Tunable, launched: Launched
) -> None:
    """The process aborts when a launched kernel is collected during a capture."""
    declared, kernels = [], []
    for number in range(100):
        tunable = dataclasses.replace(tuned)
        if number < 2:
            tunable.launch(*tensors(64))
            tunable.launch(*tensors(3000))
        kernels.append(weakref.ref(dispatcher_of(tunable).kernels.of(AT_64)))
        declared.append(weakref.ref(tunable))
    launch = tunable.launch
    del tunable
    gc.collect()
    assert [number for number, one in enumerate(declared) if one() is not None] == [99]
    launch(*tensors(64))
    del launch
    gc.collect()
    assert [one() for one in declared] == [None] * 100
    assert None not in [one() for one in kernels]
    assert len(launched()) == 5


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
def test_a_launch_function_taken_before_the_first_call_is_the_fast_one_afterwards(
    tuned: Tunable, launched: Launched
) -> None:
    tunable, calls = counted(tuned)
    launch = tunable.launch
    launch(*tensors(64))
    calls.clear()
    launch(*tensors(64))
    assert calls == []
    assert len(launched()) == 2


# Keys: B13 -------------------------------------------------------------------------------------------------


@ct.kernel
def _shift_kernel(source, target, by, tile_n: ct.Constant[int]):
    block = ct.bid(0)
    ct.store(target, (block,), ct.load(source, (block,), (tile_n,)) + by)


def shift(driver: Driver, **changes: Any) -> tuple[Tunable, list[Problem]]:
    """A kernel with a scalar; the problems that its search space was asked about."""
    asked: list[Problem] = []

    def default(arch: object, problem: Problem) -> Config:
        asked.append(problem)
        return Config(constants={"tile_n": 64})

    declared: dict[str, Any] = {
        "name": "shift",
        "package": "tests",
        "kernel": _shift_kernel,
        "axes": {"N": Exact()},
        "problem": lambda source, target, by: {"dtype": source.dtype, "N": source.shape[0]},
        "search_space": lambda arch, problem: [Config(constants={"tile_n": 64})],
        "default": default,
        "grid_fn": lambda config, device, problem: (-(-problem.size("N") // 64),),
        "args_fn": lambda config, source, target, by: (source, target, by, config["tile_n"]),
        "make_args": scale.make_args,
        "reference": scale.reference,
        "outputs": ("target",),
        "typical": [{"dtype": "float32", "N": 64}],
        "tables": Path("/nonexistent/tuned_configs"),
    }
    tunable = Tunable(**{**declared, **changes})
    dispatcher_of(tunable).load(SM90)
    asked.clear()
    return tunable, asked


def vector(size: int, stride: int = 1) -> torch.Tensor:
    return torch.empty(size * stride, device="meta")[::stride]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissWarning)
        yield


@pytest.mark.process
def test_a_scalar_that_is_only_passed_on_is_not_in_the_key(driver: Driver, launched: Launched) -> None:
    tunable, asked = shift(driver)
    for by in (1.0, 2.0, 3.0):
        tunable.launch(vector(64), vector(64), by)
    assert len(asked) == 1
    assert len(dispatcher_of(tunable)._memo) == 1
    assert len(launched()) == 3


@pytest.mark.process
def test_b13_a_scalar_that_the_problem_reads_is_in_the_key(driver: Driver) -> None:
    """B13: a key too coarse would launch by=1.0 with the plan of by=-1.0."""
    tunable, asked = shift(
        driver,
        problem=lambda source, target, by: {"dtype": source.dtype, "N": source.shape[0], "up": by > 0},
        typical=[{"dtype": "float32", "N": 64, "up": True}],
    )
    for by in (1.0, -1.0, 1.0, -1.0):
        tunable.launch(vector(64), vector(64), by)
    assert [problem["up"] for problem in asked] == [True, False]


@pytest.mark.process
def test_b13_strides_are_in_the_key_of_a_problem_that_asks_for_the_layout(driver: Driver) -> None:
    """B13: strides and layout."""
    tunable, asked = shift(
        driver,
        problem=lambda source, target, by: {"N": source.shape[0], "dense": source.is_contiguous()},
        typical=[{"N": 64, "dense": True}],
    )
    for stride in (1, 2, 1, 2):
        tunable.launch(vector(64, stride), vector(64), 1.0)
    assert [problem["dense"] for problem in asked] == [True, False]


@pytest.mark.process
def test_b13_strides_that_nothing_reads_share_a_plan_and_cutile_tells_them_apart(driver: Driver) -> None:
    """B13: the alignment class is in cuTile's own key, so two strides are two compilations of one plan."""
    tunable, asked = shift(driver)
    tunable.launch(vector(64), vector(64), 1.0)
    tunable.launch(vector(64, 3), vector(64), 1.0)
    assert len(asked) == 1
    assert len(set(driver.compiled)) == 2


@pytest.mark.process
def test_b13_what_a_later_path_reads_grows_the_key_and_keeps_old_plans_out(driver: Driver) -> None:
    """B13: the second argument's size is read only for large first ones; both branches stay right."""

    def problem(source: Any, target: Any, by: float) -> dict[str, object]:
        size = source.shape[0]
        return {"N": size, "other": str(target.shape[0] if size > 100 else 0)}

    tunable, asked = shift(driver, problem=problem, axes={"N": Exact()}, typical=[{"N": 64, "other": "0"}])
    for size, other in [(64, 64), (64, 128), (256, 64), (256, 128), (256, 64), (64, 256)]:
        tunable.launch(vector(size), vector(other), 1.0)
    assert [(p["N"], p["other"]) for p in asked] == [(64, "0"), (256, "64"), (256, "128")]


@pytest.mark.process
def test_b13_a_problem_that_cannot_be_followed_is_asked_at_each_launch(
    driver: Driver, launched: Launched
) -> None:
    """B13: an address is nothing a key can be made of beforehand."""
    asked_at: list[int] = []

    def problem(source: Any, target: Any, by: float) -> dict[str, object]:
        asked_at.append(1)
        return {"N": source.shape[0], "aligned": source.data_ptr() % 16 == 0}

    tunable, _ = shift(driver, problem=problem, typical=[{"N": 64, "aligned": True}])
    tunable.launch(vector(64), vector(64), 1.0)
    seen = len(asked_at)
    tunable.launch(vector(64), vector(64), 1.0)
    assert len(asked_at) > seen
    assert len(launched()) == 2


@pytest.mark.process
def test_constants_that_args_fn_reads_from_shapes_follow_the_shape(driver: Driver) -> None:
    @ct.kernel
    def kernel(source, target, by, tile_n: ct.Constant[int]):  # type: ignore[no-untyped-def]
        ct.store(target, (0,), ct.load(source, (0,), (tile_n,)) + by)

    tunable, _ = shift(
        driver,
        kernel=kernel,
        problem=lambda source, target, by: {"dtype": source.dtype, "N": 64},
        args_fn=lambda config, source, target, by: (source, target, target.shape[0], config["tile_n"]),
    )
    seen: list[tuple[Any, ...]] = []
    for size in (64, 128, 64, 128):
        tunable.launch(vector(64), vector(size), 1.0)
    tunable.launch.__globals__["ct_launch"] = lambda *args: seen.append(args[3])
    for size in (64, 128):
        tunable.launch(vector(64), vector(size), 1.0)
    assert [args[2] for args in seen] == [64, 128]


@pytest.mark.process
def test_a_scalar_that_args_fn_computes_with_is_computed_at_each_launch(driver: Driver) -> None:
    tunable, _ = shift(
        driver, args_fn=lambda config, source, target, by: (source, target, by * 2, config["tile_n"])
    )
    tunable.launch(vector(64), vector(64), 1.0)
    seen: list[tuple[Any, ...]] = []
    tunable.launch.__globals__["ct_launch"] = lambda *args: seen.append(args[3])
    tunable.launch(vector(64), vector(64), 2.0)
    tunable.launch(vector(64), vector(64), 3.0)
    assert [args[2] for args in seen] == [4.0, 6.0]


@pytest.mark.process
def test_an_argument_may_be_a_tensor_in_one_call_and_none_in_the_next(
    driver: Driver, launched: Launched
) -> None:
    tunable, asked = shift(
        driver,
        problem=lambda source, target, by: {"N": source.shape[0], "biased": by is not None},
        args_fn=lambda config, source, target, by: (source, target, 1.0, config["tile_n"]),
        typical=[{"N": 64, "biased": True}],
    )
    for by in (None, vector(64), None, vector(64)):
        tunable.launch(vector(64), vector(64), by)
    assert [problem["biased"] for problem in asked] == [False, True]
    assert len(launched()) == 4


# Bad arguments ---------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    pass


@pytest.mark.process
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.as_subclass(Wrapped), r"argument source is a .*Wrapped.*\.as_subclass\(torch\.Tensor\)"),
        (
            lambda x: torch.empty(x.shape, dtype=x.dtype),
            r"argument source is on device cpu; pass a CUDA tensor",
        ),
        (
            lambda x: x.to(torch.float32).numel() and __import__("numpy").zeros((64, 1024)),
            r"source is a numpy.ndarray that torch cannot view",
        ),
    ],
    ids=["subclass", "cpu", "numpy"],
)
def test_an_argument_that_cannot_be_launched_is_named(
    tuned: Tunable, launched: Launched, spoil: Callable[[torch.Tensor], Any], message: str, warm: bool
) -> None:
    source, target = tensors(64)
    if warm:
        tuned.launch(source, target)
    launched()
    with pytest.raises(LaunchError, match=message):
        tuned.launch(spoil(source), target)
    assert launched() == []


@pytest.mark.process
@pytest.mark.parametrize("warm", [False, True])
def test_a_tensor_that_requires_grad_is_refused_while_grad_is_enabled(
    tuned: Tunable, launched: Launched, driver: Driver, warm: bool
) -> None:
    source, target = tensors(64)
    if warm:
        tuned.launch(source, target)
    driver.runtime.grad = True
    with pytest.raises(LaunchError, match=r"argument source requires grad.*torch\.no_grad\(\)"):
        tuned.launch(source.requires_grad_(), target)
    driver.runtime.grad = False
    launched()
    tuned.launch(source, target)
    assert len(launched()) == 1


@pytest.mark.process
def test_a_parameter_is_launched_like_a_tensor(tuned: Tunable, launched: Launched) -> None:
    source, target = tensors(64)
    tuned.launch(torch.nn.Parameter(source), target)
    assert launched() == [blocks(64, 1024, AT_64)]


@pytest.mark.process
def test_an_expanded_output_is_refused_where_launches_are_watched(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ct.launch
    watcher = {cutile.PASSED_ON: True, "own": own}
    exec("def launch(*args):\n return own(*args)", watcher)
    monkeypatch.setattr(ct, "launch", watcher["launch"])
    watched = dataclasses.replace(tuned)
    source, target = tensors(64)
    watched.launch(source, target)
    with pytest.raises(LaunchError, match="is an expanded view"):
        watched.launch(source, target[:1].expand(64, 1024))
    watched.launch(source, target)
    assert len(driver.launches) == 2


@pytest.mark.process
@pytest.mark.parametrize("warm", ["not launched", "launched", "launched with an expanded source"])
def test_an_expanded_output_is_refused_at_each_call(
    warm: str, tuned: Tunable, launched: Launched, driver: Driver
) -> None:
    source, target = tensors(64)
    expanded = torch.empty(1, 1024, dtype=torch.bfloat16, device="meta").expand(64, 1024)
    if warm == "launched":
        tuned.launch(source, target)
    elif warm != "not launched":
        tuned.launch(expanded, target)
        tuned.launch(expanded, target)
    loaded, count = len(driver.compiled), len(launched())
    for _ in range(2):
        with pytest.raises(
            LaunchError, match="argument target is written by the kernel and is an expanded view"
        ):
            tuned.launch(source, expanded)
    assert (launched(), len(driver.compiled)) == ([], loaded)
    for given in (source, expanded):
        tuned.launch(given, target)
    assert len(launched()) == 2
    assert count == {"not launched": 0, "launched": 1}.get(warm, 2)


@pytest.mark.process
def test_an_expanded_output_is_refused_beside_one_with_a_harmless_stride_of_zero(
    tuned: Tunable, launched: Launched
) -> None:
    source, target = tensors(1)
    harmless, expanded = (
        torch.empty_strided((1, 1024), strides, dtype=torch.bfloat16, device="meta")
        for strides in ((0, 16), (0, 0))  # both have the same signature
    )
    for written in (target, harmless, harmless, target):
        tuned.launch(source, written)
    assert len(launched()) == 4
    with pytest.raises(LaunchError, match="is an expanded view"):
        tuned.launch(source, expanded)
    assert launched() == []


@pytest.mark.process
def test_an_untested_cutile_s_plans_are_keyed_by_the_strides_of_what_is_written(
    tuned: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aot_tune.nvidia.cutile.private_names_known", lambda: False)
    source, target = tensors(64)
    fresh = dataclasses.replace(tuned)
    fresh.launch(source, target)
    with pytest.raises(LaunchError, match="is an expanded view"):
        fresh.launch(source, torch.empty(1, 1024, dtype=torch.bfloat16, device="meta").expand(64, 1024))
    assert len(launched()) == 1


def test_a_tensor_without_memory_is_refused(tuned: Tunable, driver: Driver, launched: Launched) -> None:
    source, target = tensors(64)
    driver.runtime.freed.add(id(target))
    with pytest.raises(LaunchError, match=r"argument target has no memory: .* torch\.zeros_like\(target\)"):
        tuned.launch(source, target)
    assert launched() == []


def test_a_dual_tensor_of_forward_mode_is_refused(tuned: Tunable, launched: Launched) -> None:
    source, target = tensors(64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(source, torch.empty_like(source))
        with pytest.raises(LaunchError, match="argument source is a dual tensor of forward-mode autograd"):
            tuned.launch(dual, target)
    assert launched() == []


def test_torch_says_which_tensors_have_neither_memory_nor_a_tangent() -> None:
    here = TorchRuntime()
    zero, freed, empty = torch._efficientzerotensor((3,)), torch.ones(3), torch.empty(0)
    freed.untyped_storage().resize_(0)
    assert [here.has_memory(one) for one in (torch.ones(3), empty, zero, freed)] == [True, True, False, False]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        assert [here.has_tangent(one) for one in (dual, torch.ones(3))] == [True, False]
    assert not here.has_tangent(torch.ones(3))


@pytest.mark.process
@pytest.mark.parametrize("stderr", ["none", "closed", "full", "broken pipe"])
def test_a_choice_that_cannot_be_logged_is_launched(
    stderr: str, tuned: Tunable, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.LOG, "1")
    reading, writing = os.pipe()
    os.close(reading)
    descriptor = os.open("/dev/full", os.O_WRONLY) if stderr == "full" else os.dup(writing)
    os.close(writing)
    file = None if stderr == "none" else os.fdopen(descriptor, "w", buffering=1)
    if stderr == "closed":
        with suppress(OSError):
            file.close()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", file)
        for _ in range(2):
            tuned.launch(*tensors(64))
            tuned.launch(*tensors(100))
    with suppress(OSError):
        os.close(descriptor) if file is None else file.close()
    assert len(launched()) == 4
    assert len(dispatcher_of(tuned)._memo) == 2


def test_a_missing_argument_is_python_s_own_error(tuned: Tunable) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'target'"):
        tuned.launch(tensors(64)[0])


@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
def test_a_grid_that_is_no_grid_is_refused(tuned: Tunable) -> None:
    wrong = dataclasses.replace(tuned, grid_fn=lambda config, device, problem: (int(problem.M == 1), 1))
    with pytest.raises(LaunchError, match=r"grid_fn gives \(0, 1\).*ints of 1 or more"):
        wrong.launch(*tensors(64))


@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
@pytest.mark.parametrize("grid", [(2**24,), (1, 2**16), (1, 1, 2**16)])
def test_a_grid_that_cannot_be_launched_is_refused(tuned: Tunable, grid: tuple[int, ...]) -> None:
    large = dataclasses.replace(tuned, grid_fn=lambda config, device, problem: grid)
    with pytest.raises(LaunchError, match=r"takes a grid of .* at most; pass fewer rows or sequences per"):
        large.launch(*tensors(64))


@pytest.mark.parametrize(
    ("name", "value"),
    [(environment.SEARCH_SECONDS, "abc"), (environment.RANKED, "yes"), (environment.CONFIG, "x")],
)
def test_a_variable_that_means_nothing_is_told_at_the_first_launch(
    name: str, value: str, tuned: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name}='{value}': write"):
        tuned.launch(*tensors(64))  # of which its table has an entry


# Devices and threads ---------------------------------------------------------------------------------------


@pytest.mark.process
def test_tensors_of_a_device_that_is_not_current_enter_it_on_the_default_stream(
    tuned: Tunable, driver: Driver
) -> None:
    driver.devices = 2
    for _ in range(3):  # the slow path once, then the memo
        for device in (1, 0):
            tuned.launch(*(FakeTensor((64, 1024), torch.float32, device) for _ in range(2)))
    assert [one.device for one in driver.launches] == [1, 0] * 3


@pytest.mark.process
def test_a_stream_of_the_other_device_needs_no_entering(tuned: Tunable, driver: Driver) -> None:
    driver.devices = 2
    driver.runtime.streams[1] = stream_on(1)
    for _ in range(2):
        tuned.launch(*(FakeTensor((64, 1024), torch.float32, 1) for _ in range(2)))
    assert [(one.device, one.stream) for one in driver.launches] == [(1, stream_on(1))] * 2
    assert driver.runtime.entries == []


@pytest.mark.process
def test_tensors_of_two_devices_are_refused_also_after_a_good_launch(tuned: Tunable, driver: Driver) -> None:
    driver.devices = 2
    one, other = (FakeTensor((64, 1024), torch.float32, device) for device in (0, 1))
    tuned.launch(one, one)
    with pytest.raises(LaunchError, match="argument target is on cuda:1, argument source on cuda:0"):
        tuned.launch(one, other)


@pytest.mark.process
def test_many_threads_launch_and_resolve_at_once(tuned: Tunable, driver: Driver) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work() -> None:
        try:
            start.wait()
            for _ in range(5):
                for rows in range(16, 176, 16):
                    tuned.launch(*tensors(rows))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(driver.launches) == 8 * 5 * 10


# Misses ----------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_miss_is_warned_of_once_with_the_command_that_tunes_it(tuned: Tunable) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tuned.launch(*tensors(4096))
            tuned.launch(*tensors(4096), config=DEFAULT)
    messages = [str(one.message) for one in caught if one.category is MissWarning]
    assert len(messages) == 1
    assert (
        "aot-tune tune scale --arch sm90 --module tests.support.samples "
        "--problem dtype=bfloat16,M=4096,N=1024" in messages[0]
    )
    assert f"on sm90 in {tuned.tables}; took" in messages[0]
    assert caught[0].filename == __file__


@pytest.mark.process
def test_a_server_may_have_a_miss_raise_and_have_its_problem_written(
    tuned: Tunable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Driver
) -> None:
    monkeypatch.setenv(environment.ON_MISS, "error")
    monkeypatch.setenv(environment.RECORD, str(tmp_path / "missed"))
    tuned.launch(*tensors(64))
    for _ in range(2):
        with pytest.raises(MissError, match="AOT_TUNE_ON_MISS=error"):
            tuned.launch(*tensors(4096))
    assert len(driver.launches) == 1
    (line,) = (tmp_path / f"missed.{os.getpid()}").read_text().splitlines()
    assert json.loads(line) == {
        "kernel": "scale",
        "arch": "sm90",
        "problem": {"dtype": "bfloat16", "M": 4096, "N": 1024},
    }
    assert dispatcher_of(tuned).choice(SM90, Problem(json.loads(line)["problem"])).source == "far"


@pytest.mark.process
def test_b12_thousands_of_new_shapes_keep_the_memos_and_the_warnings_bounded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B12: a full memo forgets its older half and goes on; the 33rd miss is the last that is warned of."""
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 64)
    tunable, asked = shift(driver)
    dispatcher = dispatcher_of(tunable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(1, 1001):
            tunable.launch(vector(size * 16), vector(16), 1.0)
            assert len(dispatcher._memo) <= 64
            assert len(dispatcher._plans) <= 64
    assert len(asked) == 1000
    assert sum(one.category is MissWarning for one in caught) == 33
    assert "further ones are printed only with AOT_TUNE_LOG=1" in str(caught[-1].message)


@pytest.mark.process
def test_each_choice_and_its_reason_is_printed_where_asked(
    tuned: Tunable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(environment.LOG, "1")
    tuned.launch(*tensors(64))
    tuned.launch(*tensors(64))
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "scale dtype=bfloat16 M=64 N=1024 on sm90: tile_m=32" in told.err
    assert "(own: bucket" in told.err


# Capture: B9 -----------------------------------------------------------------------------------------------


@pytest.mark.process
def test_b9_a_miss_during_capture_takes_the_nearest_loaded_config_without_searching(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B9: no search, no compile; the stream sees one launch."""
    monkeypatch.setenv(environment.SEARCH_SECONDS, "1000")
    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", lambda *args, **options: pytest.fail("searched"))
    tuned.launch(*tensors(256))  # loads 64x64 for this signature
    driver.capturing = True
    tuned.launch(*tensors(4096))
    assert driver.launches[-1].grid == blocks(4096, 1024, AT_256)
    assert len(driver.compiled) == 1


@pytest.mark.process
def test_b9_what_would_be_compiled_during_capture_is_refused_before_the_stream_is_touched(
    tuned: Tunable, driver: Driver
) -> None:
    """B9: not even the fallback is loaded."""
    driver.capturing = True
    with pytest.raises(
        LaunchError, match=r"scale would be loaded during graph capture.*aot_tune\.prime\(\.\.\.\)"
    ):
        tuned.launch(*tensors(64))
    assert driver.launches == []
    driver.capturing = False
    tuned.launch(*tensors(64))
    assert len(driver.launches) == 1


# Tables ----------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_tables_of_another_arch_are_never_read(
    driver: Driver, launched: Launched, tmp_path: Path
) -> None:
    """B3: other arch."""
    write(tmp_path, scale_table()).rename(tmp_path / "sm90" / "kept.json")
    other = tmp_path / "sm100"
    other.mkdir()
    (tmp_path / "sm90" / "kept.json").rename(other / "scale.json")
    tunable = dataclasses.replace(scale, tables=tmp_path)
    tunable.launch(*tensors(256))
    assert launched() == [blocks(256, 1024, DEFAULT)]


@pytest.mark.process
def test_a_table_of_other_source_is_used_with_one_warning(
    driver: Driver, launched: Launched, tmp_path: Path
) -> None:
    write(tmp_path, dataclasses.replace(scale_table(), source_hash="0123456789abcdef"))
    tunable = dataclasses.replace(scale, tables=tmp_path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tunable.launch(*tensors(64))
        tunable.launch(*tensors(256))
    assert [one.category for one in seen] == [TableWarning]
    assert "was tuned for other source of scale (0123456789abcdef, now " in str(seen[0].message)
    assert launched() == [blocks(64, 1024, AT_64), blocks(256, 1024, AT_256)]


@pytest.mark.process
@pytest.mark.parametrize("here", ["99.9.9", None])
def test_a_table_of_another_compilers_code_is_used_with_one_warning(
    driver: Driver, launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str | None
) -> None:
    monkeypatch.setattr("aot_tune.nvidia.cutile.packaged_compiler", lambda: here)
    monkeypatch.setattr("aot_tune.nvidia.cutile.may_have_compiler", lambda: True)
    write(tmp_path, scale_table())
    tunable = dataclasses.replace(scale, tables=tmp_path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tunable.launch(*tensors(64))
        tunable.launch(*tensors(256))
    said = [str(one.message) for one in seen if one.category is TableWarning]
    assert len(said) == (0 if here is None else 1), "a compiler that nobody knows is not told to be another"
    assert all(
        "that tileiras 13.4.92 compiled, and scale runs code of tileiras 99.9.9 here" in one for one in said
    )
    assert launched() == [blocks(64, 1024, AT_64), blocks(256, 1024, AT_256)]


@pytest.mark.process
@pytest.mark.parametrize("made", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_tables_of_another_card_are_used_with_one_warning_in_a_process(
    driver: Driver, launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    monkeypatch.setattr(messages, "_WARNED_MODELS", set())
    table = scale_table()
    write(
        tmp_path,
        dataclasses.replace(table, built_with=dataclasses.replace(table.built_with, device_name=made)),
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):  # two declarations, as of two kernels
            tunable = dataclasses.replace(scale, tables=tmp_path)
            tunable.launch(*tensors(64))
            tunable.launch(*tensors(256))
    said = [str(one.message) for one in seen if one.category is TableWarning]
    assert len(said) == (0 if made == "NVIDIA H200" else 1)
    assert all(
        f"another GPU model of the arch: {made}, and this is NVIDIA H200. They are used" in one
        for one in said
    )
    assert launched() == [blocks(64, 1024, AT_64), blocks(256, 1024, AT_256)] * 2


@pytest.mark.process
@pytest.mark.parametrize(("made", "taken"), [("NVIDIA H100 80GB HBM3", AT_256), ("NVIDIA H200", AT_64)])
@pytest.mark.filterwarnings("ignore:tables were measured on another GPU model")
def test_on_another_card_a_launch_takes_what_loads_less_and_config_for_says_so(
    driver: Driver, launched: Launched, tmp_path: Path, made: str, taken: Config
) -> None:
    table = equally_fast(Problem({"dtype": "bfloat16", "M": 64, "N": 1024}), AT_64)
    write(
        tmp_path,
        dataclasses.replace(table, built_with=dataclasses.replace(table.built_with, device_name=made)),
    )
    tunable = dataclasses.replace(loading_more(AT_64), tables=tmp_path)
    assert tunable.config_for(*tensors(64)) == taken
    tunable.launch(*tensors(64))
    assert launched() == [blocks(64, 1024, taken)]


@pytest.mark.process
def test_without_nvml_the_tables_are_read_at_the_first_launch(
    driver: Driver, launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "gpus", lambda: None)
    tunable = dataclasses.replace(scale, tables=tmp_path)
    write(tmp_path, scale_table())
    tunable.launch(*tensors(256))
    assert launched() == [blocks(256, 1024, AT_256)]


@pytest.mark.process
def test_the_kernels_of_a_table_are_made_at_construction_and_no_other_ever(
    tuned: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        pytest.fail("a kernel was made on the launch path")

    monkeypatch.setattr("aot_tune.nvidia.cutile.with_hints", refuse)
    for rows in (1, 64, 256, 100, 200):
        tuned.launch(*tensors(rows))


def test_what_the_sweep_of_a_table_has_checked_is_not_checked_where_it_is_served(tuned: Tunable) -> None:
    """A process without a table for its GPUs checks it, and so do the commands."""
    wrong: dict[str, Any] = {"default": lambda arch, problem: AT_64, "search_space": [DEFAULT, AT_256]}
    message = "which search_space lacks"
    with pytest.raises(DeclarationError, match=message):
        dataclasses.replace(scale, **wrong)
    with pytest.warns(TableWarning, match="in no search space"):
        served = dataclasses.replace(tuned, **wrong)
    (mistake,) = declaration_problems(served, SM90)
    assert re.search(message, mistake)
    with pytest.raises(DeclarationError, match="axes is empty"):
        dataclasses.replace(tuned, axes={})
    for default, error in (
        (lambda arch, problem: {"tile_m": 16}, "Config"),
        (lambda arch: DEFAULT, "default"),
    ):
        with pytest.raises(DeclarationError, match=error):
            dataclasses.replace(tuned, default=default)


def test_every_table_s_hint_is_one_kernel(tuned: Tunable) -> None:
    kernels = dispatcher_of(tuned).kernels
    one, two = AT_64, AT_256
    assert kernels.of(one) is kernels.of(one)
    assert kernels.of(one) is not kernels.of(two)


def test_a_problem_without_an_axis_is_refused_by_its_name(driver: Driver) -> None:
    full = [True]

    def problem(source: Any, target: Any, by: float) -> dict[str, object]:
        return {"N": source.shape[0]} if full else {"n": source.shape[0]}

    tunable, _ = shift(driver, problem=problem, axes={"N": Pow2()}, typical=[{"N": 64}])
    full.clear()
    with pytest.raises(LaunchError, match="problem\\(\\) gives None for the axis N"):
        tunable.launch(vector(64), vector(64), 1.0)


@pytest.fixture
def _closed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the databases that cuTile leaves open where it cannot use them: Python 3.13 warns of each."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remembered(*args: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **options))
        return opened[-1]

    monkeypatch.setattr("sqlite3.connect", remembered)
    yield
    for database in opened:
        database.close()


def _a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.write_text("")
    return folder


def _below_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return _a_file(folder, monkeypatch) / "below"


def _garbage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    (folder / "cache.db").write_bytes(b"no database" * 1000)
    return folder


def _a_folder_for_a_database(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "cache.db").mkdir(parents=True)
    return folder


def _read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # By the database's own means, since no file is read-only to root.
    folder.mkdir()
    connect = sqlite3.connect
    connect(folder / "cache.db").close()
    monkeypatch.setattr(
        "sqlite3.connect", lambda path, **options: connect(f"file:{path}?mode=ro", uri=True, **options)
    )
    return folder


@pytest.mark.process
@pytest.mark.usefixtures("_closed_at_the_end")
@pytest.mark.parametrize(
    "breaks",
    [_a_file, _below_a_file, _garbage, _a_folder_for_a_database, _read_only],
    ids=lambda b: b.__name__,
)
def test_b17_a_broken_disk_cache_of_cutile_does_not_stop_serving(
    tuned: Tunable,
    launched: Launched,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    breaks: Callable[[Path, pytest.MonkeyPatch], Path],
) -> None:
    """B17: it cannot be made, opened, read or written; cuTile compiles all the same, and once."""
    from cuda.tile._cext import default_tile_context

    folder = breaks(tmp_path / "cache", monkeypatch)
    dispatcher = dispatcher_of(tuned)
    kernel = dispatcher.kernels.of(AT_64)
    compile_with = type(kernel)._compile
    config = dataclasses.replace(default_tile_context.config, cache_dir=str(folder))

    def compile_in_broken(self: Any, signature: Any, context: Any, capability: Any = None) -> Any:
        from cuda.tile._cext import TileContext

        return compile_with(self, signature, TileContext(config=config), capability)

    monkeypatch.setattr(type(kernel), "_compile", compile_in_broken)
    for _ in range(2):
        tuned.launch(*tensors(64))
    assert launched() == [blocks(64, 1024, AT_64)] * 2
    assert len(driver.compiled) == 1


@pytest.mark.parametrize(("rows", "winner"), [(1, DEFAULT), (64, AT_64), (50, AT_64), (256, AT_256)])
def test_config_for_says_what_a_launch_would_get_and_launches_nothing(
    tuned: Tunable, launched: Launched, rows: int, winner: Config
) -> None:
    expected = dispatcher_of(tuned).choice(SM90, tuned.problem_of(*tensors(rows))).config
    assert tuned.config_for(*tensors(rows)) == expected
    assert rows == 50 or expected == winner
    assert launched() == []
    with pytest.raises(LaunchError, match="nothing is launched for dtype=bfloat16 M=0 N=1024, so it has no"):
        tuned.config_for(*tensors(0))


@pytest.mark.parametrize("mode", ["error", "nearest"])
def test_a_miss_of_config_for_is_one_as_a_launch_s(
    mode: str, tuned: Tunable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.ON_MISS, mode)
    monkeypatch.setenv(environment.RECORD, str(tmp_path / "missed"))
    tuned.config_for(*tensors(64))
    assert list(tmp_path.glob("missed.*")) == []
    if mode == "error":
        with pytest.raises(MissError, match="aot-tune tune"):
            tuned.config_for(*tensors(64, 8192))
    else:
        tuned.config_for(*tensors(64, 8192))
    (path,) = tmp_path.glob("missed.*")
    assert len(path.read_text().splitlines()) == 1
    assert dispatcher_of(tuned).choice(SM90, tuned.problem_of(*tensors(64, 8192))).missed


@pytest.mark.parametrize("count", [0, 1, 3])
def test_config_for_of_too_few_or_too_many_arguments_says_what_it_takes(tuned: Tunable, count: int) -> None:
    args = (*tensors(64), 0.5)[:count]
    with pytest.raises(LaunchError, match=rf"scale\.config_for takes source, target; .* not {count}$"):
        tuned.config_for(*args)


@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
def test_config_for_passes_over_what_does_not_fit_this_gpu(tuned: Tunable, driver: Driver) -> None:
    fitting = dataclasses.replace(
        tuned, fits=lambda config, device, problem: config != AT_64 or "too few multiprocessors"
    )
    assert fitting.config_for(*tensors(64)) not in (AT_64,)


# What cuTile refuses ----------------------------------------------------------------------------------------


@ct.kernel
def _product_kernel(source, target, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    ct.static_assert(target.dtype != ct.float64, "no result of doubles")
    tile = ct.load(source, (ct.bid(0), ct.bid(1)), (tile_m, tile_n))
    ct.store(target, (ct.bid(0), ct.bid(1)), tile.astype(target.dtype))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")
def test_what_cutile_refuses_names_kernel_problem_and_arguments(driver: Driver, launched: Launched) -> None:
    product = dataclasses.replace(scale, kernel=_product_kernel)
    source, target = tensors(64)
    product.launch(source, target)
    for _ in range(2):  # by the launch function, which knows this problem, and not by its slow path alone
        with pytest.raises(LaunchError, match="no result of doubles") as caught:
            product.launch(source, target.double().t().contiguous().t())
        assert str(caught.value).startswith(
            f"scale.launch: cuTile refuses dtype=bfloat16 M=64 N=1024 with {DEFAULT}: StaticAssertionError: "
        )
        told = "the arguments are source bfloat16 (64, 1024), target float64 (64, 1024) with strides (1, 64);"
        assert told in str(caught.value)
        assert isinstance(caught.value.__cause__, ct.TileError)
    assert len(launched()) == 1


# Lists, absent outputs, several kernels, the device, dependent launches -------------------------------------


def _untuned(tunable: Tunable) -> Tunable:
    return dataclasses.replace(tunable, tables=Path("/nonexistent/tuned_configs"))


def _noted_args(tunable: Tunable) -> tuple[Tunable, list[Config]]:
    """The declaration without tables, and the configs that `args_fn` is called with."""
    asked: list[Config] = []

    def args_fn(config: Config, *args: Any, device: Any) -> tuple[Any, ...]:
        asked.append(config)
        return tunable.args_fn_on(device)(config, *args)

    return dataclasses.replace(_untuned(tunable), args_fn=args_fn), asked


@pytest.mark.process
def test_lists_of_tensors_are_launched_and_remembered_by_their_shapes(
    driver: Driver, launched: Launched
) -> None:
    tunable, asked = _noted_args(scale_each)
    some = [vector(1024), vector(1040)], [vector(1024), vector(1040)]
    tunable.launch(*some)
    known = len(asked)
    tunable.launch([vector(1024), vector(1040)], some[1])
    assert len(asked) == known  # the plan is found, and the lists are handed on
    assert launched() == [(132, 1, 1)] * 2
    tunable.launch([vector(1024), vector(2048)], some[1])
    assert len(asked) > known


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")  # its functions are noted: other source
@pytest.mark.parametrize("protocol", ["__dlpack__", "__cuda_array_interface__"])
def test_arrays_of_other_libraries_are_launched_as_tensors(
    tuned: Tunable, launched: Launched, protocol: str
) -> None:
    tunable, calls = counted(tuned)
    source, target = (FakeTensor((64, 1024), torch.bfloat16) for _ in range(2))
    tunable.launch(ForeignArray(source, protocol), ForeignArray(target, protocol))
    seen = len(calls)
    tunable.launch(source, ForeignArray(target, protocol))
    tunable.launch(source, target)
    assert len(calls) == seen  # one plan serves arrays and tensors
    tunable.launch(ForeignArray(source, protocol), target, config=OTHER)
    assert launched() == [*[blocks(64, 1024, AT_64)] * 3, blocks(64, 1024, OTHER)]
    assert tunable.config_for(ForeignArray(source, protocol), target) == AT_64


@pytest.mark.process
def test_arrays_of_other_libraries_in_lists_are_launched_as_tensors(
    driver: Driver, launched: Launched
) -> None:
    tunable, asked = _noted_args(scale_each)
    some = [FakeTensor((1024,)), FakeTensor((1040,))]
    tunable.launch(some, some)
    known = len(asked)
    tunable.launch([ForeignArray(x) for x in some], [some[0], ForeignArray(some[1])])
    assert len(asked) == known  # the plan is found
    assert launched() == [(132, 1, 1)] * 2


@pytest.mark.process
def test_members_of_lists_are_checked_as_tensors_are(driver: Driver) -> None:
    tunable = _untuned(scale_each)
    good = [vector(1024), vector(1024)]
    driver.runtime.grad = True
    with pytest.raises(LaunchError, match=r"argument xs\[1\] requires grad"):
        tunable.launch([vector(1024), vector(1024).requires_grad_()], good)
    expanded = torch.empty(1, device="meta").expand(1024)
    with pytest.raises(LaunchError, match=r"argument outs\[0\] is written by the kernel and is an expanded"):
        tunable.launch(good, [expanded, vector(1024)])
    tunable.launch(good, good)
    with pytest.raises(LaunchError, match=r"argument xs\[1\] requires grad"):  # also where a plan is known
        tunable.launch([vector(1024), vector(1024).requires_grad_()], good)
    with pytest.raises(LaunchError, match=r"argument outs\[1\] is written by the kernel and is an expanded"):
        tunable.launch(good, [vector(1024), expanded])


@pytest.mark.process
def test_lists_of_tensors_on_two_devices_are_told_apart(driver: Driver) -> None:
    driver.devices = 2
    tunable = _untuned(scale_each)
    on = [[FakeTensor((1024,), torch.float32, device) for _ in range(2)] for device in (0, 1)]
    for _ in range(2):
        for lists in on:
            tunable.launch(lists, lists)
    assert [one.device for one in driver.launches] == [0, 1] * 2
    with pytest.raises(LaunchError, match=r"argument xs\[1\] is on cuda:1, argument xs\[0\] on cuda:0"):
        tunable.launch([on[0][0], on[1][0]], on[0])


@pytest.mark.process
def test_what_cutile_refuses_of_a_list_names_its_tensors(driver: Driver) -> None:
    with pytest.raises(LaunchError, match=r"xs \[float32 \(1024,\), bfloat16 \(1024,\)\]"):
        _untuned(scale_each).launch([vector(1024), vector(1024).bfloat16()], [vector(1024), vector(1024)])


@pytest.mark.process
def test_an_output_may_be_absent_in_one_call_and_there_in_the_next(
    driver: Driver, launched: Launched
) -> None:
    tunable = _untuned(row_sum)
    x, out = torch.empty(64, 8192, device="meta"), vector(64)
    for largest in (None, vector(64), None):
        tunable.launch(x, out, largest)
    assert [("_B0_" in one.symbol, "_B1_" in one.symbol) for one in driver.launches] == [
        (True, False),
        (False, True),
        (True, False),
    ]


@pytest.mark.process
def test_each_config_launches_the_kernel_that_it_names(driver: Driver, launched: Launched) -> None:
    tunable = _untuned(row_sum)
    args = torch.empty(64, 1024, device="meta"), vector(64), None
    for config in tunable.space(SM90, tunable.problem_of(*args)):
        for _ in range(2):
            tunable.launch(*args, config=config)
    names = [one.symbol.partition("_kernel")[0] for one in driver.launches]
    assert names == ["_sum_looped"] * 4 + ["_sum_whole"] * 2
    with pytest.raises(LaunchError, match="is for no kernel; write kernel='whole' or kernel='looped' in it"):
        tunable.launch(*args, config=Config(constants={"step": 128}))


@pytest.mark.process
def test_known_launches_of_several_kernels_call_nothing(driver: Driver, tmp_path: Path) -> None:
    whole = Config(kernel="whole", constants={"tile": 1024})
    asked: list[Config] = []

    def args_fn(config: Config, *args: Any) -> tuple[Any, ...]:
        asked.append(config)
        return row_sum.args_fn(config, *args)

    tunable = dataclasses.replace(row_sum, tables=tmp_path, args_fn=args_fn)
    write(tmp_path, table_of(tunable, {tunable.typical_problems[0]: whole}))
    tunable = dataclasses.replace(tunable)
    calls = [
        (torch.empty(64, cols, device="meta"), vector(64), vector(64) if largest else None)
        for cols, largest in ((1024, True), (8192, True), (8192, False))
    ]
    for _ in range(3):  # the key grows until it holds what the arguments of both are made of
        for args in calls:
            tunable.launch(*args)
    known, first = len(asked), len(driver.launches)
    for args in calls:
        tunable.launch(*args)
    assert len(asked) == known
    names = [one.symbol.partition("_kernel")[0] for one in driver.launches[first:]]
    assert names == ["_sum_whole", "_sum_looped", "_sum_looped"]


@pytest.mark.process
def test_a_table_names_the_kernel_of_each_config(driver: Driver, tmp_path: Path, launched: Launched) -> None:
    whole = Config(kernel="whole", constants={"tile": 1024})
    tunable = dataclasses.replace(row_sum, tables=tmp_path)
    write(tmp_path, table_of(tunable, {tunable.typical_problems[0]: whole}))
    assert '"kernel": "whole"' in (tmp_path / "sm90" / "row_sum.json").read_text()
    tunable = dataclasses.replace(tunable)
    args = torch.empty(64, 1024, device="meta"), vector(64), vector(64)
    assert tunable.config_for(*args) == whole
    for _ in range(2):
        tunable.launch(*args)
    assert all(one.symbol.startswith("_sum_whole_kernel") for one in driver.launches)


@pytest.mark.process
def test_args_fn_may_take_the_device_of_the_launch(driver: Driver) -> None:
    driver.devices, driver.capability_of = 2, {1: (10, 0)}
    tunable = _untuned(scale_each)
    for _ in range(2):
        for device in (0, 1):
            lists = [FakeTensor((1024,), torch.float32, device) for _ in range(2)]
            tunable.launch(lists, lists)
    blocks = [(one.grid[0], f"_I{one.grid[0]}_" in one.symbol) for one in driver.launches]
    assert blocks == [(132, True), (148, True)] * 2


@pytest.mark.process
def test_a_device_is_given_where_args_fn_is_called_at_each_launch(driver: Driver) -> None:
    def args_fn(config: Config, xs: Any, outs: Any, *, device: Any) -> tuple[Any, ...]:
        return [*xs], [*outs], device.sm_count, config["tile"]

    tunable = dataclasses.replace(_untuned(scale_each), args_fn=args_fn)
    for _ in range(3):
        tunable.launch([vector(1024), vector(1024)], [vector(1024), vector(1024)])
    pattern = dispatcher_of(tunable)._pattern
    assert pattern is not None
    assert pattern.layout is None
    assert ["_I132_" in one.symbol for one in driver.launches] == [True] * 3


@pytest.mark.process
@pytest.mark.parametrize(("capability", "dependent"), [((9, 0), True), ((8, 0), False)])
def test_a_declared_dependent_launch_is_one_on_archs_that_have_it(
    driver: Driver, capability: tuple[int, int], dependent: bool
) -> None:
    driver.capability_of = {0: capability}

    @ct.kernel
    def kernel(x, out, tile: ct.Constant[int]):  # type: ignore[no-untyped-def]
        ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (tile,)))

    for declared in (True, False):
        tunable = dataclasses.replace(_untuned(double), kernel=kernel, programmatic_dependent_launch=declared)
        for _ in range(2):
            tunable.launch(vector(4096), vector(4096))
    assert [one.dependent for one in driver.launches] == [dependent] * 2 + [False] * 2


@pytest.mark.process
def test_a_hint_by_target_is_the_arch_s_own_value(driver: Driver) -> None:
    driver.capability_of = {0: (10, 0)}
    given = Config(constants={"tile": 256}, hints={"num_ctas": ct.ByTarget(sm_100=2), "occupancy": 2})
    tunable = _untuned(double)
    tunable.launch(vector(4096), vector(4096), config=given)
    [plan] = dispatcher_of(tunable)._plans.values()
    assert dict(plan.choice.config.hints) == {"num_ctas": 2, "occupancy": 2}


def test_an_unfit_default_is_replaced_by_a_config_of_its_kernel(driver: Driver) -> None:
    tunable = _untuned(row_sum)
    problem = tunable.typical_problems[0]
    default = tunable.default_config(SM90, problem)
    choice = dispatcher_of(tunable).choice(
        SM90, problem, unfit=lambda config: "it does not fit" if config == default else None
    )
    assert (choice.config.kernel, dict(choice.config.constants)) == ("looped", {"step": 256})
