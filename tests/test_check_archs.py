"""tests.check_archs with the real compiler on a small kernel, and what it prints about faults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aot_tune.declare.discovery import FoundKernel
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests import check_archs
from tests.check_archs import ARCHS, Checked, app, check, lines
from tests.support.make import planned_commands
from tests.support.samples import DEFAULT, MODULE, SM90, scale_in, scale_table, write

SM80, SM120 = Arch.parse("sm80"), Arch.parse("sm120")


def quiet(text: str) -> None:
    pass


@pytest.fixture
def found(tmp_path: Path) -> FoundKernel:
    return scale_in(tmp_path / "tables")["scale"]


@pytest.mark.process
def test_the_likely_configs_compile_where_an_arch_has_no_table(found: FoundKernel, tmp_path: Path) -> None:
    old, new = check([found], (SM80, SM120), quiet, jobs=2, most=4, folder=tmp_path)
    assert (old.arch, new.arch) == (SM80, SM120)
    for one in (old, new):
        assert (one.asked, one.compiled, one.too_large, one.portfolio, one.wrong) == (4, 4, 0, False, "")


@pytest.mark.process
def test_the_portfolio_and_the_default_compile_where_it_has_one(found: FoundKernel, tmp_path: Path) -> None:
    write(tmp_path / "tables", scale_table())
    [one] = check([found], (SM90,), quiet, jobs=2, folder=tmp_path)
    assert one.portfolio
    # Two configs and the default, for M = 1 and for the edges that 16 divides.
    assert (one.asked, one.compiled, one.wrong) == (6, 6, "")


@pytest.mark.process
def test_a_config_that_does_not_compile_is_named_and_the_others_are_counted(
    found: FoundKernel, tmp_path: Path
) -> None:
    odd = Config(constants={"tile_m": 48, "tile_n": 64}, hints={"occupancy": 1, "num_ctas": 1})
    broken = dataclasses.replace(found.tunable, search_space=lambda arch, problem: [DEFAULT, odd])
    [one] = check([FoundKernel(module=MODULE, tunable=broken)], (SM80,), quiet, jobs=1, folder=tmp_path)
    assert one.compiled == one.asked - 2
    assert one.wrong.startswith(
        "scale on sm80 does not compile with tile_m=48 tile_n=64 num_ctas=1 occupancy=1"
    )
    assert "on dtype=bfloat16 M=1 N=1024: " in one.wrong


def test_a_space_that_is_empty_on_an_arch_is_a_mistake(found: FoundKernel, tmp_path: Path) -> None:
    empty = dataclasses.replace(
        found.tunable, search_space=lambda arch, problem: [] if arch == SM120 else [DEFAULT]
    )
    [one] = check([FoundKernel(module=MODULE, tunable=empty)], (SM120,), quiet, jobs=1, folder=tmp_path)
    assert one.asked == 0
    assert "is empty; return at least the default" in one.wrong


def test_a_kernel_that_is_not_for_an_arch_is_no_mistake(found: FoundKernel, tmp_path: Path) -> None:
    newer = dataclasses.replace(
        found.tunable, legal=lambda config, arch, problem: arch >= SM90 or f"{arch} has no fp8"
    )
    [one] = check([FoundKernel(module=MODULE, tunable=newer)], (SM80,), quiet, jobs=1, folder=tmp_path)
    assert (one.asked, one.wrong, one.refused) == (0, "", "sm80 has no fp8")
    assert lines([one])[0].endswith("0 do not fit  refused: sm80 has no fp8")


def answers(*wrong: str) -> tuple[Checked, ...]:
    return tuple(
        Checked(
            kernel="scale",
            arch=SM80,
            portfolio=False,
            asked=9,
            compiled=8,
            spilling=2,
            too_large=1,
            refused="",
            wrong=text,
        )
        for text in wrong
    )


def _run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_each_kernel_is_a_line_and_a_failure_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(answers("")) == ["sm80  scale  8 of 9 compile  2 spill  1 do not fit  its likely configs"]
    monkeypatch.setattr(check_archs, "check", lambda *_, **__: answers("", "scale on sm80 does not compile"))
    result = _run("--kernel", "rope")
    assert result.exit_code == 1
    assert result.stdout.count("8 of 9 compile") == 2
    assert result.stderr.startswith("18 compilations, ")
    assert result.stderr.endswith("scale on sm80 does not compile\n")
    assert [one["wrong"] for one in json.loads(_run("--json").stdout)] == [
        "",
        "scale on sm80 does not compile",
    ]
    monkeypatch.setattr(check_archs, "check", lambda *_, **__: answers(""))
    assert _run("--arch", "sm100").exit_code == 0


def test_every_option_of_check_archs_reaches_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def instead(
        kernels: Sequence[FoundKernel], archs: Sequence[Arch], say: object, *, jobs: int, most: int
    ) -> tuple[Checked, ...]:
        asked.append(([one.tunable.name for one in kernels], [*archs], jobs, most))
        return answers("")

    monkeypatch.setattr(check_archs, "check", instead)
    words = "--arch sm80 --arch 12.0 --kernel rope --kernel softmax --jobs 2 --most 3"
    assert _run(*words.split(), "--module", "aot_tune.kernels").exit_code == 0
    assert _run("--module", MODULE).exit_code == 0
    assert asked == [
        (["rope", "softmax"], [SM80, SM120], 2, 3),
        (["scale"], [*ARCHS], None, None),
    ]


@pytest.mark.parametrize("words", [("--arch", "sm9000"), ("--kernel", "scala"), ("--most", "0")])
def test_a_wrong_word_to_check_archs_is_exit_code_2(words: tuple[str, ...]) -> None:
    result = _run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


@pytest.mark.process
def test_make_check_archs_passes_its_arguments_on() -> None:
    (command,) = planned_commands("check-archs", "ARGS=--arch sm100")
    assert command.endswith(" -m tests.check_archs --arch sm100")
