"""`aot_tune/API.md` is made from the public names as they are."""

from __future__ import annotations

import aot_tune
from tests.api_page import PATH, SECTIONS, generated


def test_the_page_is_what_the_names_say() -> None:
    assert PATH.read_bytes() == generated(), "run python -m tests.api_page"


def test_the_page_has_every_public_name_once() -> None:
    names = [name for section in SECTIONS.values() for name in section]
    assert sorted(names) == sorted(set(aot_tune.__all__) - {"__version__"})
