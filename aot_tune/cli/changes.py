"""What changed between two tables, declared or recorded: its form, and the words and marks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from aot_tune.tables.table import BuiltWith
from aot_tune.values.arch import Arch

Kind = Literal["added", "removed", "config", "figures"]
"""How an entry changed: it was added, it was removed, another config won, or only its figures differ."""

SIGNS: Mapping[Kind, str] = {"added": "+", "removed": "-", "config": "!", "figures": "~"}
"""The mark that an entry's line begins with."""

WORDS: Mapping[Kind, str] = {
    "added": "added",
    "removed": "removed",
    "config": "with another config",
    "figures": "with other figures only",
}
"""The words that the summary counts the changes with."""


class Timed(Protocol):
    """An entry of either kind of table."""

    @property
    def mean_us(self) -> float:
        """The winner's mean time, microseconds."""


E = TypeVar("E", bound=Timed)
T = TypeVar("T")
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Change(Generic[E]):
    """One entry that changed."""

    kind: Kind
    """How it changed."""

    old: E | None
    """The entry before; None when it was added."""

    new: E | None
    """The entry after; None when it was removed."""

    @property
    def speedup(self) -> float | None:
        """The winner's time before / its time after; None when one of the entries is missing."""
        return None if self.old is None or self.new is None else self.old.mean_us / self.new.mean_us


@dataclass(frozen=True, kw_only=True)
class TableChanges(Generic[T, C]):
    """The changes of one kernel's table for one arch."""

    kernel: str
    """The kernel's name."""

    arch: Arch
    """The arch that the tables are for."""

    old: T | None
    """The table before; None when the table was added."""

    new: T | None
    """The table after; None when the table was removed."""

    changes: tuple[C, ...]
    """The entries that changed, in the table's order."""

    remarks: tuple[str, ...]
    """What changed outside the entries: source, device, compiler and the like; one line each."""

    @property
    def empty(self) -> bool:
        """Whether nothing changed."""
        return not self.changes and not self.remarks


def kind_of(old: E | None, new: E | None, config_of: Callable[[E], object]) -> Kind | None:
    """How an entry changed; None where it is the same.

    Args:
        old: The entry before.
        new: The entry after.
        config_of: Entry -> what tells its config from others.
    """
    if old is None:
        return "added"
    if new is None:
        return "removed"
    if config_of(old) != config_of(new):
        return "config"
    return None if old == new else "figures"


def built_with_remarks(old: BuiltWith, new: BuiltWith) -> Iterator[str]:
    """A line for each part of the GPU and the software that differs."""
    for name in ("device_name", "sm_count", "cuda_tile", "tileiras", "driver"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{name} {before or 'none'} -> {after or 'none'}"
