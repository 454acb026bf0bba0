"""Tables and archives are found without importing kernels, and shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.cli.documents import find
from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.documents.find import tables_found
from aot_tune.cli.show import table_lines
from aot_tune.cubins.origin import declared_code
from aot_tune.cubins.origin_walk import origin_of
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.errors import UsageError
from aot_tune.tables.table import StateTimes
from aot_tune.values.arch import Arch
from tests.support.samples import SM90, scale, scale_in, scale_table, with_entry, write

SM100 = Arch.parse("sm100")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package's folder with a table for two archs, none of them found by import."""
    write(tmp_path, scale_table())
    write(tmp_path, scale_table(SM100))
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    monkeypatch.setattr(find.store, "folder_of_package", lambda package: tmp_path)
    monkeypatch.setattr(find.discovery, "find_tunables", lambda modules: {})
    return tmp_path


def test_tables_are_chosen_by_kernel_and_arch(folder: Path) -> None:
    assert [str(one.path.relative_to(folder)) for one in tables_found(None, None)[0]] == [
        "sm100/scale.json",
        "sm90/scale.json",
    ]
    (one,), unreadable = tables_found("scale", SM90)
    assert (one.path, one.table.arch, unreadable) == (folder / "sm90/scale.json", SM90, [])


def test_a_table_that_is_not_there_is_refused_with_those_that_are(folder: Path) -> None:
    with pytest.raises(
        UsageError, match="no table of matmul for sm90 is there; there is sm100/scale sm90/scale"
    ):
        tables_found("matmul", SM90)


def test_where_there_is_no_table_at_all_it_says_how_to_come_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    monkeypatch.setattr(find.store, "folder_of_package", lambda package: tmp_path)
    monkeypatch.setattr(find.discovery, "find_tunables", lambda modules: {})
    with pytest.raises(UsageError, match=r"no table is there; make one with .* in AOT_TUNE_TABLES"):
        tables_found(None, None)


def test_a_folder_that_only_the_declaration_names_is_found(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, own = tmp_path_factory.mktemp("empty"), folder
    monkeypatch.setattr(find.store, "folder_of_package", lambda package: empty)
    monkeypatch.setattr(find.discovery, "find_tunables", lambda modules: scale_in(own))
    assert len(tables_found("scale", None)[0]) == 2


def test_a_module_in_the_current_folder_is_found_by_name_and_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "besidelib").mkdir()
    (tmp_path / "besidelib" / "kernels.py").write_text("raise AssertionError('imported')")
    path = write(tmp_path / "besidelib" / "tuned_configs", scale_table())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    for module in ("besidelib.kernels", "besidelib/kernels.py"):
        assert [found.path for found in tables_found("scale", None, [module])[0]] == [path]


def test_a_named_folder_is_the_only_one_that_is_searched(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    path = write(other, scale_table())
    assert [found.path for found in tables_found(None, None, only=other)[0]] == [path]
    with pytest.raises(UsageError, match=f"no table of rope is in {other}; there is sm90/scale"):
        tables_found("rope", None, only=other)


def test_the_overview_gives_gains_and_the_worst_regret() -> None:
    heads, line = table_lines([DeclaredDocument(Path("sm90/scale.json"), scale_table())], whole=False)
    assert heads.split()[:3] == ["arch", "kernel", "entries"]
    # The default won one of three entries, the others gain 1.5: the geometric mean is 1.31.
    assert line.split()[:6] == ["sm90", "scale", "3", "1.31x", "1.50x", "1.0%"]


def test_a_table_is_shown_with_its_portfolio_and_entries() -> None:
    table = scale_table()
    lines = DeclaredDocument(Path("x.json"), table).lines()
    assert lines[0] == "scale on sm90: x.json"
    assert f"source {table.source_hash}" in lines[1]
    assert lines[3:5] == [f"  P0: {table.portfolio[0]}", f"  P1: {table.portfolio[1]}"]
    assert [line.split()[-5] for line in lines[6:]] == ["default:", "P0:", "P1:"]


def test_a_table_says_that_launches_take_one_config_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOT_TUNE_BATCH_INVARIANT", "1")
    assert DeclaredDocument(Path("scale.json"), scale_table()).lines()[-1] == (
        "AOT_TUNE_BATCH_INVARIANT is set: launches take one config of the portfolio for every batch; "
        "aot-tune doctor scale prints it"
    )
    monkeypatch.delenv("AOT_TUNE_BATCH_INVARIANT")
    assert "every batch" not in "".join(DeclaredDocument(Path("scale.json"), scale_table()).lines())


def test_json_is_the_document_and_its_place() -> None:
    data = DeclaredDocument(Path("x.json"), scale_table()).data()
    assert data["path"] == Path("x.json")
    assert data["schema"] == 2
    assert list(data)[1:3] == ["schema", "kernel"]


@pytest.mark.process
def test_show_and_diff_import_neither_torch_nor_cuda_tile(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    put(tmp_path, "sm90", scale=1)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from aot_tune.cli.diff import diff_paths\n"
        "from aot_tune.cli.documents.find import tables_found\n"
        "from aot_tune.cli.show import archives_found\n"
        f"assert archives_found(None, None)[0]\n"
        f"assert tables_found('scale', None)[0]\n"
        f"assert diff_paths(Path({str(tmp_path)!r}), Path({str(tmp_path)!r}))\n"
        "print([name for name in ('torch', 'cuda.tile') if name in sys.modules])\n"
    )
    environment = {"AOT_TUNE_TABLES": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Archives of cubins -------------------------------------------------------------------------------


def put(folder: Path, arch: str, **codes: int) -> int:
    """Write an archive with one cubin of the given bytes for each kernel; return the file's size."""
    kernels = [
        KernelCubins(
            kernel=name,
            symbol="s",
            origin=origin_of(declared_code(scale), ""),
            cubins={((), "a"): bytes(size)},
        )
        for name, size in codes.items()
    ]
    path = folder / arch / "cubins.aot"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pack(Arch.parse(arch), kernels))
    return path.stat().st_size


def _archives(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["show", "--archives", *map(str, words)])


def _rows(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines()]


def test_archive_sizes_are_printed_by_kernel_and_arch(tmp_path: Path) -> None:
    first = put(tmp_path, "sm100", matmul=20_000, rope=3_000)
    second = put(tmp_path, "sm90", matmul=1_500_000)
    result = _archives("--folder", tmp_path)
    assert result.exit_code == 0
    assert _rows(result) == [
        ["archives", "of", "cubins", "in", f"{tmp_path}:"],
        ["KB", "sm90", "sm100"],
        ["matmul", "1,500", "20"],
        ["rope", "-", "3"],
        ["the", "file", f"{second / 1000:,.0f}", f"{first / 1000:,.0f}"],
    ]


def test_archives_are_chosen_by_kernel_and_arch(tmp_path: Path) -> None:
    size = put(tmp_path, "sm100", matmul=20_000, rope=3_000)
    put(tmp_path, "sm90", matmul=1_500_000)
    result = _archives("rope", "--arch", "sm100", "--folder", tmp_path)
    assert _rows(result)[1:] == [["KB", "sm100"], ["rope", "3"], ["the", "file", f"{size / 1000:,.0f}"]]
    (one,) = json.loads(_archives("rope", "--arch", "sm100", "--folder", tmp_path, "--json").stdout)
    assert (one["path"], one["arch"], one["bytes"]) == (str(tmp_path / "sm100" / "cubins.aot"), "sm100", size)
    assert one["kernels"].keys() == {"rope"}
    assert (one["kernels"]["rope"]["cubins"], one["kernels"]["rope"]["bytes"]) == (1, 3_000)
    result = _archives("softmax", "--folder", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no archive has cubins of softmax; there is matmul rope" in result.stderr


def test_each_folder_of_archives_has_a_table_of_its_own(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path_factory.mktemp("named")
    monkeypatch.setenv("AOT_TUNE_TABLES", str(named))
    put(folder, "sm90", rope=3_000)
    put(named, "sm90", rope=5_000)
    heads = [line for line in _archives().stdout.splitlines() if line.startswith(("archives", "rope"))]
    assert [line.split() for line in heads] == [
        ["archives", "of", "cubins", "in", f"{named}:"],
        ["rope", "5"],
        ["archives", "of", "cubins", "in", f"{folder}:"],
        ["rope", "3"],
    ]


def test_a_folder_without_archives_is_exit_code_2_with_the_command(tmp_path: Path) -> None:
    result = _archives("--folder", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith(f"make one: aot-tune compile --out {tmp_path}\n")
    result = _archives("--folder", tmp_path, "--arch", "sm90")
    assert result.stderr.endswith(f"make one: aot-tune compile --arch sm90 --out {tmp_path}\n")


def test_one_damaged_archive_fails_and_the_others_are_printed(tmp_path: Path) -> None:
    put(tmp_path, "sm90", matmul=1)
    put(tmp_path, "sm100", matmul=20_000)
    (tmp_path / "sm90" / "cubins.aot").write_bytes(b"nothing")
    result = _archives("--folder", tmp_path)
    assert result.exit_code == 1
    assert ["matmul", "20"] in _rows(result)
    assert result.stderr.startswith(f"aot-tune: {tmp_path}/sm90/cubins.aot")


def test_disturbed_entries_and_other_states_are_said_below_the_entries() -> None:
    table = with_entry(
        scale_table(), 1, disturbed="the clocks fell", states={"cool": StateTimes(mean_us=9, default_us=12)}
    )
    *_, disturbed, states = DeclaredDocument(Path("x"), table).lines()
    bucket = table.entries[1].bucket
    assert disturbed == f"disturbed: {bucket}: the clocks fell"
    assert states == f"in other states: {bucket}: cool 9.00 us, default 12.00 us"
    entries = DeclaredDocument(Path("x"), table).data()["entries"]
    assert isinstance(entries, list)
    assert entries[1]["disturbed"] == "the clocks fell"


@pytest.mark.parametrize("depth", [300, 1000])
def test_b2_a_table_nested_deeply_is_an_error_of_its_own_and_the_rest_is_shown(
    folder: Path, depth: int
) -> None:
    (folder / "sm90" / "scale.json").write_text("[" * depth + "]" * depth)
    tables, unreadable = tables_found(None, None)
    assert [one.table.arch for one in tables] == [SM100]
    assert [str(folder / "sm90" / "scale.json") in str(error) for error in unreadable] == [True]
    result = CliRunner().invoke(app, ["diff", str(folder / "sm90"), str(folder / "sm100")])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, TypeError)
