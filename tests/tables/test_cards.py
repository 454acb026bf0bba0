"""What is said of tables that were measured on another card."""

from __future__ import annotations

import dataclasses

import pytest

from aot_tune.tables.cards import measured_on, other_card
from tests.support.samples import scale_table


def test_nothing_is_said_of_the_same_card() -> None:
    assert other_card("NVIDIA H200", "NVIDIA H200") is None


@pytest.mark.parametrize(
    ("here", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "2.2 % slower with them than with the best of the portfolio"),
        ("NVIDIA H100 PCIe", "how much slower its choices are here was not measured"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "how much slower its choices are here was not measured"),
        ("NVIDIA H200 MIG 1g.18gb", "how much slower its choices are here was not measured"),
        ("NVIDIA GH200 480GB", "how much slower its choices are here was not measured"),
    ],
)
def test_another_card_is_told_with_what_is_known(here: str, known: str) -> None:
    said = other_card("NVIDIA H200", here) or ""
    assert said.startswith(
        f"tables were measured on another card of the arch: NVIDIA H200, and this is {here}."
    )
    assert known in said
    assert "aot-tune bench regret" in said
    assert "ranks of one job should be on cards of one model" in said


def test_predictions_were_measured_on_no_card() -> None:
    table = scale_table()
    predicted = dataclasses.replace(
        table, entries=tuple(dataclasses.replace(entry, evidence="predicted") for entry in table.entries)
    )
    assert measured_on([table, table, predicted]) == ("NVIDIA H200",)
    assert measured_on([predicted]) == ()
