"""A problem: the sizes and dtypes of one call, which the choice of a config depends on. Pure."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping

from aot_tune.errors import DeclarationError

Value = int | str | bool


_PLAIN = frozenset({int, str, bool})


class Problem(Mapping[str, Value]):
    """Sizes (int) and classes (str or bool: dtypes, layouts, flags) by name. Frozen, hashable, ordered.

    ``problem["M"]`` and ``problem.M`` are one value. A ``torch.dtype`` is kept as its name, ``bfloat16``.
    """

    __slots__ = ("_hash", "_values")
    _hash: int | None
    _values: dict[str, Value]

    def __init__(self, values: Mapping[str, object]) -> None:
        plain: dict[str, Value] = {}
        for name, value in values.items():
            if type(value) not in _PLAIN:
                value = _plain(name, value)
            plain[name] = value  # type: ignore[assignment]
        object.__setattr__(self, "_values", plain)
        object.__setattr__(self, "_hash", None)  # computed on demand: most are never hashed

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __getattr__(self, name: str) -> Value:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"this problem has no {name}; it has {' '.join(self._values)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Problem is frozen; use replaced()")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, Value]:
        """Return the dict's own view, which is faster than Mapping's."""
        return self._values.items()

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash(frozenset(self._values.items())))
        return self._hash  # type: ignore[return-value]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self._values == other._values

    def __reduce__(self) -> tuple[object, ...]:
        return Problem, (dict(self._values),)

    def __repr__(self) -> str:
        return f"Problem({self})"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._values.items())

    def size(self, name: str) -> int:
        """Return the size called `name`; the caller ensures that it is a size."""
        # Not asserted, for speed: one choice of a config reads a hundred sizes.
        return self._values[name]  # type: ignore[return-value]

    def replaced(self, **values: Value) -> Problem:
        """Return a copy of this problem with other values for the named keys."""
        return Problem({**self._values, **values})


def _plain(name: str, value: object) -> Value:
    """Convert a dtype to its name, and a value of a subclass of int or str to the plain type."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise DeclarationError(
        f"a problem's {name} is {value!r:.80} of type {kind.__name__}; "
        "return an int size, a dtype, a str or a bool"
    )


def problem_option(problem: Problem) -> str:
    """Format a problem for the option --problem: ``M=300,N=4096,K=4096,dtype=bfloat16``."""
    return ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in problem.items()
    )
