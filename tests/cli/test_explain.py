"""Why a problem gets its config: the step of the ladder, the times compared, what to do about a miss."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.cli.explain import explain, explanation_lines, overview_lines
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import Gpu
from aot_tune.tables.table import StateTimes
from aot_tune.tunable import Tunable
from aot_tune.values.problem import Problem
from tests.support.samples import (
    DEFAULT,
    SM90,
    equally_fast,
    loading_more,
    scale_in,
    scale_table,
    with_entry,
    write,
)
from tests.support.shipped import FOUND


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tunable:
    """The sample kernel with a table for sm90, and no cache to remember anything."""
    for name in environment.DESCRIPTIONS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AOT_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    for name in environment.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    write(tmp_path / "own", scale_table())
    return scale_in(tmp_path / "own")["scale"].tunable


def _problem(m: int, n: int = 1024, dtype: str = "bfloat16") -> Problem:
    return Problem({"dtype": dtype, "M": m, "N": n})


def test_the_edge_takes_the_entrys_winner_and_shows_the_times_it_beat(scale: Tunable) -> None:
    told = explain(scale, SM90, _problem(64))
    table = scale_table()
    assert (told.source, told.config) == ("own", table.entries[1].config)
    assert [(one.config, one.us) for one in told.compared] == [
        (table.portfolio[0], 10.0),
        (table.portfolio[1], 15.0),
        (DEFAULT, 15.0),
    ]
    assert told.remarks == ()


def test_the_times_of_each_state_are_shown_and_the_worst_one_decides(scale: Tunable, tmp_path: Path) -> None:
    table = scale_table()
    points = tuple(
        dataclasses.replace(point, states={"written": (30.0, 16.0, 17.0)})
        for point in table.entries[1].points
    )
    states = {"written": StateTimes(mean_us=30.0, default_us=17.0)}
    write(tmp_path / "own", with_entry(table, 1, points=points, states=states))
    told = explain(scale, SM90, _problem(40))
    assert told.config == table.portfolio[1], "the first is the fastest in one state and slow in another"
    assert [dict(one.us) for one in told.at_edge] == [
        {"read": 10.0, "written": 30.0},
        {"read": 15.0, "written": 16.0},
        {"read": 15.0, "written": 17.0},
    ]
    in_portfolio = dataclasses.replace(scale, default=lambda arch, problem: table.portfolio[1])
    rows = explain(in_portfolio, SM90, _problem(40)).at_edge
    assert [one.config for one in rows] == [*table.portfolio], "a default of the portfolio is one row"
    text = "\n".join(explanation_lines(told))
    assert "as in its worst state" in text
    assert "times at the bucket's edge in each state of the GPU, us, all with tile_n=64 num_ctas=1:" in text
    assert len(text.splitlines()) < 24, "it stays one screen"
    assert explain(scale, SM90, _problem(256)).at_edge == ()
    elsewhere = explain(scale, SM90, _problem(100))
    assert (elsewhere.source, elsewhere.at_edge) == ("nearest", ()), "another bucket's times are not its own"
    of_size = dataclasses.replace(
        scale, default=lambda arch, problem: DEFAULT if problem["M"] == 64 else table.portfolio[0]
    )
    assert explain(of_size, SM90, _problem(40)).at_edge[-1].config == DEFAULT, "as at the edge"
    path = tmp_path / "own/sm90/scale.json"
    path.write_text(path.read_text().replace('"us": [', '"us": [-', 1))
    assert explain(dataclasses.replace(scale), SM90, _problem(40)).at_edge == told.at_edge


def test_a_table_of_another_compilers_code_is_remarked(scale: Tunable, tmp_path: Path) -> None:
    table = scale_table()
    other = dataclasses.replace(table.built_with, tileiras="12.9.1", cuda_tile="1.5.0")
    path = write(tmp_path / "own", dataclasses.replace(table, built_with=other))
    [remark] = explain(scale, SM90, _problem(64)).remarks
    here = (
        f"tileiras {cutile.packaged_compiler()} here, and cuda-tile is {cutile.version()} in place of 1.5.0"
    )
    assert remark == (
        f"{path} holds the times of code that tileiras 12.9.1 compiled, and scale runs code of {here}; its "
        "choices are used, and may not be the fastest: install tileiras 12.9.1, or tune again: "
        f"aot-tune tune scale --arch sm90{scale.module_option}"
    )


def test_a_table_of_other_source_is_remarked_as_a_launch_would_warn(scale: Tunable, tmp_path: Path) -> None:
    path = write(tmp_path / "own", dataclasses.replace(scale_table(), source_hash="0" * 16))
    [remark] = explain(scale, SM90, _problem(64)).remarks
    assert remark.startswith(f"{path} was tuned for other source of scale (0000000000000000, now ")
    assert "tune again: aot-tune tune scale --arch sm90" in remark


def test_a_winner_that_the_space_has_no_more_is_remarked(scale: Tunable) -> None:
    winner = scale_table().entries[1].config
    narrowed = dataclasses.replace(
        scale,
        search_space=lambda arch, problem: [c for c in scale.search_space(arch, problem) if c != winner],
    )
    [remark] = explain(narrowed, SM90, _problem(64)).remarks
    assert f"1 config in no search space of scale, left out, such as {winner}" in remark


def test_a_size_inside_a_bucket_shows_the_points_the_times_are_told_from(scale: Tunable) -> None:
    told = explain(scale, SM90, _problem(50))
    assert told.bucket == _problem(64)
    assert told.source == "own"
    for point in scale_table().entries[1].points:
        assert f"M={point.size['M']} (" in told.basis
    assert [one.ratio for one in told.compared] == sorted(one.ratio for one in told.compared)
    assert told.config == told.compared[0].config


@pytest.mark.usefixtures("scale")
def test_the_factors_of_a_row_are_its_ratio() -> None:
    sizes = {"dtype": "float16", "activation": "none", "M": 37, "N": 5000, "K": 1111}
    told = explain(FOUND["linear"].tunable, SM90, Problem(sizes))
    assert told.source == "nearest"
    assert any(row.counts != 1 for row in told.compared)
    for row in told.compared:
        assert row.near * row.counts * row.unseen == pytest.approx(row.ratio, rel=1e-3)
    lines = explanation_lines(told)
    assert len(lines) < 24, "it stays one screen"
    assert ", all with " in lines[2]
    assert "num_ctas=1" not in "".join(lines[3:])


def test_lines_mark_the_chosen_config_and_the_default(scale: Tunable) -> None:
    head, step, _, *times = explanation_lines(explain(scale, SM90, _problem(64)))
    assert head == f"scale dtype=bfloat16 M=64 N=1024 on sm90: {scale_table().entries[1].config}"
    assert step.startswith("  own: bucket ")
    assert [line.startswith("  *") for line in times] == [True, False, False]
    assert times[2].endswith("tile_m=16 occupancy=1 (default)")


def test_many_problems_take_one_line_each_and_point_to_the_remarks(scale: Tunable) -> None:
    told = [explain(scale, SM90, _problem(64)), explain(scale, SM90, _problem(1, dtype="float32"))]
    _, first, second, again = overview_lines(told)
    assert first.split() == [*str(_problem(64)).split(), "own", *str(told[0].config).split()]
    assert "default" in second
    assert again.startswith(
        "1 problem with remarks; --problem prints all of one; the first: no bucket at or near"
    )


def test_of_very_many_problems_a_part_is_printed(scale: Tunable) -> None:
    told = [explain(scale, SM90, _problem(64))] * 25
    _, *rows = overview_lines(told)
    assert len(rows) == 11
    assert rows[-1].strip() == "and 15 more; --problem prints one"
    assert len(overview_lines(told[:20])) == 21


def test_a_miss_names_the_command_that_tunes_it(scale: Tunable) -> None:
    told = explain(scale, SM90, _problem(64, dtype="float32"))
    assert told.source == "default"
    assert told.compared == ()
    assert "aot-tune tune scale --arch sm90" in told.remarks[0]
    assert "dtype=float32,M=64,N=1024" in told.remarks[0]
    assert "search live" in told.remarks[1]


def test_the_a_b_switch_is_seen(scale: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOT_TUNE_CONFIG", "default")
    told = explain(scale, SM90, _problem(64))
    assert (told.source, told.config) == ("asked default", DEFAULT)


def test_one_config_for_every_batch_is_told_with_what_each_would_cost(
    scale: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOT_TUNE_BATCH_INVARIANT", "1")
    batched = dataclasses.replace(
        scale,
        batch_axes=("M",),
        legal=lambda config, arch, problem: config["tile_m"] != 64 or problem.size("M") > 1 or "too few rows",
    )
    told = explain(batched, SM90, _problem(256))
    narrow, wide = scale_table().portfolio
    assert (told.source, told.config, told.remarks) == ("invariant", narrow, ())
    assert [(one.config, one.regret, one.untimed) for one in told.every_batch] == [
        (wide, 0.5, 0),
        (narrow, 0.5, 0),
    ]
    *_, heading, second, first = explanation_lines(told)
    assert heading == "  AOT_TUNE_BATCH_INVARIANT: one config serves every batch; worst regret of each:"
    assert first.split()[:3] == ["*", "50.0%", "at"]
    assert second.endswith("refused: dtype=bfloat16 M=1 N=1024: too few rows")


def test_a_declaration_without_a_batch_is_remarked_where_one_config_is_asked_for(
    scale: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOT_TUNE_BATCH_INVARIANT", "1")
    told = explain(scale, SM90, _problem(64))
    assert (told.source, told.every_batch) == ("own", ())
    assert told.remarks == ("AOT_TUNE_BATCH_INVARIANT changes nothing here: scale declares no batch_axes",)


def test_tables_of_another_card_are_remarked(scale: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [Gpu(index=0, name="NVIDIA H100 PCIe", arch=SM90, uuid="a")]
    monkeypatch.setattr("aot_tune.serve.loader.gpus", lambda: here)
    (remark,) = explain(scale, SM90, _problem(64)).remarks
    assert "another GPU model of the arch: NVIDIA H200, and this is NVIDIA H100 PCIe." in remark


@pytest.mark.parametrize(("gpu_model", "place"), [("NVIDIA H100 PCIe", 1), ("NVIDIA H200", 0)])
def test_the_choice_of_this_machines_card_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_model: str, place: int
) -> None:
    here = [Gpu(index=0, name=gpu_model, arch=SM90, uuid="a")]
    monkeypatch.setattr("aot_tune.serve.loader.gpus", lambda: here)
    configs = scale_table().portfolio
    write(tmp_path, equally_fast(_problem(64), configs[0]))
    told = explain(dataclasses.replace(loading_more(configs[0]), tables=tmp_path), SM90, _problem(64))
    assert told.config == configs[place]
    assert ("loads 50% of the bytes of" in told.reason) == (place == 1)


def test_a_damaged_table_is_remarked_and_missed(scale: Tunable, tmp_path: Path) -> None:
    (tmp_path / "own/sm90/scale.json").write_bytes(b"{")
    fresh = dataclasses.replace(scale)
    told = explain(fresh, SM90, _problem(64))
    assert told.source == "default"
    assert sum("not JSON" in remark for remark in told.remarks) == 1


def test_a_wrong_declaration_is_told_without_a_table(scale: Tunable) -> None:
    wrong = dataclasses.replace(scale, args_fn=lambda config, source, target: (source, target))
    answers = [explain(wrong, SM90, problem) for problem in wrong.typical_problems]
    *_, one = explanation_lines(answers[0])
    told = "the declaration is wrong: args_fn returned 2 values; return a tuple of what the kernel takes:"
    assert one.strip().startswith(told)
    assert [explain(scale, SM90, problem).mistakes for problem in scale.typical_problems] == [(), (), ()]
