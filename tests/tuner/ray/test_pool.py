"""Compiling on other nodes: results come back with their cubins, and what goes wrong there is told here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aot_tune.errors import TuneError
from aot_tune.nvidia.cubin import Resources
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileJob, cached, is_transient
from aot_tune.tuner.compile.job_queue import KernelRefusedError
from aot_tune.tuner.ray.compiler import RemoteResult
from aot_tune.tuner.ray.pool import RemotePool, TaskLostError
from tests.support.samples import SM90


def _job(key: str, name: str = "scale") -> CompileJob:
    return CompileJob(key=key, module="m", name=name, signature="s", hints={}, arch=SM90)


class ScriptedTasks:
    """Tasks that end when a test says so, with what it says."""

    def __init__(self, **answers: RemoteResult | Exception) -> None:
        self.answers = answers
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.ended: list[str] = []

    def begin(self, job: CompileJob) -> str:
        self.begun.append(job.key)
        return job.key

    def wait(self, tasks: Any, timeout_s: float) -> list[str]:
        return [task for task in tasks if task in self.ended]

    def result(self, task: str) -> RemoteResult:
        answer = self.answers[task]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self, task: str) -> None:
        self.cancelled.append(task)


def _there(key: str, cubin: bytes = b"code") -> RemoteResult:
    resources = Resources(registers=32, stack_bytes=0, shared_bytes=0, threads=128)
    return RemoteResult(
        result=Compiled(
            key=key, path=Path(f"/on/its/node/{key}.cubin"), code="c", resources=resources, loop=None,
            seconds=0.5, cached=False,
        ),
        cubin=cubin,
    )  # fmt: skip


def test_a_cubin_is_kept_in_the_drivers_folder_and_found_by_the_next_sweep(tmp_path: Path) -> None:
    tasks = ScriptedTasks(a=_there("a"))
    tasks.ended = ["a"]
    with RemotePool(tasks, 2, tmp_path) as pool:
        pool.submit(_job("a"))
        pool.submit(_job("a"))
        (result,) = pool.poll()
        assert pool.unfinished == 0
    assert isinstance(result, Compiled)
    assert (result.path, result.path.read_bytes()) == (tmp_path / "a.cubin", b"code")
    assert cached(tmp_path, "a") is not None
    with RemotePool(tasks, 2, tmp_path) as pool:
        pool.submit(_job("a"))
        assert [one.key for one in pool.poll()] == ["a"]
    assert tasks.begun == ["a"]


def test_as_many_tasks_run_as_there_are_cpus_and_closing_ends_them(tmp_path: Path) -> None:
    tasks = ScriptedTasks(a=_there("a"))
    with RemotePool(tasks, 2, tmp_path) as pool:
        for key in ("a", "b", "c", "d"):
            pool.submit(_job(key))
        assert (tasks.begun, pool.idle, pool.unfinished) == (["a", "b"], 0, 4)
        tasks.ended = ["a"]
        pool.poll()
        assert tasks.begun == ["a", "b", "c"]
    assert tasks.cancelled == ["b", "c"]


def test_a_task_that_ray_gives_up_is_a_failure_that_the_next_sweep_tries_again(tmp_path: Path) -> None:
    failure = CompileFailure(key="b", message="no tile fits", seconds=0.1)
    tasks = ScriptedTasks(a=TaskLostError("the node died"), b=RemoteResult(result=failure))
    tasks.ended = ["a", "b"]
    with RemotePool(tasks, 2, tmp_path) as pool:
        pool.submit(_job("a"))
        pool.submit(_job("b"))
        lost, refused = pool.poll()
    assert is_transient(lost)
    assert isinstance(lost, CompileFailure)
    assert "the node died" in lost.message
    assert refused == failure


def test_where_a_node_can_compile_nothing_the_sweep_stops_with_its_reason(tmp_path: Path) -> None:
    tasks = ScriptedTasks(a=RemoteResult(refusal="nothing can be compiled: no such module"))
    tasks.ended = ["a"]
    with RemotePool(tasks, 2, tmp_path) as pool:
        pool.submit(_job("a"))
        with pytest.raises(TuneError, match="no such module"):
            pool.poll()


def test_a_kernel_that_a_node_cannot_load_leaves_the_others_compiling(tmp_path: Path) -> None:
    tasks = ScriptedTasks(a=RemoteResult(refusal="no such module", of_kernel=True), c=_there("c"))
    with RemotePool(tasks, 2, tmp_path) as pool:
        for key in ("a", "b", "d"):
            pool.submit(_job(key))
        pool.submit(_job("c", "other"))
        tasks.ended = ["a", "c"]
        with pytest.raises(KernelRefusedError, match="no such module") as raised:
            pool.poll()
        assert (raised.value.kernel, tasks.cancelled, pool.unfinished) == ("scale", ["b"], 1)
        assert [one.key for one in pool.poll()] == ["c"]
    assert tasks.begun == ["a", "b", "c"]
