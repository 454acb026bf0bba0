"""Grids and curves: their colours, their axes and their labels."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from aot_tune.cli.report.pictures import BLUE, ORANGE, Cell, curves, grid, shade
from aot_tune.tables.table import Entry
from tests.support.samples import scale_table


def test_colours_run_from_orange_over_white_to_blue() -> None:
    assert shade(0) == "#ffffff"
    assert (shade(1), shade(7)) == ("#004488",) * 2
    assert (shade(-1), shade(-7)) == ("#cc5500",) * 2


def _simulated(color: tuple[int, int, int]) -> tuple[float, float, float]:
    """A colour as deuteranopes see it: Viénot, Brettel and Mollon 1999, in linear light."""
    red, green, blue = ((channel / 255) ** 2.2 for channel in color)
    seen = 0.29275 * red + 0.70725 * green
    return seen, seen, -0.02234 * red + 0.02234 * green + blue


def test_the_ends_of_the_scale_differ_for_red_green_blindness() -> None:
    blue, orange = _simulated(BLUE), _simulated(ORANGE)
    assert abs(blue[2] - orange[2]) > 0.2
    assert abs(blue[0] - orange[0]) > 0.1


def test_a_grid_has_a_row_for_each_edge_and_the_buckets_values_in_titles() -> None:
    def cell(entry: Entry) -> Cell:
        return Cell(f"{entry.gain:.2f}", shade(1), "a < b")

    drawn = ET.fromstring(grid(scale_table(), cell, 'three "cells"'))
    assert drawn.attrib["aria-label"] == 'three "cells"'
    texts = [element.text for element in drawn if element.tag.endswith("text")]
    assert [text for text in texts if text in ("256", "64", "1")] == ["256", "64", "1"]
    titles = [element[0].text for element in drawn if element.tag.endswith("rect")]
    assert titles == ["1: a < b", "64: a < b", "256: a < b"]


def test_curves_have_a_point_for_each_count_and_a_legend() -> None:
    drawn = ET.fromstring(curves([("mean", [0.2, 0.1, 0.0]), ("worst", [0.9, 0.3, 0.0])], "falls"))
    circles = [element[0].text for element in drawn if element.tag.endswith("circle")]
    assert circles[:3] == ["0 configs: mean 20.0%", "1 configs: mean 10.0%", "2 configs: mean 0.0%"]
    assert len(circles) == 6
    texts = [element.text for element in drawn if element.tag.endswith("text")]
    assert {"mean", "worst", "configs"} <= set(texts)
