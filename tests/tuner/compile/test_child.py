"""The compiling child: which kernel and hints a job names."""

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


def test_a_recorded_kernel_gets_its_winner_s_hints_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, Mapping[str, int | None]]] = []

    def refuse(kernel: Any, hints: Mapping[str, int | None], *args: Any, **options: Any) -> bytes:
        asked.append((kernel, dict(hints)))
        raise CutileError("enough is known")

    kernel = tuned_once.scale_kernel.replace_hints(num_ctas=2)
    monkeypatch.setattr(tuned_once, "scale_kernel", kernel)
    monkeypatch.setattr(cutile, "compile_cubin", refuse)
    one = entry(1024)
    job = CompileJob(
        key="key", module=MODULE, name="scale_kernel", recorded=True, signature=one.signature,
        hints=one.hints, arch=SM90,
    )  # fmt: skip
    with pytest.raises(CutileError, match="enough is known"):
        Compiler(lambda report: None, tmp_path, 1.0).compile(job)
    assert asked == [(kernel, {"num_ctas": None, "occupancy": 1, "opt_level": 3})]
