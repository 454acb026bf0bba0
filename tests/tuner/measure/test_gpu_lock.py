"""Where the lock of a GPU lies, and who may take it; each test has folders of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aot_tune.errors import TuneError
from aot_tune.tuner.measure import gpu_lock
from aot_tune.tuner.measure.gpu_lock import GpuLock
from tests.support.gpu_locks import shared_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_lock, "FOLDERS", (tmp_path / "none", tmp_path / "lock", tmp_path / "tmp"))
    return shared_folder(tmp_path / "lock")


def test_the_lock_does_not_lie_in_the_folder_that_a_job_sets(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "one"))
    held = GpuLock("GPU-1", "tuning matmul")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "two"))
    with pytest.raises(
        TuneError, match=f"GPU-1 is taken by process {os.getpid()}, tuning matmul; wait for it"
    ):
        GpuLock("GPU-1", "tuning softmax")
    GpuLock("GPU-2", "tuning softmax").release()
    held.release()
    GpuLock("GPU-1", "tuning softmax").release()


def test_the_real_folders_are_fixed_ones_of_the_host() -> None:
    assert all(folder.is_absolute() for folder in gpu_lock.FOLDERS)
    assert Path("/tmp") in gpu_lock.FOLDERS


def test_a_folder_that_not_everybody_may_write_is_passed_over(folder: Path, tmp_path: Path) -> None:
    """Else root and a user would each lock in a folder of their own."""
    folder.chmod(0o755)
    shared_folder(tmp_path / "tmp")
    GpuLock("GPU-1", "tuning").release()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["aot-tune-GPU-1.lock"]
    assert list(folder.iterdir()) == []


def test_without_any_such_folder_it_says_what_to_make(folder: Path) -> None:
    folder.chmod(0o777)  # without the sticky bit anybody could remove the lock
    with pytest.raises(TuneError, match=r"make one of .*lock.* writable for all users \(mode 1777\)"):
        GpuLock("GPU-1", "tuning")


def test_everybody_may_open_the_lock_whatever_the_umask_is(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        GpuLock("GPU-1", "tuning").release()
    finally:
        os.umask(before)
    assert (folder / "aot-tune-GPU-1.lock").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_what_is_no_file_is_refused_and_never_waited_for(folder: Path, what: str) -> None:
    path = folder / "aot-tune-GPU-1.lock"
    if what == "link":
        path.symlink_to(folder / "elsewhere")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(TuneError, match=r"GPU-1 cannot be locked .*; remove this file"):
        GpuLock("GPU-1", "tuning")
    assert not (folder / "elsewhere").exists()


def test_a_lock_file_that_is_left_is_taken_over(folder: Path) -> None:
    (folder / "aot-tune-GPU-1.lock").write_text("old")
    (folder / "aot-tune-GPU-1.lock").chmod(0o444)  # another user's
    GpuLock("GPU-1", "tuning").release()
