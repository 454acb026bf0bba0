"""The compiler's remarks, as tileiras 13.4 writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot_tune.nvidia import cutile
from aot_tune.nvidia.remarks import remarks_of
from aot_tune.tuner.plan.candidates import DeviceKernel
from tests.support.samples import DEFAULT, SM90, scale_in

TEXT = """--- !Passed
Pass:            Tensor-core
Name:            RemarkTensorCoreMMA
DebugLoc:        { File: '<unknown file>', Line: 0, Column: 0 }
Function:        matmul
Args:
  - RemarkId:    5
  - Remark:      MMA operation successfully optimized to use Tensor Cores
  - Instruction: Tensor-core SM90
  - Shape:       '[64, 16, 16]'
...
--- !Failure
Pass:            Memory
Name:            RemarkMemoryTmaLoadFailed
Function:        matmul
Args:
  - Remark:      Failed to select TMA load instruction
  - Reason:      no contiguous dimension found
...
--- !Passed
Pass:            Tensor-core
Name:            RemarkTensorCoreMMA
Args:
  - RemarkId:    5
  - Remark:      MMA operation successfully optimized to use Tensor Cores
  - Instruction: Tensor-core SM90
  - Shape:       '[64, 16, 16]'
...
"""


def test_equal_remarks_are_counted_and_failures_come_first() -> None:
    failure, product = remarks_of(TEXT)
    assert (failure.failed, failure.text) == (
        True, "Failed to select TMA load instruction: no contiguous dimension found"
    )  # fmt: skip
    assert (product.failed, product.times) == (False, 2)
    assert product.text.endswith("to use Tensor Cores: Tensor-core SM90, [64, 16, 16]")


@pytest.mark.parametrize("text", ["", "no yaml", "--- !Passed\n", "--- !Passed\n...\n", TEXT[:200]])
def test_text_of_another_form_has_no_remarks_or_nameless_ones(text: str) -> None:
    assert all(not remark.text for remark in remarks_of(text))


@pytest.mark.process
def test_the_compiler_writes_remarks_where_they_are_wanted(tmp_path: Path) -> None:
    kernel = DeviceKernel(scale_in(tmp_path)["scale"], SM90)
    job = kernel.job(kernel.tunable.typical_problems[0], DEFAULT)
    path = tmp_path / "remarks"
    compiled = [
        cutile.compile_cubin(kernel.tunable.kernel, job.hints, job.signature, SM90, remarks=wanted)
        for wanted in (path, None)
    ]
    assert compiled[0] == compiled[1]
    assert any("Load instruction selected" in remark.text for remark in remarks_of(path.read_text()))
