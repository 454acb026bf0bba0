"""What `check` finds, each fault made in an otherwise faultless folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aot_tune.cli.app import app
from aot_tune.cli.check import archive_lines, archives, check
from aot_tune.cli.documents import declared
from aot_tune.cubins.pack import pack
from aot_tune.declare import discovery
from aot_tune.declare.fingerprint import hashing
from aot_tune.errors import UsageError
from aot_tune.serve import loader
from aot_tune.tables import reader, writer
from aot_tune.tables.table import Table
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests.support.make import planned_commands
from tests.support.sample_archive import packed, put
from tests.support.samples import DEFAULT, SM90, SPACE, scale, scale_in, scale_table, with_entry, write

SM100 = Arch.parse("sm100")

ROOT = Path(__file__).parents[2]


def _told(folder: Path, path: Path | None = None) -> list[str]:
    return [str(finding) for finding in check(scale_in(folder), path)]


def test_a_faultless_folder_has_no_findings(tmp_path: Path) -> None:
    path = write(tmp_path, scale_table())
    assert _told(tmp_path) == []
    assert _told(tmp_path, tmp_path) == []
    assert _told(tmp_path, path.parent) == []
    assert _told(tmp_path, path) == []


def test_the_current_folder_is_an_arch_s_where_it_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, scale_table()).parent
    (folder / "below").mkdir()
    monkeypatch.chdir(folder)
    assert [line.split(": ")[:2] for line in _told(tmp_path, Path())] == [
        [str(folder / "below"), "an unknown file"]
    ]
    monkeypatch.chdir(folder / "below")
    assert len(_told(tmp_path, Path(".."))) == 1


def test_every_shipped_kernel_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single table of theirs here, it says of each of the others that it has none."""
    monkeypatch.setattr("aot_tune.cli.check._declaration_findings", lambda *args: ())
    (tmp_path / "sm90").mkdir()
    shutil.copy(ROOT / "tuned_configs" / "sm90" / "rope.json", tmp_path / "sm90")
    kernels = {
        name: dataclasses.replace(kernel, tunable=dataclasses.replace(kernel.tunable, tables=tmp_path))
        for name, kernel in discovery.find_tunables([discovery.OWN_KERNELS]).items()
    }
    told = [finding.what for finding in check(kernels)]
    others = sorted(path.stem for path in (ROOT / "tuned_configs" / "sm90").glob("*.json"))
    others.remove("rope")
    assert sorted(told) == [f"{name} has no table for sm90" for name in others]
    assert len(others) == 15


def _config(**constants: int) -> Config:
    return Config(constants={**DEFAULT.constants, **constants}, hints=DEFAULT.hints)


def _faults() -> dict[str, tuple[Callable[[Table], Table], str]]:
    def entry(place: int, **values: object) -> Callable[[Table], Table]:
        return lambda table: with_entry(table, place, **values)

    bucket = scale.buckets[1]
    return {
        "stale source": (
            lambda t: dataclasses.replace(t, source_hash="0" * 16),
            "the kernel's code has changed",
        ),
        "predicted": (entry(1, evidence="predicted"), "a prediction in a package's own tables"),
        "outside the space": (entry(1, config=_config(tile_m=128)), "is outside the search space"),
        "not legal": (entry(1, config=SPACE[-1]), "is not legal: 64 x 128 does not fit"),
        "not in the portfolio": (entry(1, config=SPACE[1]), "is neither in the portfolio nor the default"),
        "slower than the default": (entry(1, mean_us=20.0), "slower than the default: 20.0 us against 15.0"),
        "default with two times": (
            entry(0, default_us=3.0),
            "the default won with 2.0 us, but default_us is 3.0",
        ),
        "no point at the edge": (
            entry(1, points=scale_table().entries[1].points[:-1]),
            "is not the bucket's edge",
        ),
        "unknown dtype": (entry(1, bucket=bucket.replaced(dtype="bfloat17")), "make_args cannot make it"),
        "dtype of another kind": (entry(1, bucket=bucket.replaced(dtype=True)), "dtype is True"),
        "portfolio nobody can use": (
            lambda t: dataclasses.replace(t, portfolio=(*t.portfolio[:1], SPACE[-1])),
            "is legal and in the search space for no entry",
        ),
        "an entry is missing": (
            lambda t: dataclasses.replace(t, entries=t.entries[1:]),
            "a declared shape has no entry",
        ),
    }


@pytest.mark.parametrize("name", list(_faults()))
def test_a_fault_is_found_with_its_file_its_place_and_what_to_do(name: str, tmp_path: Path) -> None:
    make, told = _faults()[name]
    path = write(tmp_path, make(scale_table()))
    lines = _told(tmp_path)
    assert any(told in line for line in lines), lines
    assert all(line.startswith(f"{path}: ") and "tune" in line.lower() for line in lines)


def test_bytes_that_were_edited_by_hand_are_found_with_their_line(tmp_path: Path) -> None:
    path = write(tmp_path, scale_table())
    path.write_bytes(path.read_bytes().replace(b'"sm_count": 132', b'"sm_count":  132'))
    (line,) = _told(tmp_path)
    number = path.read_bytes()[: path.read_bytes().index(b"sm_count")].count(b"\n") + 1
    assert f"not the bytes that aot-tune writes, from line {number} on" in line


def test_entries_out_of_order_are_found_by_their_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, scale_table())
    before = reader.parse(path.read_bytes())
    lines = path.read_bytes().splitlines(True)
    places = [i for i, line in enumerate(lines) if b'"bucket"' in line]
    swapped = [line.rstrip(b",\n") + b",\n" for line in (lines[places[1]], lines[places[0]])]
    lines[places[0]], lines[places[1]] = swapped
    path.write_bytes(b"".join(lines))
    assert reader.parse(path.read_bytes()) == before
    (line,) = _told(tmp_path)
    assert "not the bytes that aot-tune writes" in line


def test_a_file_that_is_no_table_is_found_with_the_place_in_it(tmp_path: Path) -> None:
    path = write(tmp_path, scale_table())
    path.write_bytes(path.read_bytes().replace(b'"num_ctas": 1', b'"num_ctas": 3', 1))
    (line,) = _told(tmp_path)
    assert line.startswith(f"{path}: portfolio[0].hints.num_ctas: ")
    path.write_bytes(path.read_bytes()[:50])
    (line,) = _told(tmp_path)
    assert "not JSON" in line
    assert "restore it" in line


def test_unknown_files_archs_and_kernels_are_found(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "sm_90").mkdir()
    (tmp_path / "sm90" / "scale.json.orig").write_text("x")
    (tmp_path / "sm90" / "scalar.json").write_text("x")
    told = _told(tmp_path)
    assert [line.split(": ")[1] for line in told] == [
        "an unknown file",
        "no GPU arch has this name",
        "no kernel of tests.support.samples is called that",
        "an unknown file",
    ]


def test_a_readme_may_be_in_the_root_of_the_tables(tmp_path: Path) -> None:
    path = write(tmp_path, scale_table())
    for name in ("README.md", "schema.json"):
        (tmp_path / name).write_text("What the tables are.")
    assert _told(tmp_path) == []
    assert _told(tmp_path, tmp_path) == []
    (path.parent / "README.md").write_text("No table.")
    assert [line.split(": ")[:2] for line in _told(tmp_path)] == [
        [str(path.parent / "README.md"), "an unknown file"]
    ]


@pytest.mark.parametrize("name", ["readme.md", "README", "README.txt", "README.md.orig", "NOTES.md"])
def test_a_readme_of_another_name_is_an_unknown_file(tmp_path: Path, name: str) -> None:
    write(tmp_path, scale_table())
    (tmp_path / name).write_text("What the tables are.")
    (line,) = _told(tmp_path)
    assert line.startswith(f"{tmp_path / name}: an unknown file: ")


def test_a_readme_that_is_not_a_file_is_found(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    (tmp_path / "README.md").symlink_to(tmp_path / "nowhere")
    (line,) = _told(tmp_path)
    assert ": an unknown file: " in line


def test_a_readme_alone_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("What the tables are.")
    (line,) = _told(tmp_path)
    assert "holds no tables for scale" in line
    with pytest.raises(UsageError, match="no tables in"):
        check(scale_in(tmp_path / "own"), tmp_path)


def test_a_table_in_the_wrong_place_is_found(tmp_path: Path) -> None:
    table = write(tmp_path, scale_table())
    (tmp_path / "sm100").mkdir()
    table.rename(tmp_path / "sm100" / "scale.json")
    (tmp_path / "sm90").rmdir()
    wrong = "it is the table of scale on sm90: move it to sm90/scale.json"
    assert wrong in "\n".join(_told(tmp_path))
    assert wrong in "\n".join(_told(tmp_path, tmp_path / "sm100" / "scale.json")), "as pre-commit names it"


def test_a_table_whose_lines_git_has_converted_is_found_as_such(tmp_path: Path) -> None:
    path = write(tmp_path, scale_table())
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (line,) = _told(tmp_path)
    assert line.endswith("lines end in CRLF: write *.json eol=lf into .gitattributes, and check it out anew")


def test_a_table_in_the_shared_folder_of_a_namespace_package_is_found_with_its_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_of_check" / "beta").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    former = write(tmp_path / "acme_of_check" / "tuned_configs", scale_table())
    own = tmp_path / "acme_of_check" / "beta" / "tuned_configs"
    moved = dataclasses.replace(scale, package="acme_of_check.beta", tables=None)
    kernels = {"scale": dataclasses.replace(scale_in(tmp_path)["scale"], tunable=moved)}
    no_tables, found = map(str, check(kernels))
    assert no_tables.startswith(f"{own}: holds no tables for scale")
    assert found.startswith(
        f"{former}: not read: tables of acme_of_check.beta lie in {own}: "
        f"mkdir -p {own / 'sm90'} && mv {former} {own / 'sm90'}, "
    )
    (own / "sm90").mkdir(parents=True)
    former.rename(own / "sm90" / "scale.json")
    assert check(kernels) == []


def test_a_kernel_without_a_table_for_an_arch_that_has_others_is_found(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    (tmp_path / "sm100").mkdir()
    (line,) = _told(tmp_path)
    assert line.endswith(
        "scale has no table for sm100: run aot-tune tune scale --arch sm100 --module tests.support.samples"
    )


def test_a_kernel_without_any_table_is_found(tmp_path: Path) -> None:
    (line,) = _told(tmp_path / "none")
    assert "holds no tables for scale: tune them on a GPU of each arch: aot-tune tune scale --module " in line


def test_an_archive_alone_is_remarked_to_serve_defaults(tmp_path: Path) -> None:
    (tmp_path / "sm90").mkdir()
    put(tmp_path, packed())
    remarks = [one for one in check(scale_in(tmp_path)) if one.remark]
    assert [one.what for one in remarks] == [
        "no kernel has a table for any arch: the archives serve the defaults alone"
    ]
    write(tmp_path, scale_table())
    assert [one for one in check(scale_in(tmp_path)) if one.remark] == []


def test_what_is_wrong_with_many_entries_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = scale_table()
    for place in range(3):
        table = with_entry(table, place, evidence="predicted")
    write(tmp_path, table)
    each = [line for line in _told(tmp_path) if "a prediction in a package's own tables" in line]
    assert len(each) == 3
    monkeypatch.setattr(declared, "_MOST_ALIKE", 2)
    [line] = [line for line in _told(tmp_path) if "a prediction in a package's own tables" in line]
    assert f"3 entries, the first of {table.entries[0].bucket}" in line


def test_a_command_names_the_module_in_which_a_kernel_was_found(tmp_path: Path) -> None:
    found = {
        name: dataclasses.replace(one, module="mylib.all_of_them") for name, one in scale_in(tmp_path).items()
    }
    (line,) = [str(finding) for finding in check(found) if "holds no tables" in finding.what]
    assert ": tune them on a GPU of each arch: aot-tune tune scale --module mylib.all_of_them;" in line


def test_configs_need_not_name_constants_that_args_fn_computes(tmp_path: Path) -> None:
    space = [Config(hints={"occupancy": occupancy}) for occupancy in (1, 2)]
    found = scale_in(tmp_path)["scale"]
    tunable = dataclasses.replace(
        found.tunable,
        search_space=lambda arch, problem: space,
        legal=lambda config, arch, problem: True,
        default=lambda arch, problem: space[0],
        grid_fn=lambda config, device, problem: (problem.size("M"), 1),
        args_fn=lambda config, source, target: (source, target, 1, source.shape[1]),
        tiles=None,
    )
    columns = (10.0, 15.0)
    entries = tuple(
        dataclasses.replace(
            entry,
            config=space[1],
            mean_us=10.0,
            default_us=15.0,
            points=tuple(dataclasses.replace(point, us=columns) for point in entry.points),
        )
        for entry in scale_table().entries
    )
    table = dataclasses.replace(
        scale_table(), source_hash=hashing.source_hash(tunable), portfolio=(space[1],), entries=entries
    )
    path = write(tmp_path, table)
    assert check({"scale": dataclasses.replace(found, tunable=tunable)}) == []
    assert loader.mismatch(tunable, table.arch, table) is None
    path.write_bytes(writer.dump(scale_table()))
    told = [finding.what for finding in check({"scale": dataclasses.replace(found, tunable=tunable)})]
    assert any(
        "does not hold the declaration's constants in the kernel's order: none" in what for what in told
    )


def test_predictions_outside_of_a_package_are_no_fault(tmp_path: Path) -> None:
    own, elsewhere = tmp_path / "own", tmp_path / "build"
    table = scale_table(SM100)
    for place in range(3):
        table = with_entry(table, place, evidence="predicted")
    write(elsewhere, table)
    assert _told(own, elsewhere) == []


def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not exist.* --module"):
        check(scale_in(tmp_path), tmp_path / "nowhere")


def test_a_folder_with_nothing_to_check_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty" / "sm90").mkdir(parents=True)
    (tmp_path / "empty" / "notes.txt").write_text("x")
    for place in (tmp_path / "empty", tmp_path / "empty" / "sm90"):
        with pytest.raises(UsageError, match=f"no tables in {place}; give a table, an arch's folder or"):
            _told(tmp_path / "own", place)
    (line,) = _told(tmp_path / "empty", tmp_path / "empty" / "sm90")
    assert "scale has no table for sm90" in line


def test_what_a_declaration_lacks_for_an_arch_is_found_beside_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aot_tune.declare import checks

    write(tmp_path, scale_table())
    monkeypatch.setattr(
        checks, "declaration_problems", lambda tunable, arch: [f"{tunable.name} on {arch}: no"]
    )
    (line,) = _told(tmp_path)
    assert line.endswith("scale on sm90: no: correct the declaration")


def test_a_wrong_declaration_is_found_where_its_kernel_has_no_table(tmp_path: Path) -> None:
    (found,) = scale_in(tmp_path).values()
    wrong = dataclasses.replace(found.tunable, args_fn=lambda config, source, target: (source, target))
    kernels = {"scale": dataclasses.replace(found, tunable=wrong)}
    for folders in ((), ("sm90",)):
        for folder in folders:
            (tmp_path / folder).mkdir()
        lines = [str(finding) for finding in check(kernels)]
        (line,) = [line for line in lines if "args_fn" in line]
        assert (
            "scale: args_fn returned 2 values; return a tuple of what the kernel takes: source, target"
            in line
        )
        assert line.endswith(": correct the declaration")


# Archives of cubins -------------------------------------------------------------------------------


def test_an_archive_of_cubins_that_fits_is_no_fault(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    path = put(tmp_path, packed())
    for place in (None, tmp_path, path.parent, path):
        assert _told(tmp_path, place) == []


def test_an_arch_with_an_archive_alone_lacks_no_table(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    alone = tmp_path / "sm100" / "cubins.aot"
    alone.parent.mkdir()
    alone.write_bytes(pack(SM100, []))
    assert _told(tmp_path) == []
    write(tmp_path, scale_table(SM100)).rename(alone.parent / "other.json")
    assert any("scale has no table for sm100" in line for line in _told(tmp_path))


def test_an_archive_that_does_not_fit_is_found_with_the_command_that_makes_it(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    path = put(tmp_path, packed(source_hash="0" * 16, files={"tests.support.samples": "0" * 64}))
    for place in (None, path):
        (line,) = _told(tmp_path, place)
        assert line.startswith(f"{path}: scale: the file of tests.support.samples is not as it was compiled")
        assert line.endswith(
            ": compile it again (aot-tune compile --arch sm90 --module tests.support.samples), or remove it"
        )
    path.write_bytes(b"{}")
    (line,) = _told(tmp_path)
    assert line.startswith(f"{path}: ")
    assert "compile it again" in line


def test_a_table_or_cubins_of_another_module_s_kernel_are_not_told_to_be_removed_alone(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, scale_table())
    other = write(tmp_path, dataclasses.replace(scale_table(), kernel="other"))
    archive = put(tmp_path, packed(), packed("other"))
    step = "there is scale; if another module declares it, name that too (--module), else remove it"
    assert _told(tmp_path) == [
        f"{archive}: no kernel of tests.support.samples is called other: {step}",
        f"{other}: no kernel of tests.support.samples is called that: {step}",
    ]
    assert _told(tmp_path, other) == [f"{other}: no kernel of tests.support.samples is called other: {step}"]
    assert _told(tmp_path, path) == []


# check --archives ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The sample's table and an archive that fits it."""
    write(tmp_path, scale_table())
    put(tmp_path, packed())
    return tmp_path


def test_an_archive_that_fits_is_one_line_with_its_size(folder: Path) -> None:
    (fit,) = archives(scale_in(folder))
    assert archive_lines([fit]) == [f"{fit.path} fits: {fit.bytes / 1000:,.0f} KB, 1 kernel"]
    fit.path.write_bytes(pack(SM90, []))
    (line,) = archive_lines(archives(scale_in(folder)))
    assert line.endswith("0 kernels; none of scale")


def test_an_archive_that_does_not_fit_is_printed_with_what_to_do(folder: Path) -> None:
    path = put(folder, packed(source_hash="0" * 16, files={"tests.support.samples": "0" * 64}))
    head, fault, step = archive_lines(archives(scale_in(folder)))
    assert head == f"{path} does not fit the tables and sources here:"
    assert fault.startswith("  scale: the file of tests.support.samples is not as it was compiled")
    assert step == f"  build it again (aot-tune compile --arch sm90), or remove it: rm {path}"


def test_archives_are_checked_below_the_path_that_is_given(folder: Path) -> None:
    path = folder / "sm90" / "cubins.aot"
    shutil.copytree(folder / "sm90", folder / "sm100")
    found = scale_in(folder)
    for place in (path, path.parent):
        assert [(fit.path, fit.faults) for fit in archives(found, place)] == [(path, ())]
    assert [bool(fit.faults) for fit in archives(found, folder)] == [True, False]
    assert archives(found, folder) == archives(found)
    assert [fit.faults for fit in archives(scale_in(folder / "own"), path)] == [()]
    with pytest.raises(UsageError, match="does not exist"):
        archives(found, folder / "nowhere")


def test_check_archives_fails_where_one_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = discovery.Survey(found=scale_in(folder), broken=())
    monkeypatch.setattr(discovery, "survey", lambda modules=(): declared)

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["check", "--archives", *words])
        return result.exit_code, result.stdout

    code, text = run()
    assert (code, "fits: " in text) == (0, True)
    put(folder, packed("gone"))
    code, text = run()
    assert (code, "no such kernel is declared" in text) == (1, True)
    code, text = run("--json")
    (fit,) = json.loads(text)
    assert (code, fit["kernels"], fit["faults"]) == (1, ["gone"], ["gone: no such kernel is declared"])
    (folder / "sm90" / "cubins.aot").unlink()
    assert run() == (0, "no archives of cubins here; aot-tune check FOLDER --archives looks elsewhere\n")
    assert run("--json") == (0, "[]\n")


@pytest.mark.process
@pytest.mark.parametrize("arch", ["", "sm90"])
def test_make_wheel_checks_archives_before_it_packs_them(arch: str) -> None:
    steps = planned_commands("wheel", f"ARCH={arch}")
    checked = next(
        at
        for at, line in enumerate(steps)
        if "-m aot_tune check --archives --module aot_tune.kernels" in line
    )
    packed_at = next(at for at, line in enumerate(steps) if "pip wheel" in line)
    compiled_at = next((at for at, line in enumerate(steps) if "aot_tune compile" in line), -1)
    assert compiled_at < checked < packed_at
    assert (compiled_at >= 0) == bool(arch)


def test_disturbed_times_are_a_remark_that_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = with_entry(scale_table(), 1, disturbed="the clocks fell")
    path = write(tmp_path, table)
    (finding,) = check(scale_in(tmp_path), path)
    assert finding.remark
    assert finding.entry == str(table.entries[1].bucket)
    assert str(finding).startswith(f"remark: {path}: {finding.entry}: its times were taken while")
    monkeypatch.setattr(
        discovery, "survey", lambda modules: discovery.Survey(found=scale_in(tmp_path), broken=())
    )
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 0
    assert "no problems found, 1 remark" in result.output


def test_what_a_declaration_may_not_mean_is_a_remark_beside_its_table(tmp_path: Path) -> None:
    write(tmp_path, scale_table())
    (found,) = scale_in(tmp_path).values()
    somewhere = dataclasses.replace(
        found.tunable, search_space=lambda arch, problem: scale.search_space(arch, problem) * (arch == SM90)
    )
    findings = check({"scale": dataclasses.replace(found, tunable=somewhere)})
    (finding,) = [finding for finding in findings if "search_space is empty or raises" in finding.what]
    assert finding.remark
