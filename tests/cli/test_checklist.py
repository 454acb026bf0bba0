"""What `doctor KERNEL` lists as done and as not done, each with what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aot_tune import environment
from aot_tune.cli.app import app
from aot_tune.cli.checklist import Step, checklist
from aot_tune.declare import checks, discovery
from aot_tune.declare.checks import declaration_problems
from aot_tune.declare.declaration import Work
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from tests.support.sample_archive import packed, put
from tests.support.samples import SM90, scale, scale_in, scale_table, write


@pytest.fixture
def tunable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tunable:
    """The sample kernel with the costs of a block, in a folder without tables."""
    for name in environment.DESCRIPTIONS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "own/sm90").mkdir(parents=True)
    work = lambda config, problem: Work(load_bytes=2 * config["tile_m"] * config["tile_n"])  # noqa: E731
    return dataclasses.replace(scale_in(tmp_path / "own")["scale"].tunable, work=work)


def _steps(tunable: Tunable, arch: Arch = SM90) -> list[Step]:
    found = discovery.FoundKernel(module="mylib.kernels", tunable=tunable)
    return checklist(found, arch, declaration_problems(tunable, arch))


def test_a_new_kernel_lacks_its_table_and_its_archive(tunable: Tunable) -> None:
    declared, remarks, model, table, archive = _steps(tunable)
    assert str(declared) == (
        "[x] declared without a mistake of form for 3 typical problems on sm90, at most 20 candidates each; "
        "results are compared when a GPU measures them"
    )
    assert (remarks.done, model.done) == (True, True)
    assert str(table).startswith(
        "[ ] no table for sm90 is used; aot-tune tune scale --arch sm90 --module mylib.kernels"
    )
    assert str(archive).startswith(
        "[ ] no archive of cubins: a first launch compiles; aot-tune compile --arch sm90 --kernel scale "
        "--module mylib.kernels"
    )


def test_a_kernel_that_is_ready_has_every_box_ticked(tunable: Tunable, tmp_path: Path) -> None:
    write(tmp_path / "own", scale_table())
    put(tmp_path / "own", packed("other"))
    assert [step.what.partition(":")[0] for step in _steps(tunable) if not step.done] == [
        "no archive of cubins"
    ]
    put(tmp_path / "own", packed())
    steps = _steps(tunable)
    assert [str(step) for step in steps if not step.done] == []
    assert "3 entries, measured, NVIDIA H200" in steps[3].what


def test_an_archive_of_other_code_is_not_done(tunable: Tunable, tmp_path: Path) -> None:
    put(tmp_path / "own", packed(source_hash="0" * 16, files={}, complete=False))
    [step] = [step for step in _steps(tunable) if step.what.startswith("archive ")]
    assert not step.done
    assert "is left out: the code is not as it was compiled (source 0000000000000000, now " in step.what
    assert "aot-tune compile --arch sm90 --kernel scale" in step.what


def test_a_table_that_lacks_a_bucket_or_is_stale_is_not_done(tunable: Tunable, tmp_path: Path) -> None:
    whole = scale_table()
    write(tmp_path / "own", dataclasses.replace(whole, entries=whole.entries[:2]))
    [step] = [step for step in _steps(tunable) if step.what.startswith("table ")]
    assert not step.done
    assert "1 declared bucket without an entry; aot-tune tune scale" in step.what
    write(tmp_path / "own", dataclasses.replace(whole, source_hash="0" * 16))
    [step] = [step for step in _steps(tunable) if step.what.startswith("table ")]
    assert not step.done


def test_work_is_missed_where_configs_differ_in_constants(tunable: Tunable) -> None:
    [step] = [step for step in _steps(dataclasses.replace(tunable, work=None)) if "work" in step.what]
    assert not step.done
    assert "tune ranks configs that differ in constants by what a few blocks" in step.what
    one_tile = [
        config for config in scale.search_space(SM90, {}) if (config["tile_m"], config["tile_n"]) == (16, 64)
    ]
    hints_alone = dataclasses.replace(tunable, work=None, search_space=lambda arch, problem: one_tile)
    [step] = [step for step in _steps(hints_alone) if "work" in step.what]
    assert step.done


def test_work_is_asked_for_where_the_code_cannot_be_followed(
    tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "uncounted", lambda tunable, arch: "a loop depends on what was loaded")
    [step] = [step for step in _steps(dataclasses.replace(tunable, work=None)) if "work" in step.what]
    assert not step.done
    assert "cannot be followed in its place: a loop depends on what was loaded; if it" in step.what


def test_mistakes_and_remarks_are_not_done_and_a_mistake_fails(
    tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(
        tunable, args_fn=lambda config, x, out: (x, out.clone(), config["tile_m"], config["tile_n"])
    )
    found = discovery.FoundKernel(module="tests.support.samples", tunable=wrong)
    monkeypatch.setattr(
        discovery, "survey", lambda modules: discovery.Survey(found={"scale": found}, broken=())
    )
    result = CliRunner().invoke(app, ["doctor", "scale", "--arch", "sm90"])
    assert result.exit_code == 1
    assert (
        "[ ] the declaration is wrong: args_fn hands on no tensor that shares the memory of " in result.output
    )
    rising = dataclasses.replace(
        tunable, search_space=lambda arch, problem: scale.search_space(arch, problem) * (arch >= SM90)
    )
    steps = [step for step in _steps(rising) if step.what.startswith("remark: search_space is empty")]
    assert [step.done for step in steps] == [False]
