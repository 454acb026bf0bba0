"""Which recorded tables `doctor` says would be read, and what they answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aot_tune import environment
from aot_tune.cli.app import app
from aot_tune.cli.documents.recorded import recorded_states as states
from aot_tune.values.arch import Arch
from tests.support import recorded_launches
from tests.support.recorded_launches import NAME, SM90, table


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in environment.DESCRIPTIONS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(environment.TABLES, str(tmp_path))
    return tmp_path


def doctor(*words: str) -> str:
    result = CliRunner().invoke(app, ["doctor", "--arch", "sm90", *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_tables_are_told_with_what_they_answer_or_why_they_are_left_out(folder: Path) -> None:
    path = recorded_launches.write(folder)
    (state,) = states([folder], SM90)
    assert (state.kernel, state.path, state.usable) == (NAME, path, True)
    assert (state.state, state.cubins) == ("2 problems, recorded on NVIDIA H200", "no cubins")
    assert [*states([folder], Arch(10, 0))] == []
    recorded_launches.write(folder, table(source_hash="0" * 16))
    (state,) = states([folder], SM90)
    assert not state.usable
    assert state.state.startswith("left out: the code of scale_kernel changed since it was recorded")
    path.write_text("{")
    (state,) = states([folder], SM90)
    assert state.state.startswith(f"left out: {path}: not JSON")


def test_a_folder_that_cannot_be_listed_is_told_and_the_others_are_read(folder: Path) -> None:
    recorded_launches.write(folder)
    (folder / "file").touch()
    first, second = states([folder / "file", folder], SM90)
    assert first.state.startswith(f"left out: cannot list {folder / 'file'}: ")
    assert second.usable


def test_the_diagnosis_lists_them_with_the_folders(folder: Path) -> None:
    recorded_launches.write(folder)
    lines = doctor().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("recorded tables for sm90 in "))
    assert str(folder) in lines[at]
    assert lines[at + 1].split("  ")[1:3] == [NAME, "2 problems, recorded on NVIDIA H200"]


def test_a_dotted_name_tells_which_problems_are_answered(folder: Path) -> None:
    path = recorded_launches.write(folder)
    lines = doctor(NAME).splitlines()
    assert lines[0] == f"{NAME} on sm90: {path}: 2 problems, recorded on NVIDIA H200; no cubins"
    assert [line.split("  ")[0] for line in lines[2:4]] == [
        f"x=float16[{rows}] out=float16[{rows}] n={rows} factor=float" for rows in (1024, 4096)
    ]
    assert lines[2].endswith("no")
    assert "the nearest that has the same of all that is compiled in" in lines[-1]
    assert lines[-1].endswith("AOT_TUNE_ON_MISS=search decides")


def test_an_unrecorded_name_is_refused_with_the_nearest(folder: Path) -> None:
    recorded_launches.write(folder)
    result = CliRunner().invoke(app, ["doctor", "--arch", "sm90", NAME[:-1]])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"no recorded table is of '{NAME[:-1]}'; there is {NAME}; the nearest is {NAME}" in result.stderr


def test_a_kernel_recorded_on_another_arch_is_told_with_that_arch(folder: Path) -> None:
    recorded_launches.write(folder)
    assert doctor(NAME, "--arch", "sm100").splitlines() == [
        f"{NAME} was not recorded on sm100, so none of its problems is answered: "
        "AOT_TUNE_ON_MISS=search decides",
        f"it was recorded on sm90: aot-tune doctor {NAME} --arch sm90 prints the answered problems",
    ]
