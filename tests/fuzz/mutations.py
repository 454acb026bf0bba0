"""Change bytes at random: their bits and pieces, or, where they are JSON, values and keys of the document.

Every choice comes from the `random.Random` that is passed in, so that a fuzzer or Hypothesis can repeat it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Node = Any
"""A value of a JSON document."""

MOST_BYTES = 1 << 16
"""The most bytes of an input: a fuzzer finds more with many small inputs than with few large ones."""

VALUES: tuple[Node, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30,
    0.0, -0.0, 0.5, 1e-9, 1e-320, 1e308, 3.9999,
    "", "a", "M", "dtype", "bfloat16", "measured", "predicted", "pow2", "exact", "sm90", "sm_90", "9.0",
    "../x", "/etc", "x\x00", "\x1b[31m", "\ud800", "\ufeff", "1", "NaN", "x" * 201,
    [], {}, [[]], [{}], {"": None}, {"constants": {}, "hints": {}},
)  # fmt: skip
"""Values at the limits of what readers accept, and beyond."""

PIECES = (
    b"", b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"0", b"-", b"e9", b"1e999", b"NaN", b"Infinity",
    b"true", b"null", b"\n", b"\r\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000",
    b"[" * 2000, b'{"a":' * 1100, b" " * 64, b"\x00" * 64,
)  # fmt: skip
"""Bytes that readers of text trip over."""


def mutate(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    """Change an input in one to four places.

    Args:
        data: The input.
        random: Makes every choice.
        others: Inputs to take pieces from.
    """
    for _ in range(random.randrange(1, 5)):
        changed = _changed_document(data, random) if random.random() < 0.6 else None
        data = _changed_bytes(data, random, others) if changed is None else changed
    return data[:MOST_BYTES]


# Bytes ------------------------------------------------------------------------------------------------------


def _changed_bytes(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    start = random.randrange(len(data) + 1)
    end = min(len(data), start + random.choice((0, 1, 1, 2, 4, 16, 256)))
    kind = random.randrange(6)
    if kind == 0 and start < len(data):  # flip a bit
        return data[:start] + bytes([data[start] ^ 1 << random.randrange(8)]) + data[start + 1 :]
    if kind == 1:  # leave out
        return data[:start] + data[end:]
    if kind == 2:  # repeat
        return data[:end] + data[start:end] * random.choice((1, 2, 8)) + data[end:]
    if kind == 3 and others:  # splice
        other = random.choice(others)
        return data[:start] + other[random.randrange(len(other) + 1) :]
    if kind == 4 and random.random() < 0.3:  # cut off
        return data[:start]
    return data[:start] + random.choice(PIECES) + data[end:]


# Documents --------------------------------------------------------------------------------------------------


def _changed_document(data: bytes, random: Random) -> bytes | None:
    """The document, or one line of several, with one change; None where that is no JSON object or list."""
    lines = data.split(b"\n") if data.startswith(b"{") and b"}\n{" in data else [data]
    at = random.randrange(len(lines))
    try:
        document = json.loads(lines[at])
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict | list) or not document:
        return None
    _change(document, random)
    lines[at] = json.dumps(document).encode()
    return b"\n".join(lines)


def _change(document: Node, random: Random) -> None:
    """Change one value or key somewhere in a document that is not empty, in place."""
    inside, key = _place(document, random)
    value = inside[key]
    kind = random.randrange(8)
    if kind == 0:
        del inside[key]
    elif kind == 1:
        inside[key] = [value]
    elif kind == 2:  # one of the document's own values
        other, there = _place(document, random)
        inside[key] = copy.deepcopy(other[there])
    elif kind == 3 and isinstance(inside, list):
        inside.insert(random.randrange(len(inside) + 1), copy.deepcopy(value))
    elif kind == 3:  # another name for it
        inside[_name(random)] = inside.pop(key)
    elif kind == 4 and isinstance(value, int | float):
        inside[key] = random.choice(_NUMBERS)(value)
    elif kind == 5 and isinstance(inside, dict):
        inside[_name(random)] = copy.deepcopy(value)
    else:
        inside[key] = copy.deepcopy(random.choice(VALUES))


_NUMBERS: tuple[Callable[[Any], Node], ...] = (
    lambda x: x + 1, lambda x: x - 1, lambda x: -x, lambda x: x * 2, lambda x: x / 2, lambda x: x // 2,
    lambda x: x * 10**18, lambda x: x / 10**6, float, str,
)  # fmt: skip
"""Changes of a number."""


def _name(random: Random) -> str:
    return random.choice([value for value in VALUES if isinstance(value, str)])


def _place(document: Node, random: Random) -> tuple[Any, Any]:
    """A place in a document: the object or list, and the key or index in it."""
    inside = document
    while True:
        key = random.choice(list(inside)) if isinstance(inside, dict) else random.randrange(len(inside))
        value = inside[key]
        if not isinstance(value, dict | list) or not value or random.random() < 0.15:
            return inside, key
        inside = value
