"""Where recorded tables lie beside a library's own: told once, by `install`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_further: list[Path] = []


def use_folders(folders: Sequence[Path]) -> bool:
    """Read these folders too, after a library's own; return whether they are others than before."""
    others = list(folders) != _further
    _further[:] = folders
    return others


def further_folders() -> tuple[Path, ...]:
    """The folders of the last `use_folders`."""
    return tuple(_further)
