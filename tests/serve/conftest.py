"""The stand-in driver for tests that launch, and an environment without anybody's variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.nvidia.nvml import Gpu
from aot_tune.serve import loader
from tests.support import driver as fake_driver
from tests.support.samples import SM90


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*environment.DESCRIPTIONS, *environment.LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(environment.CACHE_DIR, str(tmp_path / "cache"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.Driver]:
    """One H200 that NVML tells of too; nothing runs on it."""
    gpu = Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="GPU-0")
    monkeypatch.setattr(loader, "gpus", lambda: (gpu,))
    with fake_driver.stand_in() as driver:
        yield driver


@pytest.fixture
def launched(driver: fake_driver.Driver) -> Callable[[], list[tuple[int, ...]]]:
    """The grids launched since the last call."""

    def take() -> list[tuple[int, ...]]:
        grids = [one.grid for one in driver.launches]
        driver.launches.clear()
        return grids

    return take
