"""The page of tables: valid pictures, the figures of `show --json`, and nothing that is loaded."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest

from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.json_text import json_text
from aot_tune.cli.report.page import Shown, page
from aot_tune.cli.report.sources import shown_tables
from aot_tune.tables.table import Table, geometric_mean
from aot_tune.values.config import Config
from tests.support.samples import DEFAULT, scale_table, with_entry

SHIPPED = Path(__file__).parents[3] / "tuned_configs"
MOST_BYTES_A_BUCKET = 2000


@functools.cache
def shipped() -> tuple[list[Shown], str]:
    shown, remarks, unreadable = shown_tables([SHIPPED], None, ())
    assert unreadable == []
    return shown, page(shown, remarks)


def _shown(table: Table, old: Table | None = None) -> Shown:
    before = None if old is None else DeclaredDocument(Path("scale.json"), old)
    return Shown(new=DeclaredDocument(Path("scale.json"), table), old=before)


def pictures(text: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def test_the_page_of_the_shipped_tables_is_small_and_the_same_again() -> None:
    shown, text = shipped()
    buckets = sum(len(each.new.table.entries) for each in shown)
    assert len(text.encode()) < MOST_BYTES_A_BUCKET * buckets
    for each in shown:
        own = page([each]).encode()
        assert len(own) < 400_000
    assert page(shown) == page(shown)


def test_the_page_loads_and_runs_nothing() -> None:
    _, text = shipped()
    for refused in ("<script", "<link", "<img", "<iframe", "src=", "url(", "@import", "onload"):
        assert refused not in text
    assert set(re.findall(r"https?:[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r'href="(.)', text)) == {"#"}


def test_every_picture_is_valid_and_has_a_text_in_its_place() -> None:
    shown, text = shipped()
    drawn = pictures(text)
    assert len(drawn) == sum(5 if each.least_us else 4 for each in shown)
    labels = [picture.attrib["aria-label"] for picture in drawn]
    assert {picture.attrib["role"] for picture in drawn} == {"img"}
    assert len(set(labels)) == len(labels)
    assert all(re.search(r"\d", label) for label in labels)


def test_each_bucket_is_a_cell_of_each_grid() -> None:
    shown, _ = shipped()
    for each in shown:
        for picture in pictures(page([each])):
            cells = [element for element in picture if element.tag.endswith("rect")]
            assert len(cells) in (0, len(each.new.table.entries))
            assert len({(cell.attrib["x"], cell.attrib["y"]) for cell in cells}) == len(cells)


def test_every_figure_of_the_summary_is_that_of_show_json() -> None:
    shown, text = shipped()
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", text)]
    documents = json.loads(json_text([each.new.data() for each in shown]))
    assert len(rows) == len(documents) == 16
    for row, document in zip(rows, documents, strict=True):
        entries = document["entries"]
        gains = [entry["default_us"] / entry["mean_us"] for entry in entries]
        assert [words(cell) for cell in row] == [
            f"{document['arch']}/{document['kernel']}",
            str(len(entries)),
            f"{geometric_mean(gains):.2f}x",
            f"{max(gains):.2f}x",
            str(sum(gain == 1.0 for gain in gains)),
            f"{max(entry['regret'] for entry in entries):.1%}",
            str(len(document["portfolio"])),
            "measured",
        ]


def _one_entry(table: Table) -> Table:
    return dataclasses.replace(table, entries=table.entries[:1])


def _named(table: Table, name: str) -> Table:
    """The table of a kernel whose constant has such a name."""

    def renamed(config: Config) -> Config:
        return Config(constants={f"{name}{key}": value for key, value in config.constants.items()})

    entries = [dataclasses.replace(entry, config=renamed(entry.config)) for entry in table.entries]
    return dataclasses.replace(table, portfolio=tuple(map(renamed, table.portfolio)), entries=tuple(entries))


@pytest.mark.parametrize(
    "table",
    [
        _one_entry(scale_table()),
        dataclasses.replace(scale_table(), entries=()),
        dataclasses.replace(scale_table(), portfolio=()),
        dataclasses.replace(
            scale_table(),
            entries=tuple(
                dataclasses.replace(entry, evidence="predicted", points=()) for entry in scale_table().entries
            ),
        ),
        _named(scale_table(), '<&"'),
    ],
    ids=["one entry", "no entry", "no portfolio", "predicted, without points", "names"],
)
def test_unusual_tables_are_drawn(table: Table) -> None:
    text = page([_shown(table)])
    for picture in pictures(text):
        assert picture.attrib["aria-label"]
    assert '<&"' not in text
    assert ("predicted" in text) == any(entry.evidence == "predicted" for entry in table.entries)


def test_two_tables_show_what_gains_less_and_what_has_another_config() -> None:
    old = scale_table()
    new = with_entry(old, 1, config=DEFAULT, mean_us=15.0)
    new = dataclasses.replace(new, entries=new.entries[1:])
    [before, *others] = [
        picture.attrib["aria-label"]
        for picture in pictures(page([_shown(new, old)]))
        if "before" in picture.attrib["aria-label"]
    ]
    assert others == []
    assert before == ("Gain now / gain before of sm90/scale: 0.816x; 1 with another config, 0 new, 1 gone")
    text = page([_shown(new, old)])
    assert ">0.67*</text>" in text
    assert (
        "over the default; gain now / before: 0.816x; 1 with another config, 0 new, 1 gone</summary>" in text
    )


def test_a_link_of_the_summary_leads_inside_what_it_opens() -> None:
    text = page([_shown(scale_table())])
    [inside] = re.findall(r"<details>(.*)</details>", text)
    assert 'href="#sm90/scale"' in text
    assert 'id="sm90/scale"' in inside


@pytest.mark.slow
@pytest.mark.process
def test_a_browser_renders_the_page_without_a_message(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed here")
    path = tmp_path / "report.html"
    path.write_text(shipped()[1].replace("<details>", "<details open>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    logged = ["--enable-logging=stderr", f"--screenshot={tmp_path / 'page.png'}", path.as_uri()]
    ended = subprocess.run([browser, *options, *logged], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0
    assert _console(ended.stderr.splitlines()) == []
    assert (tmp_path / "page.png").stat().st_size > 10_000


def _console(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if "CONSOLE" in line]
