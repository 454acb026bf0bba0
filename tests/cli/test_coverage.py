"""What `doctor --coverage` lists: classes, sizes, divisors and configs of which a table has no times."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aot_tune.cli.app import app
from aot_tune.cli.coverage import Coverage, coverage, coverage_lines, space_of
from aot_tune.kernels import attention_decode_tunable, attention_tunable
from aot_tune.serve import loader
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from tests.support.samples import SM90, scale_in, scale_table, write


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tunable:
    """The sample kernel with entries at M = 1, 64 and 256 of N = 1024."""
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    write(tmp_path / "own", scale_table())
    return scale_in(tmp_path / "own")["scale"].tunable


def _problem(m: int, n: int = 1024, dtype: str = "bfloat16") -> Problem:
    return Problem({"dtype": dtype, "M": m, "N": n})


def _gaps(of: Coverage) -> list[tuple[str, str, int]]:
    return [(gap.kind, gap.what, gap.problems) for gap in of.gaps]


def test_a_problem_that_the_table_answers_has_no_gap(scale: Tunable) -> None:
    answer = coverage(scale, SM90, [_problem(64), _problem(100), _problem(300)])
    assert answer.gaps == ()
    assert coverage_lines(answer) == ["scale on sm90: 3 problems of the list, no gap"]


def test_classes_sizes_and_divisors_without_a_bucket_are_gaps(scale: Tunable) -> None:
    asked = [
        _problem(64, dtype="float16"),
        *(_problem(m) for m in (6, 9, 20, 1000, 2000, 4000)),
        _problem(64, 1000),
    ]
    assert _gaps(coverage(scale, SM90, asked)) == [
        ("classes", "dtype=float16", 1),
        ("sizes", "M=8,2048..4096 N=1024", 3),
        ("divisibility", "N = 8 x odd", 1),
    ]


def test_a_config_that_no_point_near_timed_is_a_gap_where_it_may_run(scale: Tunable, tmp_path: Path) -> None:
    table = scale_table()
    entry = table.entries[1]
    points = tuple(dataclasses.replace(point, us=(point.us[0], None, point.us[2])) for point in entry.points)
    entries = (dataclasses.replace(entry, points=points),)
    write(tmp_path / "own", dataclasses.replace(table, entries=entries))
    [gap] = coverage(scale, SM90, [_problem(50), _problem(60)]).gaps
    assert (gap.kind, gap.what, gap.problems, gap.example) == (
        "config", str(table.portfolio[1]), 2, _problem(50),
    )  # fmt: skip


def test_without_a_list_the_tables_own_space_is_asked(scale: Tunable) -> None:
    answer = coverage(scale, SM90)
    assert not answer.listed
    gaps = _gaps(answer)
    assert ("sizes", "M=8 N=1024", 1) in gaps
    assert [what for kind, what, _ in gaps if kind == "divisibility"] == [
        f"N = {2**k} x odd" for k in range(10)
    ]


@pytest.mark.parametrize("tunable", [attention_tunable, attention_decode_tunable], ids=lambda one: one.name)
def test_a_kernels_own_space_has_no_problem_that_its_calls_are_refused(tunable: Tunable) -> None:
    problems = space_of(tunable, loader.load(tunable, SM90))
    assert len(problems) > len(tunable.typical_problems)
    for problem in problems:
        assert problem["head_dim"] in (64, 128)
        assert problem.size("heads") % problem.size("kv_heads") == 0
        if "page_size" in problem and not problem["windowed"]:
            assert problem.size("context") % problem.size("page_size") == 0


def test_without_a_table_every_declared_problem_is_a_gap(scale: Tunable) -> None:
    answer = coverage(scale, Arch.parse("sm100"))
    assert answer.problems == len(scale.typical_problems)
    assert {gap.kind for gap in answer.gaps} == {"classes"}
    assert sum(gap.problems for gap in answer.gaps) == answer.problems
    [first, *_] = coverage_lines(answer)
    assert first == f"scale on sm100: {answer.problems} problems of its own space, 1 gap"


def test_the_command_takes_a_file_of_missed_problems(
    scale: Tunable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "aot_tune.declare.discovery.find_tunables", lambda modules: scale_in(tmp_path / "own")
    )
    missed = tmp_path / "missed.7"
    line = {"kernel": "scale", "arch": "sm90", "problem": dict(_problem(2000))}
    missed.write_text(json.dumps(line) + "\n")
    command = ["doctor", "scale", "--arch", "sm90", "--coverage", "--problems", str(missed)]
    printed = CliRunner().invoke(app, command)
    assert (printed.exit_code, printed.stdout.splitlines()[0]) == (
        0,
        "scale on sm90: 1 problem of the list, 1 gap",
    )
    assert "M=2048 N=1024" in printed.stdout
    answer = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert answer["gaps"][0]["kind"] == "sizes"
    refused = CliRunner().invoke(app, ["doctor", "scale", "--problems", str(missed)])
    assert refused.exit_code == 2
    assert "--problems goes with --coverage" in refused.stderr
    refused = CliRunner().invoke(app, ["doctor", "mylib.ops.scale", "--coverage"])
    assert refused.exit_code == 2
    assert "mylib.ops.scale is a recorded kernel" in refused.stderr
