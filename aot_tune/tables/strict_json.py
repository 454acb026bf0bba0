"""Read unambiguous JSON in bounded time and memory; errors name the place. Imports nothing of tables.

Reading is part of every import, so the usual case is checked by types alone; paths are built only for errors.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import orjson

from aot_tune.errors import TableError
from aot_tune.values.text import shortened

MOST_BYTES = 16 * 1024 * 1024
"""Most bytes of a document; larger ones are refused unread. The largest shipped table has 3 % of it."""

MOST_VALUES = 1_250_000
"""Most values of a document: a table of as many entries as it may have, with 300 values each. 16 MiB of
``{},`` took 470 MB of memory, 500,000 values take 42 MB."""

LONGEST_TEXT = 200
"""Most characters of a string: names and versions are short, and they are printed."""

Json = Any
"""Value that orjson returns: dict, list, str, int, float, bool or None."""

_BOM = b"\xef\xbb\xbf"
_KEY = re.compile(rb'"\s*:')
_KINDS = {dict: "an object", list: "a list", type(None): "null"}


def loads(data: bytes | str) -> Json:
    """Parse UTF-8 JSON; refuse equal keys, NaN, a BOM, lone surrogates and depth, where readers differ.

    Raises:
        TableError: The text is not such JSON, or is larger than `MOST_BYTES` or `MOST_VALUES`.
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
    check_count(data)
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise TableError(_not_json(data) or f"not JSON: {error}") from None
    # orjson keeps the last of two equal keys. Where no string holds an escape, a quote before a colon always
    # ends a key, so the keys in the text are counted against those kept; only a difference is read slowly.
    try:
        kept = orjson.dumps(document).count(b'":')
    except orjson.JSONEncodeError as error:  # it reads objects and lists nested 1024 deep, and writes 254
        raise TableError(f"not a document of this kind: {error}") from None
    if b"\\" in data or len(_KEY.findall(data)) != kept:
        try:
            json.loads(data, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise TableError(f"not JSON with one meaning: {error}") from None
    return document


def check_count(data: bytes) -> None:
    """Refuse a text of more than `MOST_VALUES` values."""
    if data.count(b"{") + data.count(b"[") + data.count(b",") > MOST_VALUES:
        raise TableError(f"more than {MOST_VALUES} values; a document has at most that many")


def _not_json(data: bytes) -> str | None:
    """Return which text of Git's a file holds in place of JSON; None where it holds none."""
    if data.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS in place of the file: git lfs pull"
    if re.search(rb"^(<{7} |={7}$|>{7} )", data, re.M):
        return "holds conflict markers of a merge: resolve the conflict"
    return None


def _distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    document: dict[str, Json] = {}
    for name, value in pairs:
        if name in document:
            raise TableError(f"the key {name!r:.80} appears twice in one object")
        document[name] = value
    return document


def check_keys(value: Json, path: str, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Refuse a value that is not an object of exactly these keys, in any order, and `optional` ones."""
    if type(value) is not dict:
        expected("an object", value, path)
    if tuple(value) in (keys, (*keys, *optional)):  # the usual cases, quickly
        return
    for key in keys:
        if key not in value:
            raise TableError(f"the key {key!r} is missing", path)
    known = (*keys, *optional)
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise TableError(
            f"the key {unknown!r:.80} is unknown; expected {shortened(', '.join(known) or 'none')}", path
        )


def check_identifiers(value: Json, path: str) -> None:
    """Refuse a value that is not an object whose keys are Python names."""
    if type(value) is not dict:
        expected("an object", value, path)
    for name in value:
        if len(name) > LONGEST_TEXT or not name.isidentifier():
            expected("a Python name as key", name, path)


def check_text(value: Json, path: str) -> None:
    """Refuse a value that is not a short printable string: no control character may reach a terminal."""
    if type(value) is not str or len(value) > LONGEST_TEXT or not value.isprintable():
        expected(f"a printable text of at most {LONGEST_TEXT} characters", value, path)


def as_list(value: Json, path: str) -> list[Json]:
    """Return the value; refuse it where it is not a list."""
    if type(value) is not list:
        expected("a list", value, path)
    return value


def as_number(value: Json, path: str, *, zero: bool = True) -> float:
    """Return the value as a float; refuse all but finite numbers of 0 or more, above 0 without `zero`."""
    if type(value) not in (int, float) or not 0 <= value < math.inf or (value == 0 and not zero):
        expected("a number of 0 or more" if zero else "a number above 0", value, path)
    return float(value)


def expected(what: str, value: Json, path: str) -> NoReturn:
    """Refuse a value with a message such as ``expected a list, got bool True (at entries[3].points)``."""
    kind = type(value)
    raise TableError(f"expected {what}, got {_KINDS.get(kind) or f'{kind.__name__} {value!r:.80}'}", path)
