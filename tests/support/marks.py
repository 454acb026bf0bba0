"""Finds all processes that tests have started, whoever their parents are now."""

from __future__ import annotations

import os
from pathlib import Path

MARK = "STARTED_BY_TESTS"
"""A variable; every process that inherits its value can be found again."""


def forking() -> int | None:
    """The process from which this one's workers are forked."""
    from aot_tune.tuner.process import fork_server  # not at pytest's start, which imports this module

    return None if fork_server._server is None else fork_server._server.process.pid


def marked(mark: str) -> list[int]:
    """Processes that began with the mark, this one left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # gone meanwhile, or another user's
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and state != "Z":
            found.append(int(entry.name))
    return found
