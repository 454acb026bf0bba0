"""The README's picture of a report is drawn from the shipped table."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from tests.report_picture import FILE, ROOT, drawn


def test_the_readme_shows_the_picture_of_the_shipped_table_and_its_text() -> None:
    picture, label = drawn()
    assert FILE.read_text() == picture, "draw it again: python -m tests.report_picture"
    assert f"![{label}](.github/gains.svg)" in (ROOT / "README.md").read_text()
    assert ET.fromstring(picture).attrib["aria-label"] == label
    assert len(picture) < 20_000
