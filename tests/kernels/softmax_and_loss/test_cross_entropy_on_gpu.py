"""cross_entropy on a real GPU: loss and gradient over dtypes, ragged sizes, ignored rows and configs."""

from __future__ import annotations

import pytest
import torch

from aot_tune.kernels.rows import row_groups
from aot_tune.kernels.softmax_and_loss.cross_entropy import cross_entropy, cross_entropy_tunable
from tests.support.agree import problem
from tests.support.kernels_on_gpu import check, here, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [
        (1, 1),
        (3, 5),
        (100, 1000),
        (7, 4096),
        (33, 32000),
        (17, 50257),
        (5, 128256),
        (300, 151936),
        (2, 262144),
    ],
)
def test_cross_entropy_agrees_with_the_reference(
    rows: int, vocabulary: int, gradient: bool, dtype: str
) -> None:
    check(cross_entropy_tunable, problem(dtype=dtype, gradient=gradient, rows=rows, vocabulary=vocabulary))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("vocabulary", [32000, 50257, 128256])
def test_cross_entropy_agrees_in_every_config(vocabulary: int, gradient: bool, dtype: str) -> None:
    # More rows than the GPU holds at a time, so that blocks follow one another.
    one = problem(dtype=dtype, gradient=gradient, rows=1601, vocabulary=vocabulary)
    check(cross_entropy_tunable, one, every=1)
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        (dtype, offset)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for offset in (1e3, -1e3, 6e4, 1e6, 1e30, 3e38, -3e38)
        if abs(offset) < torch.finfo(dtype).max
    ],
)
@pytest.mark.parametrize("vocabulary", [32000, 128256])
def test_logits_far_from_zero_give_their_loss_and_gradient(
    vocabulary: int, offset: float, dtype: torch.dtype
) -> None:
    logits = (normal(40, vocabulary).float() * 4 + offset).to(dtype)
    target = targets(40, vocabulary)
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, target, reduction="none")
    losses.sum().backward()
    loss = cross_entropy(logits, target, grad_scale=1.0)
    torch.testing.assert_close(loss.double(), losses.detach(), rtol=1e-5, atol=1e-4)
    assert exact.grad is not None
    eps = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=2 * eps, atol=1e-6)


def targets(rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows,), device="cuda")


def zeros(rows: int) -> torch.Tensor:
    return torch.zeros(row_groups.ints(rows, row_groups.MOST_LANES), dtype=torch.int32, device="cuda")


def compare(logits: torch.Tensor, target: torch.Tensor, scale: float, ignored: int = -100) -> None:
    """Loss and gradient beside torch's."""
    leaf = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(leaf, target, ignore_index=ignored, reduction="none")
    [slopes] = torch.autograd.grad(wanted.sum() * scale, leaf)
    loss = cross_entropy(logits, target, ignore_index=ignored, grad_scale=scale)
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(logits.double(), slopes, rtol=1e-2, atol=2e-7 * scale)


def test_ignored_rows_have_neither_loss_nor_gradient() -> None:
    target = targets(300, 32000)
    target[::3] = 7
    logits = normal(300, 32000)
    logits[0] = torch.nan  # which an ignored row may well hold
    loss = cross_entropy(logits, target, ignore_index=7, grad_scale=0.5)
    assert bool((loss[::3] == 0).all())
    assert bool((logits[::3] == 0).all())
    compare(normal(300, 32000), target, 0.5, ignored=7)


def test_rows_of_a_wider_tensor_change_and_nothing_beside_them() -> None:
    wide = normal(65, 40000)
    before = wide.clone()
    compare(wide[:, 8:32008], targets(65, 32000), 0.25)
    assert torch.equal(wide[:, :8], before[:, :8])
    assert torch.equal(wide[:, 32008:], before[:, 32008:])
    compare(normal(33, 1001)[:, 1:], targets(66, 1000)[::2], 1.0)


def test_a_target_that_is_no_column_gives_nan_and_harms_no_other_row() -> None:
    rows, vocabulary = 64, 50257
    one = problem(dtype="bfloat16", gradient=True, rows=rows, vocabulary=vocabulary)
    for config in cross_entropy_tunable.candidates(here(), one)[::4]:
        logits, target = normal(rows, vocabulary), targets(rows, vocabulary)
        alone, loss, slots = logits.clone(), torch.empty(rows, device="cuda"), zeros(rows)
        wrong = torch.tensor([vocabulary, -1, 2**31, 2**32 + 5, -(2**40), 2**62], device="cuda")
        cross_entropy_tunable.launch(alone, target, loss, slots, -100, 1.0, config=config)
        right = loss.clone()
        target[3:9] = wrong
        cross_entropy_tunable.launch(logits, target, loss, slots, -100, 1.0, config=config)
        kept = torch.ones(rows, dtype=torch.bool, device="cuda")
        kept[3:9] = False
        assert bool(loss[~kept].isnan().all())
        assert bool(logits[~kept].isnan().all())
        assert torch.equal(loss[kept], right[kept])
        assert torch.equal(logits[kept], alone[kept])
        assert not bool(slots.any())


@pytest.mark.parametrize("vocabulary", [16384, 50257, 262144])
def test_blocks_that_share_rows_give_the_same_in_every_launch(vocabulary: int) -> None:
    rows = 700
    logits, target, slots = normal(rows, vocabulary), targets(rows, vocabulary), zeros(rows)
    target[::7] = -100
    one = problem(dtype="bfloat16", gradient=True, rows=rows, vocabulary=vocabulary)
    for config in cross_entropy_tunable.candidates(here(), one)[::3]:
        first: tuple[torch.Tensor, torch.Tensor] | None = None
        for _ in range(20):
            slopes, loss = logits.clone(), torch.empty(rows, device="cuda")
            cross_entropy_tunable.launch(slopes, target, loss, slots, -100, 1.0, config=config)
            first = first or (slopes, loss)
            assert torch.equal(slopes, first[0])
            assert torch.equal(loss, first[1])
        assert not bool(slots.any())


def test_two_streams_and_a_graph_have_slots_of_their_own() -> None:
    logits, target = normal(300, 50257), targets(300, 50257)
    right = logits.clone()
    losses = cross_entropy(right, target, grad_scale=1.0)
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    copies = [[logits.clone() for _ in range(10)] for _ in streams]
    torch.cuda.synchronize()
    for stream, mine in zip(streams, copies, strict=True):
        with torch.cuda.stream(stream):
            for each in mine:
                cross_entropy(each, target, grad_scale=1.0)
    torch.cuda.synchronize()
    assert all(torch.equal(each, right) for mine in copies for each in mine)
    held, graph = logits.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]):  # where the same call ran before
        loss = cross_entropy(held, target, grad_scale=1.0)
    for _ in range(3):
        held.copy_(logits)
        graph.replay()
        assert torch.equal(held, right)
        assert torch.equal(loss, losses)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_losses_of_few_rows_are_right_in_every_config(rows: int) -> None:
    for vocabulary in (50257, 262144):
        check(
            cross_entropy_tunable,
            problem(dtype="bfloat16", gradient=False, rows=rows, vocabulary=vocabulary),
            every=1,
        )


@pytest.mark.parametrize("vocabulary", [32000, 262144])
def test_the_loss_alone_leaves_the_logits_as_they_are(vocabulary: int) -> None:
    logits, target = normal(100, vocabulary), targets(100, vocabulary)
    before = logits.clone()
    wanted = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    torch.testing.assert_close(cross_entropy(logits, target).double(), wanted, rtol=1e-5, atol=2e-5)
    assert torch.equal(logits, before)


def test_cross_entropy_is_right_beyond_2_to_the_31_elements() -> None:
    vocabulary = 128256
    rows = 2**31 // vocabulary + 100  # 4.3 GB
    logits, target = normal(rows, vocabulary), targets(rows, vocabulary)
    last = slice(rows - 100, rows)
    leaf = logits[last].double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(leaf, target[last], reduction="none")
    [slopes] = torch.autograd.grad(wanted.sum(), leaf)
    loss = cross_entropy(logits, target, grad_scale=1.0)
    torch.testing.assert_close(loss[last].double(), wanted.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(logits[last].double(), slopes, rtol=1e-2, atol=2e-7)
    torch.cuda.empty_cache()
