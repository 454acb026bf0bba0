"""Read JSON with one meaning, in bounded time and memory, and say where a value is wrong. Knows no table.

Reading is part of every import: the usual case is checked by types alone, and a path is printed to complain.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import orjson

from aot_tune.errors import TableError

MOST_BYTES = 16 * 1024 * 1024
"""Larger documents are refused unread; the largest shipped table is a hundredth of it."""

MOST_VALUES = 500_000
"""Values of one document, 25 times a table of 225 entries: 16 MiB of ``{},`` took 470 MB, these take 42."""

LONGEST_TEXT = 200
"""Characters of one string: names and versions are short, and get printed."""

Json = Any
"""What orjson returns: dict, list, str, int, float, bool or None."""

_BOM = b"\xef\xbb\xbf"
_KEY = re.compile(rb'"\s*:')
_KINDS = {dict: "an object", list: "a list", type(None): "null"}


def loads(data: bytes | str) -> Json:
    """Parse UTF-8 JSON; refuses what it leaves open: equal keys, NaN, a BOM, lone surrogates, endless depth.

    Raises:
        TableError: It is not such a text, or larger than `MOST_BYTES` or `MOST_VALUES`.
    """
    if isinstance(data, str):
        try:
            data = data.encode()
        except UnicodeEncodeError as error:
            raise TableError(f"not UTF-8 text: {error.reason}") from None
    if len(data) > MOST_BYTES:
        raise TableError(f"{len(data)} bytes; a document has at most {MOST_BYTES}")
    if not data.strip():
        raise TableError("the file is empty")
    if data.startswith(_BOM):
        raise TableError("starts with a byte order mark; save it as UTF-8 without one")
    if data.count(b"{") + data.count(b"[") + data.count(b",") > MOST_VALUES:
        raise TableError(f"more than {MOST_VALUES} values; no document has so many")
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise TableError(f"not JSON: {error}") from None
    # orjson keeps the last of two equal keys. Where no string holds an escape, a quote before a colon always
    # ends a key, so the keys in the text are counted against those kept; only a difference is read slowly.
    if b"\\" in data or len(_KEY.findall(data)) != orjson.dumps(document).count(b'":'):
        try:
            json.loads(data, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise TableError(f"not JSON with one meaning: {error}") from None
    return document


def _distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name, value in pairs:
        if name in found:
            raise TableError(f"the key {name!r:.80} is there twice in one object")
        found[name] = value
    return found


def check_keys(value: Json, path: str, keys: tuple[str, ...]) -> None:
    """An object of exactly these keys, in any order."""
    if type(value) is not dict:
        expected("an object", value, path)
    if tuple(value) == keys or value.keys() == set(keys):
        return
    for key in keys:
        if key not in value:
            raise TableError(f"the key {key!r} is missing", path)
    unknown = next(key for key in value if key not in keys)
    raise TableError(f"the key {unknown!r:.80} is unknown; expected {', '.join(keys) or 'none'}", path)


def check_identifiers(value: Json, path: str) -> None:
    """An object whose keys are Python names."""
    if type(value) is not dict:
        expected("an object", value, path)
    for name in value:
        if len(name) > LONGEST_TEXT or not name.isidentifier():
            expected("a Python name as key", name, path)


def check_text(value: Json, path: str) -> None:
    """A short printable string: no control characters reach a terminal."""
    if type(value) is not str or len(value) > LONGEST_TEXT or not value.isprintable():
        expected(f"a printable text of at most {LONGEST_TEXT} characters", value, path)


def as_list(value: Json, path: str) -> list[Json]:
    """A list."""
    if type(value) is not list:
        expected("a list", value, path)
    return value


def as_number(value: Json, path: str, *, zero: bool = True) -> float:
    """A finite number of 0 (or, without `zero`, just above) and more; a whole one may lack its point."""
    if type(value) not in (int, float) or not 0 <= value < math.inf or (value == 0 and not zero):
        expected("a number of 0 or more" if zero else "a number above 0", value, path)
    return float(value)


def expected(what: str, value: Json, path: str) -> NoReturn:
    """Refuse a value: ``expected int, got bool True (at entries[3].config.hints.num_ctas)``."""
    kind = type(value)
    raise TableError(f"expected {what}, got {_KINDS.get(kind) or f'{kind.__name__} {value!r:.80}'}", path)
