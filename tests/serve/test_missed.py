"""The file of problems that missed: whole lines, each once, bounded; a failure is one warning."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.errors import MissWarning
from aot_tune.serve import missed
from aot_tune.serve.missed import note
from tests.support.driver import Driver


@pytest.fixture
def file(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.RECORD, str(tmp_path / "missed"))
    monkeypatch.setattr(missed, "_files", {})
    return tmp_path / f"missed.{os.getpid()}"


def test_each_problem_is_a_line_once(file: Path) -> None:
    for size in (1, 2, 1):
        note({"kernel": "scale", "problem": {"M": size}})
    assert [json.loads(line)["problem"] for line in file.read_text().splitlines()] == [{"M": 1}, {"M": 2}]
    assert file.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_without_the_variable_or_while_a_graph_is_captured(
    file: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.capturing = True
    note({"kernel": "scale"})
    driver.capturing = False
    monkeypatch.delenv(environment.RECORD)
    note({"kernel": "scale"})
    assert not file.exists()


def test_lines_and_bytes_are_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed, "MOST_LINES", 3)
    for size in range(9):
        note({"M": size})
    assert len(file.read_text().splitlines()) == 3
    monkeypatch.setattr(missed, "MOST_LINES", 100)
    monkeypatch.setattr(missed, "MOST_BYTES", file.stat().st_size + 10)
    for size in range(9):
        note({"M": size})
    assert len(file.read_text().splitlines()) == 4


@pytest.mark.parametrize("named", [".", "/", "..", "kept", "kept/"])
def test_a_name_that_is_a_folder_is_one_warning(
    named: str,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(environment.RECORD, named)
    note({"kernel": "scale"})
    note({"kernel": "other"})
    assert ["it is a folder; name a file in it" in str(one.message) for one in recwarn] == [True]
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize("place", ["folder", "link", "fifo"])
def test_what_cannot_be_written_is_one_warning(file: Path, place: str) -> None:
    match place:
        case "folder":
            file.mkdir()
        case "link":
            file.symlink_to(file.with_name("other"))
        case "fifo":
            os.mkfifo(file)
    with pytest.warns(MissWarning, match="problems that missed are not written: ") as warned:
        note({"M": 1})
    note({"M": 2})
    assert len(warned) == 1


def test_a_full_disk_leaves_no_half_a_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note({"M": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    with pytest.warns(MissWarning, match="the disk is full"):
        note({"M": 2})
    assert file.read_text() == '{"M":1}\n'


def test_a_warning_that_is_an_error_stops_nothing(file: Path) -> None:
    file.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        note({"M": 1})


@pytest.mark.process
def test_a_forked_child_writes_to_a_file_of_its_own(file: Path) -> None:
    note({"M": 1})
    child = os.fork()
    if not child:
        note({"M": 1})
        os._exit(0)
    os.waitpid(child, 0)
    assert file.with_name(f"missed.{child}").read_text() == file.read_text()


def test_a_process_goes_on_with_the_file_of_an_earlier_one_that_had_its_number(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container each start has the number 1."""
    monkeypatch.setattr(missed, "MOST_LINES", 4)
    for _ in range(3):
        monkeypatch.setattr(missed, "_files", {})
        for size in (1, 2):
            note({"M": size})
    assert file.read_text() == '{"M":1}\n{"M":2}\n'
    file.write_text(file.read_text() + '{"M"')
    monkeypatch.setattr(missed, "_files", {})
    for size in (1, 3, 4, 5):
        note({"M": size})
    assert file.read_text() == '{"M":1}\n{"M":2}\n{"M"\n{"M":3}\n'
