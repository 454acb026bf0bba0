"""Arguments as plain values, and arguments like them."""

from __future__ import annotations

import json

import pytest
import torch

from aot_tune.errors import NotRecordableError
from aot_tune.replay.record import arguments
from aot_tune.replay.record.arguments import ALIGNMENT, described, rebuilt

CPU = torch.device("cpu")


def again(*args: object) -> tuple[object, ...]:
    contents: dict[str, torch.Tensor] = {}
    return rebuilt(json.loads(json.dumps(described(args, contents))), contents, CPU)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6),
        torch.randn(4, 6).t(),
        torch.randn(8, 6)[1::2, 1:3],
        torch.randn(6)[1:],
        torch.randn(1, 3).expand(4, 3),
        torch.empty(0, 3),
        torch.tensor(2.0),
        torch.zeros(8, dtype=torch.float8_e4m3fn),
    ],
    ids=["whole", "transposed", "strided", "misaligned", "expanded", "empty", "scalar", "fp8"],
)
def test_a_tensor_keeps_shape_strides_dtype_and_alignment(tensor: torch.Tensor) -> None:
    (like,) = again(tensor)
    assert isinstance(like, torch.Tensor)
    assert (like.shape, like.stride(), like.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    start = like.untyped_storage().data_ptr()
    if tensor.numel():
        assert (like.data_ptr() - start) % ALIGNMENT == tensor.data_ptr() % ALIGNMENT
    assert not like.float().any()


def test_whole_numbers_keep_their_values_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    places = torch.tensor([[3, 1], [2, 9]], dtype=torch.int32).t()
    (like,) = again(places)
    assert torch.equal(like, places)  # type: ignore[arg-type]
    monkeypatch.setattr(arguments, "MOST_CONTENTS", 8)
    (zeros,) = again(places)
    assert not zeros.any()  # type: ignore[attr-defined]


def test_what_was_one_tensor_is_one_again() -> None:
    x = torch.randn(4)
    one, two, (three, number) = again(x, x, [x, 2.5])  # type: ignore[misc]
    assert one is two is three
    assert number == 2.5
    assert again(None, True, 3, "silu", (1, 2)) == (None, True, 3, "silu", (1, 2))


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(NotRecordableError, match="an argument is a dtype, which cannot be sent"):
        described([torch.float32], {})
