"""`aot-tune profile` on a real GPU: durations, classes, spills, privileges, and a change that is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aot_tune.cli.app import app
from aot_tune.cli.measure import profile
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.values.problem import problem_option
from tests.support.shipped import FOUND

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PROFILES", tmp_path)


def _profile(kernel: str, problem: str, *words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["profile", kernel, "--problem", problem, "--json", *words])
    print(result.stderr)
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    print({name: report[name] for name in ("bound", "here_us", "table_us", "findings", "tried")})
    return report


MATMUL = "M=4096,N=4096,K=4096,dtype=bfloat16"


def _longest(kernel: str) -> str:
    problems = FOUND[kernel].tunable.typical_problems
    return problem_option(max(problems, key=lambda one: one.size("rows") * one.size("cols")))


def test_a_large_product_is_bound_by_the_tensor_unit_and_its_time_is_the_tables() -> None:
    report = _profile("matmul", MATMUL)
    assert report["bound"] == "tensor"
    if (visible_gpus() or ())[0].name == "NVIDIA H200":
        assert report["here_us"] == pytest.approx(report["table_us"], rel=0.10)


def test_rows_that_are_moved_once_are_bound_by_memory() -> None:
    assert _profile("softmax", _longest("softmax"))["bound"] == "memory"


def test_counters_agree_with_the_clock_where_they_may_be_read() -> None:
    report = _profile("matmul", MATMUL)
    counters = report["counters"]
    if counters["refusal"]:
        assert "error" in counters["refusal"] or "not installed" in counters["refusal"]
        pytest.skip(counters["refusal"])
    assert counters["passes"] <= 6
    assert counters["values"]["gpu__time_duration.sum"] / 1e3 == pytest.approx(report["here_us"], rel=0.10)


def test_a_config_that_spills_is_said_to_spill() -> None:
    problem = "dtype=bfloat16,mask=causal,batch=16,tokens=256,heads=8,kv_heads=1,head_dim=128"
    report = _profile("attention_varlen", problem, "--config", "tile_m=128")
    assert report["facts"]["resources"]["stack_bytes"] > 0
    assert "spills" in [finding["rule"] for finding in report["findings"]]


def test_the_same_config_twice_differs_in_no_finding() -> None:
    _profile("matmul", MATMUL)
    (kept,) = profile.PROFILES.glob("*.json")
    result = CliRunner().invoke(app, ["profile", "matmul", "--problem", MATMUL, "--diff", str(kept)])
    print(result.stdout)
    assert "findings gone: none; new: none" in result.stdout
