"""Reading cubins that the real compiler made just now."""

from __future__ import annotations

import functools
import shutil

import pytest

from aot_tune.errors import StoreError, TuneError
from aot_tune.kernels.products.matmul import matmul_tunable
from aot_tune.nvidia import cubin, cutile
from aot_tune.nvidia.sass import Loop, inner_loop
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import samples

LARGE = Problem({"dtype": "bfloat16", "M": 4096, "N": 4096, "K": 4096})


@functools.cache
def matmul(arch: str, tile_m: int, tile_n: int, tile_k: int, num_ctas: int = 1, occupancy: int = 1) -> bytes:
    config = Config(
        constants={
            "tile_m": tile_m,
            "tile_n": tile_n,
            "more": 0,
            "tile_k": tile_k,
            "swapped": 0,
            "group": 8,
            "peeled": 1,
            "splits": 1,
        },
        hints={"num_ctas": num_ctas, "occupancy": occupancy},
    )
    args = matmul_tunable.args_fn(config, *matmul_tunable.make_args(LARGE, "meta", 0))
    signature = cutile.signature_of(matmul_tunable.kernel, args)
    return cutile.compile_cubin(matmul_tunable.kernel, config.hints, signature, Arch.parse(arch))


@functools.cache
def scale(tile_m: int, m: int = 64, **hints: int) -> bytes:
    problem = Problem({"dtype": "bfloat16", "M": m, "N": 1024})
    config = Config(constants={"tile_m": tile_m, "tile_n": 64})
    args = samples.scale.args_fn(config, *samples.scale.make_args(problem, "meta", 0))
    signature = cutile.signature_of(samples.scale.kernel, args)
    return cutile.compile_cubin(samples.scale.kernel, hints, signature, Arch.parse("sm80"))


@pytest.mark.process
def test_resources_are_those_the_vendors_tool_tells() -> None:
    held = cubin.resources(matmul("sm90", 128, 128, 64))
    assert 64 <= held.registers <= 255
    assert held.stack_bytes == 0
    # At least two stages of both operands, and what a block may have at most.
    assert 2 * (128 + 128) * 64 * 2 <= held.shared_bytes <= 227 * 1024
    assert held.threads % 128 == 0
    assert 128 <= held.threads <= 1024


@pytest.mark.process
def test_a_tile_too_large_for_the_registers_shows_its_spills() -> None:
    data = matmul("sm90", 256, 256, 64)
    assert cubin.resources(data).stack_bytes > 1000
    loop = inner_loop(cubin.machine_code(data))
    assert loop is not None
    assert loop.local_accesses > 100


@pytest.mark.process
def test_hints_that_do_nothing_give_the_same_code() -> None:
    # sm_80 has no clusters of blocks.
    one, two = scale(16, num_ctas=1), scale(16, num_ctas=2)
    assert cubin.code_digest(one) == cubin.code_digest(two)


@pytest.mark.process
def test_another_symbol_does_not_make_other_code() -> None:
    """Sizes divisible by 16 and others are two signatures, and for this kernel the same instructions."""
    one, two = matmul_of_size(4096), matmul_of_size(4097)
    assert one != two
    assert cubin.code_digest(one) == cubin.code_digest(two)


@pytest.mark.process
def test_a_cubin_has_the_symbol_that_it_was_compiled_with_and_no_other() -> None:
    args = samples.scale.args_fn(
        samples.DEFAULT,
        *samples.scale.make_args(Problem({"M": 64, "N": 4096, "dtype": "bfloat16"}), "meta", 0),
    )
    signature = cutile.signature_of(samples.scale.kernel, args)
    data = cutile.compile_cubin(
        samples.scale.kernel, samples.DEFAULT.hints, signature, Arch.parse("sm90"), symbol="scaled"
    )
    assert cubin.has_symbol(data, "scaled")
    assert not cubin.has_symbol(data, "scale")  # a beginning of the name
    assert not cubin.has_symbol(data, signature)


@functools.cache
def matmul_of_size(m: int) -> bytes:
    config = Config(
        constants={
            "tile_m": 128,
            "tile_n": 128,
            "more": 0,
            "tile_k": 64,
            "swapped": 0,
            "group": 8,
            "peeled": 1,
            "splits": 1,
        },
        hints={"num_ctas": 1, "occupancy": 1},
    )
    args = matmul_tunable.args_fn(config, *matmul_tunable.make_args(LARGE.replaced(M=m), "meta", 0))
    signature = cutile.signature_of(matmul_tunable.kernel, args)
    return cutile.compile_cubin(matmul_tunable.kernel, config.hints, signature, Arch.parse("sm90"))


@pytest.mark.process
def test_other_tiles_clusters_or_archs_are_other_code() -> None:
    digests = [
        cubin.code_digest(data)
        for data in (
            scale(16),
            scale(32),
            matmul("sm90", 128, 128, 64),
            matmul("sm90", 128, 128, 64, num_ctas=2),
            matmul("sm80", 64, 64, 32),
        )
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.process
def test_any_changed_instruction_changes_the_digest() -> None:
    data = scale(16)
    at = data.index(cubin.machine_code(data))
    changed = data[: at + 100] + bytes([data[at + 100] ^ 1]) + data[at + 101 :]
    assert cubin.code_digest(changed) != cubin.code_digest(data)


@pytest.mark.process
def test_the_inner_loop_of_a_matmul_is_found_on_every_generation() -> None:
    loops = {
        arch: inner_loop(cubin.machine_code(matmul(arch, 64, 128, 64)))
        for arch in ("sm80", "sm90", "sm100", "sm120")
    }
    for arch, loop in loops.items():
        assert isinstance(loop, Loop), arch
        assert 0 < loop.tensor_ops < loop.instructions
    # Four steps of 16 in a tile_k of 64, each of the 64 rows that the unit takes at a time.
    assert loops["sm90"].tensor_ops % 4 == 0
    # One warp's share of 64 x 128 x 64 in operations of 16 x 8 x 16, four warps or eight.
    assert loops["sm80"].tensor_ops in (64, 128)


@pytest.mark.process
def test_a_pipelined_loop_is_told_from_one_that_waits() -> None:
    good = inner_loop(cubin.machine_code(matmul("sm90", 128, 128, 64)))
    assert good is not None
    assert good.pipelined
    assert (good.waits, good.selects, good.local_accesses) == (0, 0, 0)
    spilled = inner_loop(cubin.machine_code(matmul("sm90", 256, 256, 64)))
    assert spilled is not None
    assert not spilled.pipelined


@pytest.mark.process
def test_code_without_tensor_operations_has_no_loop() -> None:
    assert inner_loop(cubin.machine_code(scale(16))) is None
    assert inner_loop(b"") is None
    assert inner_loop(bytes(range(256)) * 64) is None


@pytest.mark.process
@pytest.mark.parametrize("data", [b"", b"not a cubin", b"\x7fELF\x02" + b"\xff" * 100])
def test_what_is_no_cubin_is_an_error(data: bytes) -> None:
    with pytest.raises(TuneError):
        cubin.resources(data)
    with pytest.raises(TuneError):
        cubin.code_digest(data)


@pytest.mark.process
def test_a_cubin_cut_short_is_an_error_wherever_it_is_cut() -> None:
    data = scale(16)
    for end in range(0, len(data), 997):
        with pytest.raises(TuneError):
            cubin.resources(data[:end])
        with pytest.raises(TuneError):
            cubin.code_digest(data[:end])


@pytest.mark.process
def test_a_missing_cuobjdump_is_named_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    cubin.find_tool.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    try:
        with pytest.raises(StoreError, match="pip install nvidia-cuda-cuobjdump"):
            cubin.resources(scale(16))
    finally:
        cubin.find_tool.cache_clear()
