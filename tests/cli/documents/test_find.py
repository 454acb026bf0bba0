"""Which tables the verbs find, and which kind each is of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aot_tune import environment
from aot_tune.cli.app import app
from aot_tune.cli.documents import find
from aot_tune.errors import UsageError
from aot_tune.values.arch import Arch
from tests.support.recorded_tables import TABLE, write


def test_a_package_with_tables_in_a_named_folder_need_declare_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "tests.support.tuned_once"
    with pytest.raises(UsageError, match="declares no kernel"):
        find.declared([module])
    monkeypatch.setenv(environment.TABLES, str(tmp_path))
    write(tmp_path, dataclasses.replace(TABLE, module="testsuite.ops"))  # of another package
    with pytest.raises(UsageError, match="declares no kernel"):
        find.declared([module])
    write(tmp_path, dataclasses.replace(TABLE, module=module))
    assert find.declared([module]) == {}
    assert find.bare_folders([module]) == []


def test_a_kernel_is_compiled_for_the_archs_it_was_recorded_on(tmp_path: Path) -> None:
    sm90, sm100, sm120 = Arch(9, 0), Arch(10, 0), Arch(12, 0)
    name = "mylib.ops.scale_kernel"
    paths = [write(tmp_path, dataclasses.replace(TABLE, arch=arch)) for arch in (sm90, sm120)]
    paths.append(write(tmp_path, dataclasses.replace(TABLE, kernel="other", arch=sm100)))
    assert find.chosen(paths, [name], [sm90, sm100]) == (paths[0],)
    with pytest.raises(UsageError, match=f"{name} was recorded on sm90 and sm120, not sm100: write --arch"):
        find.chosen(paths, [name], [sm100])
    stray = tmp_path / "hopper" / f"{name}.json"
    with pytest.raises(UsageError, match=f"no recorded table is of '{name}'; there is none"):
        find.chosen([stray], [name], [sm100])
    with pytest.raises(UsageError, match="json is in no arch's folder, such as sm90; move it to one"):
        find.check_any([stray], [sm100])


def test_compiling_a_recorded_kernel_for_another_arch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.TABLES, str(tmp_path))
    write(tmp_path, TABLE)
    words = ["compile", "--kernel", "mylib.ops.scale_kernel", "--arch", "sm100"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "aot-tune: mylib.ops.scale_kernel was recorded on sm90, not sm100: write --arch sm90\n"
    )


def test_compiling_a_package_that_only_records_for_another_arch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.TABLES, str(tmp_path))
    module = "tests.support.tuned_once"
    write(tmp_path, dataclasses.replace(TABLE, module=module))
    result = CliRunner().invoke(app, ["compile", "--module", module, "--arch", "sm100"])
    assert (result.exit_code, result.stdout) == (2, "")
    told = "all that is here was recorded on sm90, not sm100: write --arch sm90"
    assert result.stderr == f"aot-tune: {told}\n"
