"""The picture of first calls: what it shows of records, and that the committed one is what it draws."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

from aot_tune.bench import picture, records
from aot_tune.bench.__main__ import main
from aot_tune.bench.records import Record
from aot_tune.bench.sections import replay
from tests.support.bench_records import MADE

ROOT = Path(__file__).parents[2]


def shape(bare: float, *, searches: int = 1, **replayed: float) -> dict[str, Any]:
    return {"searches": searches, "first_ms": {"bare": bare, **replayed}}


def keep(folder: Path, device: str, **shapes: list[dict[str, Any]]) -> None:
    """Record operations with their shapes on a device."""
    made = replace(MADE, device=device)
    for name, each in shapes.items():
        figures = {"shapes": {f"shape {place}": one for place, one in enumerate(each)}}
        records.add(folder, "replay", name, Record(made_with=made, kernels={}, figures=figures))


def test_the_committed_picture_is_the_one_that_the_report_draws() -> None:
    """`aot-tune bench --report --write` mends it."""
    calls = picture.first_calls(records.RESULTS)
    assert calls is not None
    assert (ROOT / picture.FILE).read_text() == picture.svg(calls)


def test_it_shows_the_first_shape_of_what_searches_and_is_replayed_from_cubins(tmp_path: Path) -> None:
    compiled = {**shape(900.0, cubins=800.0), replay.COMPILED: "no cubin"}
    keep(
        tmp_path, "NVIDIA H100",
        softmax=[shape(1006.0, compiled=500.0, cubins=19.5), shape(7.0, cubins=1.5)],
        matmul=[shape(9500.0, cubins=12.0)],
        rms_norm=[shape(300.0, searches=0, compiled=310.0)],
        rope=[shape(800.0, compiled=100.0)],
        bmm=[compiled],
    )  # fmt: skip
    keep(tmp_path, "NVIDIA H200", softmax=[shape(1.0, cubins=0.5)])
    calls = picture.first_calls(tmp_path)
    assert calls is not None
    assert calls.device == "NVIDIA H100"
    assert list(calls.ms.items()) == [("matmul", (9500.0, 12.0)), ("softmax", (1006.0, 19.5))]
    assert str(calls) == (
        "First calls of 2 operations of TileGym: 1.0 s to 9.5 s as the library comes, "
        "12 ms to 20 ms replayed from cubins"
    )


def test_nothing_is_drawn_without_a_record_of_first_calls(tmp_path: Path) -> None:
    assert picture.first_calls(tmp_path) is None
    keep(tmp_path, "NVIDIA H100", rms_norm=[shape(300.0, searches=0)])
    assert picture.first_calls(tmp_path) is None


def test_bars_are_as_long_as_times_on_a_logarithmic_scale_and_fit() -> None:
    calls = picture.FirstCalls(device="A & B", ms={"a": (10_000.0, 10.0), "b": (100.0, 0.5)})
    drawn = ET.fromstring(picture.svg(calls))
    space = "{http://www.w3.org/2000/svg}"
    widths = [float(one.get("width", "")) for one in drawn.iter(f"{space}rect")][2:]  # behind the legend's
    assert widths == [490.0, 122.5, 245.0, 0.0]
    texts = [one.text for one in drawn.iter(f"{space}text")]
    assert {"1 ms", "10 s", "a", "b", "100 ms", "0.5 ms"} <= set(texts)
    assert all(float(one.get("x", "")) <= 760 - 50 for one in drawn.iter(f"{space}text"))
    assert any(text is not None and text.startswith("A & B, ") for text in texts)


def test_the_report_draws_it_with_this_checkouts_readmes_alone(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    keep(results, "NVIDIA H100", matmul=[shape(9500.0, cubins=12.0)])
    readme.write_text("<!-- report: first-call -->\n<!-- report: end -->\n")
    (tmp_path / ".github").mkdir()
    monkeypatch.setattr("aot_tune.bench.report._CHECKOUT", tmp_path)
    assert main(["--report", "--write", str(readme), "--results", str(results)]) == 0
    assert f"]({picture.FILE})" in readme.read_text()
    assert not (tmp_path / picture.FILE).exists()
    monkeypatch.setattr("aot_tune.bench.report.readmes", lambda: [readme])
    assert main(["--report", "--write", "--results", str(results)]) == 0
    calls = picture.first_calls(results)
    assert calls is not None
    assert (tmp_path / picture.FILE).read_text() == picture.svg(calls)
    assert f"{tmp_path / picture.FILE}: written" in capsys.readouterr().out
