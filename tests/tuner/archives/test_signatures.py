"""The classes of sizes: whatever size a launch has, its signature is among those that are compiled."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.cubins.size_classes import ODD_SEED, representatives
from aot_tune.declare.discovery import OWN_KERNELS, FoundKernel, find_tunables
from aot_tune.inputs import has_odd_sizes
from aot_tune.kernels import attention_decode_tunable, attention_varlen_tunable
from aot_tune.nvidia import cutile
from aot_tune.tables.store import package_folder, read_table, table_path
from aot_tune.tables.table import Table
from aot_tune.tunable import Tunable
from aot_tune.tuner.archives.signatures import Compilation, _compilation, compilations
from aot_tune.tuner.measure.worker.backend import RECHECK_SEEDS, SEEDS
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, MODULE, SPACE, scale, scale_table

SM90 = Arch.parse("sm90")
DTYPES = ["bfloat16", "float32", "float64", "int8"]


rows = dataclasses.replace(
    scale,
    search_space=lambda arch, problem: [DEFAULT],
    typical=[{"dtype": DTYPES, "M": Pow2.edges(1, 4096), "N": 1024}],
    make_args=lambda problem, device, seed: tuple(
        torch.empty(
            problem.size("M"), problem.size("N"), dtype=getattr(torch, str(problem["dtype"])), device="meta"
        )
        for _ in range(2)
    ),
)
"""M is a size and no stride."""

columns = dataclasses.replace(
    rows,
    make_args=lambda problem, device, seed: tuple(
        torch.empty(
            problem.size("N"), problem.size("M"), dtype=getattr(torch, str(problem["dtype"])), device="meta"
        ).t()
        for _ in range(2)
    ),
)
"""M is a size and a stride."""

both = dataclasses.replace(
    rows, axes={"M": Pow2(), "N": Pow2()}, typical=[{"dtype": "float16", "M": [1, 64], "N": [1, 1024]}]
)
"""Two bucketed axes."""


def paged(page: int) -> Tunable:
    """Beside x a table of pages, as many as M fills: rows of a size that is a quotient of M."""

    def make_args(problem: Problem, device: object, seed: int) -> tuple[torch.Tensor, ...]:
        size = problem.size("M"), -(-problem.size("N") // page)
        return torch.empty(problem.size("M"), 64, device="meta"), torch.empty(size, device="meta")

    axes = {"M": Pow2(), "N": Pow2()}
    return dataclasses.replace(both, axes=axes, typical=[{"dtype": "float32", "M": [4, 64], "N": 2048}],
                               make_args=make_args)  # fmt: skip


@cache
def compiled(which: str) -> frozenset[Compilation]:
    tunable = {"rows": rows, "columns": columns, "both": both, "16": paged(16), "64": paged(64)}[which]
    return frozenset(compilations(DeviceKernel(FoundKernel(module=MODULE, tunable=tunable), SM90), ()))


def asked(tunable: Tunable, problem: Problem) -> Compilation:
    args = tunable.args_fn(DEFAULT, *tunable.make_args(problem, "meta", 0))
    return Compilation(tuple(DEFAULT.hints.items()), cutile.signature_of(tunable.kernel, args))


@given(size=st.integers(1, 100_000), dtype=st.sampled_from(DTYPES))
def test_every_size_of_a_declared_dtype_has_its_signature_compiled(size: int, dtype: str) -> None:
    problem = Problem({"dtype": dtype, "M": size, "N": 1024})
    assert asked(rows, problem) in compiled("rows")
    assert asked(columns, problem) in compiled("columns")


@given(m=st.integers(1, 5000), n=st.integers(1, 5000))
def test_two_bucketed_axes_are_combined(m: int, n: int) -> None:
    assert asked(both, Problem({"dtype": "float16", "M": m, "N": n})) in compiled("both")


@pytest.mark.parametrize("page", [16, 64])
@given(m=st.integers(1, 300), n=st.integers(1, 100_000))
def test_a_quotient_of_an_axis_has_every_class_of_sizes_too(page: int, m: int, n: int) -> None:
    problem = Problem({"dtype": "float32", "M": m, "N": n})
    assert asked(paged(page), problem) in compiled(str(page))


def test_sizes_farther_from_an_edge_are_few_and_those_of_a_quotient_alone() -> None:
    bucket = Problem({"dtype": "float32", "M": 64, "N": 2048})
    near = [2048, 2040, 2044, 2046, 2047]
    assert [p.size("N") for p in representatives(both, bucket)][:5] == near
    for page in (16, 64):  # a page less, and four: the width's own class, and that of its bytes
        sizes = dict.fromkeys(p.size("N") for p in representatives(paged(page), bucket))
        assert [*sizes] == [*near, 2048 - page, 2048 - 4 * page]


def test_a_size_of_1_is_compiled_where_the_declaration_has_it_and_left_out_where_not() -> None:
    def of_4(problem: Problem, device: object, seed: int) -> tuple[torch.Tensor, ...]:
        if problem.size("M") < 4:
            raise ValueError("M must be 4 or more")
        return rows.make_args(problem, device, seed)

    large = dataclasses.replace(rows, typical=[{"dtype": "bfloat16", "M": 64, "N": 1024}])
    none = dataclasses.replace(large, make_args=of_4)
    lone = asked(rows, Problem({"dtype": "bfloat16", "M": 1, "N": 1024}))
    assert lone in compilations(DeviceKernel(FoundKernel(module=MODULE, tunable=large), SM90), ())
    assert lone not in (
        found := compilations(DeviceKernel(FoundKernel(module=MODULE, tunable=none), SM90), ())
    )
    assert len(found) == 3  # a multiple of 16, another, the weakest


def test_the_classes_are_few() -> None:
    # Rows: of each dtype a size of 1, a multiple of 16, another; and the weakest.
    assert len(compiled("rows")) == 4 * len(DTYPES)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16, 17, 100, 4096])
def test_representatives_lie_in_the_bucket_and_begin_with_its_edge(size: int) -> None:
    found = representatives(scale, Problem({"dtype": "bfloat16", "M": size, "N": 1024}))
    assert found[0].size("M") == edge(size)
    assert {edge(problem.size("M")) for problem in found} == {edge(size)}
    assert len(set(found)) == len(found)


def test_exact_axes_keep_their_sizes() -> None:
    one = dataclasses.replace(scale, axes={"M": Exact(), "N": Exact()})
    problem = Problem({"dtype": "bfloat16", "M": 100, "N": 1000})
    assert representatives(one, problem) == (problem,)


def test_a_tables_configs_are_compiled_where_they_are_legal_and_no_others() -> None:
    kernel = DeviceKernel(FoundKernel(module=MODULE, tunable=scale), SM90)
    table: Table = scale_table()
    found = compilations(kernel, [table])
    used = {DEFAULT, *table.portfolio, *(entry.config for entry in table.entries)}
    assert len(used) < len(SPACE)
    exact = {
        asked_with(config, problem)
        for config, bucket in itertools.product(used, (entry.bucket for entry in table.entries))
        for problem in representatives(scale, bucket)
    }
    weak = {
        Compilation(tuple(DEFAULT.hints.items()), cutile.weakest_signature(scale.kernel, one.signature))
        for one in exact
        if one.hints == tuple(DEFAULT.hints.items()) and "_I16_" in one.signature
    }
    assert len(weak) == 1
    assert set(found) == exact | weak
    forbidden = dataclasses.replace(
        scale, legal=lambda config, arch, problem: config == DEFAULT or "only the default"
    )
    assert len(compilations(DeviceKernel(FoundKernel(module=MODULE, tunable=forbidden), SM90), [table])) == 4


@pytest.mark.parametrize(("arch", "some"), [("sm80", False), ("sm89", False), ("sm90", True)])
def test_a_kernel_that_an_arch_cannot_run_is_not_compiled_for_it(arch: str, some: bool) -> None:
    for name in ("matmul_fp8", "matmul_fp8_block"):
        kernel = DeviceKernel(find_tunables([OWN_KERNELS])[name], Arch.parse(arch))
        assert bool(compilations(kernel, ())) == some


def asked_with(config: object, problem: Problem) -> Compilation:
    args = scale.args_fn(config, *scale.make_args(problem, "meta", 0))
    return Compilation(tuple(config.hints.items()), cutile.signature_of(scale.kernel, args))  # type: ignore[attr-defined]


# The shipped kernels with sizes that no axis names ----------------------------------------------------------


@cache
def defaults_of(name: str) -> tuple[DeviceKernel, frozenset[Compilation]]:
    kernel = DeviceKernel(find_tunables([OWN_KERNELS])[name], SM90)
    return kernel, frozenset(compilations(kernel, ()))


def assert_compiled(name: str, problem: Problem, args: tuple[object, ...]) -> None:
    kernel, found = defaults_of(name)
    tunable = kernel.tunable
    assert tunable.problem_of(*args) == problem
    config = tunable.default_config(SM90, problem)
    signature = cutile.signature_of(tunable.kernel, tuple(tunable.args_fn(config, *args)))
    assert Compilation(tuple(config.hints.items()), signature) in found, problem


@pytest.mark.parametrize("more", [0, 1, 15, 16])
def test_a_cache_may_have_any_number_of_pages(more: int) -> None:
    for problem in attention_decode_tunable.typical_problems[::3]:
        args = list(attention_decode_tunable.make_args(problem, "meta", 0))
        for place in (1, 2):
            pages, *rest = args[place].shape
            args[place] = torch.empty(pages + more, *rest, dtype=args[place].dtype, device="meta")
        assert_compiled("attention_decode", problem, tuple(args))


@pytest.mark.parametrize("fewer", [1, 16, 31, 48, 64, 256, 300, 511, 512, 1000])
def test_a_block_table_may_have_any_width(fewer: int) -> None:
    for declared in attention_decode_tunable.typical_problems[::3]:
        context = declared.size("context") - fewer
        # Below 512 keys fewer than a bucket has another default, of which these shapes declare none.
        if not declared["windowed"] and context > 0 and (context > 256 or declared.size("context") < 512):
            for batch in (declared.size("batch"), declared.size("batch") - fewer % 16):
                if edge(batch) == declared["batch"] and batch > 0:
                    problem = declared.replaced(batch=batch, context=context)
                    made = list(attention_decode_tunable.make_args(problem, "meta", 0))
                    assert made[3].shape[1] == -(-problem.size("context") // problem.size("page_size"))
                    for place in (1, 2):  # a cache of an odd number of pages, whatever the table's size
                        pages, *rest = made[place].shape
                        made[place] = torch.empty(pages | 1, *rest, dtype=made[place].dtype, device="meta")
                    at_most = made[3].shape[1] * problem.size("page_size")
                    assert_compiled("attention_decode", problem.replaced(context=at_most), tuple(made))


def test_tables_of_one_page_a_sequence_are_a_class_of_their_own() -> None:
    kernel, _ = defaults_of("attention_decode")
    problem = next(p for p in kernel.tunable.typical_problems if p["batch"] == 8).replaced(context=16)
    assert_compiled("attention_decode", problem, made := kernel.launch_args(problem))
    assert made[3].shape == (8, 1)


@pytest.mark.parametrize(("q_more", "k_more"), [(0, 0), (0, 5), (0, 16), (3, 3), (3, 16)])
def test_packed_sequences_may_have_more_keys_than_queries(q_more: int, k_more: int) -> None:
    for problem in attention_varlen_tunable.typical_problems[::3]:
        args = list(attention_varlen_tunable.make_args(problem, "meta", 0))
        total = -(-args[0].shape[0] // 16) * 16

        def longer(
            place: int, more: int, args: list[torch.Tensor] = args, total: int = total
        ) -> torch.Tensor:
            _, *rest = args[place].shape
            return torch.empty(total + more, *rest, dtype=args[place].dtype, device="meta")

        args[0], args[3] = longer(0, q_more), longer(3, q_more)
        args[1], args[2] = longer(1, k_more), longer(2, k_more)
        args[4] = torch.empty(args[4].shape[0], total + q_more, device="meta")
        assert_compiled("attention_varlen", problem, tuple(args))


@pytest.mark.parametrize("name", ["attention_decode", "attention_varlen"])
def test_a_sweep_poses_the_sizes_that_it_compiled_and_odd_ones_have_their_own_seed(
    name: str,
) -> None:
    """Another signature would be compiled by the worker, one config after another."""
    kernel, _ = defaults_of(name)
    problem = kernel.tunable.typical_problems[0]
    config = kernel.tunable.default_config(kernel.arch, problem)

    def signature(seed: int) -> str:
        return cutile.signature_of(kernel.tunable.kernel, kernel.kernel_args(problem, config, seed))

    assert {signature(seed) for seed in (*SEEDS, *RECHECK_SEEDS)} == {kernel.job(problem, config).signature}
    assert not any(has_odd_sizes(seed) for seed in (*SEEDS, *RECHECK_SEEDS))
    assert has_odd_sizes(ODD_SEED)
    assert signature(ODD_SEED) != signature(0)


def test_a_config_of_a_table_that_no_space_holds_is_not_asked_about() -> None:
    asked: list[object] = []

    def legal(config: Config, arch: Arch, problem: Problem) -> bool:
        asked.append(config["tile_m"])
        return 4096 % int(config["tile_m"]) == 0

    table = scale_table()
    none = Config(constants={**DEFAULT.constants, "tile_m": 0}, hints=DEFAULT.hints)
    kernel = DeviceKernel(FoundKernel(module=MODULE, tunable=dataclasses.replace(scale, legal=legal)), SM90)
    spoilt = dataclasses.replace(table, portfolio=(*table.portfolio, none))
    assert compilations(kernel, (spoilt,)) == compilations(kernel, (table,))
    assert 0 not in asked


def test_the_default_for_every_batch_is_compiled_where_nothing_tabled_is() -> None:
    other = next(config for config in SPACE if config not in (DEFAULT, *scale_table().portfolio))
    alone = Problem({"dtype": "bfloat16", "M": 1, "N": 1024})

    def is_compiled(**fields: Any) -> bool:
        """Whether the default of many rows is compiled for one row."""
        one = dataclasses.replace(
            scale, default=lambda arch, problem: other if problem.size("M") > 64 else DEFAULT, **fields
        )
        kernel = DeviceKernel(FoundKernel(module=MODULE, tunable=one), SM90)
        return asked_with(other, alone) in compilations(kernel, [scale_table()])

    assert not is_compiled()
    assert not is_compiled(batch_axes=("M",))  # a config of the portfolio serves every batch
    assert is_compiled(batch_axes=("M",), invariant=lambda config, problem: config == other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention_decode", "matmul_fp8", "matmul_fp8_block"])
def test_some_config_has_a_cubin_at_nearly_every_size_between_the_declared_ones(name: str) -> None:
    """The default depends on the size, and has one at few of them: a launch takes the best that has."""
    found, draw = find_tunables([OWN_KERNELS])[name], random.Random(3)
    tunable, kernel = found.tunable, DeviceKernel(found, SM90)
    table = read_table(table_path(package_folder(tunable), SM90, name))
    needed, asked, missing = set(compilations(kernel, [table])), 0, 0
    sizes = {
        axis: [bucket.size(axis) for bucket in tunable.buckets]
        for axis, kind in tunable.axes.items()
        if isinstance(kind, Pow2)
    }
    for _ in range(400):
        drawn = {a: math.exp(draw.uniform(math.log(min(of)), math.log(max(of)))) for a, of in sizes.items()}
        problem = draw.choice(tunable.buckets).replaced(**{a: round(size) for a, size in drawn.items()})
        if problem.get("windowed"):  # there are no more keys than the window's
            continue
        runs = (config for config in table.portfolio if tunable.refusal(config, SM90, problem) is None)
        asked += 1
        missing += not needed.intersection(_compilation(kernel, problem, config, 0) for config in runs)
    assert missing <= 0.02 * asked
    assert asked > 200
