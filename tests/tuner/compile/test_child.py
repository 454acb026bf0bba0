"""The compiling child: which kernel a job names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aot_tune.errors import CutileError
from aot_tune.nvidia import cutile
from aot_tune.tuner.compile.child import Compiler
from aot_tune.tuner.compile.job import CompileJob
from tests.support import tuned_once
from tests.support.recorded_launches import MODULE, SM90, entry

HINTED = tuned_once.scale_kernel.replace_hints(num_ctas=2)


def find(module: str, name: str, kernel: str | None) -> Any:
    return HINTED if (module, name, kernel) == (MODULE, "scale", "wide") else None


def test_the_kernel_is_the_one_that_the_finder_of_a_job_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, Mapping[str, int]]] = []

    def refuse(kernel: Any, hints: Mapping[str, int], *args: Any, **options: Any) -> bytes:
        asked.append((kernel, hints))
        raise CutileError("enough is known")

    monkeypatch.setattr(cutile, "compile_cubin", refuse)
    one = entry(1024)
    job = CompileJob(
        key="key", module=MODULE, name="scale", kernel="wide", finder=f"{__name__}:find",
        signature=one.signature, hints=one.hints, arch=SM90,
    )  # fmt: skip
    with pytest.raises(CutileError, match="enough is known"):
        Compiler(lambda report: None, tmp_path, 1.0).compile(job)
    assert asked == [(HINTED, {"occupancy": 1, "opt_level": 3})]
