"""Folders in which tests lock GPUs that are not there, so that tests which run at once do not meet."""

from __future__ import annotations

from pathlib import Path


def shared_folder(path: Path) -> Path:
    """The folder, made writable for all users as the real ones are."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o1777)
    return path
