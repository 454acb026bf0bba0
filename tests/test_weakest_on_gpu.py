"""On a GPU: one cubin that assumes nothing of its arrays computes right for arrays of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel", ["matmul", "rms_norm", "rope"])
def test_the_weakest_cubin_is_right_for_aligned_ragged_unaligned_transposed_and_size_1_inputs(
    kernel: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.weakest_child", kernel],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    wrong = {case: verdict for case, verdict in answer["verdicts"].items() if verdict != "right"}
    assert wrong == {}
    assert 1 <= answer["weakest"] <= len(answer["verdicts"]) // 4  # the layouts share one cubin
