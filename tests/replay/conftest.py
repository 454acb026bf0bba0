"""The stand-in driver, and an environment without anybody's variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aot_tune import environment
from tests.support import driver as fake_driver


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*environment.DESCRIPTIONS, *environment.LAUNCHERS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def driver() -> Iterator[fake_driver.Driver]:
    """One idle H200; nothing runs on it."""
    with fake_driver.stand_in() as driver:
        yield driver
