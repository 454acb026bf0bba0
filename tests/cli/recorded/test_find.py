"""What the verbs ask of recorded tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.cli.recorded import find
from aot_tune.errors import UsageError
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
