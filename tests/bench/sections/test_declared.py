"""Kernels of other modules, swept by the real tuner and compiler; a session without a GPU takes the times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aot_tune.bench.sections import declared
from aot_tune.bench.sections.part import Part, Request
from aot_tune.errors import TuneError, UsageError
from aot_tune.nvidia.nvml import Gpu
from aot_tune.tables.table import geometric_mean
from aot_tune.values.problem import Problem
from tests.support import hashed_sessions, samples, several_kernels
from tests.support.hashed_sessions import HashedSession
from tests.support.samples import SM90, entry

MODULE = "tests.support.samples"


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that is named and never used."""
    gpu = Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="GPU-0")
    monkeypatch.setattr(declared, "visible_gpus", lambda: (gpu,))
    with hashed_sessions.measuring(monkeypatch):
        yield


@pytest.mark.process
def test_a_kernel_of_another_module_is_swept_whole_and_told(tmp_path: Path) -> None:
    [part] = declared.run(Request(modules=(MODULE,)))
    figures = part.figures
    assert part.name == "scale"
    assert figures["problems"] == len(samples.scale.buckets) == len(figures["rows"])
    legal = sum(len(samples.scale.candidates(SM90, bucket)) for bucket in samples.scale.buckets)
    assert 0 < figures["candidates verified"] <= legal
    gains = [row["default_us"] / row["winner_us"] for row in figures["rows"]]
    assert [row["default over winner"] for row in figures["rows"]] == gains
    said = figures["default over winner"]
    assert (said["least"], said["most"]) == (min(gains), max(gains))
    assert said["geometric mean"] == pytest.approx(geometric_mean(gains))
    assert figures["sweep_s"] > 0
    asked = {problem for _, problem, _ in HashedSession.told}
    assert {str(problem) for problem in asked} >= {row["problem"] for row in figures["rows"]}
