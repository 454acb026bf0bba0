"""Compiling in a process of a node, with the real compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from aot_tune.tuner.compile.job import Compiled, CompileFailure
from aot_tune.tuner.ray import compiler
from aot_tune.tuner.ray.compiler import compile_on_node
from tests.support.compile_jobs import job

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(compiler, "node_folder", lambda: tmp_path / "node")
    compiler._child.close()
    yield tmp_path / "node"
    compiler._child.close()


def test_a_task_brings_its_cubin_and_may_run_again_and_others_after_a_refusal(folder: Path) -> None:
    there = compile_on_node(job(16))
    assert isinstance(there.result, Compiled)
    assert there.cubin == (folder / f"{job(16).key}.cubin").read_bytes()
    for path in folder.iterdir():
        path.unlink()
    again = compile_on_node(job(16))  # as Ray does where the node with the result ended
    assert isinstance(again.result, Compiled)
    assert again.result.code == there.result.code

    missing = compile_on_node(dataclasses.replace(job(32), key="missing", module="no.such.module"))
    assert (missing.result, missing.of_kernel) == (None, True)
    assert "no.such.module" in missing.refusal
    refused = compile_on_node(dataclasses.replace(job(32), key="refused", signature="no signature"))
    assert isinstance(refused.result, CompileFailure)
    assert isinstance(compile_on_node(job(32)).result, Compiled)
