"""What attention's kernels are held against: the reference's own results, with no keys or queries too."""

from __future__ import annotations

import math

import pytest
import torch

from aot_tune.kernels.prefill import flash_reference
from aot_tune.kernels.prefill.attention import attention_tunable
from tests.support.agree import assert_agrees, expected
from tests.support.attention import shape

CPU = torch.device("cpu")


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_is_torchs_own_attention(causal: bool) -> None:
    args = attention_tunable.make_args(
        shape(50, batch=2, heads=6, kv_heads=2, mask="causal" if causal else "full"), CPU, 0
    )
    q, k, v = (x.double().transpose(1, 2) for x in args[:3])
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    found = expected(attention_tunable, args)
    torch.testing.assert_close(found["out"].value, wanted.transpose(1, 2))
    scores = q @ k.repeat_interleave(3, 1).transpose(2, 3) / 8
    hidden = torch.ones(50, 50, dtype=torch.bool).triu(1) & causal
    torch.testing.assert_close(found["lse"].value, scores.masked_fill(hidden, -math.inf).logsumexp(3))


def test_the_reference_does_not_depend_on_how_many_queries_it_takes_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = attention_tunable.make_args(shape(50, mask="causal_9"), CPU, 0)
    wanted = expected(attention_tunable, args)
    monkeypatch.setattr(flash_reference, "_MOST_SCORES", 700)
    found = expected(attention_tunable, args)
    for name in ("out", "lse"):
        torch.testing.assert_close(found[name].value, wanted[name].value)


@pytest.mark.parametrize(("left_out", "name"), [(slice(64, 96), "out"), (slice(5, 6), "lse")])
def test_keys_left_out_are_told_from_a_rounding(left_out: slice, name: str) -> None:
    q, k, v, out, lse, *how = args = attention_tunable.make_args(shape(2048, heads=2), CPU, 0)
    wanted = expected(attention_tunable, args)
    out.copy_(wanted["out"].value)
    lse.copy_(wanted["lse"].value)
    assert_agrees(attention_tunable, args, wanted)
    hidden = k.clone()
    hidden[:, left_out] = 0
    without = expected(attention_tunable, (q, hidden, v, out, lse, *how))
    {"out": out, "lse": lse}[name].copy_(without[name].value)
    with pytest.raises(AssertionError, match=f"of {name} are wrong"):
        assert_agrees(attention_tunable, args, wanted)


MASKS = [(True, None), (False, None), (True, 3), (False, 3)]


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_without_keys_the_reference_is_0_and_the_log_sum_exp_minus_infinity(
    causal: bool, window: int | None
) -> None:
    q, keys = torch.randn(5, 6, 64), torch.randn(0, 2, 64)
    out, lse = flash_reference.reference(q, keys, keys, 0.1, causal, window)
    assert torch.equal(out, torch.zeros(5, 6, 64, dtype=torch.float64))
    assert torch.equal(lse, torch.full((6, 5), -math.inf, dtype=torch.float64))


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("kv_len", [0, 4])
def test_without_queries_the_reference_is_empty(kv_len: int, causal: bool, window: int | None) -> None:
    keys = torch.randn(kv_len, 2, 64)
    out, lse = flash_reference.reference(torch.randn(0, 6, 64), keys, keys, 0.1, causal, window)
    assert (out.shape, lse.shape) == ((0, 6, 64), (6, 0))
