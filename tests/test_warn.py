"""Warnings of serving: one that cannot be written stops no launch, and all are given in one way."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest

import aot_tune
from aot_tune.errors import MissWarning
from aot_tune.serve import loader
from aot_tune.serve.kernels import declared_cubins
from aot_tune.serve.search.cache import UserCache
from aot_tune.warn import warn
from tests.support.samples import SM90, scale
from tests.support.user_cache import KEY

ERRORS = [OSError(28, "No space left"), ValueError("I/O operation on closed file")]


@pytest.fixture(params=ERRORS, ids=["full disk", "closed stderr"])
def tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings that were tried to be written, which raises."""
    texts: list[str] = []

    def write(message: object, *rest: object) -> None:
        texts.append(str(message))
        raise request.param

    monkeypatch.setattr(warnings, "showwarning", write)
    return texts


@pytest.mark.filterwarnings("always")
def test_a_warning_that_cannot_be_written_is_no_error(tried: list[str]) -> None:
    warn("a miss", MissWarning)
    assert tried == ["a miss"]


@pytest.mark.filterwarnings("always")
def test_what_lies_in_a_file_and_cannot_be_told_is_left_out(tried: list[str], tmp_path: Path) -> None:
    winner = tmp_path / KEY.place
    winner.parent.mkdir(parents=True, mode=0o700)
    tmp_path.chmod(0o700)
    winner.write_text("{")
    assert UserCache(tmp_path).read(KEY) is None
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "scale.json").write_text("{")
    (tmp_path / "sm90" / "cubins.aot").write_bytes(b"no archive")
    mine = dataclasses.replace(scale, tables=tmp_path)
    assert not loader.load(mine, SM90).tables
    assert not declared_cubins(mine).sections(SM90)
    assert len(tried) == 3


def test_a_warning_that_a_filter_makes_an_error_is_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MissWarning, match="a miss"):
            warn("a miss", MissWarning)


def test_no_module_of_choosing_or_serving_warns_in_another_way() -> None:
    package = Path(aot_tune.__path__[0])
    modules = [*package.glob("*.py"), *package.glob("choose/*.py"), *package.glob("serve/**/*.py")]
    using = [path.name for path in modules if "warnings.warn" in path.read_text()]
    assert using == ["warn.py"]
