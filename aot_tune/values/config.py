"""A config: the constants and hints of one candidate of a search space. Pure: uses no kernel and no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from aot_tune.errors import DeclarationError

Constant = bool | int | float | str
"""Type of the ``ct.Constant`` arguments that a table can hold."""

HINTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "num_ctas": (1, 2, 4, 8, 16),
        "occupancy": tuple(range(1, 33)),
        "num_worker_warps": (1, 2, 4, 8, 16, 32),
        "opt_level": (0, 1, 2, 3),
    }
)
"""Hints of ``replace_hints`` in canonical order, each with the values that cuTile accepts."""


_PLAIN = frozenset({bool, int, float, str})

_BY_TARGET = "ByTarget"
"""Name of cuTile's class of values by arch. Identifies the class, because nothing here imports cuTile."""


class Config:
    """One candidate: a kernel's ``ct.Constant`` arguments and its compiler hints. Frozen and hashable.

    Two configs are equal when they hold the same values, in whatever order they were written. Hints print in
    the order of `HINTS`. Constants print in the order in which they were written; a `Tunable` puts them into
    the order of the kernel's parameters.

    Args:
        constants: Each constant's value, by name: a bool, int, float or str.
        hints: Each hint's value, by a name of `HINTS`; in a search space also a ``ct.ByTarget`` of such
            values.
        kernel: The name of the config's kernel, where a declaration has several.

    Raises:
        DeclarationError: A value is of another type, a hint is unknown, or cuTile would refuse its value.
    """

    __slots__ = ("_hash", "_key", "by_target", "constants", "hints", "kernel")

    _hash: int
    _key: tuple[object, ...]

    constants: Mapping[str, Constant]
    """Values of the kernel's constants, by name."""

    hints: Mapping[str, int]
    """Compiler hints. Only a config that an author wrote may hold a ``ct.ByTarget``: a declaration puts the
    arch's value in its place before anything else reads the config."""

    by_target: bool
    """Whether a hint is a ``ct.ByTarget``."""

    kernel: str | None
    """Name of the config's kernel; None where the declaration has one kernel."""

    def __init__(
        self,
        *,
        constants: Mapping[str, Constant] | None = None,
        hints: Mapping[str, Any] | None = None,
        kernel: str | None = None,
    ) -> None:
        given_constants, given_hints = dict(constants or {}), dict(hints or {})
        by_target = False
        for name, value in given_constants.items():
            if type(value) not in _PLAIN:
                value = given_constants[name] = _plain(name, value)
            if type(value) is float and not math.isfinite(value):
                raise DeclarationError(f"constant {name} is {value!r}; write a finite number")
        for hint, number in given_hints.items():
            if hint not in HINTS:
                raise DeclarationError(f"{hint!r} is not a compiler hint; write one of {' '.join(HINTS)}")
            if type(number).__name__ == _BY_TARGET:
                by_target = True
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number not in HINTS[hint]:
                raise DeclarationError(f"hint {hint} is {number!r}; cuTile takes {_values(HINTS[hint])}")
        if kernel is not None and not (type(kernel) is str and kernel.isidentifier()):
            raise DeclarationError(f"kernel is {kernel!r:.80}; write the name of one of the kernels, or None")
        ordered_hints = {hint: given_hints[hint] for hint in HINTS if hint in given_hints}
        # True == 1 and 0.0 == -0.0 in Python, but they are different constants to a kernel.
        key = (
            frozenset(
                (name, type(value).__name__, value or str(value)) for name, value in given_constants.items()
            ),
            tuple((hint, repr(v)) for hint, v in ordered_hints.items())
            if by_target  # which has no hash
            else tuple(ordered_hints.items()),
            kernel,
        )
        object.__setattr__(self, "constants", MappingProxyType(given_constants))
        object.__setattr__(self, "hints", MappingProxyType(ordered_hints))
        object.__setattr__(self, "kernel", kernel)
        object.__setattr__(self, "by_target", by_target)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Config is frozen; make a new one to change {name}")

    def __getitem__(self, constant: str) -> Constant:
        """Return the constant's value."""
        return self.constants[constant]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (dict(self.constants), dict(self.hints), self.kernel)

    def __repr__(self) -> str:
        return f"Config({self})"

    def __str__(self) -> str:
        named = [("kernel", self.kernel)] if self.kernel is not None else []
        parts = [f"{name}={value}" for name, value in (*named, *self.constants.items(), *self.hints.items())]
        return " ".join(parts) or "no constants, no hints"

    def with_constant_order(self, names: tuple[str, ...]) -> Config:
        """Return an equal config with its constants in the order of `names`."""
        ordered = {name: self.constants[name] for name in names if name in self.constants}
        if list(self.constants) == list(ordered):
            return self
        return Config(constants=ordered, hints=self.hints, kernel=self.kernel)

    @property
    def document(self) -> dict[str, object]:
        """Form of the config in JSON files; a kernel is written only where it is named."""
        named = {} if self.kernel is None else {"kernel": self.kernel}
        return {**named, "constants": dict(self.constants), "hints": dict(self.hints)}


def _plain(name: object, value: object) -> Constant:
    """Convert an enum member, or a value of a subclass of int, float or str, to the plain type."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise DeclarationError(f"constant {name} is {value!r:.80}; write a bool, int, float or str")


def _rebuild(constants: dict[str, Constant], hints: dict[str, int], kernel: str | None) -> Config:
    return Config(constants=constants, hints=hints, kernel=kernel)


def _values(values: tuple[int, ...]) -> str:
    contiguous = len(values) > 5 and values == tuple(range(values[0], values[-1] + 1))
    return f"{values[0]} to {values[-1]}" if contiguous else ", ".join(map(str, values))
