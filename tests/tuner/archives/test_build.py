"""`aot-tune compile` with the real compiler and no GPU: what is compiled, what is kept, what is said of
failures."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aot_tune.cli.app import app
from aot_tune.cubins.archive import Archive, Section
from aot_tune.declare import discovery
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import DeclarationError, StoreError, TableError, TuneError
from aot_tune.tables.table import Table
from aot_tune.tuner.archives import build as build_cubins
from aot_tune.tuner.archives.build import build
from aot_tune.tuner.archives.report import ArchiveReport, CubinRequest
from aot_tune.tuner.compile.job import CompileFailure, CompileJob
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests.support import wide_samples
from tests.support.driver import stand_in
from tests.support.sample_archive import packed, put
from tests.support.samples import DEFAULT, MODULE, SM90, SPACE, entry, scale, scale_table, write

pytestmark = pytest.mark.process

SM100 = Arch.parse("sm100")
WIDER = Config(constants={"tile_m": 32, "tile_n": 64}, hints=DEFAULT.hints)
ODD = Config(constants={"tile_m": 24, "tile_n": 64}, hints=DEFAULT.hints)  # no power of two


@pytest.fixture(autouse=True)
def _no_tables_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test compiled, the next need not."""
    return tmp_path_factory.mktemp("cubins")


def sample(folder: Path, name: str = "scale") -> FoundKernel:
    few = [{"dtype": "bfloat16", "M": [1, 64], "N": 1024}]
    tunable = dataclasses.replace(scale, tables=folder, typical=few)
    object.__setattr__(tunable, "name", name)
    return FoundKernel(module=MODULE, tunable=tunable)


def odd_sample(folder: Path) -> FoundKernel:
    """The sample with a config in its search space that does not compile."""
    found = sample(folder)
    spaced = dataclasses.replace(found.tunable, search_space=lambda arch, problem: [*SPACE, ODD])
    return dataclasses.replace(found, tunable=spaced)


def request(folder: Path, cubins: Path, **values: object) -> CubinRequest:
    given = {"kernels": (sample(folder),), "archs": (SM90,), "jobs": 2, "cubins": cubins, **values}
    return CubinRequest(**given)  # type: ignore[arg-type]


def one(reports: tuple[ArchiveReport, ...]) -> ArchiveReport:
    (report,) = reports
    return report


def section(report: ArchiveReport, kernel: str = "scale") -> Section:
    found = Archive(report.path).section(kernel)
    assert found is not None
    return found


def test_a_wrong_declaration_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    found = sample(tmp_path)
    clones = lambda config, source, target: (source, target.clone(), *config.constants.values())  # noqa: E731
    wrong = dataclasses.replace(found, tunable=dataclasses.replace(found.tunable, args_fn=clones))
    with pytest.raises(DeclarationError, match=r"scale: args_fn hands on no tensor that shares the memory"):
        build(request(tmp_path, tmp_path, kernels=(wrong,)), print)


def small_table(*portfolio: Config) -> Table:
    whole = scale_table()
    made = entry(whole.entries[0].bucket, portfolio[0], portfolio)
    return dataclasses.replace(whole, portfolio=portfolio, entries=(made,))


def test_a_second_run_compiles_nothing_and_leaves_the_file_as_it_was(tmp_path: Path, cubins: Path) -> None:
    first = one(build(request(tmp_path, cubins), lambda line: None))
    assert first.changed
    assert first.path == tmp_path / "sm90" / "cubins.aot"
    assert not first.failures
    status = first.path.stat()
    second = one(build(request(tmp_path, cubins), lambda line: pytest.fail(line)))
    assert not second.changed
    assert [kernel.compiled for kernel in second.kernels] == [0]
    assert first.path.stat().st_mtime_ns == status.st_mtime_ns
    assert (first.bytes, second.bytes) == (status.st_size, status.st_size)


def test_it_tells_how_long_it_will_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cubins, "_SAY_SECONDS", 0.0)
    said: list[str] = []
    build(request(tmp_path, tmp_path / "empty"), said.append)
    assert said[0] == "compiling 4 cubins; 0 exist already"
    assert any(line.startswith("compiled ") and " of 4, about " in line for line in said[1:]), said


def test_without_a_table_it_holds_the_default_for_each_class_and_for_none(
    tmp_path: Path, cubins: Path
) -> None:
    keys = section(one(build(request(tmp_path, cubins), lambda line: None))).keys
    assert {hints for hints, _ in keys} == {tuple(DEFAULT.hints.items())}
    signatures = sorted(signature.partition("_K")[2] for _, signature in keys)
    assert len(signatures) == 4
    assert any("_A2bf16_3l0_i" in signature for signature in signatures)  # the weakest
    assert sum(signature.startswith("t2") for signature in signatures) == 1  # a size of 1


def test_signatures_of_equal_code_share_one_cubin(tmp_path: Path, cubins: Path) -> None:
    report = one(build(request(tmp_path, cubins), lambda line: None))
    (kernel,) = report.kernels
    assert (kernel.signatures, kernel.cubins) == (4, 3)
    keys = [key for key in section(report).keys if "_K" in key[1]]
    codes = {section(report).cubin(*key) for key in keys}
    assert len(codes) == 3
    assert all(code is not None and b"_scale_kernel\0" in code for code in codes)


def test_a_changed_table_compiles_only_what_it_adds(tmp_path: Path, cubins: Path) -> None:
    before = one(build(request(tmp_path, cubins), lambda line: None))
    write(tmp_path, small_table(WIDER))
    after = one(build(request(tmp_path, cubins), lambda line: None))
    (old,), (new,) = before.kernels, after.kernels
    assert after.changed
    assert (
        new.signatures - old.signatures == new.compiled == 3
    )  # its three classes; the weakest is the default's
    assert any("_I32_I64" in signature for _, signature in section(after).keys)


def predicted_table(*portfolio: Config) -> Table:
    whole = small_table(*portfolio)
    entries = tuple(dataclasses.replace(one, evidence="predicted") for one in whole.entries)
    return dataclasses.replace(whole, entries=entries)


def test_predictions_of_a_named_folder_are_compiled_beside_them_alone(
    tmp_path: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, named = tmp_path / "own", tmp_path / "named"
    write(named, predicted_table(WIDER))
    monkeypatch.setenv("AOT_TUNE_TABLES", str(named))
    reports = {report.path: report for report in build(request(own, cubins), lambda line: None)}
    shipped, beside = (reports.pop(folder / "sm90" / "cubins.aot") for folder in (own, named))
    assert not reports
    assert not any("_I32_I64" in signature for _, signature in section(shipped).keys)
    assert any("_I32_I64" in signature for _, signature in section(beside).keys)
    monkeypatch.delenv("AOT_TUNE_TABLES")
    assert not one(build(request(own, cubins), lambda line: None)).changed


def test_predictions_in_a_packages_own_table_are_not_compiled(tmp_path: Path, cubins: Path) -> None:
    write(tmp_path, predicted_table(WIDER))
    with pytest.raises(TuneError, match="1 entry of a package's own table are predicted"):
        build(request(tmp_path, cubins), lambda line: None)
    assert not (tmp_path / "sm90" / "cubins.aot").exists()


def test_what_a_declaration_may_not_mean_is_said_first(tmp_path: Path, cubins: Path) -> None:
    said: list[str] = []
    found = sample(tmp_path)
    spaced = dataclasses.replace(
        found.tunable, search_space=lambda arch, problem: scale.search_space(arch, problem) * (arch == SM90)
    )
    kernels = (dataclasses.replace(found, tunable=spaced),)
    build(request(tmp_path, cubins, kernels=kernels), said.append)
    assert said[0].startswith("remark: scale: search_space is empty or raises on sm80")


def test_another_folder_gets_the_same_bytes(tmp_path: Path, cubins: Path) -> None:
    here = one(build(request(tmp_path, cubins), lambda line: None))
    there = one(build(request(tmp_path, cubins, out=tmp_path / "there"), lambda line: None))
    assert there.path == tmp_path / "there" / "sm90" / "cubins.aot"
    assert here.path.read_bytes() == there.path.read_bytes()


def test_each_arch_gets_its_archive(tmp_path: Path, cubins: Path) -> None:
    reports = build(request(tmp_path, cubins, archs=(SM90, SM100)), lambda line: None)
    assert [Archive(report.path).arch for report in reports] == [SM90, SM100]
    hopper, blackwell = (section(report) for report in reports)
    assert hopper.keys == blackwell.keys
    assert hopper.cubin(*hopper.keys[0]) != blackwell.cubin(*hopper.keys[0])


def test_naming_a_kernel_keeps_the_others(tmp_path: Path, cubins: Path) -> None:
    other = sample(
        tmp_path, "rescale"
    )  # the same kernel by another name, which a child must find: compiled already
    build(request(tmp_path, cubins), lambda line: None)
    jobs_of = build_cubins._job

    def as_scale(*args: object) -> object:
        return dataclasses.replace(jobs_of(*args), name="scale")  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_cubins, "_job", as_scale)
        both = one(build(request(tmp_path, cubins, kernels=(other,), only_these=True), lambda line: None))
        assert [kernel.kernel for kernel in both.kernels] == ["rescale", "scale"]
        assert section(both, "scale").cubin(*section(both, "scale").keys[0]) is not None
        alone = one(build(request(tmp_path, cubins, kernels=(other,)), lambda line: None))
    assert [kernel.kernel for kernel in alone.kernels] == ["rescale"]


def three_more(folder: Path) -> None:
    """An archive with a kernel of another module, one that has code of this one, and one removed from it."""
    (folder / "sm90").mkdir()
    gone = {MODULE: "0" * 64}
    put(folder, packed("other", files={"otherlib": "0" * 64}), packed("helped"), packed("gone", files=gone))


def test_naming_a_module_keeps_the_kernels_of_others_and_drops_what_it_declares_no_more(
    tmp_path: Path, cubins: Path
) -> None:
    three_more(tmp_path)
    said: list[str] = []
    report = one(build(request(tmp_path, cubins, modules=(MODULE,)), said.append))
    assert [kernel.kernel for kernel in report.kernels] == ["helped", "other", "scale"]
    assert section(report, "other").cubin(*section(report, "other").keys[0]) == b"code"
    assert any(f"{report.path} keeps helped other, not of {MODULE}; " in line for line in said)
    assert any(f"{report.path} loses gone, no longer declared" in line for line in said)


def test_a_module_s_submodules_are_its_own(tmp_path: Path, cubins: Path) -> None:
    three_more(tmp_path)
    report = one(build(request(tmp_path, cubins, modules=("tests",)), lambda line: None))
    assert [kernel.kernel for kernel in report.kernels] == ["helped", "other", "scale"]


def test_with_no_module_named_what_is_declared_nowhere_is_dropped_and_said(
    tmp_path: Path, cubins: Path
) -> None:
    three_more(tmp_path)
    said: list[str] = []
    report = one(build(request(tmp_path, cubins), said.append))
    assert [kernel.kernel for kernel in report.kernels] == ["scale"]
    assert any("loses gone helped other, no longer declared" in line for line in said)


def test_a_damaged_archive_is_replaced_and_the_loss_is_said(tmp_path: Path, cubins: Path) -> None:
    path = tmp_path / "sm90" / "cubins.aot"
    path.parent.mkdir()
    path.write_bytes(b"aot_tune cubins\n" + bytes(100))
    said: list[str] = []
    report = one(build(request(tmp_path, cubins, only_these=True), said.append))
    assert any("are lost" in line and str(path) in line for line in said)
    assert section(report).keys


def test_a_config_that_does_not_compile_is_named_and_the_rest_is_written(
    tmp_path: Path, cubins: Path
) -> None:
    write(tmp_path, small_table(ODD))
    report = one(build(request(tmp_path, cubins, kernels=(odd_sample(tmp_path),)), lambda line: None))
    assert len(report.failures) == 3
    assert all("scale on sm90" in line and "_I24_I64" in line and "power" in line for line in report.failures)
    assert len(section(report).keys) == 4


def test_a20_what_is_there_stays_where_no_compilation_of_a_kernel_succeeds(
    tmp_path: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = build_cubins._compiled

    def refused(asked: CubinRequest, jobs: list[CompileJob], say: Callable[[str], None]) -> dict[str, object]:
        failed = {
            job.key: CompileFailure(key=job.key, message="no", seconds=0.0) for job in jobs if is_odd(job)
        }
        return {**compiled(asked, [job for job in jobs if not is_odd(job)], say), **failed}

    def is_odd(job: CompileJob) -> bool:
        return job.name == "rescale"

    monkeypatch.setattr(build_cubins, "_compiled", refused)
    found = sample(tmp_path, "rescale")
    only_odd = dataclasses.replace(found.tunable, search_space=[ODD], default=lambda arch, problem: ODD)
    broken = dataclasses.replace(found, tunable=only_odd)
    (tmp_path / "sm90").mkdir()
    whole = put(tmp_path, packed("rescale"), packed("scale")).read_bytes()
    report = one(build(request(tmp_path, cubins, kernels=(broken,)), lambda line: None))
    assert (report.changed, report.bytes, len(report.failures)) == (False, len(whole), 4)
    assert report.path.read_bytes() == whole
    elsewhere = request(tmp_path, cubins, kernels=(broken,), out=tmp_path / "new")
    assert not one(build(elsewhere, lambda line: None)).path.exists()
    said: list[str] = []
    report = one(build(request(tmp_path, cubins, kernels=(sample(tmp_path), broken)), said.append))
    assert section(report, "rescale").cubin(*section(report, "rescale").keys[0]) == b"code"
    assert len(section(report).keys) == 4
    assert any(
        "keeps the present cubins of rescale, of which no compilation succeeded" in line for line in said
    )


def test_a_table_that_cannot_be_read_is_an_error_before_anything_is_compiled(
    tmp_path: Path, cubins: Path
) -> None:
    path = tmp_path / "sm90" / "scale.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(TableError, match=r"scale\.json"):
        build(request(tmp_path, cubins), lambda line: None)


def test_a_table_whose_configs_are_another_kernel_s_is_an_error_that_says_what_to_do(
    tmp_path: Path, cubins: Path
) -> None:
    write(tmp_path, small_table(Config(constants={"tile_m": 32, "width": 64}, hints=DEFAULT.hints)))
    with pytest.raises(TableError, match=r"constants tile_m width, .* have tile_m tile_n: tune scale again"):
        build(request(tmp_path, cubins), lambda line: None)


def test_a_kernel_that_the_arch_cannot_run_is_left_out_and_is_no_failure(
    tmp_path: Path, cubins: Path
) -> None:
    def legal(config: Config, arch: Arch, problem: object) -> bool | str:
        return arch != SM100 or "it has no such unit"

    some = dataclasses.replace(sample(tmp_path).tunable, legal=legal)
    kernels = (FoundKernel(module=MODULE, tunable=some),)
    report = one(build(request(tmp_path, cubins, kernels=kernels, archs=(SM100,)), lambda line: None))
    assert (report.kernels, report.failures) == ((), ())


def test_a_kernel_without_a_search_space_on_the_arch_is_left_out_and_told(tmp_path: Path) -> None:
    spaces, told = {SM90: SPACE}, list[str]()
    some = dataclasses.replace(sample(tmp_path).tunable, search_space=lambda arch, problem: spaces[arch])
    kernels = (FoundKernel(module=MODULE, tunable=some),)
    assert build(request(tmp_path, tmp_path, kernels=kernels, archs=(SM100,)), told.append) == ()
    assert told[-1] == "scale: no search space on sm100; nothing is compiled for it there"


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_compiled(
    tmp_path: Path, cubins: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        build(request(tmp_path, cubins, out=tmp_path / "file"), lambda line: None)


# The verb ---------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["compile", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def declared(tmp_path: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(discovery, "find_tunables", lambda modules=(): {"scale": sample(tmp_path)})
    build_here = build_cubins.build
    monkeypatch.setattr(
        build_cubins,
        "build",
        lambda asked, *rest: build_here(dataclasses.replace(asked, cubins=cubins), *rest),
    )
    return tmp_path


def test_several_archs_follow_one_option_and_sizes_are_printed(declared: Path) -> None:
    code, out, _ = run("--arch", "sm90", "sm100", "--kernel", "scale")
    assert code == 0
    lines = out.splitlines()
    assert str(declared / "sm90" / "cubins.aot") in lines[0]
    assert "KB" in lines[0]
    assert lines[1].split()[:2] == ["sm90", "scale"]
    assert lines[3].split()[:2] == ["sm100", "scale"]


def test_a_kernel_in_an_archs_place_is_told_where_it_belongs(declared: Path) -> None:
    code, _, err = run("scale", "--arch", "sm90")
    assert code == 2
    assert "scale is a kernel, not an arch: write --kernel scale" in err


def test_a_named_module_reaches_the_archive(declared: Path) -> None:
    three_more(declared)
    code, _, err = run("--arch", "sm90", "--module", "tests/support/samples.py")
    assert code == 0
    assert f"keeps helped other, not of {MODULE}; " in err
    assert Archive(declared / "sm90" / "cubins.aot").kernels == ("helped", "other", "scale")


def test_json_reports_what_the_text_does(declared: Path) -> None:
    code, out, _ = run("--arch", "sm90", "--json")
    assert code == 0
    (report,) = json.loads(out)
    assert report["arch"] == "sm90"
    assert report["kernels"][0]["signatures"] == 4


def test_what_does_not_compile_fails_the_verb(declared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "find_tunables", lambda modules=(): {"scale": odd_sample(declared)})
    write(declared, small_table(ODD))
    code, _, err = run("--arch", "sm90")
    assert code == 1
    assert "not compiled: scale on sm90" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_and_says_how_to_go_on(
    number: signal.Signals, code: int, declared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_until_stopped(asked: object, say: object, others: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal should have stopped this")

    monkeypatch.setattr(build_cubins, "build", build_until_stopped)
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
    try:
        ended, out, err = run("--arch", "sm90")
    finally:
        signal.signal(signal.SIGINT, outside)
    assert (ended, out) == (code, "")
    assert err == (
        "stopped; what was compiled is kept in build/archive-cubins. To go on, run the same command again\n"
    )


def test_an_unknown_arch_or_kernel_is_a_usage_error(declared: Path) -> None:
    assert run("--arch", "sm17")[0] == 2
    assert run("--arch", "sm90", "--kernel", "nothing")[0] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning", "ignore::aot_tune.errors.CubinWarning")
def test_named_kernels_and_lists_are_served_without_a_compiler(
    tmp_path: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [{"rows": 64, "cols": 1024, "largest": True}]
    several = dataclasses.replace(wide_samples.row_sum, tables=tmp_path, typical=few)
    listed = dataclasses.replace(wide_samples.scale_each, tables=tmp_path)
    [problem] = several.typical_problems
    whole = Config(kernel="whole", constants={"tile": 1024})
    write(tmp_path, wide_samples.table_of(several, {problem: whole}))
    found = tuple(FoundKernel(module=wide_samples.MODULE, tunable=one) for one in (several, listed))
    report = one(build(request(tmp_path, cubins, kernels=found), lambda line: None))
    assert not report.failures
    kernels = {signature.partition("_K")[0] for _, signature in section(report, "row_sum").keys}
    assert kernels == {"_sum_whole_kernel", "_sum_looped_kernel"}

    monkeypatch.setattr("aot_tune.nvidia.cutile.may_have_compiler", lambda: False)
    with stand_in() as driver:
        served = dataclasses.replace(several)
        args = served.make_args(problem, "meta", 0)
        served.launch(*args)
        served.launch(*args, config=served.default_config(SM90, problem))
        xs, outs = listed.make_args(listed.typical_problems[0], "meta", 0)
        listed.launch(xs, outs)
        listed.launch([x.repeat_interleave(2)[::2] for x in xs], outs)  # the weakest cubin
        assert len(driver.launches) == 4
