"""rope on a real GPU: right over dtypes, models, partial rotations, both layouts and its space."""

from __future__ import annotations

import pytest
import torch

from aot_tune.kernels import rope, rope_tunable
from aot_tune.values.problem import Problem
from tests.support.agree import assert_agrees, expected, problem
from tests.support.kernels_on_gpu import DTYPES, check, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only", "memory_given_back")]


def rotation(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", *,
    rotary_dim: int = 0, interleaved: bool = False,
) -> Problem:  # fmt: skip
    return problem(
        dtype=dtype, interleaved=interleaved, tokens=tokens, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, rotary_dim=rotary_dim or head_dim,
    )  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 2), (1, 32, 8, 128), (5, 40, 8, 128), (33, 64, 8, 64), (7, 3, 1, 16), (1000, 128, 128, 64)],
)
def test_rope_agrees_with_the_reference(
    sizes: tuple[int, int, int, int], dtype: str, interleaved: bool
) -> None:
    check(rope_tunable, rotation(*sizes, dtype, interleaved=interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(256, 64), (80, 32), (3, 2)])
def test_rope_rotates_a_part_of_each_head(head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    check(rope_tunable, rotation(50, 16, 2, head_dim, rotary_dim=rotary_dim, interleaved=interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(64, 8, 128), (40, 8, 128), (28, 4, 64), (71, 1, 64)])
def test_rope_agrees_across_its_space(heads: int, kv_heads: int, dim: int, interleaved: bool) -> None:
    check(rope_tunable, rotation(777, heads, kv_heads, dim, interleaved=interleaved), every=1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_views_into_a_fused_projection_and_nothing_beside_them(interleaved: bool) -> None:
    tokens, heads, kv_heads, dim = 50, 32, 8, 128
    fused = normal(tokens, (heads + 2 * kv_heads) * dim)
    before = fused.clone()
    q = fused[:, : heads * dim].view(tokens, heads, dim)
    k = fused[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    _, _, cos, sin, _ = rope_tunable.make_args(
        rotation(tokens, heads, kv_heads, dim), torch.device("cuda"), 0
    )
    wanted = expected(rope_tunable, (q, k, cos, sin, interleaved))
    rope(q, k, cos, sin, interleaved=interleaved)
    assert_agrees(rope_tunable, (q, k, cos, sin, interleaved), wanted)
    assert torch.equal(fused[:, (heads + kv_heads) * dim :], before[:, (heads + kv_heads) * dim :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_right_beyond_2_to_the_31_elements(interleaved: bool) -> None:
    tokens, heads, dim = 2**31 // 8192 + 100, 64, 128  # 4.3 GB
    q, k = normal(tokens, heads, dim), normal(tokens, 1, dim)
    angles = torch.rand((tokens, dim // 2), device="cuda") * 6.28
    cos, sin = angles.cos(), angles.sin()
    last = slice(tokens - 150, tokens)
    at_the_end = (q[last], k[last], cos[last], sin[last], interleaved)
    wanted = expected(rope_tunable, at_the_end)
    rope(q, k, cos, sin, interleaved=interleaved)
    assert_agrees(rope_tunable, at_the_end, wanted)
