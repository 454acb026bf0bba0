"""What each kernel is measured against: the rivals compute the same, and the work is what it says."""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

import pytest
import torch

from aot_tune import kernels
from aot_tune.bench.kernels.rivals.attention import seen
from aot_tune.bench.kernels.run import STANDARDS
from aot_tune.bench.kernels.standard import COMPILED
from aot_tune.bench.kernels.standing import COPY
from aot_tune.tunable import Tunable
from aot_tune.values.problem import Problem
from tests.kernels.cases import CASES
from tests.support.agree import assert_agrees, expected, problem

MODULES = [
    import_module(one.name) for one in walk_packages(kernels.__path__, "aot_tune.kernels.") if not one.ispkg
]
SHIPPED = {one.name: one for module in MODULES for one in vars(module).values() if isinstance(one, Tunable)}


def test_every_shipped_kernel_has_a_standard_or_says_why_it_has_none() -> None:
    assert SHIPPED.keys() - STANDARDS.keys() == {name for name, case in CASES.items() if case.no_rivals}


def small(tunable: Tunable) -> Problem:
    """A declared problem, its sizes cut down to what a CPU does at once."""
    first = tunable.typical_problems[0]
    sizes = {name: value for name, value in first.items() if type(value) is int}
    most = {"head_dim": 64, "rotary_dim": 64}
    return first.replaced(**{name: min(value, most.get(name, 24)) for name, value in sizes.items()})


MEASURED = {name: STANDARDS[name] for name in SHIPPED if name in STANDARDS}
IN_PLACE = [name for name, one in MEASURED.items() if COMPILED in one.rivals and one.flops is None]


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_torch_compiles_computes_what_the_kernel_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    tunable = SHIPPED[name]
    args = tunable.make_args(small(tunable), torch.device("cpu"), 1)
    wanted = expected(tunable, args)
    STANDARDS[name].rivals[COMPILED](*args)()
    assert_agrees(tunable, args, wanted)


@pytest.mark.parametrize("name", [name for name, one in MEASURED.items() if COPY in str(one.demands)])
def test_what_is_held_against_a_copy_has_one_timed_beside_it(name: str) -> None:
    assert STANDARDS[name].copies


def work(name: str, one: Problem) -> tuple[float, float]:
    tunable = SHIPPED[name]
    return STANDARDS[name].work(tunable, one, tunable.make_args(one, torch.device("cpu"), 0))


def test_inputs_and_outputs_move_once_and_what_is_changed_in_place_twice() -> None:
    assert work("rms_norm", problem(dtype="bfloat16", rows=8, cols=32)) == (2 * 8 * 32 * 2 + 32 * 2, 0)
    one = SHIPPED["fused_add_rms_norm"].typical_problems[0].replaced(rows=8, cols=32)
    assert work("fused_add_rms_norm", one) == (4 * 8 * 32 * 2 + 32 * 2, 0)


def test_of_a_rope_that_rotates_half_of_a_head_half_is_moved() -> None:
    sizes = {"tokens": 8, "heads": 4, "kv_heads": 2, "head_dim": 32, "rotary_dim": 16}
    one = SHIPPED["rope"].typical_problems[0].replaced(**sizes)
    assert work("rope", one) == (2 * 8 * 6 * 16 * 2 + 2 * 8 * 8 * 4, 0)


def test_a_product_moves_its_three_matrices_and_multiplies_and_adds() -> None:
    one = small(SHIPPED["matmul"]).replaced(M=8, N=24, K=16)
    assert work("matmul", one) == ((8 * 16 + 16 * 24 + 8 * 24) * 2, 2 * 8 * 24 * 16)


def test_of_a_cache_the_keys_that_are_seen_are_read() -> None:
    tunable = SHIPPED["attention_decode"]
    one = tunable.typical_problems[0].replaced(batch=1, context=32, heads=4, kv_heads=2, head_dim=64)
    assert work("attention_decode", one) == (2 * 32 * 2 * 64 * 2 + 2 * 4 * 64 * 2 + 4 * 4, 0)


def masked(queries: int, keys: int, causal: bool, window: int | None) -> int:
    at = torch.arange(queries)[:, None] + keys - queries
    place = torch.arange(keys)[None]
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        mask = place <= at
        if window is not None:
            mask &= place >= at - window
    return int(mask.sum())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 10), (10, 10), (1, 9)])
def test_the_pairs_that_a_mask_leaves_are_counted(
    queries: int, keys: int, window: int | None, causal: bool
) -> None:
    assert seen(queries, keys, causal=causal, window=window) == masked(queries, keys, causal, window)
