"""attention_decode on a real GPU: right over models, pages, lengths, windows, splits, views and graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_tune.cubins.size_classes import ODD_SEED
from aot_tune.kernels.decode.attention_decode import attention_decode, attention_decode_tunable
from aot_tune.serve.launch.checks import unfit
from aot_tune.values.device import Device
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.kernels_on_gpu import check, here

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only", "memory_given_back")]

CUDA = torch.device("cuda")


def shape(batch: int, context: int, heads: int = 32, kv_heads: int = 8, **more: Any) -> Any:
    rest = {"dtype": "bfloat16", "windowed": False, "head_dim": 128, "page_size": 16, **more}
    return problem(batch=batch, context=context, heads=heads, kv_heads=kv_heads, **rest)


@pytest.mark.parametrize(
    ("batch", "context", "heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (1, 1, 1, 1, 64, 16, "bfloat16"),
        (1, 5000, 32, 8, 128, 16, "float16"),
        (1, 20000, 64, 8, 128, 64, "bfloat16"),
        (3, 1000, 5, 5, 64, 32, "float16"),
        (5, 777, 40, 8, 128, 128, "bfloat16"),
        (7, 300, 64, 1, 128, 32, "bfloat16"),
        (33, 2048, 64, 8, 64, 16, "bfloat16"),
        (200, 513, 8, 1, 128, 64, "float16"),
    ],
)
def test_it_agrees_with_the_reference(
    batch: int, context: int, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: str
) -> None:
    more = {"head_dim": head_dim, "page_size": page_size, "dtype": dtype}
    check(attention_decode_tunable, shape(batch, context, heads, kv_heads, **more))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("batch", "context", "windowed"), [(1, 8000, False), (64, 1500, False), (16, 128, True)]
)
def test_it_agrees_across_its_space(batch: int, context: int, windowed: bool, page_size: int) -> None:
    one = shape(batch, context, page_size=page_size, windowed=windowed)
    check(attention_decode_tunable, one, every=4)


@pytest.mark.parametrize("window", [128, 100, 1, 300])
@pytest.mark.parametrize("batch", [33, 256])
def test_windows_agree_in_every_config_of_theirs(batch: int, window: int) -> None:
    one = shape(batch, window, 64, 8, head_dim=64, windowed=True)
    args = attention_decode_tunable.make_args(one, CUDA, 1)
    args[4][1:3] = torch.tensor([0, 5], dtype=torch.int32)  # none, and fewer than the window
    wanted = expected(attention_decode_tunable, args)
    candidates = attention_decode_tunable.candidates(here(), one)
    if here().major == 9 and window == 128:  # elsewhere they may spill
        assert {c.hints["occupancy"] for c in candidates} == {1, 2, 3, 4}
    for config in candidates:
        poison(attention_decode_tunable, args)
        attention_decode_tunable.launch(*args, config=config)
        assert_agrees(attention_decode_tunable, args, wanted, config)


def test_it_agrees_where_pages_are_gathered() -> None:
    one = shape(300, 600)
    args = attention_decode_tunable.make_args(one, CUDA, 1)
    wanted = expected(attention_decode_tunable, args)
    for config in attention_decode_tunable.candidates(here(), one):
        if config["gather"]:
            poison(attention_decode_tunable, args)
            attention_decode_tunable.launch(*args, config=config)
            assert_agrees(attention_decode_tunable, args, wanted, config)


def test_it_agrees_again_and_again_with_many_splits() -> None:
    one = shape(2, 8192)
    args = attention_decode_tunable.make_args(one, CUDA, 1)
    wanted = expected(attention_decode_tunable, args)
    candidates = attention_decode_tunable.candidates(here(), one)
    for balanced in (False, True):
        alike = [c for c in candidates if c["balanced"] == balanced]
        most = max(alike, key=lambda c: int(c["splits"]))
        for _ in range(300):  # who arrives last differs
            poison(attention_decode_tunable, args)
            attention_decode_tunable.launch(*args, config=most)
            assert_agrees(attention_decode_tunable, args, wanted)
    assert not bool(args[7].any()), "what the splits left is not zero again"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(8, 1, 64), (64, 8, 64), (32, 8, 128), (40, 2, 128), (64, 1, 128)]
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_all_that_splits_leave_is_taken_away_again(
    heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    one = shape(1, 16384, heads, kv_heads, head_dim=head_dim, page_size=page_size)
    args = attention_decode_tunable.make_args(one, CUDA, 1)
    wanted = expected(attention_decode_tunable, args)
    tried = [
        c for c in attention_decode_tunable.candidates(here(), one)
        if int(c["splits"]) == 64 and int(c["tile_n"]) == 64 and c.hints["occupancy"] == 2
    ]  # fmt: skip
    assert tried
    for config in tried:
        poison(attention_decode_tunable, args)
        for length in (16384, 1, 16383, 64, 65, 0, 5000, 16384):  # from all splits active to one
            args[4].fill_(length)
            attention_decode_tunable.launch(*args, config=config)
            assert not bool(args[7].any()), (config, length)
        assert_agrees(attention_decode_tunable, args, wanted, config)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "head_dim"),
    [(8, 64, 8, 64), (8, 32, 8, 128), (64, 8, 1, 128), (3, 64, 1, 128), (16, 32, 8, 128), (33, 64, 8, 64)],
)
def test_equal_parts_are_right_for_all_lengths_and_leave_nothing(
    batch: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    one = shape(batch, 8192, heads, kv_heads, head_dim=head_dim)
    args = attention_decode_tunable.make_args(one, CUDA, ODD_SEED)
    properties = torch.cuda.get_device_properties(0)
    device = Device.reference(here()).with_sm_count(properties.name, properties.multi_processor_count)
    candidates = attention_decode_tunable.candidates(here(), one)
    tried = [
        c for c in candidates if c["balanced"] and unfit(attention_decode_tunable, c, device, one) is None
    ]
    if batch * kv_heads <= device.sm_count:
        assert tried
    chance = torch.Generator().manual_seed(1)
    for again in range(7):
        lengths = torch.randint(0, 8193, (batch,), generator=chance, dtype=torch.int32)
        lengths[: batch // 2] //= 3 ** (again % 4)  # from about alike to some long ones among short ones
        lengths[-1], lengths[0] = (8192, 0) if again else (1, 1)
        if again == 6:
            lengths.fill_(8000)
        args[4].copy_(lengths)
        wanted = expected(attention_decode_tunable, args)
        for config in tried:
            for _ in range(5):
                poison(attention_decode_tunable, args)
                attention_decode_tunable.launch(*args, config=config)
                assert not bool(args[7].any()), (config, lengths)
                torch.testing.assert_close(args[5].double(), wanted["out"].value, rtol=1e-2, atol=4e-3)
                torch.testing.assert_close(args[6].double(), wanted["lse"].value, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, -0.0, torch.nan, torch.inf])
def test_parts_that_are_zero_or_not_finite_are_waited_for(value: float) -> None:
    given = inputs_of([8000, 5000, 1])
    given[2][given[3][0, :500].long()] = value
    for _ in range(20):
        out = attention_decode(*given)
        torch.testing.assert_close(out[0], torch.full_like(out[0], value), equal_nan=True)
        assert bool(out[1:].isfinite().all())


def inputs_of(lengths: list[int], *, page_size: int = 16) -> tuple[torch.Tensor, ...]:
    """Eight heads over two, NaN in all that no sequence may look at, and no such page in the table's rest."""
    one = shape(len(lengths), max(*lengths, 1), 8, 2, page_size=page_size)
    q, k_cache, v_cache, table, seq_lens = attention_decode_tunable.make_args(one, CUDA, 2)[:5]
    seq_lens.copy_(torch.tensor(lengths))
    for row, length in zip(table, lengths, strict=True):
        used = -(-length // page_size)
        for cache in (k_cache, v_cache):
            cache[row[used:].long()] = torch.nan
            if length % page_size:
                cache[row[used - 1], length % page_size :] = torch.nan
        # What the cache does not have, on either side; and the page of a sequence of many.
        rest = torch.tensor([-(2**31), 2**31 - 1, -1, int(table[-1, 0])], dtype=torch.int32, device=CUDA)
        row[used:] = rest.repeat(len(row))[: len(row) - used]
    return q, k_cache, v_cache, table, seq_lens


def assert_right(given: tuple[torch.Tensor, ...], **more: Any) -> None:
    q, k_cache, v_cache, table, seq_lens = given
    out, lse = attention_decode(*given, return_lse=True, **more)
    for i, length in enumerate(seq_lens.tolist()):
        first = max(length - more.get("window", length), 0)
        pages = table[i, : -(-length // k_cache.shape[1])].long()
        k, v = (c[pages].flatten(0, 1)[first:length].double().transpose(0, 1) for c in (k_cache, v_cache))
        scores = q[i].double().reshape(k.shape[0], -1, q.shape[2]) @ k.transpose(1, 2) * q.shape[2] ** -0.5
        torch.testing.assert_close(lse[i].double(), scores.logsumexp(2).reshape(-1), rtol=1e-4, atol=1e-4)
        wanted = (scores.softmax(2) @ v).reshape(q.shape[1:])
        torch.testing.assert_close(out[i].double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("window", [None, 1, 64, 100, 5000])
def test_it_takes_any_lengths_and_windows_and_reads_nothing_beside_them(
    window: int | None, page_size: int
) -> None:
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4096, 4097]
    assert_right(inputs_of(lengths, page_size=page_size), **({} if window is None else {"window": window}))


def test_an_empty_sequence_gives_zeros_and_a_log_sum_of_minus_infinity() -> None:
    given = inputs_of([0, 500, 0])
    out, lse = attention_decode(*given, return_lse=True)
    assert bool((out[[0, 2]] == 0).all())
    assert bool((lse[[0, 2]] == -torch.inf).all())
    assert bool(out[1].isfinite().all())


def test_it_takes_views_of_queries_caches_and_tables() -> None:
    q, k_cache, v_cache, table, seq_lens = inputs_of([100, 300, 47])
    fused = torch.cat((q, q), dim=2)[:, :, 128:]
    assert_right((fused, k_cache, v_cache, table, seq_lens))
    both = torch.stack((k_cache, v_cache), dim=1)
    assert_right((q, both[:, 0], both[:, 1], table, seq_lens))
    heads_first = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (k_cache, v_cache)]
    assert_right((q, *heads_first, table, seq_lens))
    wider = torch.cat((table, table), dim=1)[:, : table.shape[1]]
    assert_right((q, k_cache, v_cache, wider, seq_lens))
    unaligned = torch.cat((k_cache[..., :1], k_cache), dim=3)[..., 1:]
    assert_right((q, unaligned, v_cache, table, seq_lens))


def test_a_cache_of_more_than_2_to_the_31_elements_is_read_to_its_end() -> None:
    pages = 2**31 // (16 * 8 * 128) + 10  # 4.3 GB each
    k_cache = torch.randn((pages, 16, 8, 128), device=CUDA, dtype=torch.bfloat16)
    q = torch.randn((2, 32, 128), device=CUDA, dtype=torch.bfloat16)
    table = torch.arange(pages - 40, pages, device=CUDA, dtype=torch.int32).flip(0).reshape(2, 20)
    lengths = torch.tensor([320, 300], device=CUDA, dtype=torch.int32)
    assert_right((q, k_cache, k_cache, table, lengths))


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_graph_is_replayed_with_other_lengths_and_pages(own_stream: bool) -> None:
    given = inputs_of([500, 4000, 1000])
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream if own_stream else torch.cuda.current_stream()):
        attention_decode(*given)
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(given[0])
    with torch.cuda.graph(graph, stream=stream if own_stream else None):
        attention_decode(*given, out=out)
        attention_decode(*given, out=out)
    for lengths in ([1, 2, 3], [500, 4000, 1000], [64, 1, 999]):
        given[4].copy_(torch.tensor(lengths))
        given[3][:, :20] = given[3][:, :20].flip(1)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.isnan().any(), torch.tensor(False, device=CUDA))
        torch.testing.assert_close(out, attention_decode(*given))


def test_two_streams_do_not_share_a_workspace() -> None:
    given = inputs_of([8000, 5000])
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    wanted = attention_decode(*given)
    torch.cuda.synchronize()
    outs = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(attention_decode(*given))
    torch.cuda.synchronize()
    for out in outs:
        torch.testing.assert_close(out, wanted)
