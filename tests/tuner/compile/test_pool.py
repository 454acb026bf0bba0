"""The compile pool, with the real compiler and real child processes; rows A3 and A4 of the fault list."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aot_tune.errors import StoreError, TuneError
from aot_tune.tuner.compile import pool as compiling
from aot_tune.tuner.compile.job import (
    Compiled,
    CompileFailure,
    CompileResult,
    cached,
    compiles_nowhere,
    is_transient,
    keep,
)
from aot_tune.tuner.compile.job_queue import KernelRefusedError
from aot_tune.tuner.compile.pool import CompilePool
from tests.support.compile_jobs import job
from tests.support.marks import MARK, forking, marked
from tests.support.other_compilers import other

pytestmark = pytest.mark.process


def all_results(pool: CompilePool, within_s: float = 120.0) -> dict[str, CompileResult]:
    until = time.monotonic() + within_s
    results: dict[str, CompileResult] = {}
    while pool.unfinished and time.monotonic() < until:
        results |= {result.key: result for result in pool.poll(1.0)}
    assert not pool.unfinished, "the pool did not finish"
    return results


def put_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path, what_it_does: str) -> None:
    """A ``tileiras`` that does as told on kernels of 32-row tiles, and compiles all others."""
    from cuda.tile import _compile

    real = _compile._find_compiler_bin().path
    folder.mkdir()
    script = folder / "tileiras"
    script.write_text(
        f'#!/bin/bash\nif [ -f "$1" ] && grep -aq I32_I64 "$1"; then\n{what_it_does}\nfi\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def of_tests() -> set[int]:
    """What runs of all that tests started, but for the process from which children are forked."""
    return set(marked(os.environ[MARK])) - {forking()}


def assert_none_left(within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while (left := of_tests()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def test_jobs_compile_in_children_and_a_second_run_takes_them_from_the_folder(tmp_path: Path) -> None:
    jobs = [job(16), job(32), job(16, occupancy=2)]
    with CompilePool(2, 60.0, tmp_path) as pool:
        for one in [*jobs, jobs[0]]:  # the repetition is not compiled again
            pool.submit(one)
        first = all_results(pool)
    assert_none_left()
    assert set(first) == {one.key for one in jobs}
    for result in first.values():
        assert isinstance(result, Compiled)
        assert result.path.read_bytes()[:4] == b"\x7fELF"
        assert result.resources.threads >= 32
        assert not result.cached
        assert result.seconds > 0
    with CompilePool(2, 60.0, tmp_path, target=other("NeverStarts")) as pool:
        for one in jobs:
            pool.submit(one)
        second = all_results(pool)
    assert {key: vars(result) | {"cached": False} for key, result in second.items()} == {
        key: vars(result) for key, result in first.items()
    }
    assert all(isinstance(result, Compiled) and result.cached for result in second.values())


def test_children_that_start_at_once_are_there_when_the_first_job_comes(tmp_path: Path) -> None:
    with CompilePool(2, 60.0, tmp_path, at_once=True) as pool:
        pids = [child.worker.pid for child in pool._children]
        assert (len(pids), pool.idle, pool.unfinished) == (2, 2, 0)
        for one in (job(16), job(32)):
            pool.submit(one)
        assert len(all_results(pool)) == 2
        assert [child.worker.pid for child in pool._children] == pids


def test_a_kernel_that_no_child_can_load_is_refused_and_the_pool_goes_on(tmp_path: Path) -> None:
    unknown = dataclasses.replace(job(16), key="0" * 64, name="nobody")
    with CompilePool(1, 60.0, tmp_path) as pool:
        pool.submit(unknown)
        pool.submit(dataclasses.replace(unknown, key="1" * 64))
        pool.submit(job(32))
        with pytest.raises(KernelRefusedError, match="declares no kernel 'nobody'") as raised:
            all_results(pool)
        assert raised.value.kernel == "nobody"
        assert list(all_results(pool)) == [job(32).key]


def test_a_refusal_that_comes_together_with_other_messages_is_heard_at_once(tmp_path: Path) -> None:
    jobs = [job(16), job(32)]
    with CompilePool(1, 60.0, tmp_path, target=other("RefusesInOneBreath")) as pool:
        for one in jobs:
            pool.submit(one)
        results = all_results(pool, within_s=30.0)
    assert [result.message for result in results.values()] == ["not with me"] * 2  # type: ignore[union-attr]


def test_a_damaged_cubin_in_the_folder_is_compiled_again(tmp_path: Path) -> None:
    with CompilePool(1, 60.0, tmp_path) as pool:
        pool.submit(job(16))
        (good,) = all_results(pool).values()
    assert isinstance(good, Compiled)
    data = good.path.read_bytes()
    good.path.write_bytes(data[:-1])
    assert cached(tmp_path, good.key) is None
    with CompilePool(1, 60.0, tmp_path) as pool:
        pool.submit(job(16))
        (again,) = all_results(pool).values()
    assert isinstance(again, Compiled)
    assert not again.cached
    assert again.path.read_bytes() == data


def test_two_processes_that_write_one_cubin_leave_a_pair_that_fits(tmp_path: Path) -> None:
    # The compiler writes one of two codes for some inputs, so two processes' files may differ.
    with CompilePool(1, 60.0, tmp_path / "made") as pool:
        pool.submit(job(16))
        (made,) = all_results(pool).values()
    assert isinstance(made, Compiled)

    def write(number: int) -> bool:
        for turn in range(200):
            key = f"{turn:064}"
            one = dataclasses.replace(made, key=key, path=tmp_path / f"{key}.cubin")
            keep(tmp_path, one, bytes([number]) * 4096)
            if cached(tmp_path, key) is None:
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(write, range(4)))


@pytest.mark.parametrize(
    ("signal_name", "number"), [pytest.param("SIGSEGV", 11, marks=pytest.mark.slow), ("SIGKILL", 9)]
)
def test_a_compiler_that_is_killed_is_that_jobs_failure_with_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_name: str, number: int
) -> None:
    """A3."""
    put_on_path(monkeypatch, tmp_path / "bin", f"kill -{number} $$")
    with CompilePool(1, 60.0, tmp_path / "cubins", target=other("CompilerOnPath")) as pool:
        for one in (job(32), job(16)):
            pool.submit(one)
        results = all_results(pool)
    failed = results[job(32).key]
    assert isinstance(failed, CompileFailure)
    assert f"the compiler was killed by {signal_name}" in failed.message
    assert isinstance(results[job(16).key], Compiled)
    assert_none_left()


def test_a_compiler_that_is_killed_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: the system kills an innocent process when memory is short."""
    put_on_path(monkeypatch, tmp_path / "bin", "if [ ! -f $0.once ]; then echo > $0.once; kill -9 $$; fi")
    with CompilePool(1, 60.0, tmp_path / "cubins", target=other("CompilerOnPath")) as pool:
        pool.submit(job(32))
        (result,) = all_results(pool).values()
    assert isinstance(result, Compiled)
    assert (tmp_path / "bin" / "tileiras.once").exists()
    assert_none_left()


def test_a_compiling_process_that_is_killed_once_is_tried_again(tmp_path: Path) -> None:
    """A3."""
    with CompilePool(1, 60.0, tmp_path, target=other("DiesOnce")) as pool:
        pool.submit(job(16))
        (result,) = all_results(pool).values()
    assert isinstance(result, Compiled)


def test_a_crash_that_leaves_a_child_is_told_as_a_crash_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: the child holds the pipe that the compiler's output is read from."""
    put_on_path(monkeypatch, tmp_path / "bin", "setsid sleep 1000 & sleep 1000 & kill -11 $$")
    with CompilePool(1, 120.0, tmp_path / "cubins", target=other("CompilerOnPath")) as pool:
        pool.submit(job(32))
        (failed,) = all_results(pool).values()
        assert isinstance(failed, CompileFailure)
        assert "the compiler was killed by SIGSEGV" in failed.message
        assert_none_left()


def test_a_compiler_that_hangs_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3."""
    put_on_path(monkeypatch, tmp_path / "bin", "setsid sleep 1000 & sleep 1000")
    with CompilePool(1, 4.0, tmp_path / "cubins", target=other("CompilerOnPath")) as pool:
        pool.submit(job(32))
        (failed,) = all_results(pool).values()
        # What the compiler left behind goes with its group: at once, not when the pool closes.
        assert_none_left()
        pool.submit(job(16))
        (good,) = all_results(pool).values()
    assert isinstance(failed, CompileFailure)
    assert "exceeded timeout" in failed.message
    assert failed.seconds < 30
    assert isinstance(good, Compiled)
    assert_none_left()


def test_a_compiling_process_that_dies_is_that_jobs_failure(tmp_path: Path) -> None:
    """A3."""
    with CompilePool(2, 60.0, tmp_path, target=other("DiesAtOccupancyTwo")) as pool:
        for one in (job(16, 2), job(16), job(32, 2), job(32)):
            pool.submit(one)
        results = all_results(pool)
    for tile_m in (16, 32):
        failed = results[job(tile_m, 2).key]
        assert isinstance(failed, CompileFailure)
        assert "SIGKILL" in failed.message
        assert isinstance(results[job(tile_m).key], Compiled)
    assert_none_left()


def test_a_compiling_process_that_never_answers_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3."""
    monkeypatch.setattr(compiling, "_GRACE_SECONDS", 1.0)
    with CompilePool(1, 1.0, tmp_path, target=other("HangsAtOccupancyTwo")) as pool:
        for one in (job(16, 2), job(16)):
            pool.submit(one)
        results = all_results(pool)
    failed = results[job(16, 2).key]
    assert isinstance(failed, CompileFailure)
    assert "no answer within" in failed.message
    assert isinstance(results[job(16).key], Compiled)
    assert_none_left()


def test_a_child_that_fails_to_start_is_replaced_and_no_job_is_blamed(tmp_path: Path) -> None:
    """A4."""
    with CompilePool(1, 60.0, tmp_path, target=other("StartsTheThirdTime")) as pool:
        pool.submit(job(16))
        (result,) = all_results(pool).values()
    assert isinstance(result, Compiled)
    assert (tmp_path / "starts").read_text() == "xxx"


def test_children_that_never_start_end_the_run_with_an_error(tmp_path: Path) -> None:
    """A4."""
    with CompilePool(1, 60.0, tmp_path, target=other("NeverStarts")) as pool:
        pool.submit(job(16))
        with pytest.raises(TuneError, match=r"no compiling process starts here, tried 3 times.*exit code 7"):
            all_results(pool)
    assert_none_left()


def test_a_parent_that_is_killed_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A3, A8: kill -9 at any instant."""
    put_on_path(monkeypatch, tmp_path / "bin", "echo > $0.began; sleep 1000 & sleep 1000")
    script = (
        "from pathlib import Path\n"
        "from aot_tune.tuner.compile.pool import CompilePool\n"
        "from tests.support.compile_jobs import job\n"
        "from tests.support.other_compilers import other\n"
        f"pool = CompilePool(1, 600.0, Path({str(tmp_path)!r}), target=other('CompilerOnPath'))\n"
        "pool.submit(job(32))\n"
        "pool.poll(600.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    began = tmp_path / "bin" / "tileiras.began"
    until = time.monotonic() + 60
    while not began.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert began.exists()
    assert len(of_tests()) >= 5  # the parent, its fork server, its child, the compiler and what that started
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert_none_left()


def test_closing_stops_what_is_being_compiled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A11."""
    put_on_path(monkeypatch, tmp_path / "bin", "sleep 1000")
    pool = CompilePool(2, 600.0, tmp_path, target=other("CompilerOnPath"))
    pool.submit(job(32))
    assert pool.poll(5.0) == []
    pool.close()
    assert_none_left()


def test_compiling_children_see_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with CompilePool(1, 60.0, tmp_path, target=other("TellsItsGpus")) as pool:
        pool.submit(job(16))
        all_results(pool)
    assert (tmp_path / "gpus").read_text() == "''"


@pytest.mark.parametrize("yielding", [False, True])
def test_compiling_children_give_way_where_they_are_asked_to(tmp_path: Path, *, yielding: bool) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with CompilePool(1, 60.0, tmp_path, yielding=yielding) as pool:
        pool.submit(job(16))
        [result] = all_results(pool).values()
        assert isinstance(result, Compiled)
        guard = pool._children[0].worker.pid
        [child] = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        assert (os.getpriority(os.PRIO_PROCESS, int(child)) > mine) == yielding


def test_the_cores_are_those_that_a_process_may_use() -> None:
    code = "from aot_tune.tuner.compile.pool import usable_cores; print(usable_cores())"
    core = str(min(os.sched_getaffinity(0)))
    told = subprocess.run(
        ["taskset", "-c", core, sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["1"]


def test_where_a_system_does_not_tell_the_cores_are_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert compiling.usable_cores() == 7


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        CompilePool(1, 60.0, tmp_path / "file" / "cubins") as pool,
        pytest.raises(StoreError, match=r"the folder for cubins.*name another with --cubins"),
    ):
        pool.submit(job(16))


def test_a_pool_that_was_given_nothing_to_compile_leaves_no_folder(tmp_path: Path) -> None:
    """Its children may have started for jobs that never came: a sweep that is refused."""
    with CompilePool(1, 60.0, tmp_path / "cubins", at_once=True):
        pass
    assert not (tmp_path / "cubins").exists()


def test_a_folder_that_cannot_be_written_ends_the_run_and_blames_no_job(tmp_path: Path) -> None:
    """A10: what cannot be kept is an error, not a failure of the config."""
    folder = tmp_path / "cubins"
    with CompilePool(1, 60.0, folder) as pool:
        pool.submit(job(16))
        shutil.rmtree(folder)  # while the child starts
        folder.write_text("")
        with pytest.raises(TuneError, match="cannot write"):
            all_results(pool)
    assert_none_left()


def test_a_temporary_folder_that_cannot_be_written_is_said_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler, unlike Python, would go nowhere else, and end with "Return code 5"."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(TuneError, match=r"temporary folder .*none cannot be written.*set TMPDIR to one"):
        CompilePool(1, 60.0, tmp_path / "cubins")


def test_a_temporary_folder_that_disappears_ends_the_run_and_blames_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    put_on_path(monkeypatch, tmp_path / "bin", f"rm -r {temporary}; exit 5")
    with CompilePool(1, 60.0, tmp_path / "cubins", target=other("CompilerOnPath")) as pool:
        pool.submit(job(32))
        with pytest.raises(TuneError, match=r"temporary folder .*cannot be written"):
            all_results(pool)
    assert_none_left()


# A20: the machine is to blame, and no kernel ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("what_it_does", "words"),
    [
        ('rm "$0"; kill -9 $$', r"the compiler is gone: .*tileiras'"),
        (
            "echo 'error: No space left on device' >&2; exit 5",
            r"temporary folder .*\(No space left on device\)",
        ),
    ],
    ids=["gone", "full"],
)
def test_a20_what_the_machine_lacks_ends_the_run_and_blames_no_job(
    what_it_does: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(monkeypatch, tmp_path / "bin", what_it_does)
    with CompilePool(1, 60.0, tmp_path / "cubins", target=other("CompilerOnPath")) as pool:
        pool.submit(job(32))
        with pytest.raises(TuneError, match=words):
            all_results(pool)
    assert_none_left()


def test_a20_a_compiler_that_leaves_no_cubin_is_a_failure_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(monkeypatch, tmp_path / "bin", "exit 0")
    with CompilePool(1, 60.0, tmp_path / "cubins", target=other("CompilerOnPath")) as pool:
        pool.submit(job(32))
        results = all_results(pool).values()
    blamed = compiles_nowhere(results)
    assert blamed is not None
    assert blamed.startswith(
        "none of its 1 compilations succeeds: the compiler ended without an error and left no"
    )
    assert blamed.endswith("; cure that and run the command again")
    assert all(map(is_transient, results))


def test_a20_it_compiles_where_the_parent_ignores_how_children_end(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with CompilePool(1, 60.0, tmp_path) as pool:
            pool.submit(job(16))
            (result,) = all_results(pool).values()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert isinstance(result, Compiled)


def test_a_kernel_that_the_compiler_refuses_is_to_be_repaired() -> None:
    killed = CompileFailure(key="a", message="the compiler was killed by SIGKILL", seconds=1.0)
    refused = CompileFailure(key="b", message='bad tile\n  "k.py", line 7', seconds=1.0)
    assert compiles_nowhere([]) is None
    assert (compiles_nowhere([killed]) or "").endswith("by SIGKILL; cure that and run the command again")
    assert (compiles_nowhere([killed, refused]) or "").endswith("bad tile (k.py, line 7); repair the kernel")
