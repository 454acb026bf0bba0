"""Turn the project's values into JSON, for `--json`. Pure. `tables.reader` makes a table's text itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""Data that JSON can hold."""


def plain(value: object) -> Plain:
    """A value as JSON data: a dataclass by its fields, a config by its two parts, archs and paths as text.

    Raises:
        TypeError: The value has no such form, which is a mistake of the caller.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Arch | Path):
        return str(value)
    if isinstance(value, Config):
        return plain(value.document)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Pow2 | Exact):
        return value.kind
    if dataclasses.is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def json_text(value: object) -> str:
    """A value as indented JSON text."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False)
