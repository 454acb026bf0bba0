"""What cubins were compiled from: the quick comparison holds where nothing changed, and the source hash
decides the rest."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from aot_tune.cubins.origin import Origin, declared_code, difference
from aot_tune.cubins.origin_walk import origin_of
from aot_tune.declare.fingerprint import hashing
from aot_tune.kernels import TUNABLES
from aot_tune.tunable import Tunable

_HELPERS = """
import cuda.tile as ct
FACTOR = 2
DTYPE = ct.float32
def scaled(tile):
    return tile.astype(DTYPE) * FACTOR
"""
_KERNELS = '''
import dataclasses
import cuda.tile as ct
from tests.support.samples import scale
from {helpers} import scaled
WIDTH = 64
TABLE = {{"a": [1, 2]}}
@ct.kernel
def kernel(source, target, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    """Scale."""
    row = ct.bid(0)
    ct.store(target, (row, 0), scaled(ct.load(source, (row, 0), (tile_m, WIDTH))))
def made(factor):
    @ct.kernel
    def inner(source, target, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
        row = ct.bid(0)
        ct.store(target, (row, 0), ct.load(source, (row, 0), (tile_m, 64)) * factor)
    return inner
@ct.kernel
def by_table(source, target, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    row = ct.bid(0)
    ct.store(target, (row, 0), ct.load(source, (row, 0), (tile_m, 64)) * ct.static_eval(TABLE["a"][1]))
plain = dataclasses.replace(scale, kernel=kernel)
closed = dataclasses.replace(scale, kernel=made(3))
tabled = dataclasses.replace(scale, kernel=by_table)
'''


class Library:
    """Two modules of somebody's, made anew in each test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = (f"kernels_{folder.name}", f"helpers_{folder.name}")
        self.write(0, _KERNELS.format(helpers=self.names[1]))
        self.write(1, _HELPERS)

    def write(self, which: int, text: str) -> None:
        (self.folder / f"{self.names[which]}.py").write_text(text)

    def load(self) -> ModuleType:
        for name in self.names:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(self.names[0])


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    here = Library(tmp_path)
    yield here
    for name in here.names:
        sys.modules.pop(name, None)


def origin(tunable: Tunable) -> Origin:
    return origin_of(declared_code(tunable), "13.4.92")


def test_unchanged_code_is_told_without_taking_its_hash(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = library.load().plain
    told = origin(plain)
    assert told.complete
    assert set(told.files) == set(library.names)  # the kernel's own and its helper's
    assert told.values == {
        f"{library.names[0]}:WIDTH": "64",
        f"{library.names[1]}:FACTOR": "2",
        f"{library.names[1]}:DTYPE": told.values[f"{library.names[1]}:DTYPE"],
    }
    monkeypatch.setattr(hashing, "source_hash", lambda tunable: pytest.fail("it was hashed"))
    assert difference(declared_code(plain), told) is None


def test_a_comment_changes_the_file_but_not_the_code(library: Library) -> None:
    told = origin(library.load().plain)
    library.write(1, "# A comment.\n\n" + _HELPERS)
    assert difference(declared_code(library.load().plain), told) is None


def test_other_code_in_a_helper_is_named(library: Library) -> None:
    told = origin(library.load().plain)
    library.write(1, _HELPERS.replace("* FACTOR", "* FACTOR + 1"))
    reason = difference(declared_code(library.load().plain), told)
    assert reason is not None
    assert f"the file of {library.names[1]}" in reason


@pytest.mark.parametrize(("name", "value"), [("FACTOR", 3), ("FACTOR", 2.0), ("FACTOR", True)])
def test_a_global_that_is_set_otherwise_at_run_time_is_seen(
    library: Library, name: str, value: object
) -> None:
    plain = library.load().plain
    told = origin(plain)
    setattr(sys.modules[library.names[1]], name, value)
    reason = difference(declared_code(plain), told)
    assert reason is not None
    assert f"the value of {name}" in reason


def test_a_dtype_that_is_set_otherwise_at_run_time_is_seen(library: Library) -> None:
    import cuda.tile as ct

    plain = library.load().plain
    told = origin(plain)
    sys.modules[library.names[1]].DTYPE = ct.float16  # type: ignore[attr-defined]
    assert difference(declared_code(plain), told) is not None


def test_files_and_globals_tell_all_of_every_shipped_kernel() -> None:
    """Else each process would hash the sources at import, 7 to 30 ms."""
    codes = (declared_code(tunable) for tunable in TUNABLES)
    assert [code.name for code in codes if not origin_of(code, "13.4").complete] == []


@pytest.mark.parametrize("name", ["closed", "tabled"])
def test_where_files_and_globals_do_not_tell_all_the_hash_is_taken(library: Library, name: str) -> None:
    module = library.load()
    told = origin(getattr(module, name))
    assert not told.complete
    assert difference(declared_code(getattr(module, name)), told) is None
    import dataclasses

    if name == "closed":
        changed = dataclasses.replace(module.closed, kernel=module.made(4))
    else:
        module.TABLE["a"][1] = 5
        changed = module.tabled
    assert difference(declared_code(changed), told) is not None


def test_a_module_that_is_not_imported_is_never_imported(library: Library) -> None:
    plain = library.load().plain
    told = origin(plain)
    named = Origin(**{**vars(told), "files": {**told.files, "antigravity": "00"}, "source_hash": "0"})
    assert difference(declared_code(plain), named) is not None
    assert "antigravity" not in sys.modules
