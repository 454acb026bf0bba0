"""Replacing cuTile's search in a process: no other module is loaded, and no way around it is silent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aot_tune.nvidia import cutile
from aot_tune.replay.answer.install import install, uninstall

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    uninstall()


def lazy(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that its first attribute loads."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


class Frozen(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


class NoModule:
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise ImportError("asked for its class")


def test_install_loads_no_lazy_module_and_lets_no_modules_exception_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.tile.tune

    (tmp_path / "bad.py").write_text("raise ModuleNotFoundError('loaded')")
    bad = lazy("bad", tmp_path / "bad.py", monkeypatch)
    frozen = Frozen("frozen")
    vars(frozen)["search"] = own = cuda.tile.tune.exhaustive_search
    others = {"frozen": frozen, "no_module": NoModule(), "empty": ModuleType.__new__(ModuleType)}
    for name, module in others.items():
        monkeypatch.setitem(sys.modules, name, module)
    install()
    assert cutile.stands_in(cuda.tile.tune.exhaustive_search)
    assert frozen.search is cuda.tile.tune.exhaustive_search
    uninstall()
    assert cuda.tile.tune.exhaustive_search is frozen.search is own
    assert type(bad).__name__ == "_LazyModule"


@pytest.mark.parametrize("tables", [None, 5, [None], ["tables", 5]])
def test_tables_that_are_no_folders_are_refused_by_name(tables: Any) -> None:
    with pytest.raises(TypeError, match=r"^tables=.*: pass a folder, or a sequence of folders$"):
        install(tables=tables)


def test_a_relative_folder_where_the_current_one_was_removed_is_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    install(tables="tables")


IMPORTED = """
import importlib, importlib.util, json, os, pkgutil, sys, warnings
import aot_tune
from aot_tune.errors import MissError
from aot_tune.nvidia import cutile

HOME = "cuda.tile.tune"
replaced = {}


def look(what, name=HOME):
    replaced[what] = cutile.stands_in(importlib.import_module(name).exhaustive_search)


def forget():
    for name in [name for name in sys.modules if name.startswith("cuda.tile.tune")]:
        del sys.modules[name]


class Fails:
    left = 1

    def find_spec(self, name, path, target=None):
        if name == f"{HOME}._tune" and self.left:
            self.left -= 1
            raise ImportError("the disk was busy")


aot_tune.install()
assert "cuda.tile" not in sys.modules
sys.meta_path.insert(0, Fails())
try:
    import cuda.tile
except ImportError as error:
    replaced["fails"] = str(error)
sys.modules.pop(HOME, None)
importlib.util.find_spec(HOME)
look("again after a failure and a probe")
import cuda.tile
spec = cuda.tile.tune.__spec__
loader = cuda.tile.tune.__loader__
replaced["the loader is cuTile's"] = spec.loader is loader and hasattr(loader, "get_code")
replaced["its files are read"] = b"exhaustive_search" in pkgutil.get_data(HOME, "__init__.py")
importlib.reload(importlib.import_module(f"{HOME}._tune"))
look("a reload of the module below", f"{HOME}._tune")
importlib.reload(cuda.tile.tune)
look("a reload")
del sys.modules[HOME]
look("another import")
forget()
look("another import of all")
forget()
spec = importlib.util.find_spec(HOME)
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules[HOME] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
look("a lazy module")
aot_tune.uninstall()
look("uninstall")
forget()
look("an import after uninstall")

from aot_tune.replay.answer import searches
searches.answered = None
failures = []
for mode in ("search", "error", "error"):
    os.environ["AOT_TUNE_ON_MISS"] = mode
    forget()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            aot_tune.install()
            import cuda.tile.tune
            failures.append([str(one.message) for one in seen])
        except MissError as error:
            failures.append(str(error))
print(json.dumps({"replaced": replaced, "failures": failures}))
"""


@cache
def imported() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.mark.process
def test_b19_the_function_is_replaced_whenever_cutile_is_imported_anew() -> None:
    assert imported()["replaced"] == {
        "fails": "the disk was busy",
        "again after a failure and a probe": True,
        "the loader is cuTile's": True,
        "its files are read": True,
        "a reload of the module below": True,
        "a reload": True,
        "another import": True,
        "another import of all": True,
        "a lazy module": True,
        "uninstall": False,
        "an import after uninstall": False,
    }


@pytest.mark.process
def test_b19_where_it_cannot_be_replaced_one_line_says_so_or_no_search_is_made() -> None:
    warned, *refused = imported()["failures"]
    said = "searches in this process are not replayed: TypeError: 'NoneType' object is not callable"
    assert warned == [said]
    assert refused == [f"{said}, and AOT_TUNE_ON_MISS=error"] * 2
