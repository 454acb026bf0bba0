"""Serving processes survive the faults B1 to B20: nothing is lost, wrong or hung."""

from __future__ import annotations

import pytest

from tests.faults import rows, serving
from tests.faults.world import Tally, World

pytestmark = pytest.mark.process

SLOW = ("B1", "B3", "B4", "B6", "B7", "B8", "B11", "B12", "B13", "B14", "B15", "B17", "B18", "B19", "B20")
"""Rows of many processes, of long waits or of all shipped kernels: `make test` leaves them out."""


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow) if row in SLOW else row for row in serving.SCENARIOS]
)
def test_a_fault_of_a_server_costs_no_launch_and_no_choice(row: str, world: World) -> None:
    tally = Tally()
    rows.run_row(row, world, tally)
    assert tally.why == []
    assert tally.injected >= rows.stated(row)
