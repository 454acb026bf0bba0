"""Whether the archives in a folder of tables fit the tables and sources."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from aot_tune.cubins.archive import FILE_NAME
from aot_tune.cubins.pack import pack
from aot_tune.declare.discovery import FoundKernel
from aot_tune.tuner.archives.check import Fit, check
from tests.support.sample_archive import packed, put
from tests.support.samples import DEFAULT, MODULE, SM90, SPACE, entry, scale, scale_table, write

ROOT = Path(__file__).parents[3]
FOUND = {"scale": FoundKernel(module=MODULE, tunable=scale)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, scale_table())
    put(tmp_path, packed())
    return tmp_path


def only(folder: Path) -> Fit:
    (fit,) = check(folder, FOUND)
    return fit


def test_an_archive_of_these_tables_and_sources_fits(folder: Path) -> None:
    fit = only(folder)
    assert (fit.faults, fit.missing, fit.kernels) == ((), (), ("scale",))
    assert (fit.path, fit.bytes) == (
        folder / "sm90" / FILE_NAME,
        (folder / "sm90" / FILE_NAME).stat().st_size,
    )


def test_a_folder_without_archives_gives_no_results(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("What the tables are.")
    assert [*check(tmp_path, FOUND)] == []
    assert [*check(tmp_path / "not there", FOUND)] == []


def test_an_archive_of_other_sources_does_not_fit(folder: Path) -> None:
    put(folder, packed(source_hash="0" * 16, files={MODULE: "0" * 64}))
    [fault] = only(folder).faults
    assert fault.startswith("scale: the file of ")
    assert "is not as it was compiled" in fault


def test_an_archive_of_a_table_that_was_tuned_since_does_not_fit(folder: Path) -> None:
    table = scale_table()
    other = next(config for config in SPACE if config not in {DEFAULT, *table.portfolio})
    made = entry(table.entries[0].bucket, other, (other,))
    write(folder, dataclasses.replace(table, portfolio=(other,), entries=(made,)))
    [fault] = only(folder).faults
    assert fault.startswith("scale: 3 of the ")
    assert fault.endswith("signatures that its table needs have no cubin")


def test_undeclared_kernels_do_not_fit_and_absent_ones_are_missing(folder: Path) -> None:
    put(folder, packed("gone"))
    fit = only(folder)
    assert fit.faults == ("gone: no such kernel is declared",)
    assert fit.missing == ("scale",)
    (folder / "sm90" / "cubins.aot").write_bytes(pack(SM90, []))
    assert (only(folder).faults, only(folder).kernels, only(folder).missing) == ((), (), ("scale",))
    (folder / "sm90" / "scale.json").unlink()
    assert only(folder).missing == (), "it has no table there"


def test_a_damaged_or_misplaced_archive_does_not_fit(folder: Path) -> None:
    good = folder / "sm90" / "cubins.aot"
    shutil.copytree(folder / "sm90", folder / "sm100")
    shutil.copy(good, folder / "sm90" / "before.aot")
    faults = {fit.path.relative_to(folder).as_posix(): fit.faults for fit in check(folder, FOUND)}
    elsewhere = ("an archive of sm90 belongs in sm90/cubins.aot",)
    assert faults == {
        "sm100/cubins.aot": elsewhere, "sm90/before.aot": elsewhere, "sm90/cubins.aot": (),
    }  # fmt: skip
    data = bytearray(good.read_bytes())
    for at, fault in ((-1, "damaged"), (100, "damaged"), (0, "not an archive of cubins")):
        good.write_bytes(bytes((*data[:at], data[at] ^ 1, *data[at:][1:])))
        assert any(fault in told for one in check(folder, FOUND) if one.path == good for told in one.faults)


def test_every_file_that_a_wheel_would_take_for_an_archive_is_asked_about() -> None:
    assert 'artifacts = ["*.aot"]' in (ROOT / "pyproject.toml").read_text()
    assert Path(FILE_NAME).suffix == ".aot"
