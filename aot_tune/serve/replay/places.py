"""Where recorded tables lie beside a library's own: told once, by `install`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_further: list[Path] = []


def use_folders(folders: Sequence[Path]) -> None:
    """Read these folders too, after a library's own."""
    _further[:] = folders


def further_folders() -> tuple[Path, ...]:
    """The folders of the last `use_folders`."""
    return tuple(_further)
