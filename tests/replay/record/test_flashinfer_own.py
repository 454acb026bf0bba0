"""FlashInfer's own tests of four cuTile kernels on a GPU: as they come, recorded, and replayed.

They are not in its wheel: ``FLASHINFER_TESTS`` names the folder ``tests`` of a checkout of its repository.
Its cuTile code is what `make flashinfer` fetches.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from aot_tune import environment
from aot_tune.bench.libraries import fetched
from tests.support import flashinfer_api

ROOT = Path(__file__).parents[3]
THEIRS = os.path.abspath(named) if (named := os.environ.get("FLASHINFER_TESTS")) else ""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (THEIRS and (fetched.FOLDER / "flashinfer").is_dir()),
        reason="FLASHINFER_TESTS names no checkout's tests, or `make flashinfer` has fetched nothing",
    ),
]

_ROPE = "attention/test_rope.py::test_generalized_rope_quantize[cutile-False-quant_dtype0-input_dtype1"
_GROUPS = "quantization/test_per_token_group_quant_8bit_cutile.py::"
TESTS = (
    "gemm/test_mm_bf16.py::test_mm_bf16[32-1024-1024-res_dtype10-False-False-cutile-False]",
    "gemm/test_mm_bf16.py::test_mm_bf16_cutile_rejects_bias_and_pdl",
    "gemm/test_mm_bf16.py::test_mm_bf16_cutile_repeat_uses_tune_cache",
    "gemm/test_bmm_bf16.py::test_bmm_bf16[16-48-64-64-res_dtype4-cutile]",
    "gemm/test_bmm_bf16.py::test_bmm_bf16_cutile_repeat_uses_tune_cache",
    *(f"{_ROPE}-{tokens}-mla-128-1-64-512]" for tokens in (1, 128, 899)),
    f"{_GROUPS}test_basic[cutile-dst_dtype1-128-128-2048]",
    f"{_GROUPS}test_column_major_scales[cutile-dst_dtype1-128-128-2048]",
    f"{_GROUPS}test_tma_aligned_scales[cutile-dst_dtype0-128-2048-128]",
    f"{_GROUPS}test_tma_aligned_scales[cutile-dst_dtype0-128-2048-130]",
    f"{_GROUPS}test_non_pow2_group_size[dst_dtype1-96-128]",
)


class Run(NamedTuple):
    """A run of the tests."""

    passed: int
    timed: int
    compiled: int
    seconds: float


def _run(folder: Path, *words: str, **variables: str) -> Run:
    """Run the tests in a process, under the words before their command."""
    (folder / "flashinfer_api.py").write_bytes(Path(flashinfer_api.__file__).read_bytes())
    paths = [folder, Path(THEIRS).parent, ROOT, fetched.FOLDER.absolute(), *map(Path, sys.path)]
    environ = {
        **{name: value for name, value in os.environ.items() if name not in environment.DESCRIPTIONS},
        "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys(paths))),
        "CUDA_TILE_CACHE_DIR": "off",
        **variables,
    }
    theirs = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "flashinfer_api",
        "-p",
        "no:cacheprovider",
    ]
    theirs += ["-c", os.devnull, "--rootdir", str(folder), *(f"{THEIRS}/{test}" for test in TESTS)]
    started = time.monotonic()
    done = subprocess.run(
        [*words, *theirs], cwd=folder, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    timed, compiled = re.findall(flashinfer_api.COUNTED.format(r"(\d+)", r"(\d+)"), done.stdout)[-1]
    passed = re.findall(r"(\d+) passed", done.stdout)[-1]
    return Run(int(passed), int(timed), int(compiled), seconds)


def test_they_pass_replayed_as_they_pass_without(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    ours = (sys.executable, "-m", "aot_tune")
    as_they_come = _run(tmp_path)
    recorded = _run(
        tmp_path, *ours, "record", "--out", str(tables), "--journal", str(tmp_path / "journal"), "--"
    )
    replayed = _run(tmp_path, *ours, "run", "--tables", str(tables), "--", **{environment.ON_MISS: "error"})
    for name, run in (("as they come", as_they_come), ("recorded", recorded), ("replayed", replayed)):
        print(f"{name}: {run.passed} passed, {run.timed} timed, {run.compiled} compiled, {run.seconds:.1f} s")
    assert as_they_come.passed == recorded.passed == replayed.passed == len(TESTS)
    assert as_they_come.timed > 0
    assert replayed.timed == 0
