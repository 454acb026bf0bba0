"""What `check` finds of recorded tables, each fault made in an otherwise faultless folder."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aot_tune.cli.app import app
from aot_tune.cli.check import check
from aot_tune.replay.table import Library
from aot_tune.tables import store
from aot_tune.values.arch import Arch
from tests.support import recorded_launches
from tests.support.recorded_launches import NAME, table
from tests.support.samples import scale_in, scale_table
from tests.support.samples import write as write_declared


def told(folder: Path, path: Path | None = None) -> list[str]:
    return [str(finding) for finding in check(scale_in(folder), path)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_declared(tmp_path, scale_table())
    return tmp_path


def test_a_faultless_recorded_table_has_no_findings(folder: Path) -> None:
    path = recorded_launches.write(folder)
    assert told(folder) == []
    assert told(folder, path) == []
    assert told(folder, path.parent) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source_hash": "0" * 16}, "source_hash: the code of scale_kernel changed since it was recorded"),
        (
            {"library": Library(name="pytest", version="0.1")},
            "library: it was recorded with pytest 0.1, and ",
        ),
        ({"kernel": "gone_kernel"}, "kernel: no global of tests.support.tuned_once is a ct.kernel of the"),
        ({"module": "not_there"}, "kernel: there is no module 'not_there' here"),
    ],
)
def test_a_table_of_something_else_is_found(folder: Path, changes: dict[str, Any], said: str) -> None:
    path = recorded_launches.write(folder, table(**changes))
    (line,) = told(folder)
    assert line.startswith(f"{path}: {said}")
    assert line.endswith("record again (aot-tune record), or remove the table")


def test_a_kernel_made_within_a_function_is_a_remark(folder: Path) -> None:
    recorded_launches.write(folder, table(kernel="make.<locals>.scale_kernel"))
    (finding,) = check(scale_in(folder))
    assert finding.remark
    assert "made only when its library calls a function" in finding.what


def test_other_bytes_a_wrong_place_and_damage_are_found(folder: Path) -> None:
    path = recorded_launches.write(folder)
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"mean_us": 12.5,', b'"mean_us":  12.5,', 1))
    assert [line.split(": ")[1] for line in told(folder)] == [
        "not the bytes that aot-tune writes, from line 11 on"
    ]
    path.write_bytes(text)
    (folder / "sm100").mkdir()
    shutil.move(path, folder / "sm100" / path.name)
    lines = [line for line in told(folder) if NAME in line]
    assert lines == [
        f"{folder}/sm100/{path.name}: it is the recorded table of {NAME} on sm90: move it to sm90/{path.name}"
    ]
    (folder / "sm100" / path.name).write_bytes(text[:-3])
    (line,) = [line for line in told(folder) if NAME in line]
    assert line.endswith("restore it from version control, or record again: aot-tune record")


def test_a_recorded_table_under_a_declared_kernel_s_name_is_found(folder: Path) -> None:
    path = recorded_launches.write(folder)
    shutil.move(path, folder / "sm90" / "other.json")
    (line,) = told(folder)
    assert line == (
        f"{folder}/sm90/other.json: it is the recorded table of {NAME} on sm90: move it to sm90/{path.name}"
    )


def test_an_arch_for_which_searches_were_recorded_needs_no_declared_kernel_s_tables(folder: Path) -> None:
    recorded_launches.write(folder, table(arch=Arch(10, 0)))
    assert told(folder) == []


def test_a_package_that_only_records_is_checked_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "reclib"
    package.mkdir()
    (package / "__init__.py").touch()
    recorded_launches.write(package / "tuned_configs", table(source_hash="0" * 16))
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(app, ["check", "--module", "reclib"])
    assert result.exit_code == 1
    assert "source_hash: the code of scale_kernel changed since it was recorded" in result.stdout
    recorded_launches.write(package / "tuned_configs", dataclasses.replace(table()))
    assert CliRunner().invoke(app, ["check", "--module", "reclib"]).exit_code == 0
    assert CliRunner().invoke(app, ["check", "--archives", "--module", "reclib"]).exit_code == 0


def test_a_shipped_table_is_checked_for_its_form_alone_where_its_library_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = folder / store.LIBRARIES
    monkeypatch.setattr(store, "libraries_folder", lambda: libraries)
    path = recorded_launches.write(libraries, table(library=Library(name="not-there", version="0.1")))
    for checked in (None, libraries, path.parent, path):
        (finding,) = check(scale_in(folder), checked)
        assert finding.remark
        assert (
            finding.what == "it was recorded with not-there 0.1, which is not installed: its form is checked"
        )
    recorded_launches.write(libraries, table(library=Library(name="pytest", version="0.1")))
    (finding,) = check(scale_in(folder))
    assert finding.remark
    assert "is installed: its form is checked" in finding.what
    recorded_launches.write(libraries, table(source_hash="0" * 16))
    (finding,) = check(scale_in(folder))
    assert not finding.remark
    assert finding.fix.endswith("python -m aot_tune.bench.libraries")
    path.write_bytes(path.read_bytes()[:-3])
    (finding,) = check(scale_in(folder))
    assert not finding.remark
