"""attention and attention_varlen on a real GPU: lengths, masks, layouts, ragged ends, kinds of config."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from aot_tune.kernels.prefill import flash_reference
from aot_tune.kernels.prefill.attention import attention, attention_tunable
from aot_tune.kernels.prefill.attention_varlen import attention_varlen, attention_varlen_tunable
from aot_tune.values.problem import Problem
from tests.support.agree import problem
from tests.support.kernels_on_gpu import check, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only", "memory_given_back")]

# Each new combination of head_dim, dtype, kind of mask and divisibility of the sizes is a compilation of a
# second or so: the cases below pair them rather than cross them.


def shape(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    mask: str = "causal",
    dtype: str = "bfloat16",
) -> Problem:
    return problem(
        dtype=dtype, mask=mask, batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )  # fmt: skip


@pytest.mark.parametrize(
    "one",
    [
        shape(1, 1, 1, 1, 64, "causal", "float16"),
        shape(3, 17, 4, 2, 128, "full_300", "float16"),
        shape(1, 128, 32, 8, 128, "full", "bfloat16"),
        shape(2, 700, 8, 1, 64, "causal_127", "float16"),
        shape(1, 1023, 5, 5, 64, "full", "bfloat16"),
        shape(2, 2048, 8, 2, 64, "full_300", "bfloat16"),
        shape(2, 2048, 8, 2, 128, "causal", "float16"),
    ],
    ids=str,
)
def test_attention_agrees_with_the_reference(one: Problem) -> None:
    check(attention_tunable, one)


@pytest.mark.parametrize(("head_dim", "mask"), [(128, "causal"), (64, "full_300")])
def test_attention_agrees_in_every_config_of_its_space(head_dim: int, mask: str) -> None:
    check(attention_tunable, shape(2, 1000, 8, 2, head_dim, mask), every=1)


def test_attention_of_a_long_prompt_agrees_with_the_reference() -> None:
    check(attention_tunable, shape(1, 16384, 8, 1))


def with_lse(function: Any, *args: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = function(*args, return_lse=True, **how)
    return found


def agrees(
    found: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any
) -> None:
    """Compare with the reference, rows that see nothing included."""
    causal, window = how.get("causal", True), how.get("window")
    window = window and window - 1  # the reference counts without the own place
    for sequence in range(q.shape[0]):
        out, sums = flash_reference.reference(
            q[sequence], k[sequence], v[sequence], how.get("scale", q.shape[-1] ** -0.5), causal, window
        )  # fmt: skip
        close = flash_reference.close(out, sums, q.dtype)["out"]
        torch.testing.assert_close(found[sequence].double(), out, rtol=close.rtol, atol=close.atol)
        torch.testing.assert_close(lse[sequence].double(), sums, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("q_len", "kv_len"), [(130, 1000), (702, 703), (302, 100), (130, 4090)])
@pytest.mark.parametrize(
    "how", [{}, {"causal": False}, {"window": 60}, {"causal": False, "window": 60}, {"scale": 0.3}]
)
def test_attention_takes_queries_that_end_where_the_keys_end(
    q_len: int, kv_len: int, how: dict[str, Any]
) -> None:
    q, k, v = normal(2, q_len, 8, 128), normal(2, kv_len, 2, 128), normal(2, kv_len, 2, 128)
    found, lse = with_lse(attention, q, k, v, **how)
    agrees(found, lse, q, k, v, **how)


def test_attention_takes_one_query() -> None:
    q, k, v = normal(2, 1, 8, 128), normal(2, 1000, 2, 128), normal(2, 1000, 2, 128)
    for window in (60, 1):
        agrees(*with_lse(attention, q, k, v, window=window), q, k, v, window=window)


def test_attention_takes_views_of_other_layouts() -> None:
    # As scaled_dot_product_attention has it.
    q, k, v = normal(2, 8, 300, 64), normal(2, 2, 300, 64), normal(2, 2, 300, 64)
    views = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.empty_like(q)
    _, lse = with_lse(attention, *views, out=out.transpose(1, 2))
    agrees(out.transpose(1, 2), lse, *views)
    # Into a fused projection.
    fused = normal(2, 300, 8 + 2 + 2, 128)
    q, k, v = fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:]
    agrees(*with_lse(attention, q, k, v), q, k, v)
    # Not aligned, reversed in storage, last dimension not contiguous.
    odd = normal(2, 300, 4, 129)[..., 1:]
    agrees(*with_lse(attention, odd, odd, odd), odd, odd, odd)
    turned = normal(2, 300, 128, 4).transpose(2, 3)
    agrees(*with_lse(attention, turned, turned, turned), turned, turned, turned)


def test_attention_writes_only_its_output() -> None:
    q, k, v = normal(1, 200, 4, 128), normal(1, 200, 2, 128), normal(1, 200, 2, 128)
    wide = torch.full((1, 300, 8, 128), math.nan, device="cuda", dtype=torch.bfloat16)
    out = wide[:, 50:250, 2:6]
    attention(q, k, v, out=out)
    assert not bool(out.isnan().any())
    out.fill_(math.nan)
    assert bool(wide.isnan().all()), "written outside of out"


def test_attention_of_nothing_is_nothing() -> None:
    q, k = normal(2, 3, 4, 64), normal(2, 5, 2, 64)
    assert attention(q[:0], k[:0], k[:0]).shape == (0, 3, 4, 64)  # type: ignore[union-attr]
    found, lse = with_lse(attention, q, k[:, :0], k[:, :0])
    assert bool((found == 0).all())
    assert bool((lse == -math.inf).all())


def test_attention_is_right_beyond_2_to_the_31_elements() -> None:
    tokens, heads, dim = 2**31 // 8192 + 300, 64, 128  # 4.3 GB
    q, k, v = normal(1, tokens, heads, dim), normal(1, tokens, 1, dim), normal(1, tokens, 1, dim)
    found, lse = with_lse(attention, q, k, v, window=100)
    last = slice(tokens - 200, tokens)
    keys = slice(tokens - 400, tokens)
    agrees(found[:, last], lse[..., last], q[:, last], k[:, keys], v[:, keys], window=100)


# attention_varlen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [
        shape(1, 1, 8, 2, 64, "full", "bfloat16"),
        shape(5, 1, 8, 2, 128, "causal_127", "float16"),
        shape(4, 100, 8, 2, 64, "causal", "float16"),
        shape(16, 333, 8, 2, 128, "full_300", "bfloat16"),
        shape(3, 2000, 8, 2, 128, "full", "float16"),
    ],
    ids=str,
)
def test_attention_varlen_agrees_with_the_reference(one: Problem) -> None:
    check(attention_varlen_tunable, one)


@pytest.mark.parametrize(("head_dim", "mask"), [(128, "causal_127"), (64, "full")])
def test_attention_varlen_agrees_in_every_config_of_its_space(head_dim: int, mask: str) -> None:
    check(attention_varlen_tunable, shape(6, 600, 8, 2, head_dim, mask), every=1)


@pytest.mark.parametrize(("head_dim", "how"), [(128, {}), (64, {"causal": False}), (128, {"window": 60})])
def test_ragged_sequences_agree_and_touch_nothing_beside_themselves(
    head_dim: int, how: dict[str, Any]
) -> None:
    q_lens, kv_lens = [130, 0, 1, 257, 64, 90, 33], [130, 7, 500, 300, 40, 0, 33]
    before, after = 5, 100
    ends = [torch.tensor([0, *lens]).cumsum(0).int() + before for lens in (q_lens, kv_lens)]
    rows, keys = (int(end[-1]) + after for end in ends)
    q, k, v = normal(rows, 8, head_dim), normal(keys, 2, head_dim), normal(keys, 2, head_dim)
    for x, end in ((q, ends[0]), (k, ends[1]), (v, ends[1])):
        x[:before], x[int(end[-1]) :] = math.nan, math.nan
    out = torch.full_like(q, math.nan)
    cu_seqlens = [end.cuda() for end in ends]
    _, lse = with_lse(attention_varlen, q, k, v, *cu_seqlens, 257, 500, out=out, **how)
    for i in range(len(q_lens)):
        mine, its = (slice(int(end[i]), int(end[i + 1])) for end in ends)
        agrees(out[None, mine], lse[None, :, mine], q[None, mine], k[None, its], v[None, its], **how)
    assert bool(out[:before].isnan().all())
    assert bool(out[-after:].isnan().all())


def test_one_sequence_of_nan_spoils_no_other() -> None:
    lengths = [70, 200, 50]
    cu_seqlens = torch.tensor([0, 70, 270, 320], dtype=torch.int32, device="cuda")
    q, k, v = normal(320, 4, 128), normal(320, 2, 128), normal(320, 2, 128)
    for x in (q, k, v):
        x[70:270] = math.nan
    found = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths))
    assert isinstance(found, torch.Tensor)
    assert not bool(found[:70].isnan().any())
    assert not bool(found[270:].isnan().any())
    assert bool(found[70:270].isnan().all())


def test_longest_lengths_that_are_too_large_change_nothing() -> None:
    cu_seqlens = torch.tensor([0, 220, 290, 320], dtype=torch.int32, device="cuda")
    q, k, v = normal(320, 4, 128), normal(320, 2, 128), normal(320, 2, 128)
    wanted = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 220, 220)
    found = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 4096, 4096)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)


def test_attention_varlen_takes_views_into_a_fused_projection() -> None:
    fused = normal(300, 8 + 2 + 2, 128)
    q, k, v = fused[:, :8], fused[:, 8:10], fused[:, 10:]
    cu_seqlens = torch.tensor([0, 120, 300], dtype=torch.int32, device="cuda")
    found, lse = with_lse(attention_varlen, q, k, v, cu_seqlens, cu_seqlens, 180, 180)
    for part in (slice(0, 120), slice(120, 300)):
        agrees(found[None, part], lse[None, :, part], *(x[None, part] for x in (q, k, v)))


def test_packed_sequences_are_right_beyond_2_to_the_31_elements() -> None:
    tokens, heads, dim = 2**31 // 8192 + 300, 64, 128  # 4.3 GB each
    q, k, v = (normal(tokens, heads, dim) for _ in range(3))
    cu_seqlens = torch.tensor([0, tokens - 200, tokens], dtype=torch.int32, device="cuda")
    found, lse = with_lse(attention_varlen, q, k, v, cu_seqlens, cu_seqlens, tokens, tokens, window=100)
    last = slice(tokens - 200, tokens)
    agrees(found[None, last], lse[None, :, last], *(x[None, last] for x in (q, k, v)), window=100)


def test_more_blocks_than_one_dimension_of_a_grid_holds() -> None:
    cu_seqlens = torch.tensor([0, 70, 270, 320], dtype=torch.int32, device="cuda")
    q, k, v = normal(320, 4, 128), normal(320, 2, 128), normal(320, 2, 128)
    wanted = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 200, 200)
    many = torch.cat((cu_seqlens, cu_seqlens[-1:].expand(2**20)))
    found = attention_varlen(q, k, v, many, many, 320, 320)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)


def test_both_can_be_captured_and_replayed() -> None:
    q, k, v = normal(2, 300, 8, 128), normal(2, 300, 2, 128), normal(2, 300, 2, 128)
    cu_seqlens = torch.tensor([0, 300, 600], dtype=torch.int32, device="cuda")
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    attention(q, k, v)
    attention_varlen(flat_q, flat_k, flat_v, cu_seqlens, cu_seqlens, 300, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, lse = with_lse(attention, q, k, v)
        packed = attention_varlen(flat_q, flat_k, flat_v, cu_seqlens, cu_seqlens, 300, 300)
    q.normal_()
    graph.replay()
    agrees(found, lse, q, k, v)
    agrees(packed.view_as(found), lse, q, k, v)  # type: ignore[union-attr]
