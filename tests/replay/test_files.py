"""Recorded tables are found and told from others by name, and by content where they lie elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aot_tune.errors import TableError
from aot_tune.replay.files import is_recorded_file, listed_recorded, read_recorded, right_place_of
from tests.support.recorded_tables import TABLE, write
from tests.support.samples import scale_table
from tests.support.samples import write as write_declared


def test_they_are_listed_apart_from_declared_kernels(tmp_path: Path) -> None:
    declared, path = write_declared(tmp_path, scale_table()), write(tmp_path, TABLE)
    assert listed_recorded([tmp_path, tmp_path, tmp_path / "not there"]) == [path]
    assert (is_recorded_file(path), is_recorded_file(declared)) == (True, False)
    assert read_recorded(path) == TABLE


def test_one_that_lies_elsewhere_is_told_by_its_content(tmp_path: Path) -> None:
    path = write(tmp_path, TABLE)
    assert right_place_of(path, TABLE) is None
    moved = Path(shutil.move(path, tmp_path / "other.json"))
    assert is_recorded_file(moved)
    assert right_place_of(moved, TABLE) == "sm90/mylib.ops.scale_kernel.json"


def test_a_damaged_one_is_an_error_that_names_its_path(tmp_path: Path) -> None:
    path = write(tmp_path, TABLE)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TableError, match=r"mylib\.ops\.scale_kernel\.json: not JSON"):
        read_recorded(path)
