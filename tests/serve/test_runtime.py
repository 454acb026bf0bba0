"""aot_tune.serve.runtime: what torch reports, where it has no CUDA too."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from aot_tune.serve.runtime import TorchRuntime, with_tensors


def test_nothing_captures_before_cuda_is_initialised() -> None:
    """A CPU build of torch has no function that tells."""
    if not torch.cuda.is_initialized():
        assert TorchRuntime().capturing() is False


class Exporter:
    """Another library's array, which has nothing of a tensor but its DLPack protocol."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: int) -> Any:
        assert stream == -1  # nothing waits
        return self._tensor.__dlpack__()


class Subclass(torch.Tensor):
    """May use its data in its own way."""


def test_another_library_s_array_is_viewed_and_not_copied() -> None:
    held = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    array = Exporter(held)
    args = (array, 2, [array, None], (held,))
    viewed = with_tensors(args, TorchRuntime())
    for view in (viewed[0], viewed[2][0]):
        assert type(view) is torch.Tensor
        assert (view.data_ptr(), view.shape, view.dtype) == (held.data_ptr(), held.shape, held.dtype)
    assert viewed[1:2] + viewed[3:] == (2, (held,))
    assert viewed[2][1] is None


def test_an_array_of_the_host_is_not_copied_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[object] = []
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: copied.append(array))
    args = (numpy.zeros(4), numpy.zeros(()))
    assert with_tensors(args, TorchRuntime()) is args
    assert copied == []


def test_what_torch_cannot_view_and_tensors_are_left_as_they_are() -> None:
    class Broken:
        __cuda_array_interface__ = "nothing that torch can read"

    args = (
        torch.zeros(1),
        torch.zeros(1).as_subclass(Subclass),
        Broken(),
        [Broken()],
        None,
        1,
        "text",
        object(),
    )
    assert with_tensors(args, TorchRuntime()) is args
