"""Whether archives beside the tables fit them: what `make wheel` asks before it packs any."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from aot_tune.cubins.archive import FILE_NAME
from aot_tune.cubins.pack import pack
from aot_tune.declare.discovery import Found
from aot_tune.tuner.archives import check as check_archives
from aot_tune.tuner.archives.check import Fit, check, lines
from tests.support.sample_archive import packed, put
from tests.support.samples import DEFAULT, MODULE, SM90, SPACE, entry, scale, scale_table, write

ROOT = Path(__file__).parents[3]
FOUND = {"scale": Found(module=MODULE, tunable=scale)}


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
    assert [*lines(fit)] == [f"{fit.path} fits: {fit.bytes / 1000:,.0f} KB, 1 kernels"]


def test_without_archives_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert [*check(tmp_path, FOUND)] == []
    assert [*check(tmp_path / "not there", FOUND)] == []


def test_other_sources_do_not_fit_and_the_message_says_what_to_do(folder: Path) -> None:
    put(folder, packed(source_hash="0" * 16, files={MODULE: "0" * 64}))
    [fault] = only(folder).faults
    assert fault.startswith("scale: the file of ")
    assert "is not as it was compiled" in fault
    *_, last = lines(only(folder))
    assert last.strip() == (
        f"build it again (make cubins ARCH=sm90), or remove it: rm {folder}/sm90/cubins.aot"
    )


def test_a_table_that_was_tuned_since_does_not_fit(folder: Path) -> None:
    table = scale_table()
    other = next(config for config in SPACE if config not in {DEFAULT, *table.portfolio})
    made = entry(table.entries[0].bucket, other, (other,))
    write(folder, dataclasses.replace(table, portfolio=(other,), entries=(made,)))
    [fault] = only(folder).faults
    assert fault.startswith("scale: 3 of the ")
    assert fault.endswith("signatures that its table asks for have no cubin")


def test_a_kernel_that_is_no_longer_declared_does_not_fit_and_one_that_is_not_there_is_told(
    folder: Path,
) -> None:
    put(folder, packed("gone"))
    fit = only(folder)
    assert fit.faults == ("gone: no such kernel is declared",)
    assert fit.missing == ("scale",)
    (folder / "sm90" / "cubins.aot").write_bytes(pack(SM90, []))
    assert next(lines(only(folder))).endswith("0 kernels; none of scale")


def test_what_is_damaged_or_lies_where_nobody_looks_does_not_fit(folder: Path) -> None:
    good = folder / "sm90" / "cubins.aot"
    shutil.copytree(folder / "sm90", folder / "sm100")
    shutil.copy(good, folder / "sm90" / "before.aot")
    faults = {fit.path.relative_to(folder).as_posix(): fit.faults for fit in check(folder, FOUND)}
    elsewhere = ("an archive of sm90 lies in sm90/cubins.aot",)
    assert faults == {
        "sm100/cubins.aot": elsewhere, "sm90/before.aot": elsewhere, "sm90/cubins.aot": (),
    }  # fmt: skip
    data = bytearray(good.read_bytes())
    for at, fault in ((-1, "damaged"), (100, "damaged"), (0, "not an archive of cubins")):
        good.write_bytes(bytes((*data[:at], data[at] ^ 1, *data[at:][1:])))
        assert any(fault in told for one in check(folder, FOUND) if one.path == good for told in one.faults)


# The command and make ---------------------------------------------------------------------------------------


def test_the_command_fails_where_one_does_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Found(module=MODULE, tunable=dataclasses.replace(scale, tables=folder))
    monkeypatch.setattr(check_archives, "find_tunables", lambda modules: {"scale": here})
    assert check_archives.main([]) == 0
    assert "fits: " in capsys.readouterr().out
    put(folder, packed("gone"))
    assert check_archives.main([]) == 1
    assert "no such kernel is declared" in capsys.readouterr().out
    (folder / "sm90" / "cubins.aot").unlink()
    assert check_archives.main([]) == 0
    assert capsys.readouterr().out == "no archives of cubins: tables alone\n"


@pytest.mark.parametrize("arch", ["", "sm90"])
def test_make_wheel_asks_before_it_packs(arch: str) -> None:
    done = subprocess.run(
        ["make", "-n", "wheel", "VENV=", f"ARCH={arch}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    steps = [line for line in done.stdout.splitlines() if line.strip()]
    asked = next(at for at, line in enumerate(steps) if "aot_tune.tuner.archives.check" in line)
    packed_at = next(at for at, line in enumerate(steps) if "pip wheel" in line)
    compiled_at = next((at for at, line in enumerate(steps) if "aot_tune compile" in line), -1)
    assert compiled_at < asked < packed_at
    assert (compiled_at >= 0) == bool(arch)


def test_every_file_that_a_wheel_would_take_for_an_archive_is_asked_about() -> None:
    assert 'artifacts = ["*.aot"]' in (ROOT / "pyproject.toml").read_text()
    assert Path(FILE_NAME).suffix == ".aot"
