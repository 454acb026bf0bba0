"""What `doctor` says of the installation, the tables and the cache, on a machine with and without a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.cli import doctor
from aot_tune.cli.documents import declared, find
from aot_tune.declare.discovery import Broken, FoundKernel, Survey
from aot_tune.errors import UsageError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import Gpu
from aot_tune.tables.gpu_models import other_gpu_model
from aot_tune.tables.table import StateTimes
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests.support.samples import SM90, scale, scale_in, scale_table, with_entry, write


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FoundKernel]:
    """The sample kernel with a table for sm90, an empty cache folder, and no variables set."""
    for name in environment.DESCRIPTIONS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AOT_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    write(tmp_path / "own", scale_table())
    found = scale_in(tmp_path / "own")
    monkeypatch.setattr(find, "survey", lambda modules: Survey(found=found, broken=()))
    return found


def test_every_environment_variable_is_told_with_its_value(
    kernels: dict[str, FoundKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_AUTOTUNE", "1")
    told = {one.name: one.value for one in doctor.diagnose(SM90).variables}
    assert told.keys() == environment.DESCRIPTIONS.keys()
    assert told["DISABLE_AUTOTUNE"] == "1"
    assert told["AOT_TUNE_TABLES"] is None


def test_a_variable_that_cannot_be_read_is_remarked(
    kernels: dict[str, FoundKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOT_TUNE_SEARCH_SECONDS", "soon")
    monkeypatch.setenv("AOT_TUNE_RANKED", "true")
    monkeypatch.setenv("AOT_TUNE_TABLES", f"{tmp_path / 'no'}:{tmp_path / 'own/sm90'}")
    remarks = doctor.diagnose(SM90).remarks
    for said in ("AOT_TUNE_SEARCH_SECONDS='soon'", "AOT_TUNE_RANKED='true'", "no, which is not a folder"):
        assert any(said in remark for remark in remarks), said
    assert any(
        remark.endswith(f"own/sm90, an arch's folder; name its parent, {tmp_path / 'own'}")
        for remark in remarks
    )


def test_tables_are_told_in_the_order_they_are_looked_for(
    kernels: dict[str, FoundKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOT_TUNE_TABLES", str(tmp_path / "named"))
    first, own = doctor.diagnose(SM90).tables
    assert (first.path, first.state, first.usable) == (tmp_path / "named/sm90/scale.json", "no table", False)
    assert own.path == tmp_path / "own/sm90/scale.json"
    assert (own.state, own.usable) == ("3 entries, measured, NVIDIA H200", True)
    assert [one.usable for one in doctor.diagnose(Arch.parse("sm100")).tables] == [False, False]


def test_a_table_that_is_stale_or_damaged_says_so(kernels: dict[str, FoundKernel], tmp_path: Path) -> None:
    path = write(tmp_path / "own", dataclasses.replace(scale_table(), source_hash="0" * 16))
    (stale,) = doctor.diagnose(SM90).tables
    assert stale.usable
    assert "the kernel's code has changed since: tune again" in stale.state
    path.write_bytes(b"{")
    (damaged,) = doctor.diagnose(SM90).tables
    assert not damaged.usable
    assert damaged.state.startswith("not used: ")
    assert "not JSON" in damaged.state


def test_a_table_says_its_states_and_that_another_compiler_made_it(
    kernels: dict[str, FoundKernel], tmp_path: Path
) -> None:
    states = {name: StateTimes(mean_us=9.0, default_us=12.0) for name in ("written", "tight")}
    table = with_entry(scale_table(), 1, states=states)
    other = dataclasses.replace(table.built_with, tileiras="12.9.1")
    write(tmp_path / "own", dataclasses.replace(table, built_with=other))
    [told] = doctor.diagnose(SM90).tables
    assert told.usable
    assert told.state == (
        "3 entries, measured, NVIDIA H200, in the states read tight written; "
        f"times of code of tileiras 12.9.1, {cutile.compiler_version()} is installed"
    )


def test_the_cache_is_told_with_what_it_holds_or_why_it_is_left_out(
    kernels: dict[str, FoundKernel], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert doctor.diagnose(SM90).cache.state == "not there yet; a live search makes it"
    assert not cache.exists()
    (cache / "v1/sm90/scale").mkdir(parents=True)
    (cache / "v1/sm90/scale/0123.json").write_text("{}")
    assert doctor.diagnose(SM90).cache == doctor.CacheState(folder=cache, state="1 remembered winner")
    cache.chmod(0o777)
    assert doctor.diagnose(SM90).cache.state == "not used: anybody may write to it"


def test_kernels_that_cannot_be_imported_leave_the_rest_told(
    kernels: dict[str, FoundKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(modules: object) -> Survey:
        raise UsageError("module mylib needs 'torch', which is not installed")

    monkeypatch.setattr(find, "survey", refuse)
    diagnosis = doctor.diagnose(SM90)
    assert diagnosis.tables == ()
    assert "module mylib needs 'torch', which is not installed" in diagnosis.remarks
    assert diagnosis.cuda_tile == cutile.version()


def test_an_entry_point_that_is_broken_is_remarked_beside_the_tables_of_the_rest(
    kernels: dict[str, FoundKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(point="entry point lib = lib.k", what="no module is called 'lib.k'", fix="repair it")
    monkeypatch.setattr(find, "survey", lambda modules: Survey(found=kernels, broken=(broken,)))
    diagnosis = doctor.diagnose(SM90)
    assert [one.usable for one in diagnosis.tables] == [True]
    assert str(broken) in diagnosis.remarks


def test_a_machine_without_a_driver_or_compiler_is_told_in_words(
    kernels: dict[str, FoundKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: None)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    monkeypatch.setattr(cutile, "compiler_version", lambda: None)
    text = "\n".join(doctor.diagnosis_lines(doctor.diagnose(Arch.parse("sm100"))))
    for told in (
        "none found",
        "NVML does not answer",
        "sm100 (no GPU is visible)",
        "none: only prebuilt cubins launch",
    ):
        assert told in text


def test_gpus_are_told_as_torch_counts_them(
    kernels: dict[str, FoundKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = (
        Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="a"),
        Gpu(index=1, name="Tesla V100", arch=None, uuid="b"),
    )
    monkeypatch.setattr(doctor, "visible_gpus", lambda: gpus)
    text = "\n".join(doctor.diagnosis_lines(doctor.diagnose(SM90)))
    assert "cuda:0 NVIDIA H200 sm90, cuda:1 Tesla V100 (an arch cuTile does not know)" in text


def test_tables_of_another_card_are_remarked_once(
    kernels: dict[str, FoundKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "NVIDIA H100 80GB HBM3"
    here = tuple(Gpu(index=place, name=name, arch=SM90, uuid=str(place)) for place in range(8))
    monkeypatch.setattr(doctor, "visible_gpus", lambda: here)
    said = [one for one in doctor.diagnose(SM90).remarks if "another GPU model" in one]
    assert said == [other_gpu_model("NVIDIA H200", name)]
    monkeypatch.setattr(doctor, "visible_gpus", lambda: (dataclasses.replace(here[0], name="NVIDIA H200"),))
    assert not any("another GPU model" in one for one in doctor.diagnose(SM90).remarks)


def test_a_cuda_tile_that_was_not_tested_is_remarked(
    kernels: dict[str, FoundKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutile, "version", lambda: "1.99.0")
    assert any("cuda-tile 1.99.0 was not tested" in remark for remark in doctor.diagnose(SM90).remarks)


def test_what_is_left_out_of_a_table_or_was_disturbed_is_told(tmp_path: Path) -> None:
    foreign = Config(constants={"tile_m": 0, "tile_n": 64}, hints={})
    table = with_entry(scale_table(), 1, disturbed="the clocks fell")
    path = write(tmp_path, dataclasses.replace(table, portfolio=(foreign, table.portfolio[1])))
    state, used = declared._table_state(path, scale, SM90, named=False)
    assert "1 config in no search space and left out: tune again; 1 measured while disturbed" in state
    assert used is not None


def test_a_folder_that_may_not_be_looked_into_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(declared.os, "stat", refuse)
        state = declared._table_state(tmp_path / "x.json", scale, SM90, named=True)
    assert state == ("not used: Permission denied", None)


@pytest.mark.parametrize("named", [True, False])
def test_predictions_are_used_only_from_a_folder_that_is_named(tmp_path: Path, named: bool) -> None:
    table = scale_table()
    for place in range(3):
        table = with_entry(table, place, evidence="predicted")
    state, used = declared._table_state(write(tmp_path, table), scale, SM90, named=named)
    assert (used is not None) == named
    assert state.startswith(
        "3 entries, predicted" if named else "not used: 3 entries, predicted, are read only"
    )
