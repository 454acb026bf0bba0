"""The rows of the READMEs' tables of faults: each has its scenarios, and states how often they inject it."""

from __future__ import annotations

import re

from tests.faults import serving, sweeps
from tests.faults.world import ROOT, Tally, World

TABLES = {"A": ROOT / "aot_tune" / "tuner" / "README.md", "B": ROOT / "aot_tune" / "serve" / "INSIDE.md"}

ROWS = (*sweeps.SCENARIOS, *serving.SCENARIOS)
"""All rows, in the order of the tables."""

LONG = tuple(sweeps.LONG)
"""Rows whose scenarios take many minutes; some are rows of the tables as well."""


def run_row(row: str, world: World, tally: Tally, *, full: bool = False) -> None:
    """Do one row's faults; an exception of a scenario itself is wrong as well."""
    if row in serving.SCENARIOS:
        serving.run(row, world.folder / row, tally, seed=world.seed, more=full)
    _run(sweeps.SCENARIOS.get(row, ()), world, tally, full=full)
    if full:
        run_long(row, world, tally)


def run_long(row: str, world: World, tally: Tally) -> None:
    """Do the faults of one row that take many minutes."""
    _run(sweeps.LONG.get(row, ()), world, tally, full=True)


def _run(scenarios: tuple[sweeps.Scenario, ...], world: World, tally: Tally, *, full: bool) -> None:
    for scenario in scenarios:
        try:
            scenario(world, tally, full)
        except Exception as error:
            tally.add("wrong", 1, f"{scenario.__name__}: {type(error).__name__}: {error}")


def stated(row: str) -> int:
    """How often, at least, a row's test injects its fault, by the README's table."""
    text = TABLES[row[0]].read_text()
    (number,) = re.findall(rf"^\| {row} \|.*\| (\d+) \|$", text, re.M)
    return int(number)
