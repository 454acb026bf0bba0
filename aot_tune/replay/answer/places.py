"""What `install` and `aot-tune record` set for this process's searches. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_further: list[Path] = []

_recorder: list[Callable[[Any], Any]] = []


def use_folders(folders: Sequence[Path]) -> bool:
    """Read these folders too, after a library's own. Return whether they changed."""
    changed = list(folders) != _further
    _further[:] = folders
    return changed


def further_folders() -> tuple[Path, ...]:
    """Return the folders of the last `use_folders`."""
    return tuple(_further)


def record_with(recorder: Callable[[Any], Any] | None) -> None:
    """Hand every `searches.SearchCall` and `cubins.LaunchCall` to a recorder; None ends that."""
    _recorder[:] = [] if recorder is None else [recorder]


def recorder() -> Callable[[Any], Any] | None:
    """Return the function that searches and launches are handed to; None where searches are answered."""
    return next(iter(_recorder), None)
