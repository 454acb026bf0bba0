"""Spell a library's configs and hints as JSON, so that equal values are equal texts in every process.

An author may choose any form of config: namespaces, mappings, data classes, named tuples, tuples, objects of
plain classes, numbers, None, and these in each other. No config is ever rebuilt from a spelling: a recorded
config is looked up by its text in the present search space. So a spelling names types, and nothing is
imported.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from aot_tune.errors import UnspelledError

Json = Any
"""None, bool, int, float, str, and lists and str-keyed dictionaries of these."""

MOST_DEPTH = 8
"""Deepest nesting of a config. Real configs have two levels."""

LONGEST = 8_000
"""Most characters of one spelled config. Real ones have about a hundred."""

HASH_DIGITS = 16
"""Hexadecimal digits of a search space's hash: 64 bits. Nobody gains by forging one."""

_PRINTED = ("torch", "numpy", "cuda.tile")
"""Modules whose values are spelled by their printed form: ``torch.float16``, ``ByTarget(sm_100=2)``."""

_LARGEST = 2**63
"""Whole numbers from here on differ between readers of JSON."""


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, sort_keys=True)
"""Made once: `json.dumps` would make one for each value of a table."""


class _Plain:
    """Class whose objects hold nothing outside their ``__dict__``."""


def spelled(value: object, depth: int = 0) -> Json:
    """Return a config, hint or constant as JSON.

    Numbers, texts, None and lists are the same in JSON. Anything else is an object of one key, its type:
    ``{"SimpleNamespace": {"TILE_M": 64}}``, ``{"tuple": [1, 2]}``, ``{"mylib.Config": {"num_ctas": 1}}``.

    Raises:
        UnspelledError: The value's type has no spelling. The message names the type.
    """
    if depth > MOST_DEPTH:
        raise UnspelledError(f"it is nested more than {MOST_DEPTH} deep")
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if not -_LARGEST <= value < _LARGEST:
            raise UnspelledError(f"the number {value} has more than 64 bits")
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise UnspelledError(f"{value} is not a finite number")
        return value
    if type(value) is list:
        return [spelled(item, depth + 1) for item in value]
    if type(value) is tuple:
        return {"tuple": [spelled(item, depth + 1) for item in value]}
    if isinstance(value, enum.Enum):
        return {_type_name(value): value.name}
    return {_type_name(value): _fields(value, depth + 1)}


def _fields(value: Any, depth: int) -> Json:
    """Return the content of an object by name, in alphabetical order."""
    named: Mapping[Any, Any]
    if isinstance(value, Mapping):
        named = value
    elif dataclasses.is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        named = value._asdict()
    elif type(value).__module__.startswith(_PRINTED):
        return _printed(value)
    elif isinstance(value, SimpleNamespace) or (_is_plain(type(value)) and getattr(value, "__dict__", None)):
        named = vars(value)
    else:
        raise UnspelledError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be spelled; use a "
            "SimpleNamespace, a mapping, a dataclass, a NamedTuple, a tuple, a plain class or plain values"
        )
    if not all(type(name) is str for name in named):
        raise UnspelledError("a mapping with keys that are not texts cannot be spelled")
    return {name: spelled(named[name], depth) for name in sorted(named)}


def _is_plain(kind: type) -> bool:
    """Whether a class's objects hold nothing outside their ``__dict__``: no slots, and nothing of C code."""
    return kind.__basicsize__ == _Plain.__basicsize__ and not any(
        "__slots__" in vars(c) for c in kind.__mro__
    )


def _printed(value: object) -> str:
    text = repr(value)
    if " at 0x" in text or "\n" in text:
        raise UnspelledError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be spelled")
    return text


def _type_name(value: object) -> str:
    kind = type(value)
    plain = kind in (dict, SimpleNamespace)
    return kind.__name__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def text_of(spelling: Json) -> str:
    """Return a spelling as one line. Equal spellings are equal lines.

    Raises:
        UnspelledError: It has more than `LONGEST` characters.
    """
    text = str(spelling) if type(spelling) is int else _ENCODER.encode(spelling)
    if len(text) > LONGEST:
        raise UnspelledError(f"it has {len(text)} characters, more than {LONGEST}")
    return text


def texts_of(space: Sequence[object]) -> tuple[str, ...]:
    """Return the spelled configs of a search space, in its order.

    Raises:
        UnspelledError: A config cannot be spelled. The message names it and the reason.
    """
    texts: list[str] = []
    for number, config in enumerate(space):
        try:
            texts.append(text_of(spelled(config)))
        except UnspelledError as error:
            raise UnspelledError(f"config {number} of {len(space)}: {error}") from None
    return tuple(texts)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Search space of a search on one arch."""

    hashes: tuple[str, ...]
    """Its `space_hash`, and last that of tables without hints by config."""

    texts: tuple[str, ...]
    """Configs, spelled."""

    launched: Mapping[str, Mapping[str, int] | None]
    """Hints of each config's launch, by text; None where it cannot be launched."""


def space_of(
    texts: Sequence[str], hints: Mapping[str, int], launched: Sequence[Mapping[str, int] | None]
) -> Space:
    """Return a search space. The arguments are those of `space_hash`."""
    hashes = dict.fromkeys((space_hash(texts, hints, launched), space_hash(texts, hints)))
    by_text = dict(zip(texts, launched, strict=True))
    return Space(hashes=tuple(hashes), texts=tuple(texts), launched=by_text)


def space_hash(
    texts: Sequence[str], hints: Mapping[str, int], launched: Sequence[Mapping[str, int] | None] = ()
) -> str:
    """Return the hash of a search space: of its configs' texts in their order, and of the hints.

    Args:
        texts: The configs, spelled.
        hints: The hints of the kernel for the first config on the searched arch, without those of the config.
        launched: The hints of each config's launch on that arch; None where it cannot be launched. They
            count where one is neither among `hints` nor a field of the config with that name.
    """
    lines = [*texts, text_of(hints)]
    further = [_further(text, hints, of_config) for text, of_config in zip(texts, launched, strict=False)]
    if any(further):
        lines += map(text_of, further)
    return sha256("\n".join(lines).encode()).hexdigest()[:HASH_DIGITS]


def _further(text: str, hints: Mapping[str, int], launched: Mapping[str, int] | None) -> Json:
    """Return the hints of a launch that are neither the kernel's own nor in the config under their name."""
    if launched is None or launched == hints:
        return {}
    config = json.loads(text)
    fields = next(iter(config.values())) if isinstance(config, dict) else None
    known = {**hints, **fields} if isinstance(fields, dict) else hints
    pairs = ((name, launched.get(name)) for name in {*hints, *launched})
    return {name: value for name, value in pairs if value not in (hints.get(name), known.get(name))}
