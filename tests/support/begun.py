"""Declarations that `aot-tune new` began, imported as their authors would, with blanks filled in."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from aot_tune.cli.start.new import begin
from aot_tune.tunable import Tunable


def blanks_in(text: str) -> Iterator[tuple[str, str, str]]:
    """Each blank of a module's text: its field, its whole code and the example in it."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.keyword(
                arg=str() as field, value=ast.Call(func=ast.Name(id="blank"), args=[_, example])
            ):
                whole = ast.get_source_segment(text, node.value)
                inside = ast.get_source_segment(text, example)
                assert whole is not None
                assert inside is not None
                yield field, whole, inside


def filled(text: str, codes: Mapping[str, str]) -> str:
    """The text with the code for its field in place of each blank; without one, with the example."""
    left = dict(codes)
    for field, whole, example in blanks_in(text):
        text = text.replace(whole, left.pop(field, example))
    assert not left, f"not blank: {list(left)}"
    return text


def imported(text: str, folder: Path) -> Tunable:
    """The declaration in a module's text; `folder` is on the path, and in it a new package is made."""
    package = f"begun_{len(list(folder.glob('begun_*')))}_{folder.name.replace('-', '_')}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    (folder / package / "declared.py").write_text(text)
    importlib.invalidate_caches()
    module = importlib.import_module(f"{package}.declared")
    (tunable,) = (value for value in vars(module).values() if isinstance(value, Tunable))
    return tunable


def text_of(place: str, kind: str | None = None) -> str:
    """The text that `aot-tune new` writes for a kernel."""
    return begin(place, kind).text
