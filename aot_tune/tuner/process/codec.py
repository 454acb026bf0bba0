"""Encode messages between a process and its worker as JSON, and decode them strictly.

A message is made of None, bools, ints, floats, strings, lists, dicts with string keys, paths, archs, configs,
problems, and dataclasses that were registered with `message`. A tuple arrives as a list, but a field of a
dataclass has its annotated type. Unlike a pickle, a message never imports or calls anything: a kernel that
writes into the wrong memory or file can at worst make a message that `decode` refuses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from aot_tune.errors import AotTuneError
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

MOST_BYTES = 16 << 20
"""Largest message, bytes. The largest real ones, requests with hundreds of configs, take some 100 KB."""

_KIND = "is"
"""Key of an object's type. As a keyword of Python it is the name of no argument."""

_Registered = TypeVar("_Registered", bound=type)
_messages: dict[str, type] = {}


class MessageError(Exception):
    """Not a message: unparsable bytes, an unknown type, a wrong field, or too many bytes."""


def message(kind: _Registered) -> _Registered:
    """Register a dataclass whose instances may be sent; usable as a decorator.

    Both processes must import the module that registers it.
    """
    assert _messages.setdefault(kind.__name__, kind) is kind, f"two messages have the name {kind.__name__}"
    return kind


def encode(value: object) -> bytes:
    """Encode a value as the bytes of a message.

    Raises:
        MessageError: The value has a part that cannot be sent, or takes more than `MOST_BYTES`.
    """
    try:
        data = json.dumps(_plain(value), separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a value cannot be sent: {error}") from error
    if len(data) > MOST_BYTES:
        raise MessageError(f"a message has {len(data)} bytes, {MOST_BYTES} at most can be sent")
    return data


def decode(data: bytes) -> Any:
    """Decode the bytes of a message.

    Raises:
        MessageError: The bytes are not a message. No bytes raise another error.
    """
    if len(data) > MOST_BYTES:
        raise MessageError(f"a message has {len(data)} bytes, {MOST_BYTES} at most are read")
    try:
        return _value(json.loads(data.decode()))
    except MessageError:
        raise
    except (ValueError, RecursionError, AotTuneError) as error:
        raise MessageError(f"no message: {str(error)[:200]}") from error


# Encoding ---------------------------------------------------------------------------------------------------


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return {_KIND: "Path", "path": str(value)}
    if isinstance(value, Arch):
        return {_KIND: "Arch", "arch": str(value)}
    if isinstance(value, Config):
        parts = {"constants": _pairs(value.constants), "hints": _pairs(value.hints), "kernel": value.kernel}
        return {_KIND: "Config", **parts}
    if isinstance(value, Problem):
        return {_KIND: "Problem", "values": _pairs(value)}
    if _messages.get(type(value).__name__) is type(value):
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        return {_KIND: type(value).__name__} | {
            field.name: _plain(getattr(value, field.name)) for field in fields
        }
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _KIND:
                raise MessageError(f"a value cannot be sent: a dict has the key {key!r:.80}")
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(part) for part in value]
    raise MessageError(f"a value cannot be sent: {type(value).__name__}")


def _pairs(values: Mapping[str, object]) -> list[list[object]]:
    return [[name, value] for name, value in values.items()]


# Decoding ---------------------------------------------------------------------------------------------------


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(part) for part in plain]
    if not isinstance(plain, dict):
        return plain
    if _KIND not in plain:
        return {key: _value(part) for key, part in plain.items()}
    fields = {key: part for key, part in plain.items() if key != _KIND}
    kind = plain[_KIND]
    if isinstance(kind, str) and kind in _BUILT:
        names, build = _BUILT[kind]
        _same_names(kind, names, fields)
        return build(*(fields[name] for name in names))
    if isinstance(kind, str) and kind in _messages:
        return _dataclass(_messages[kind], {key: _value(part) for key, part in fields.items()})
    raise MessageError(f"no message: the unknown type {kind!r:.80}")


def _dataclass(kind: type, fields: dict[str, Any]) -> Any:
    hints = _hints(kind)
    _same_names(kind.__name__, tuple(hints), fields)
    return kind(**{name: _as(hints[name], part, f"{kind.__name__}.{name}") for name, part in fields.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _same_names(kind: str, names: tuple[str, ...], fields: Mapping[str, object]) -> None:
    if fields.keys() != set(names):
        raise MessageError(f"no message: {kind} with the fields {', '.join(fields)[:200]}")


def _as(hint: Any, value: Any, place: str) -> Any:
    """Check a value against a field's annotation, and turn a list into an annotated tuple."""
    if hint is object or hint is Any:
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for argument in arguments:
            try:
                return _as(argument, value, place)
            except MessageError:
                continue
    elif origin is Literal:
        if any(type(value) is type(literal) and value == literal for literal in arguments):
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(_as(arguments[0], part, place) for part in value)
    elif origin is not None and issubclass(dict, origin):
        if isinstance(value, dict):
            return {key: _as(arguments[1], part, place) for key, part in value.items()}
    elif hint is float:
        if type(value) in (int, float):
            return value
    elif (type(value) is hint) if hint in (bool, int, str) else isinstance(value, hint):
        return value
    raise MessageError(f"no message: {place} is {value!r:.80}")


def _named(pairs: Any, place: str) -> dict[str, Any]:
    """Return a dict from pairs of name and value."""
    if not isinstance(pairs, list):
        raise MessageError(f"no message: {place} is {pairs!r:.80}")
    values: dict[str, Any] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise MessageError(f"no message: {place} has {pair!r:.80}")
        values[pair[0]] = pair[1]
    return values


def _path(text: Any) -> Path:
    return Path(_as(str, text, "Path"))


def _arch(text: Any) -> Arch:
    return Arch.parse(_as(str, text, "Arch"))


def _config(constants: Any, hints: Any, kernel: Any) -> Config:
    named = {"constants": _named(constants, "Config.constants"), "hints": _named(hints, "Config.hints")}
    return Config(**named, kernel=_as(str | None, kernel, "Config.kernel"))


def _problem(values: Any) -> Problem:
    return Problem(_named(values, "Problem.values"))


_BUILT: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "Path": (("path",), _path),
    "Arch": (("arch",), _arch),
    "Config": (("constants", "hints", "kernel"), _config),
    "Problem": (("values",), _problem),
}
"""Paths and the types of `aot_tune.values`: the names of their fields, and their constructors."""
