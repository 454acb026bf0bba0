"""The report: tables of recorded results, and README files that agree with them. Figures are made up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from aot_tune.bench import records, report
from aot_tune.bench.__main__ import main
from aot_tune.bench.kernels.standing import Shape
from aot_tune.bench.records import Record
from aot_tune.bench.sections import replay
from aot_tune.errors import UsageError
from tests.support.bench_records import MADE

ROOT = Path(__file__).parents[2]


def shape(rows: int, size: float, **us: float) -> dict[str, Any]:
    return asdict(
        Shape(problem={"rows": rows}, config="occupancy=2", bytes=size, flops=0.0, roofline_us=9.0, us=us)
    )


def softmax() -> dict[str, Any]:
    """A small shape and a large one, beside two rivals and a copy."""
    return {
        "declared": 64,
        "rivals": ["torch.compile", "torch.softmax"],
        "shapes": [
            shape(1, 1e6, tuned=10.0, default=12.0, **{"torch.compile": 20.0, "torch.softmax": 12.5}),
            shape(2, 1e9, tuned=10.0, default=10.0, copy=9.5, **{"torch.compile": 8.0}),
        ],
    }


def keep(folder: Path, section: str, name: str, figures: Mapping[str, Any], **kernels: str) -> None:
    """Record figures of shipped kernels as they are now; a hash given by name stands for an older source."""
    now = records.present("sm90")
    stamps = {
        kernel: replace(now[kernel], **({"source_hash": old} if old else {}))
        for kernel, old in kernels.items()
    }
    records.add(folder, section, name, Record(made_with=MADE, kernels=stamps, figures=figures))


def row(text: str, begin: str) -> str:
    found = [line for line in text.splitlines() if line.startswith(begin)]
    assert len(found) == 1, (begin, text)
    return found[0]


# Kernels ----------------------------------------------------------------------------------------


def test_a_kernels_row_has_its_tables_gain_and_its_fastest_rival(tmp_path: Path) -> None:
    keep(tmp_path, "kernels", "softmax", softmax(), softmax="")
    text = report.block("summary", tmp_path)
    # The fastest rival takes 1.25 and 0.8 of the tuned config's time.
    assert row(text, "| `softmax`") == (
        "| `softmax` | 1.07x | 1.36x | torch.compile or torch.softmax | 1.00 | 0.80 |"
    )
    assert row(text, "| `rms_norm`").endswith("| | | |")
    assert "Measured on NVIDIA H200." in text


def test_the_summary_has_six_rows(tmp_path: Path) -> None:
    for folder in (tmp_path, records.RESULTS):
        lines = report.block("summary", folder).splitlines()
        assert sum(line.startswith("| `") for line in lines) == 6


def test_each_rival_has_a_row_and_a_copy_counts_from_64_mib_on(tmp_path: Path) -> None:
    keep(tmp_path, "kernels", "softmax", softmax(), softmax="")
    text = report.block("kernels", tmp_path)
    assert "| `softmax` | 153 | 1.07x | 1.36x | 16 |" in text
    assert row(text, "| `softmax` | 2 |") == (
        "| `softmax` | 2 | torch.compile | 1.26 | 0.80 | `rows=2` | 0.95 | 0.95 |"
    )
    assert row(text, "| | 1 |") == "| | 1 | torch.softmax | 1.25 | 1.25 | `rows=1` | | |"
    assert "NVIDIA H200, driver 580.1, cuda-tile 1.7.0, tileiras 13.4.92, torch 2.11.0" in text


def test_the_gain_is_the_committed_tables_own(tmp_path: Path) -> None:
    """A row that a hand once copied wrong."""
    assert row(report.block("kernels", tmp_path), "| `linear`") == "| `linear` | 159 | 1.10x | 2.26x | 16 |"


def test_a_row_of_another_source_is_marked_as_out_of_date(tmp_path: Path) -> None:
    keep(tmp_path, "kernels", "softmax", softmax(), softmax="0" * 16)
    keep(tmp_path, "lookups", "matmul", look_ups(), matmul="0" * 16)
    for name in ("summary", "kernels"):
        assert "| `softmax` (out of date) |" in report.block(name, tmp_path)
    assert "| `matmul` (out of date) |" in report.block("lookups", tmp_path)


def test_records_of_several_days_say_which_rows_are_whose(tmp_path: Path) -> None:
    keep(tmp_path, "kernels", "softmax", softmax(), softmax="")
    later = replace(MADE, date="2026-02-01")
    stamps = {"rope": records.present("sm90")["rope"]}
    records.add(tmp_path, "kernels", "rope", Record(made_with=later, kernels=stamps, figures=softmax()))
    text = report.block("kernels", tmp_path)
    assert "2026-01-31: softmax." in text
    assert "2026-02-01: rope." in text


# Other sections ---------------------------------------------------------------------------------


def look_ups() -> dict[str, Any]:
    times = {"median_us": 51.2, "99.9 %_us": 150.6, "99.99 %_us": 300.0}
    return {"look-ups": 500000, **times, "under 200 us": 0.9995, "grown_mb": 2.55}


@pytest.mark.parametrize("name", report.RUNS)
def test_what_was_not_measured_says_so_and_names_the_command(name: str, tmp_path: Path) -> None:
    text = report.block(name, tmp_path)
    assert text.count("ot measured yet; run: `aot-tune bench") == 1
    assert f"`{report.RUNS[name]}`" in text


def test_look_ups_launches_and_sizes_inside_have_their_figures(tmp_path: Path) -> None:
    keep(tmp_path, "lookups", "matmul", look_ups(), matmul="")
    line = row(report.block("lookups", tmp_path), "| `matmul`")
    assert line == "| `matmul` | 500,000 | 51 us | 151 us | 300 us | 99.95% | 2.5 MB |"
    keep(tmp_path, "launch", "launch", {"bare ct.launch": 3.91, "Tunable.launch": 4.59}, rms_norm="")
    text = report.block("launch", tmp_path)
    assert "| bare ct.launch | 3.91 us |" in text
    assert "| Tunable.launch | 4.59 us |" in text
    regrets = {"geometric mean %": 1.04, "95th percentile %": 2.0, "worst %": 3.0}
    figures = {"problems": 8, "resolver": regrets, "default": {**regrets, "worst %": 36.4}}
    keep(tmp_path, "inside", "rope", figures, rope="")
    top = {f"best of top {number}": regrets for number in (1, 3, 5)}
    keep(tmp_path, "inside", "softmax", {**figures, "model": top}, softmax="")
    text = report.block("inside", tmp_path)
    assert row(text, "| `rope`").startswith("| `rope` | 8 | 1.0 % | 2.0 % | 3.0 % | 1.0 % | 2.0 % | 36.4 % |")
    assert row(text, "| `softmax`").endswith("| 36.4 % | 1.0 % | 1.0 % | 1.0 % |")


def test_undeclared_problems_have_their_worst_state_and_cublas_in_a_tight_row(tmp_path: Path) -> None:
    regrets = {"geometric mean %": 1.04, "95th percentile %": 2.0, "worst %": 3.0}
    figures = {
        "problems": 40, "drawn": 60, "regret": {"worst state": regrets, "read": regrets},
        "default": {"worst state": {**regrets, "worst %": 36.4}}, "behind the default": ["M=3: tight"],
    }  # fmt: skip
    rival = {"cuBLAS over the choice": {"tight": {"geometric mean": 0.981, "worst": 0.87, "problems": 200}}}
    keep(tmp_path, "regret", "softmax", figures, softmax="")
    keep(tmp_path, "regret", "matmul", {**figures, **rival, "problems": 60}, matmul="")
    keep(tmp_path, "regret", "all kernels", figures, matmul="", softmax="")
    text = report.block("regret", tmp_path)
    own = "1.0 % | 2.0 % | 3.0 % | 1.0 % | 2.0 % | 36.4 % | 1 |"
    assert row(text, "| `matmul`") == f"| `matmul` | 60 | {own} 0.98 | 0.87 |"
    assert row(text, "| `softmax`") == f"| `softmax` | 40 of 60 | {own} | |"
    assert text.index("`matmul`") < text.index("`softmax`") < text.index("`all kernels`")


def test_serving_has_first_launches_and_what_follows(tmp_path: Path) -> None:
    three = dict.fromkeys(("rms_norm", "matmul", "rope"), "")
    first = {"rms_norm_ms": 5.02, "matmul_ms": 1.4, "rope_ms": 1.2, "processes": 5}
    process = {
        "prime_seconds": 4.4, "signatures loaded": 349, "plans": 302,
        **{kernel: {"waited for: first / later": 1.02} for kernel in three},
    }  # fmt: skip
    parts: dict[str, dict[str, Any]] = {
        "archive": {"kb": 2048.0, "kernels": 3},
        "first launch: with cubins": first,
        "first launch: searched": {"rms_norm_ms": 1818.2, "matmul_ms": 11406.0},
        "launch, with cubins": {
            "bare_us": 5.1, "above_us": 0.97, "grad off: above_us": 0.8, "launch_us": 6.07,
        },
        "a miss, searched live over cubins": {"64 x 512 ms": 37.0, "64 x 512 ms, the least": 30.0},
        "loading": {
            "tables": 16, "sections": 3, "tables_ms": 87.0, "tables_mb": 5.0,
            "archive_ms": 10.0, "archive_mb": 1.6,
        },
        "after prime": {"processes": [process, process]},
    }  # fmt: skip
    for name, figures in parts.items():
        keep(tmp_path, "serving", name, figures, **three)
    text = report.block("serving", tmp_path)
    assert "| with cubins | 5.0 ms | 1.4 ms | 1.2 ms | 5 |" in text
    assert "| searched | 1818 ms | 11406 ms | | 1 |" in text
    assert "| launch, with cubins, grad off | 0.80 us above a bare `ct.launch` of 5.10 us |" in text
    assert "| a miss, searched live over cubins | 37.0 ms |" in text
    assert "4.4 s for 349 signatures and 302 problems" in text
    assert "| after prime: first launch over later ones, `rope` | 1.02, highest 1.02 |" in text


def replayed(bare: float, compiled: float, cubins: float) -> dict[str, Any]:
    ratio = {"median": 0.98, "least": 0.97, "most": 1.01}
    return {
        "searches": 1,
        "first_ms": {"bare": bare, "compiled": compiled, "cubins": cubins},
        "speed-up": {"compiled": bare / compiled, "cubins": bare / cubins},
        "later_us": {"bare": 20.0, "compiled": 20.1, "cubins": 20.2},
        "later, replayed / bare": {"compiled": ratio, "cubins": {**ratio, "median": 1.05, "least": 1.02}},
        "gpu_us": {"bare": 8.0, "compiled": 7.8, "cubins": 7.9},
        "gpu, replayed / bare": {"compiled": ratio, "cubins": ratio},
    }


def test_replay_has_a_row_a_shape_and_says_what_is_slower(tmp_path: Path) -> None:
    without = {**replayed(300.0, 280.0, 1.0), "searches": 0}
    for one in (
        "first_ms",
        "speed-up",
        "later_us",
        "gpu_us",
        "later, replayed / bare",
        "gpu, replayed / bare",
    ):
        without[one] = {name: value for name, value in without[one].items() if name != "cubins"}
    missing = {**replayed(9000.0, 900.0, 950.0), replay.COMPILED: "no cubin was shipped"}
    parts = {
        "softmax": {"searches": 2, "shapes": {"8x9": replayed(1000.0, 100.0, 10.0), "9x9": missing}},
        "rms_norm": {"searches": 0, "shapes": {"8x9": without}},
        "summary": {"operations": ["softmax", "rms_norm"]},
    }
    for name, figures in parts.items():
        keep(tmp_path, "replay", name, figures)
    text = report.block("replay", tmp_path)
    assert row(text, "| `softmax`") == (
        "| `softmax` | `8x9` | 1000 ms | 100 ms | 10.0 ms | 20.0 us | 20.1 us | 8.0 us "
        "| 0.980 (0.970 to 1.010) |"
    )
    assert row(text, "| | `9x9`").startswith("| | `9x9` | 9000 ms | 900 ms | 950 ms, compiled |")
    assert row(text, "| `rms_norm`, no search").startswith(
        "| `rms_norm`, no search | `8x9` | 300 ms | 280 ms | |"
    )
    assert row(text, "First calls from cubins: 100.0 times").endswith("at least 100.0 times (`softmax 8x9`).")
    assert row(text, "First calls compiled on the spot: 10.0 times")
    assert row(text, "Recorded winners that are slower beyond noise") == (
        "Recorded winners that are slower beyond noise: none."
    )
    assert "`softmax 8x9, cubins`; `softmax 9x9, cubins`." in text
    assert row(text, "Later calls over").endswith(
        "means: compiled on the spot 0.98, from cubins 1.05, without a search 0.98."
    )


# Kernels of others ------------------------------------------------------------------------------


def swept(us: float, **more: object) -> dict[str, Any]:
    """Two problems, at which the authors' config takes 12 and 24 microseconds."""
    rows = [
        {
            "problem": f"rows={rows}", "default_us": default, "winner_us": us,
            "default over winner": default / us, "winner": "occupancy=2",
        }
        for rows, default in ((64, 12.0), (4096, 24.0))
    ]  # fmt: skip
    spread = {"geometric mean": 288**0.5 / us, "least": 12 / us, "most": 24 / us}
    counts = {"problems": 2, "candidates verified": 22, "sweep_s": 31.4}
    return {"library": "tilegym 1.5.1", **counts, "default over winner": spread, "rows": rows, **more}


def test_kernels_of_others_stand_beside_their_authors_configs(tmp_path: Path) -> None:
    keep(tmp_path, "declared", "silu_and_mul", swept(12.0))
    own = {"geometric mean": 1.1, "least": 1.0, "most": 1.2}
    keep(tmp_path, "declared", "bmm", swept(6.0, **{"best of their search over winner": own}))
    text = report.block("declared", tmp_path)
    assert "| `silu_and_mul` | tilegym 1.5.1 | 2 | 22 | 31 s | 1.41x | 1.00x | 2.00x | |" in text
    assert "| `bmm` | tilegym 1.5.1 | 2 | 22 | 31 s | 2.83x | 2.00x | 4.00x | 1.10x |" in text
    assert "| `bmm` | `rows=4096` | 24.0 us | 6.0 us | 4.00x | `occupancy=2` |" in text
    short = report.block("gained", tmp_path)
    assert "Swept in 63 s" in short
    assert "2.00 times as fast as under their authors' configs (geometric mean of 4 problems)" in short
    assert "| `bmm` | 2.83x | 2.00x | 4.00x |" in short
    for each in (text, short):
        assert "NVIDIA H200, driver 580.1, cuda-tile 1.7.0" in each


# README files -----------------------------------------------------------------------------------


LEFT_OUT = re.compile(r"<!-- report: left-out -->\n(.*?)<!-- report: end -->", re.S)


@pytest.mark.long
def test_the_readme_files_hold_what_the_committed_results_and_tables_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`aot-tune bench --report --write` mends it. The block left-out, which takes long, has its own test."""
    held = []
    [block] = [match[1] for path in report.readmes() for match in LEFT_OUT.finditer(path.read_text("utf-8"))]
    monkeypatch.setitem(report.BLOCKS, "left-out", lambda _: iter(block.splitlines()))  # type: ignore[call-overload]
    for path in report.readmes():
        text = path.read_text(encoding="utf-8")
        assert report.filled(text, where=str(path)) == text, path
        held += [name for name in report.BLOCKS if f"<!-- report: {name} -->" in text]
    assert sorted(held) == sorted(report.BLOCKS), "each stands in one README"


@pytest.mark.slow
def test_the_readme_file_of_tables_holds_what_the_rule_leaves_on_them() -> None:
    [held] = [match[1] for path in report.readmes() for match in LEFT_OUT.finditer(path.read_text("utf-8"))]
    assert held == report.block("left-out")


def test_writing_replaces_a_block_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    before = "# Title\n\n<!-- report: launch -->\nold\n<!-- report: end -->\n\nafter\n"
    readme.write_text(before)
    keep(tmp_path, "kernels", "softmax", softmax(), softmax="")
    words = ["--report", "--write", str(readme), "--results", str(tmp_path)]
    assert main(words) == 0
    assert readme.read_text() == before.replace(
        "old", "Not measured yet; run: `aot-tune bench launch --record`"
    )
    assert "written" in capsys.readouterr().out
    assert main(words) == 0
    assert "up to date" in capsys.readouterr().out


LAUNCH = "<!-- report: launch -->\nold\n<!-- report: end -->\n"


def test_a_folder_without_results_is_refused_and_no_readme_emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(LAUNCH)
    results = tmp_path / "results"
    keep(results, "kernels", "softmax", softmax(), softmax="")
    for folder, right in {
        tmp_path / "nowhere": "name the folder that --record wrote",
        tmp_path: "name the folder that --record wrote",
        results / "nvidia-h200": f"it is the folder of one device: name {results}",
        readme: "name the folder that --record wrote",
    }.items():
        for words in (["--write", str(readme)], []):
            assert main(["--report", *words, "--results", str(folder)]) == 2
            told = capsys.readouterr()
            assert told.err == f"aot-tune bench: {folder} holds no results; {right}\n"
            assert told.out == ""
    assert readme.read_text() == LAUNCH


def test_a_readme_that_cannot_be_read_is_refused_before_any_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, bad = tmp_path / "README.md", tmp_path / "bad.md"
    readme.write_text(LAUNCH)
    keep(tmp_path, "kernels", "softmax", softmax(), softmax="")
    for made, said in {
        lambda: None: "cannot read {}: No such file or directory; name a README file",
        bad.mkdir: "cannot read {}: Is a directory; name a README file",
        lambda: (bad.rmdir(), bad.write_bytes(b"\xff")): "cannot read {}: 'utf-8' codec can't decode",
        lambda: bad.write_text(
            "<!-- report: lunch -->\n<!-- report: end -->\n"
        ): "{}: no block is called lunch",
    }.items():
        made()
        assert main(["--report", "--write", str(readme), str(bad), "--results", str(tmp_path)]) == (
            2 if said.endswith("lunch") else 1
        )
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"aot-tune bench: {said.format(bad)}")
    assert readme.read_text() == LAUNCH


def test_a_readme_without_write_is_not_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report", "README.md", "--results", str(tmp_path)]) == 2
    assert "add --write, or leave README.md out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- report: lunch -->\n<!-- report: end -->\n", "no block is called lunch"),
        ("<!-- report: launch -->\n", "needs its own"),
        ("<!-- report: launch -->\n<!-- report: serving -->\n<!-- report: end -->\n", "needs its own"),
    ],
)
def test_a_marker_without_a_block_or_an_end_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        report.filled(text)


@pytest.mark.long
def test_the_report_prints_every_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, "kernels", "softmax", softmax(), softmax="")
    assert main(["--report", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert [line[3:] for line in printed.splitlines() if line.startswith("## ")] == list(report.BLOCKS)
