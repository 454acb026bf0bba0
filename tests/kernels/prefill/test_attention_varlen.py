"""attention_varlen without a GPU: the arithmetic at ragged ends, the declaration, what is refused."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.prefill.attention import attention_tunable
from aot_tune.kernels.prefill.attention_varlen import attention_varlen, attention_varlen_tunable
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import resources
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.compiling import SM90_AND_SLOW_ARCHS
from tests.support.samples import SM90

CPU = torch.device("cpu")
SMALL = Config(constants={"tile_m": 16, "tile_n": 32})


def shape(tokens: int, batch: int, *, mask: str = "causal", dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, mask=mask, batch=batch, tokens=tokens, heads=2, kv_heads=1, head_dim=64)


def packed(
    q_lens: list[int], kv_lens: list[int], *, mask: str = "causal", before: int = 0, after: int = 0
) -> tuple[Any, ...]:
    """Launch arguments for these sequences, with rows of NaN before the first and behind the last."""
    q, k, v, out, lse, *_, scale, causal, window = attention_varlen_tunable.make_args(
        shape(before + max(sum(q_lens), sum(kv_lens)) + after, 1, mask=mask), CPU, 1
    )
    starts = []
    for lens in (q_lens, kv_lens):
        ends = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        starts.append(ends + before)
    rows, keys = before + sum(q_lens) + after, before + sum(kv_lens) + after
    for x, total, used in ((q, rows, sum(q_lens)), (k, keys, sum(kv_lens)), (v, keys, sum(kv_lens))):
        x[:before] = math.nan
        x[before + used : total] = math.nan
    return (
        q[:rows], k[:keys], v[:keys], out[:rows], lse[:, :rows], *starts, max(q_lens), scale, causal, window
    )  # fmt: skip


# The declaration --------------------------------------------------------------------------------


def test_the_declared_problems_are_a_sweep_of_minutes() -> None:
    assert 30 <= len(attention_varlen_tunable.typical_problems) <= 65


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in attention_varlen_tunable.typical_problems:
        args = attention_varlen_tunable.make_args(one, torch.device("meta"), 0)
        assert attention_varlen_tunable.problem_of(*args) == one


def test_the_sequences_of_a_sweep_are_of_many_lengths_in_no_order() -> None:
    q, k, *_, cu_seqlens_q, cu_seqlens_k, longest, _, _, _ = attention_varlen_tunable.make_args(
        shape(100, 16), CPU, 0
    )
    lengths = cu_seqlens_q.diff().tolist()
    assert longest == max(lengths) == 100
    assert 12 <= min(lengths) <= 20
    assert lengths != sorted(lengths)
    assert sum(lengths) == q.shape[0] == k.shape[0]
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)


# The arithmetic ---------------------------------------------------------------------------------


@pytest.mark.emulated
@pytest.mark.parametrize("mask", ["causal", "full", "causal_9", "full_40"])
@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (1, 3), (40, 4), (65, 2)])
def test_the_kernel_agrees_with_the_reference(
    tokens: int, batch: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = "float16" if batch == 2 else "bfloat16"
    args = attention_varlen_tunable.make_args(shape(tokens, batch, mask=mask, dtype=dtype), CPU, 1)
    wanted = expected(attention_varlen_tunable, args)
    emulator.run(attention_varlen_tunable, args, SMALL, monkeypatch)
    assert_agrees(attention_varlen_tunable, args, wanted)


@pytest.mark.emulated
def test_blocks_that_one_dimension_of_a_grid_does_not_hold_are_in_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["aot_tune.kernels.prefill.attention_varlen"], "_MOST_IN_A_ROW", 5)
    one = shape(40, 4)
    assert attention_varlen_tunable.grid_fn(SMALL, Device.reference(SM90), one) == (5, 5)  # for 24
    args = attention_varlen_tunable.make_args(one, CPU, 1)
    wanted = expected(attention_varlen_tunable, args)
    emulator.run(attention_varlen_tunable, args, SMALL, monkeypatch)
    assert_agrees(attention_varlen_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("mask", ["causal", "full", "causal_9"])
def test_ragged_sequences_agree_and_touch_nothing_beside_themselves(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q_lens, kv_lens, before, after = [17, 0, 1, 33, 5], [20, 3, 40, 33, 64], 3, 4
    args = packed(q_lens, kv_lens, mask=mask, before=before, after=after)
    wanted = expected(attention_varlen_tunable, args)
    _, _, _, out, lse, *_ = args
    poison(attention_varlen_tunable, args)
    run_inside(args, monkeypatch)
    inside = slice(before, before + sum(q_lens))
    for found, name in ((out[inside], "out"), (lse[:, inside], "lse")):
        close = wanted[name]
        torch.testing.assert_close(found.double(), close.value, rtol=close.rtol, atol=close.atol)
    for rows in (slice(0, before), slice(before + sum(q_lens), None)):
        assert bool(out[rows].isnan().all())
        assert bool(lse[:, rows].isnan().all())


def run_inside(args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a problem that does not write the whole of its outputs."""
    partly = SimpleNamespace(
        kernel=attention_varlen_tunable.kernel, grid_fn=attention_varlen_tunable.grid_fn,
        args_fn=attention_varlen_tunable.args_fn, problem_of=attention_varlen_tunable.problem_of,
        parameters=attention_varlen_tunable.parameters, output_names=(), inplace=("out", "lse"),
    )  # fmt: skip
    emulator.run(partly, args, SMALL, monkeypatch)  # type: ignore[arg-type]


@pytest.mark.emulated
def test_a_sequence_without_keys_and_queries_before_all_keys_get_0(monkeypatch: pytest.MonkeyPatch) -> None:
    args = packed([4, 20, 6], [7, 12, 0])
    emulator.run(attention_varlen_tunable, args, SMALL, monkeypatch)
    _, _, _, out, lse, *_ = args
    for rows in (slice(4, 12), slice(24, 30)):
        assert bool((out[rows] == 0).all())
        assert bool((lse[:, rows] == -math.inf).all())
    for rows in (slice(0, 4), slice(12, 24)):
        assert bool(lse[:, rows].isfinite().all())


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("starts_q", "starts_k"),
    [
        ([-9, 17, 30], [-40, 20, 90]),
        ([0, 25, 10**6], [0, 2**31 - 1, 33]),
        ([20, 3, 30], [33, 4, 40]),
        ([2**31 - 1, -(2**31), 7], [-(2**31), 2**31 - 1, -1]),
        ([0, 12, 30], [50, 60, 70]),
    ],
)
def test_starts_that_leave_the_tensors_read_and_write_nothing_outside(
    starts_q: list[int], starts_k: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, out, lse, *_, scale, causal, window = packed([12, 18], [20, 20])
    starts = (torch.tensor(given, dtype=torch.int32) for given in (starts_q, starts_k))
    run_inside((q, k, v, out, lse, *starts, 30, scale, causal, window), monkeypatch)


@pytest.mark.emulated
def test_one_sequence_is_what_attention_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    args = attention_varlen_tunable.make_args(shape(50, 1), CPU, 2)
    emulator.run(attention_varlen_tunable, args, SMALL, monkeypatch)
    q, k, v, out, lse, *_, scale, causal, window = args
    found, sums = torch.empty_like(out), torch.empty_like(lse)
    batched = [x[None] for x in (q, k, v, found, sums)]
    emulator.run(attention_tunable, (*batched, scale, causal, window), SMALL, monkeypatch)
    assert torch.equal(found, out)
    assert torch.equal(sums, lse)


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.prefill.attention_varlen"]
    stand_in = SimpleNamespace(launch=lambda *args: calls.append(args))
    monkeypatch.setattr(module, "attention_varlen_tunable", stand_in)
    return calls


def some() -> dict[str, Any]:
    q, k, v, _, _, cu_seqlens_q, cu_seqlens_k, *_ = packed([3, 2], [4, 5])
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": 3, "max_seqlen_k": 5,
    }  # fmt: skip


def test_the_host_function_allocates_and_launches_once(launched: list[tuple[Any, ...]]) -> None:
    given = some()
    found = attention_varlen(**given, return_lse=True, window=2, causal=False)
    assert isinstance(found, tuple)
    [(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, longest, scale, causal, window)] = launched
    passed = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    assert all(given[name] is value for name, value in passed.items())
    assert found[0] is out
    assert found[1] is lse
    assert (tuple(out.shape), tuple(lse.shape)) == ((5, 2, 64), (2, 5))
    assert (longest, scale, causal, window) == (3, 0.125, False, 1)


def test_no_more_queries_are_looked_for_than_there_are(launched: list[tuple[Any, ...]]) -> None:
    attention_varlen(**{**some(), "max_seqlen_q": 10**6})
    assert launched[0][7] == 5


def test_what_is_empty_is_not_launched(launched: list[tuple[Any, ...]]) -> None:
    given = some()
    none = given["q"][:0]
    nowhere = torch.zeros(3, dtype=torch.int32)
    assert attention_varlen(**{**given, "q": none, "cu_seqlens_q": nowhere}).shape == (0, 2, 64)  # type: ignore[union-attr]
    empty = {**given, "k": given["k"][:0], "v": given["v"][:0], "cu_seqlens_k": nowhere, "max_seqlen_k": 0}
    out, lse = attention_varlen(**empty, return_lse=True)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    given = some()
    q, cu_seqlens = given["q"], given["cu_seqlens_q"]

    def refused(says: str, **changed: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            attention_varlen(**{**given, **changed})

    refused(r"q is \(1, 5, 2, 64\); pass a tensor of shape \(total_q, heads, head_dim\)", q=q[None])
    refused("k is float32; pass bfloat16", k=given["k"].float())
    refused(r"v has shape \(5, 2, 64\); k asks for \(9, 1, 64\)", v=q)
    refused("cu_seqlens_q is int64; pass int32", cu_seqlens_q=cu_seqlens.long())
    refused("cu_seqlens_k is a list", cu_seqlens_k=[0, 4, 9])
    refused(r"cu_seqlens_k has shape \(2,\); cu_seqlens_q asks for \(3,\)", cu_seqlens_k=cu_seqlens[:2])
    refused("max_seqlen_q is -1", max_seqlen_q=-1)
    refused("causal is 'no'; pass True or False", causal="no")
    refused("max_seqlen_k is tensor", max_seqlen_k=torch.tensor(3))
    refused("window is -2", window=-2)
    refused("out and q share memory", out=q)
    start = q.view(torch.int32).flatten()[:3].copy_(cu_seqlens)
    refused("out and cu_seqlens_q share memory", q=q.clone(), out=q, cu_seqlens_q=start)
    refused("out and cu_seqlens_k share memory", q=q.clone(), out=q, cu_seqlens_k=start)
    refused("cu_seqlens_q is on meta, not on cpu", cu_seqlens_q=cu_seqlens.to("meta"))
    assert launched == []


# The compiler -----------------------------------------------------------------------------------


def stack_bytes(arch: Arch, one: Problem, candidate: Config) -> int:
    args = attention_varlen_tunable.make_args(one, torch.device("meta"), 0)
    kernel = attention_varlen_tunable.kernel
    signature = cutile.signature_of(kernel, attention_varlen_tunable.args_fn(candidate, *args))
    cubin = cutile.compile_cubin(kernel, candidate.hints, signature, arch, timeout_s=120)
    return resources(cubin).stack_bytes


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
def test_the_default_compiles_without_spilling(name: str) -> None:
    arch = Arch.parse(name)
    one = problem(
        dtype="bfloat16", mask="causal", batch=8, tokens=2048, heads=32, kv_heads=8, head_dim=128
    )  # fmt: skip
    found = stack_bytes(arch, one, attention_varlen_tunable.default_config(arch, one))
    assert found <= (64 if name == "sm80" else 0)  # sm80 spills some sizes and places, not the sums


@pytest.mark.process
def test_a_windowed_config_of_its_space_compiles_without_spilling_on_sm90() -> None:
    one = problem(
        dtype="bfloat16", mask="causal_127", batch=16, tokens=1024, heads=64, kv_heads=8, head_dim=64
    )  # fmt: skip
    assert stack_bytes(SM90, one, attention_varlen_tunable.candidates(SM90, one)[-1]) == 0
