"""The folder in which a worker's scenarios run, and its undisturbed sweeps, which they share."""

from __future__ import annotations

import pytest

from tests.faults.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("faults"))
