"""No file can crash, hang or misconfigure a server: every fault of a table is one warning and a miss."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.errors import DeclarationError, TableWarning
from aot_tune.serve.choose import loader
from aot_tune.serve.choose.loader import load
from aot_tune.tables import writer
from aot_tune.tables.table import Table
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests.support.samples import SM90, scale, scale_table, with_entry, write

WHOLE = writer.dump(scale_table())


def spoil(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(WHOLE)) and None


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


FAULTS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(WHOLE[: len(WHOLE) // 2]),
    "nuls": lambda path: path.write_bytes(bytes(4096)),
    "directory": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "10^5 levels": lambda path: path.write_bytes(b"[" * 100_000),
    "1 GB": sparse,
    "NaN": lambda path: path.write_bytes(WHOLE.replace(b'"mean_us": 10', b'"mean_us": NaN', 1)),
    "true for 1": lambda path: path.write_bytes(WHOLE.replace(b'"schema": 1', b'"schema": true', 1)),
    "30-digit int": lambda path: path.write_bytes(
        WHOLE.replace(b'"num_ctas": 1', b'"num_ctas": ' + b"9" * 30, 1)
    ),
    "duplicate keys": lambda path: path.write_bytes(WHOLE.replace(b'"arch":', b'"kernel": "x", "arch":', 1)),
    "BOM": lambda path: path.write_bytes(b"\xef\xbb\xbf" + WHOLE),
    "lone surrogate": lambda path: path.write_bytes(WHOLE.replace(b"NVIDIA", b"\\ud800", 1)),
    "newer schema": lambda path: path.write_bytes(WHOLE.replace(b'"schema": 1', b'"schema": 3', 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_b1_b2_a_faulty_table_is_a_miss_with_one_warning_and_the_rest_is_used(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1, B2: the warning names the path; bounded in time; the next folder's table still serves."""
    bad, good = tmp_path / "bad", tmp_path / "good"
    (bad / "sm90").mkdir(parents=True)
    FAULTS[fault](bad / "sm90" / "scale.json")
    write(good, scale_table())
    monkeypatch.setenv(environment.TABLES, str(bad))
    started = time.monotonic()
    with pytest.warns(TableWarning) as seen:
        index = load(dataclasses.replace(scale, tables=good), SM90)
    assert time.monotonic() - started < 5
    assert len(seen) == 1
    assert str(bad / "sm90" / "scale.json") in str(seen[0].message)
    assert [shipped.path.parent.parent for shipped in index.tables] == [good]


def test_b1_a_table_that_may_not_be_read_is_a_miss_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: whatever reading raises, the process that serves goes on."""
    path = write(tmp_path, scale_table())
    monkeypatch.setattr(loader, "read_table", lambda path: (_ for _ in ()).throw(RuntimeError("odd")))
    with pytest.warns(TableWarning, match=r"RuntimeError: odd") as seen:
        index = load(dataclasses.replace(scale, tables=tmp_path), SM90)
    assert str(path) in str(seen[0].message)
    assert index.tables == ()


def test_a_table_that_was_never_made_is_no_fault(tmp_path: Path) -> None:
    assert load(dataclasses.replace(scale, tables=tmp_path), SM90).tables == ()


def _renamed_constants(table: Table) -> Table:
    def other(config: Config) -> Config:
        return Config(constants={"tile_x": 16, "tile_n": 64}, hints=config.hints)

    entries = tuple(dataclasses.replace(entry, config=other(entry.config)) for entry in table.entries)
    return dataclasses.replace(table, portfolio=tuple(map(other, table.portfolio)), entries=entries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: dataclasses.replace(t, arch=Arch.parse("sm100")),
            "it is the table of sm100, and not of sm90; .*: move it to sm100/scale.json, or remove it",
        ),
        (
            lambda t: dataclasses.replace(t, kernel="other"),
            "it is the table of 'other', and not of 'scale'; .*: move it to sm90/other.json, or remove it",
        ),
        (
            _renamed_constants,
            "its configs have the constants tile_x tile_n, .* tile_m tile_n; .*: tune it again",
        ),
    ],
    ids=["arch", "kernel", "constants"],
)
def test_b3_a_well_formed_table_of_something_else_is_never_used(
    change: Callable[[Table], Table], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: other arch, other kernel, constants the kernel does not take."""
    write(tmp_path, scale_table())
    monkeypatch.setattr(loader, "read_table", lambda path: change(scale_table()))
    with pytest.warns(TableWarning, match=message):
        assert load(dataclasses.replace(scale, tables=tmp_path), SM90).tables == ()


def test_predicted_entries_are_read_only_from_a_folder_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, with_entry(scale_table(), 1, evidence="predicted"))
    tunable = dataclasses.replace(scale, tables=tmp_path)
    with pytest.warns(TableWarning, match="1 of its entries are predicted and left out"):
        assert len(load(tunable, SM90).tables[0].table.entries) == 2
    monkeypatch.setenv(environment.TABLES, str(tmp_path))
    elsewhere = dataclasses.replace(scale, tables=tmp_path / "none")
    assert len(load(elsewhere, SM90).tables[0].table.entries) == 3


def test_a_named_folder_that_is_not_there_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "gone"))
    with pytest.warns(TableWarning, match=r"AOT_TUNE_TABLES names .*gone, which is not a folder"):
        load(dataclasses.replace(scale, tables=tmp_path), SM90)


def test_nvml_is_not_asked_where_no_folder_could_hold_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "gpus", lambda: pytest.fail("NVML was asked, 58 ms"))
    assert loader.archs_to_load(scale) == ()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "a\0b", "x" * 300, "", ".", "X", "con fig"])
def test_b14_a_name_that_is_no_file_name_is_refused_when_declared_and_nothing_is_touched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B14: the whole path, from a declaration to tables, archive and cache."""
    inside = tmp_path / "root" / "tables"
    inside.mkdir(parents=True)
    monkeypatch.setenv(environment.CACHE_DIR, str(tmp_path / "root" / "cache"))
    monkeypatch.setattr(loader, "gpus", lambda: pytest.fail("it was loaded"))
    with pytest.raises(DeclarationError, match="name"):
        dataclasses.replace(scale, name=name, tables=inside)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "root", inside]


def test_b14_a_table_that_names_a_kernel_elsewhere_is_a_miss(tmp_path: Path) -> None:
    """B14: a name in a file leads nowhere."""
    write(tmp_path, scale_table())
    path = tmp_path / "sm90" / "scale.json"
    path.write_bytes(WHOLE.replace(b'"kernel": "scale"', b'"kernel": "../../scale"'))
    tunable = dataclasses.replace(scale, tables=tmp_path)
    with pytest.warns(TableWarning, match="scale.json"):
        assert load(tunable, SM90).tables == ()
