"""A folder in AOT_TUNE_TABLES that holds no tables is told by each verb, and the others are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aot_tune import environment
from aot_tune.cli.app import app
from aot_tune.cli.documents import find
from aot_tune.errors import StoreError
from aot_tune.replay.answer import program
from tests.support import recorded_launches
from tests.support.recorded_launches import NAME


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The good one of four folders that AOT_TUNE_TABLES names: a file, a missing one, an arch's own."""
    good, file = tmp_path / "good", tmp_path / "afile"
    recorded_launches.write(good)
    file.touch()
    words = [file, tmp_path / "gone", good / "sm90", good]
    monkeypatch.setenv(environment.TABLES, os.pathsep.join(map(str, words)))
    return good


def _run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def _remarks(good: Path) -> list[str]:
    return [
        f"AOT_TUNE_TABLES names {good.parent / 'afile'}, which is not a folder; make it or leave it out",
        f"AOT_TUNE_TABLES names {good.parent / 'gone'}, which is not a folder; make it or leave it out",
        f"AOT_TUNE_TABLES names {good / 'sm90'}, an arch's folder; name its parent, {good}",
    ]


def test_only_folders_that_can_be_listed_are_looked_into(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find.named_folders() == [named]
    assert find.folder_remarks() == _remarks(named)

    def listed(folder: Path) -> list[Path]:
        raise StoreError(f"cannot list {folder}: Permission denied")

    monkeypatch.setattr(find.store, "listed", listed)
    assert find.named_folders() == []
    told = f"AOT_TUNE_TABLES: cannot list {named}: Permission denied; let it be read or leave it out"
    assert find.folder_remarks()[-1] == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", NAME], NAME),
        (["show"], NAME),
        (["doctor", NAME, "--arch", "sm90"], f"{NAME} on sm90"),
        (["doctor", "softmax", "--arch", "sm90", "--problem", "rows=64"], "softmax"),
    ],
)
def test_a_verb_remarks_the_others_and_goes_on(named: Path, words: list[str], told: str) -> None:
    result = _run(*words)
    assert result.exit_code == 0
    assert told in result.stdout
    assert result.stderr.splitlines() == [f"remark: {line}" for line in _remarks(named)]


def test_what_compiles_or_checks_remarks_them_too(named: Path) -> None:
    compiled = _run("compile", "--arch", "sm90", "--kernel", f"{NAME}s")
    *remarks, refusal = compiled.stderr.splitlines()
    assert remarks == [f"remark: {line}" for line in _remarks(named)]
    assert f"there is {NAME}" in refusal
    checked = _run("check", "--module", "tests.support.tuned_once")
    assert checked.exit_code == 0
    assert checked.stderr.splitlines()[:-1] == remarks


def test_a_program_s_run_remarks_them_before_it_begins(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "become", lambda command, *, tables: None)
    assert _run("run", "--", "python").stderr.splitlines() == [f"remark: {line}" for line in _remarks(named)]


def test_a_folder_that_show_is_given_is_told_alone(named: Path) -> None:
    assert _run("show", "--folder", str(named)).stderr == ""
