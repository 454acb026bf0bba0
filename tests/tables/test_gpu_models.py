"""Messages on tables that were measured on another GPU model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from aot_tune import serve
from aot_tune.bench.records import RESULTS
from aot_tune.tables.gpu_models import measured_on, other_gpu_model
from tests.support.samples import scale_table


def test_nothing_is_said_of_the_same_card() -> None:
    assert other_gpu_model("NVIDIA H200", "NVIDIA H200") is None


@pytest.mark.parametrize(
    ("here", "known"),
    [
        (
            "NVIDIA H100 80GB HBM3",
            "2.2 % slower with their edition of 27 November 2026 than with the best of the portfolio",
        ),
        ("NVIDIA H100 PCIe", "how much slower its choices are on this one was not measured"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "how much slower its choices are on this one was not measured"),
        ("NVIDIA H200 MIG 1g.18gb", "how much slower its choices are on this one was not measured"),
        ("NVIDIA GH200 480GB", "how much slower its choices are on this one was not measured"),
    ],
)
def test_another_card_is_told_with_what_is_known(here: str, known: str) -> None:
    said = other_gpu_model("NVIDIA H200", here) or ""
    assert said.startswith(
        f"tables were measured on another GPU model of the arch: NVIDIA H200, and this is {here}."
    )
    assert known in said
    assert "aot-tune bench regret" in said
    assert "ranks of one job should run on GPUs of one model" in said


def test_what_is_known_of_the_h100_is_what_was_recorded() -> None:
    recorded = json.loads((RESULTS / "nvidia-h100-80gb-hbm3" / "regret.json").read_bytes())
    whole, matmul = (recorded[name]["figures"] for name in ("all kernels", "matmul"))
    lost, of_matmul = (
        f"{each['regret']['worst state']['geometric mean %']:.1f} %" for each in (whole, matmul)
    )
    said = other_gpu_model("NVIDIA H200", "NVIDIA H100 80GB HBM3") or ""
    assert f"at {whole['problems']} sizes that nobody declared, shipped kernels were {lost} slower" in said
    assert f"and matmul {of_matmul}" in said
    readme = " ".join((Path(serve.__path__[0]) / "README.md").read_text().split())
    assert f"choices were {lost} slower" in readme
    assert f"those of `matmul` {of_matmul}." in readme


def test_predictions_were_measured_on_no_card() -> None:
    table = scale_table()
    predicted = dataclasses.replace(
        table, entries=tuple(dataclasses.replace(entry, evidence="predicted") for entry in table.entries)
    )
    assert measured_on([table, table, predicted]) == ("NVIDIA H200",)
    assert measured_on([predicted]) == ()
