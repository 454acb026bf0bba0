"""Whole sweeps survive the faults of the rows A: nothing is lost, wrong or hung."""

from __future__ import annotations

import pytest

from tests.faults import rows, sweeps
from tests.faults.world import Tally, World

pytestmark = [pytest.mark.process, pytest.mark.slow]  # a sweep starts three processes that import torch


@pytest.mark.parametrize("row", sweeps.SCENARIOS)
def test_a_fault_of_a_sweep_costs_no_measurement_and_no_table(row: str, world: World) -> None:
    tally = Tally()
    rows.run_row(row, world, tally)
    assert tally.why == []
    assert tally.injected >= rows.stated(row)


def test_a_sweep_with_flaky_configs_publishes_none_of_them(world: World) -> None:
    """The other long scenario compares times, which other tests disturb: ``make faults ARGS=--full``."""
    tally = Tally()
    rows.run_long("A5", world, tally)
    assert tally.why == []
    assert tally.injected > 0
