"""aot_tune.serve.runtime: what torch reports, where it has no CUDA too."""

from __future__ import annotations

import torch

from aot_tune.serve.runtime import TorchRuntime


def test_nothing_captures_before_cuda_is_initialised() -> None:
    """A CPU build of torch has no function that tells."""
    if not torch.cuda.is_initialized():
        assert TorchRuntime().capturing() is False
