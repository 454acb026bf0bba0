"""What blocks that share sums of a product leave for each other, seen in the emulator."""

from __future__ import annotations

from typing import Any

import pytest

from aot_tune.kernels.products import split_k


def shares_left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each share is added as a block leaves it, by its place in the scratch."""
    left: list[int] = []
    leave = split_k.leave

    def counted(scratch: Any, place: Any, sums: Any) -> None:
        left.append(int(place))
        leave(scratch, place, sums)

    monkeypatch.setattr(split_k, "leave", counted)
    return left
