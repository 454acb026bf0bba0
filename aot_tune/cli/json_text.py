"""Turn the project's values into JSON, for `--json`. Pure. `tables.writer` writes the text of tables."""

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
    """Return a value as JSON data: dataclasses by field, configs by part, archs and paths as text.

    Raises:
        TypeError: The value has no JSON form, a mistake of the caller.
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
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def json_text(value: object) -> str:
    """Return a value as indented JSON text."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False)
