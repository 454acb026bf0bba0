"""What tests of kernels on a GPU ask for by name, with `pytest.mark.usefixtures` at the module's head.

They hold for no other test of this folder, so they are not automatic.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aot_tune import environment


@pytest.fixture
def defaults_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch defaults: what a table says, and what a miss would search, is not what is tested."""
    monkeypatch.setenv(environment.CONFIG, "default")
    monkeypatch.setenv(environment.DISABLE, "1")


@pytest.fixture
def memory_given_back() -> Iterator[None]:
    """Leave the next test the memory that this one's tensors took."""
    yield
    torch.cuda.empty_cache()
