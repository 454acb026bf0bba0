"""`aot-tune compile` of recorded tables: what is compiled, where the archive lies, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from aot_tune import environment
from aot_tune.cli.app import app
from aot_tune.cubins.archive import FILE_NAME, Archive
from aot_tune.declare.fingerprint.hashing import kernel_hash
from aot_tune.errors import TableError
from aot_tune.nvidia import cutile
from aot_tune.replay.archives import RecordedTables, tabled_kernel, tabled_kernels
from aot_tune.replay.table import Library
from aot_tune.tables import store
from aot_tune.tuner.archives.build import build
from aot_tune.tuner.archives.check import check
from aot_tune.tuner.archives.report import ArchiveReport, CubinRequest
from tests.support import tuned_once, wide_samples
from tests.support.recorded_launches import MODULE, NAME, SM90, entry, table, write
from tests.support.tuned_once import SPACE
from tests.support.wide_samples import halve_kernel


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test compiled, the next need not."""
    return tmp_path_factory.mktemp("cubins")


def built(cubins: Path, *paths: Path, out: Path | None = None) -> ArchiveReport:
    request = CubinRequest(kernels=(), archs=(SM90,), jobs=2, cubins=cubins, out=out)
    (report,) = build(request, print, tabled_kernels(paths, [SM90], print))
    return report


@pytest.mark.process
def test_each_winner_is_compiled_into_the_archive_beside_the_table(tmp_path: Path, cubins: Path) -> None:
    path = write(tmp_path)
    report = built(cubins, path)
    assert (report.path, report.failures) == (path.parent / FILE_NAME, ())
    section = Archive(report.path).section(NAME)
    assert section is not None
    weakest = [cutile.weakest_signature(tuned_once.scale_kernel, one.signature) for one in table().entries]
    assert sorted(section.keys) == sorted(
        (tuple(one.hints.items()), signature)
        for one, weak in zip(table().entries, weakest, strict=True)
        for signature in (one.signature, weak)
    )
    assert section.symbol == "scale_kernel"
    assert MODULE in section.origin.files
    assert [(fit.faults, fit.missing) for fit in check(tmp_path, {}, RecordedTables())] == [((), ())]
    assert not built(cubins, path).changed


@pytest.mark.process
def test_tables_of_one_kernel_in_two_folders_share_a_section(tmp_path: Path, cubins: Path) -> None:
    one = write(tmp_path / "one", table(entry(1024)))
    other = write(tmp_path / "other", table(entry(4096, SPACE[3])))
    report = built(cubins, one, other, out=tmp_path / "out")
    assert report.path == tmp_path / "out" / "sm90" / FILE_NAME
    assert [(kernel.kernel, kernel.signatures) for kernel in report.kernels] == [(NAME, 4)]


def test_a_table_that_replaying_would_leave_out_is_an_error(tmp_path: Path, cubins: Path) -> None:
    path = write(tmp_path, table(source_hash="0" * 16))
    with pytest.raises(TableError, match=r"changed since it was recorded .*; record again \(aot-tune"):
        built(cubins, path)


def test_a_kernel_made_within_a_function_is_said_and_passed_over(tmp_path: Path, cubins: Path) -> None:
    path = write(tmp_path, table(kernel="make.<locals>.kernel"))
    said: list[str] = []
    request = CubinRequest(kernels=(), archs=(SM90,), cubins=cubins)
    assert build(request, said.append, tabled_kernels([path], [SM90], said.append)) == ()
    local = "its kernel is made only when its library calls a function"
    assert said == [f"{path}: {local}; nothing is compiled"]
    assert tabled_kernel(path) == local


@pytest.mark.process
def test_an_archive_of_another_recording_does_not_fit(tmp_path: Path, cubins: Path) -> None:
    built(cubins, write(tmp_path))
    write(tmp_path, table(entry(1024), entry(64, SPACE[0])))
    ((fault,),) = [fit.faults for fit in check(tmp_path, {}, RecordedTables())]
    assert fault == f"{NAME}: 2 of the 4 signatures that its table needs have no cubin"
    write(tmp_path).unlink()
    ((fault,),) = [fit.faults for fit in check(tmp_path, {}, RecordedTables())]
    assert fault == f"{NAME}: no such kernel is recorded"


@pytest.mark.process
def test_the_verb_compiles_a_recorded_kernel_by_name(
    tmp_path: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setenv(environment.TABLES, str(tmp_path))
    words = ["compile", "--arch", "sm90", "--cubins", str(cubins), "--kernel"]
    result = CliRunner().invoke(app, [*words, NAME])
    assert (result.exit_code, result.stdout.splitlines()[1].split()[:2]) == (0, ["sm90", NAME])
    result = CliRunner().invoke(app, [*words, NAME[:-1]])
    assert result.exit_code == 2
    assert f"no recorded table is of '{NAME[:-1]}'; there is {NAME}; the nearest is {NAME}" in result.stderr


@pytest.mark.process
def test_a_package_that_only_records_is_compiled_by_its_module(
    tmp_path: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "onlyrecords"
    package.mkdir()
    (package / "__init__.py").touch()
    write(package / "tuned_configs")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(environment.TABLES, raising=False)
    words = ["compile", "--arch", "sm90", "--cubins", str(cubins), "--module", "onlyrecords"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert Archive(package / "tuned_configs" / "sm90" / FILE_NAME).kernels == (NAME,)


@pytest.mark.process
def test_shipped_tables_are_compiled_by_the_library_s_module(
    tmp_path: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "libraries_folder", lambda: tmp_path / "libraries")
    monkeypatch.delenv(environment.TABLES, raising=False)
    path = write(tmp_path / "libraries", table(library=Library(name="pytest", version="0.1")))
    words = ["compile", "--arch", "sm90", "--cubins", str(cubins), "--module", MODULE]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert Archive(path.parent / FILE_NAME).kernels == (NAME,)
    for verb in ("show", "doctor"):
        result = CliRunner().invoke(app, [verb, NAME, "--arch", "sm90"])
        assert result.exit_code == 0, result.stderr
        assert str(path) in result.stdout
    (path.parent / FILE_NAME).unlink()
    own = write(tmp_path / "own")
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "own"))
    words = ["compile", "--arch", "sm90", "--cubins", str(cubins), "--kernel", NAME]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert (own.parent / FILE_NAME).exists()
    assert not (path.parent / FILE_NAME).exists()  # a kernel's shipped table counts where it has no other
    write(tmp_path / "libraries", table(source_hash="0" * 16))
    assert "changed since it was recorded" in str(tabled_kernel(path))


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shipped tables, with one, beside the user's folder `ours`."""
    monkeypatch.setattr(store, "libraries_folder", lambda: tmp_path / "libraries")
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "ours"))
    write(tmp_path / "libraries")
    return tmp_path / "libraries"


def compiled(cubins: Path, *words: str) -> list[str]:
    """Compile, and return the lines to stderr."""
    result = CliRunner().invoke(app, ["compile", "--arch", "sm90", "--cubins", str(cubins), *words])
    assert result.exit_code == 0, result.stderr
    return result.stderr.splitlines()


@pytest.mark.process
@pytest.mark.usefixtures("libraries")
def test_cubins_of_shipped_tables_go_to_the_user_s_folder(tmp_path: Path, cubins: Path) -> None:
    """Installed packages are read-only in many images."""
    compiled(cubins, "--module", MODULE)
    assert [path.parent.parent for path in tmp_path.rglob(FILE_NAME)] == [tmp_path / "ours"]
    assert [(fit.kernels, fit.faults) for fit in check(tmp_path / "ours", {}, RecordedTables())] == [
        ((NAME,), ())
    ]


@pytest.mark.process
def test_beside_own_tables_a_shipped_one_is_compiled_by_its_kernel_alone(
    tmp_path: Path, cubins: Path, libraries: Path
) -> None:
    x = torch.empty(64, device="meta")
    signature = cutile.signature_of(halve_kernel, (x, x, 16))
    digest, _ = kernel_hash(halve_kernel)
    other = entry(1024, hints=cutile.hints_of(halve_kernel, SM90), signature=signature)
    changes = {"module": wide_samples.__name__, "kernel": "halve_kernel", "source_hash": digest}
    for folder in (libraries, tmp_path / "ours"):
        own = write(folder, table(other, **changes)).stem
    both = sorted([own, NAME])
    for more, held in (
        (["--module", "tests.support"], [own]),
        (["--kernel", NAME], both),
        (["--module", "tests.support"], both),
        (["--kernel", own], both),
    ):
        told = compiled(cubins, *more)
        assert [*Archive(tmp_path / "ours" / "sm90" / FILE_NAME).kernels] == held
        remark = f"shipped tables of 1 kernel are left out beside your own; add one: --kernel {NAME}"
        assert (f"remark: {remark}" in told) == ("--module" in more)
    assert not (libraries / "sm90" / FILE_NAME).exists()
