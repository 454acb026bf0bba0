"""Serving on two real GPUs and more: one process that uses two, and a rank with NCCL on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.nvidia.nvml import visible_gpus
from tests.support.serving_children import answer, built, start

pytestmark = [pytest.mark.gpu, pytest.mark.gpu2]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("archives"))


def test_two_gpus_in_one_process_each_on_its_default_stream_and_not_current(
    archives: Path, tmp_path: Path
) -> None:
    told = answer(start(archives, tmp_path, "two_gpus"))
    assert told["failures"] == []
    assert told["right"] == [True] * 8
    assert told["primed"] > 0


def test_b10_ranks_with_nccl_choose_alike_whatever_their_caches_hold(archives: Path, tmp_path: Path) -> None:
    """B10: one rank's cache was filled by a process of its own."""
    filled = tmp_path / "filled"
    alone = answer(start(archives, filled, "live_search"))
    assert alone["sources"] == ["searched"] * 3
    gpus = len(visible_gpus() or ())
    ranks = [
        start(
            archives,
            tmp_path / f"empty {n}" if n else filled,
            "rank",
            str(n),
            str(gpus),
            str(tmp_path / "store"),
            **{environment.SEARCH_SECONDS: "100"},
        )
        for n in range(gpus)
    ]
    for told in map(answer, ranks):
        assert told["equal"]
        assert told["different"] > 3
        assert told["searched"] == []
