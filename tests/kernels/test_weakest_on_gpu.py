"""On a GPU: the cubin that assumes nothing of its arrays computes right for arrays of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kernels.cases import CASES
from tests.support.weakest.cases import cases
from tests.support.weakest.child import BEYOND
from tests.support.weakest.large import LARGE

pytestmark = pytest.mark.gpu

Answers = Mapping[str, Mapping[str, str | int]]


@pytest.fixture(scope="module")
def answers() -> tuple[Answers, str]:
    """All kernels' verdicts, of one process: it compiles on all cores before its first launch."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.weakest.child", *CASES],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    told: dict[str, dict[str, str | int]] = {name: {} for name in CASES}
    for line in done.stdout.splitlines():
        kernel, case, verdict = json.loads(line)
        told[kernel][case] = verdict
    return told, f"exit {done.returncode}: {done.stderr[-3000:]}"


@pytest.mark.parametrize("kernel", CASES)
def test_the_weakest_cubin_is_right_for_aligned_ragged_unaligned_transposed_and_size_1_inputs(
    kernel: str, answers: tuple[Answers, str]
) -> None:
    told, end = answers
    verdicts = {case: verdict for case, verdict in told[kernel].items() if case not in ("cubins", BEYOND)}
    assert verdicts.keys() == {case.name for case in cases(kernel)}, end
    assert {case: verdict for case, verdict in verdicts.items() if verdict != "right"} == {}
    assert int(told[kernel]["cubins"]) <= len(verdicts) // 4  # the four layouts share one cubin


@pytest.mark.parametrize("kernel", LARGE)
def test_the_weakest_cubin_is_right_where_places_need_more_than_32_bits(
    kernel: str, answers: tuple[Answers, str]
) -> None:
    told, end = answers
    assert told[kernel].get(BEYOND) == "right", end
