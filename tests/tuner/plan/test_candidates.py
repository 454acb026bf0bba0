"""What must be compiled and may be measured: plans and shortlists. No compiler runs but for its version."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_tune.declare.declaration import Work
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import DeclarationError, LaunchError, TuneError
from aot_tune.kernels.norms.rms_norm import rms_norm_tunable
from aot_tune.kernels.products.matmul import matmul_tunable
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.sass import Loop
from aot_tune.tunable import Tunable
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileResult
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, SweepPlan, plan, plan_only
from aot_tune.tuner.plan.shortlist import BEST_BY_MODEL, MOST_CANDIDATES, is_ranked, predictions, shortlist
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import samples, wide_samples

SM90 = samples.SM90
MATMUL = FoundKernel(module="aot_tune.kernels", tunable=matmul_tunable)
SCALE = FoundKernel(module=samples.MODULE, tunable=samples.scale)
SMALL = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})


def _raises_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises at one size that is no edge."""
    return lambda *args: function(*args) if args[-1].size("M") != 40 else {}["M"]


@pytest.mark.parametrize("name", ["search_space", "default", "legal"])
def test_a_function_that_raises_inside_a_bucket_is_a_wrong_declaration(name: str) -> None:
    changed: dict[str, Any] = {name: _raises_inside(getattr(samples.scale, name))}
    kernel = DeviceKernel(
        dataclasses.replace(SCALE, tunable=dataclasses.replace(samples.scale, **changed)), SM90
    )
    plan_only(kernel, SMALL, samples.SPACE)
    place = (
        rf"{name} for dtype=bfloat16 M=40 N=1024 on sm90 raised KeyError: 'M' \(.*test_candidates.py, line"
    )
    with pytest.raises(DeclarationError, match=place):
        plan_only(kernel, SMALL.replaced(M=40), samples.SPACE)


def large(m: int = 4096, dtype: str = "bfloat16") -> Problem:
    return Problem({"dtype": dtype, "M": m, "N": 4096, "K": 4096})


def with_work(tunable: Tunable) -> Tunable:
    return dataclasses.replace(tunable, work=_work)


def _work(config: Config, problem: Problem) -> Work:
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    return Work(steps=16, flops=32.0 * tile_m * tile_n, load_bytes=32.0 * (tile_m + tile_n))


# The plan ---------------------------------------------------------------------------------------------------


def test_a_plan_holds_each_problems_legal_configs_the_default_first() -> None:
    (each,) = plan(SCALE, SM90, [SMALL]).problems
    assert each.candidates[0] == each.default == samples.DEFAULT
    assert set(each.candidates) | {failure.config for failure in each.refused} == set(samples.SPACE)
    assert all(samples.scale.refusal(config, SM90, SMALL) is None for config in each.candidates)
    assert {failure.message for failure in each.refused} == {"64 x 128 does not fit"}
    assert {failure.stage for failure in each.refused} == {"legal"}


def test_a_config_that_the_gpu_is_too_small_for_is_left_out_and_another_stands_in_for_such_a_default() -> (
    None
):
    def grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
        if config == samples.DEFAULT and device.sm_count < 100:
            raise LaunchError(f"{device.sm_count} multiprocessors are too few")
        return samples.scale.grid_fn(config, device, problem)

    found = FoundKernel(module=samples.MODULE, tunable=dataclasses.replace(samples.scale, grid_fn=grid))
    slice_of_one = Device.reference(SM90).with_sm_count("a slice", 16)
    (each,) = plan(found, SM90, [SMALL], device=slice_of_one).problems
    assert samples.DEFAULT not in each.candidates
    assert each.default == each.candidates[0]
    assert "16 multiprocessors are too few" in {failure.message for failure in each.refused}


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (lambda: 1 // 0, "grid_fn raised ZeroDivisionError: "),
        (lambda: None, "grid_fn raised TypeError: "),
        (lambda: (0, 1), r"grid_fn returned (0, 1); return one to three block counts"),
    ],
)
def test_a_grid_that_fails_for_one_config_is_that_config_s_failure(
    fails: Callable[[], Any], told: str
) -> None:
    bad = samples.SPACE[3]

    def grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
        return fails() if config == bad else samples.scale.grid_fn(config, device, problem)

    found = FoundKernel(module=samples.MODULE, tunable=dataclasses.replace(samples.scale, grid_fn=grid))
    (each,) = plan(found, SM90, [SMALL]).problems
    (failure,) = [one for one in each.refused if one.config == bad]
    assert failure.stage == "launch"
    assert failure.message.startswith(told)
    assert bad not in each.candidates
    assert bad not in plan_only(DeviceKernel(found, SM90), SMALL, [bad]).candidates


def test_a_grid_that_fails_for_the_default_on_this_gpu_is_a_wrong_declaration() -> None:
    def grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
        return samples.scale.grid_fn(config, device, problem) if device.sm_count == 132 else (0,)

    found = FoundKernel(module=samples.MODULE, tunable=dataclasses.replace(samples.scale, grid_fn=grid))
    with pytest.raises(DeclarationError, match=r"the default .* grid_fn returned \(0,\)"):
        plan(found, SM90, [SMALL], device=Device.reference(SM90).with_sm_count("a slice", 16))


def test_a_default_is_asked_for_once_a_sweep() -> None:
    turn = itertools.chain([samples.DEFAULT] * 4, samples.SPACE[1:])  # the declaration's check asks too
    tunable = dataclasses.replace(samples.scale, default=lambda arch, problem: next(turn))
    kernel = DeviceKernel(FoundKernel(module=samples.MODULE, tunable=tunable), SM90)
    assert kernel.default(SMALL) == plan_only(kernel, SMALL, []).default == kernel.default(SMALL)


def test_problems_of_one_signature_class_share_their_compilations() -> None:
    problems = [large(m) for m in (128, 256, 512)]
    one, three = plan(MATMUL, SM90, problems[:1]), plan(MATMUL, SM90, problems)
    assert {job.key for job in one.jobs} <= {job.key for job in three.jobs}
    needed = {job.key for each in three.problems for job in each.jobs.values()}
    assert len(three.jobs) == len(needed) < sum(len(each.candidates) for each in three.problems)
    # 128 rows and 256 are both divisible by 16; 1, 2 and 4 rows are other classes, and so is another dtype.
    default = Config(
        constants={
            "tile_m": 64,
            "tile_n": 64,
            "more": 0,
            "tile_k": 128,
            "swapped": 0,
            "group": 8,
            "peeled": 1,
            "splits": 1,
        },
        hints={"num_ctas": 1, "occupancy": 1},
    )
    kernel = DeviceKernel(MATMUL, SM90)
    keys = [
        kernel.job(problem, default).key for problem in (large(128), large(256), large(1), large(2), large(4))
    ]
    assert keys[0] == keys[1]
    assert keys[3] == keys[4]
    assert len({*keys, kernel.job(large(128, "float16"), default).key}) == 4


def test_a_job_is_another_one_when_anything_its_cubin_depends_on_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = samples.SPACE[0]
    first = DeviceKernel(SCALE, SM90).job(SMALL, config)
    assert DeviceKernel(SCALE, SM90).job(SMALL, config) == first
    keys = {
        first.key,
        DeviceKernel(SCALE, Arch.parse("sm100")).job(SMALL, config).key,
        DeviceKernel(SCALE, SM90).job(SMALL, samples.SPACE[1]).key,
        DeviceKernel(SCALE, SM90).job(SMALL, samples.SPACE[-1]).key,
    }
    monkeypatch.setattr(cutile, "compiler_version", lambda: "99.0")
    keys.add(DeviceKernel(SCALE, SM90).job(SMALL, config).key)
    monkeypatch.setattr("aot_tune.tuner.plan.candidates.source_hash", lambda tunable: "0" * 16)
    keys.add(DeviceKernel(SCALE, SM90).job(SMALL, config).key)
    assert len(keys) == 6


def test_a_signature_is_the_one_cutile_derives_for_these_arguments() -> None:
    args = samples.scale.make_args(SMALL, "cpu", 0)
    config = samples.SPACE[3]
    wanted = cutile.signature_of(samples.scale.kernel, samples.scale.args_fn(config, *args))
    assert DeviceKernel(SCALE, SM90).job(SMALL, config).signature == wanted


def test_the_incumbent_is_the_second_candidate_while_it_may_still_run() -> None:
    table = samples.scale_table()
    problem = samples.scale.buckets[1]
    (each,) = plan(SCALE, SM90, [problem], incumbent=table).problems
    entry = table.entry(problem)
    assert entry is not None
    assert each.incumbent == entry.config == each.candidates[1]
    gone = samples.with_entry(table, 1, config=Config(constants={"tile_m": 128, "tile_n": 64}))
    (each,) = plan(SCALE, SM90, [problem], incumbent=gone).problems
    assert each.incumbent is None


def test_an_occupancy_beyond_the_devices_blocks_is_refused() -> None:
    crowded = Config(constants=samples.DEFAULT.constants, hints={"occupancy": 32, "num_ctas": 1})
    tunable = dataclasses.replace(
        samples.scale, search_space=lambda arch, problem: [samples.DEFAULT, crowded]
    )
    arch = Arch.parse("sm86")
    (each,) = plan(FoundKernel(module="x", tunable=tunable), arch, [SMALL]).problems
    assert each.candidates == (samples.DEFAULT,)
    assert each.refused[0].message == "occupancy 32: a multiprocessor of NVIDIA A10 holds at most 16 blocks"


def test_a_default_that_may_not_run_is_an_error_that_says_why() -> None:
    tunable = dataclasses.replace(samples.scale)
    object.__setattr__(tunable, "legal", lambda config, arch, problem: "never")
    with pytest.raises(
        DeclarationError, match=r"scale: the default .* may not run .* on sm90: never; declare another"
    ):
        plan(FoundKernel(module="x", tunable=tunable), SM90, [SMALL])


def test_make_args_without_meta_tensors_is_an_error_that_says_what_it_must_take() -> None:
    def cuda_only(problem: Problem, device: object, seed: int) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("no CUDA here")

    tunable = dataclasses.replace(samples.scale)
    object.__setattr__(tunable, "make_args", cuda_only)
    with pytest.raises(DeclarationError, match=r"'meta'.*no CUDA here; it must take device 'meta'"):
        plan(FoundKernel(module="x", tunable=tunable), SM90, [SMALL])


def of_others(
    wrong: Callable[[Config], object], right: Callable[[Config], object]
) -> Callable[[Config], Any]:
    return lambda config: right(config) if config == samples.DEFAULT else wrong(config)


def test_a_text_for_a_constant_is_an_error_that_names_the_kernels_parameter() -> None:
    tile = of_others(lambda config: str(config["tile_m"]), lambda config: config["tile_m"])
    tunable = dataclasses.replace(
        samples.scale,
        args_fn=lambda config, source, target: (source, target, tile(config), config["tile_n"]),
    )
    with pytest.raises(
        DeclarationError,
        match=r"scale: args_fn for .* kernel argument tile_m, a constant, is '16', a str; pass",
    ):
        plan(FoundKernel(module="x", tunable=tunable), SM90, [SMALL])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            lambda config: Work(loads_bytes=1),
            r"raised TypeError: .*'loads_bytes'(\. Did you mean .*\?)? \(.*test_candidates.py, line \d+\)",
        ),
        (lambda config: {"steps": 1}, r"returned \{'steps': 1\}; return Work for all configs"),
        (lambda config: Work(flops=-1), "raised DeclarationError: Work has flops=-1; write"),
    ],
)
def test_work_that_is_wrong_for_another_config_than_the_default_is_an_error_that_names_it(
    wrong: Callable[[Config], object], told: str
) -> None:
    work = of_others(wrong, lambda config: _work(config, SMALL))
    tunable = dataclasses.replace(samples.scale, work=lambda config, problem: work(config))
    kernel = DeviceKernel(FoundKernel(module="x", tunable=tunable), SM90)
    kernel.launched(SMALL, samples.DEFAULT)
    with pytest.raises(DeclarationError, match=f"scale: work for tile_m=16 tile_n=64 .* {told}"):
        kernel.launched(SMALL, samples.SPACE[1])


def test_without_a_compiler_planning_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutile, "compiler_version", lambda: None)
    with pytest.raises(TuneError, match=r"pip install 'aot-tune\[tune\]'"):
        plan(SCALE, SM90, [SMALL])


# The shortlist ----------------------------------------------------------------------------------------------


def compiled(planned: SweepPlan, **by_config: Mapping[Config, object]) -> dict[str, CompileResult]:
    """A made-up result for every job: all distinct and good, but for what is given."""
    resources = by_config.get("resources", {})
    codes = by_config.get("codes", {})
    failed = by_config.get("failed", {})
    loops = by_config.get("loops", {})
    results: dict[str, CompileResult] = {}
    for each in planned.problems:
        for config, job in each.jobs.items():
            if config in failed:
                results[job.key] = CompileFailure(key=job.key, message=str(failed[config]), seconds=1.0)
                continue
            loop = loops.get(config)
            results[job.key] = Compiled(
                key=job.key,
                path=Path(f"{job.key}.cubin"),
                code=str(codes.get(config, job.key)),
                resources=resources.get(config, GOOD),  # type: ignore[arg-type]
                loop=loop if isinstance(loop, Loop) else None,
                seconds=1.0,
                cached=False,
            )
    return results


GOOD = Resources(registers=128, stack_bytes=0, shared_bytes=60_000, threads=256)
SPILLED = dataclasses.replace(GOOD, stack_bytes=512)
TOO_LARGE = dataclasses.replace(GOOD, shared_bytes=228 * 1024)


def of_scale(tunable: Tunable = samples.scale, **values: object) -> tuple[SweepPlan, ProblemPlan]:
    found = FoundKernel(module=samples.MODULE, tunable=tunable)
    planned = plan(found, SM90, [SMALL], **values)  # type: ignore[arg-type]
    return planned, planned.problems[0]


def test_what_does_not_compile_fit_or_spills_is_left_out_with_its_reason() -> None:
    planned, each = of_scale()
    broken, big, spilling = each.candidates[3:6]
    results = compiled(planned, failed={broken: "crashed"}, resources={big: TOO_LARGE, spilling: SPILLED})
    listed = shortlist(planned.kernel, each, results)
    assert set(listed.configs) == set(each.candidates) - {broken, big, spilling}
    why = {failure.config: (failure.stage, failure.message) for failure in listed.failures}
    assert why[broken] == ("compile", "crashed")
    assert why[big][0] == why[spilling][0] == "resources"
    assert "233472 bytes of shared memory" in why[big][1]
    assert "stack of 512 bytes" in why[spilling][1]


def test_a_spilling_default_and_incumbent_are_measured_all_the_same() -> None:
    table = samples.scale_table()
    problem = samples.scale.buckets[1]
    planned = plan(SCALE, SM90, [problem], incumbent=table)
    (each,) = planned.problems
    assert each.incumbent is not None
    other = each.candidates[4]
    results = compiled(planned, resources=dict.fromkeys([each.default, each.incumbent, other], SPILLED))
    listed = shortlist(planned.kernel, each, results)
    assert listed.configs[:2] == (each.default, each.incumbent)
    assert other not in listed.configs


def test_spilling_configs_stay_when_nothing_else_is_left() -> None:
    planned, each = of_scale()
    results = compiled(planned, resources=dict.fromkeys(each.candidates, SPILLED))
    listed = shortlist(planned.kernel, each, results)
    assert set(listed.configs) == set(each.candidates)
    assert listed.failures == ()


def test_a_spill_outside_the_inner_loop_is_no_reason_to_leave_a_config_out() -> None:
    planned, each = of_scale()
    spilling = each.candidates[2]
    loop = Loop(instructions=60, tensor_ops=8, selects=0, local_accesses=0, waits=0, pipelined=True)
    results = compiled(planned, resources={spilling: SPILLED}, loops={spilling: loop})
    assert spilling in shortlist(planned.kernel, each, results).configs


def test_hints_that_give_the_same_code_are_measured_once_and_the_default_stands_for_them() -> None:
    planned, each = of_scale()
    single = [config for config in each.candidates if config.hints["num_ctas"] == 1]
    same = [config for config in single if config.constants == each.default.constants]
    others = [config for config in single if config["tile_m"] == 32 and config["tile_n"] == 64]
    assert len(same) == len(others) == 2
    codes = {**dict.fromkeys(same, "a"), **dict.fromkeys(reversed(others), "b")}
    listed = shortlist(planned.kernel, each, compiled(planned, codes=codes))
    assert listed.twins == {
        next(config for config in same if config != each.default): each.default,
        max(others, key=lambda config: config.hints["occupancy"]): min(
            others, key=lambda config: config.hints["occupancy"]
        ),
    }
    assert not set(listed.twins) & set(listed.configs)


def test_the_same_code_on_another_grid_is_measured_apart() -> None:
    """A persistent kernel's grid grows with the occupancy asked for, whatever the compiler makes of it."""
    planned = plan(MATMUL, Arch(8, 0), [large(4096)])
    (each,) = planned.problems
    pairs: dict[object, list[Config]] = {}
    for config in each.candidates:
        others = config.hints["num_ctas"], config.hints["num_worker_warps"]
        pairs.setdefault((frozenset(config.constants.items()), others), []).append(config)
    one, two = next(pair for pair in pairs.values() if len(pair) == 2)
    codes = {one: "same", two: "same"}
    assert shortlist(planned.kernel, each, compiled(planned, codes=codes), exhaustive=True).twins == {}
    tiny = planned.kernel.launch_key(each.problem, one), planned.kernel.launch_key(each.problem, two)
    assert tiny[0] != tiny[1]


def of_many() -> tuple[SweepPlan, ProblemPlan]:
    """A plan of matmul with each config in three occupancies, more than are measured."""
    many = dataclasses.replace(
        matmul_tunable,
        legal=lambda config, arch, problem: True,
        search_space=lambda arch, problem: [
            Config(constants=config.constants, hints={**config.hints, "occupancy": occupancy})
            for config in matmul_tunable.space(arch, problem)
            for occupancy in (1, 2, 3)
            if config.hints["occupancy"] == 1
        ],
    )
    planned = plan(FoundKernel(module=MATMUL.module, tunable=many), SM90, [large(4096)])
    return planned, planned.problems[0]


def test_the_model_keeps_its_best_few_beside_the_default() -> None:
    planned, each = of_many()
    results = compiled(planned)
    listed = shortlist(planned.kernel, each, results)
    every = predictions(planned.kernel, each, each.candidates, results)
    best = sorted(each.candidates, key=lambda config: every[config])
    assert len(each.candidates) > MOST_CANDIDATES
    assert set(best[:BEST_BY_MODEL]) <= set(listed.configs)
    assert listed.configs[0] == each.default
    assert len(listed.configs) <= BEST_BY_MODEL + 1
    assert list(listed.predicted_us.values()) == sorted(every.values())
    exhaustive = shortlist(planned.kernel, each, results, exhaustive=True)
    assert set(exhaustive.configs) == set(each.candidates)


def test_the_incumbent_is_measured_whatever_its_rank() -> None:
    planned, each = of_many()
    results = compiled(planned)
    worst = list(shortlist(planned.kernel, each, results).predicted_us)[-1]
    assert worst not in shortlist(planned.kernel, each, results).configs
    assert worst in shortlist(planned.kernel, dataclasses.replace(each, incumbent=worst), results).configs


def test_at_most_thirty_are_measured_where_no_model_ranks_them() -> None:
    space = [
        Config(constants={"tile_m": m, "tile_n": 64}, hints={"occupancy": o, "num_ctas": 1})
        for m in (16, 32)
        for o in range(1, 33)
    ]
    tunable = dataclasses.replace(samples.scale, search_space=lambda arch, problem: space)
    planned, each = of_scale(tunable)
    assert len(each.candidates) == 64
    listed = shortlist(planned.kernel, each, compiled(planned))
    assert len(listed.configs) == MOST_CANDIDATES
    assert listed.configs[0] == each.default
    assert listed.predicted_us == {}
    assert len(shortlist(planned.kernel, each, compiled(planned), exhaustive=True).configs) == 64


def test_no_model_ranks_occupancies_alone() -> None:
    found = FoundKernel(module="aot_tune.kernels", tunable=rms_norm_tunable)
    planned = plan(found, SM90, rms_norm_tunable.buckets[:1])
    assert not is_ranked(planned.kernel, planned.problems[0])
    one_tile = dataclasses.replace(
        with_work(samples.scale),
        search_space=lambda arch, problem: [
            c for c in samples.SPACE if c.constants == samples.DEFAULT.constants
        ],
    )
    planned, each = of_scale(one_tile)
    assert not is_ranked(planned.kernel, each)
    planned, each = of_scale(with_work(samples.scale))
    assert is_ranked(planned.kernel, each)


def test_the_grid_and_the_counts_are_those_of_the_device_asked_for() -> None:
    config = matmul_tunable.default_config(SM90, large())
    kernel = DeviceKernel(MATMUL, SM90, Device.reference(SM90).with_sm_count("NVIDIA H100 PCIe", 114))
    assert kernel.grid(large(), config) == (114,)
    told = kernel.launched(large(), config)
    assert (told.tiles, told.blocks, told.ctas) == (1024, 114, 1)
    assert told.memory_bytes == 2 * 3 * 4096 * 4096


# Several kernels, lists, the device ------------------------------------------------------------------------


def test_each_config_compiles_the_kernel_that_it_names() -> None:
    (each,) = plan(FoundKernel(module=wide_samples.MODULE, tunable=wide_samples.row_sum), SM90, [
        Problem({"rows": 64, "cols": 1024, "largest": True})
    ]).problems  # fmt: skip
    compiled = {(job.kernel, job.signature.partition("_kernel")[0]) for job in each.jobs.values()}
    assert compiled == {("whole", "_sum_whole"), ("looped", "_sum_looped")}
    assert {config.kernel for config in each.candidates} == {"whole", "looped"}


def test_kernels_of_equal_arguments_are_compiled_apart() -> None:
    space = [Config(kernel=name, constants={"tile": 256}) for name in ("one", "two")]
    kernels = {"one": wide_samples.double.kernel, "two": wide_samples.halve_kernel}
    tunable = dataclasses.replace(wide_samples.double, kernel=kernels, search_space=space)
    (each,) = plan(
        FoundKernel(module=wide_samples.MODULE, tunable=tunable), SM90, [Problem({"n": 4096})]
    ).problems
    assert len({job.key for job in each.jobs.values()}) == 2


def test_lists_count_as_memory_and_the_device_is_given_to_args_fn() -> None:
    kernel = DeviceKernel(FoundKernel(module=wide_samples.MODULE, tunable=wide_samples.scale_each), SM90)
    [problem] = wide_samples.scale_each.typical_problems
    assert kernel.launched(problem, kernel.default(problem)).memory_bytes == 2 * 4 * (1024 + 1040)
    assert kernel.kernel_args(problem, kernel.default(problem))[2] == kernel.device.sm_count


def test_without_work_each_block_has_its_share_of_the_arguments() -> None:
    kernel = DeviceKernel(SCALE, SM90)
    derived = kernel.derived(SMALL, samples.DEFAULT)
    blocks = derived.blocks
    moved = 2 * 64 * 1024
    assert (derived.work.load_bytes * blocks, derived.work.store_bytes * blocks) == (moved, moved)
    assert derived.work.flops == 0
    assert kernel.launched(SMALL, samples.DEFAULT).work == Work()  # nothing is refused as too fast by it
