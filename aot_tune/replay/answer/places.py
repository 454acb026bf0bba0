"""Folders of recorded tables that `install` names, besides a library's own. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_further: list[Path] = []


def use_folders(folders: Sequence[Path]) -> bool:
    """Read these folders too, after a library's own. Return whether they changed."""
    changed = list(folders) != _further
    _further[:] = folders
    return changed


def further_folders() -> tuple[Path, ...]:
    """Return the folders of the last `use_folders`."""
    return tuple(_further)
