"""A table of recorded searches as frozen values: what won which search of one kernel on one arch. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aot_tune.replay.problem import Problem
from aot_tune.replay.spelling import Json, text_of
from aot_tune.tables.table import BuiltWith
from aot_tune.values.arch import Arch
from aot_tune.values.lazy import lazy


@dataclass(frozen=True, kw_only=True)
class Library:
    """The distribution that a kernel came from."""

    name: str
    """Its name; empty for a program of its own, which no distribution holds."""

    version: str
    """Its version."""


@dataclass(frozen=True, kw_only=True)
class RecordedEntry:
    """The winner of one search."""

    space: str
    """The hash of the search space's configs, in their order."""

    problem: Problem
    """What the search was for."""

    config: Json
    """The winner, as `aot_tune.replay.spelling.spelled` spells it."""

    hints: Mapping[str, int]
    """The hints that the winner was launched with on this arch, the kernel's own among them."""

    grid: tuple[int, ...]
    """The grid that the winner was launched with."""

    mean_us: float
    """The winner's mean time, microseconds."""

    error_margin_us: float
    """Half of its 95 % confidence interval, microseconds."""

    num_samples: int
    """The number of samples behind it."""

    first_us: float | None
    """The first config's mean time in the same search, microseconds; None where it failed."""

    signature: str
    """The JIT signature that the winner was launched with."""

    count: int = 1
    """The number of recorded searches of this problem that this config won."""

    @lazy
    def text(self) -> str:
        """The winner's spelling as a line: what a search space's configs are compared with."""
        return text_of(self.config)

    @property
    def gain(self) -> float | None:
        """How many times as fast as the first config the winner is; None where the first config failed."""
        return None if self.first_us is None else self.first_us / self.mean_us


@dataclass(frozen=True, order=True)
class Launched:
    """What a library launched beside its searches: other hints or arguments than any winner's."""

    hints: tuple[tuple[str, int], ...]
    """The hints on this arch, the kernel's own among them, in cuTile's order."""

    signature: str
    """The JIT signature."""


@dataclass(frozen=True, kw_only=True)
class RecordedTable:
    """One kernel's recorded searches on one arch.

    Where searches of one problem had several winners, because the contents of an index tensor matter, each
    has an entry, and the first of them counts.
    """

    module: str
    """The module of the kernel's function."""

    kernel: str
    """The qualified name of the kernel's function."""

    arch: Arch
    """The arch."""

    source_hash: str
    """The hash of the kernel's code and of its decorator's hints."""

    library: Library
    """Where the kernel came from."""

    built_with: BuiltWith
    """The GPU and the software with which the figures were taken."""

    entries: tuple[RecordedEntry, ...]
    """The winners."""

    launched: tuple[Launched, ...] = ()
    """What the library launched otherwise than it searched; cubins are made for it too."""

    @property
    def compilations(self) -> tuple[Launched, ...]:
        """All that replaying launches, sorted, each once."""
        winners = (Launched(tuple(one.hints.items()), one.signature) for one in self.entries)
        return tuple(sorted({*winners, *self.launched}))

    @lazy
    def by_space(self) -> Mapping[str, tuple[RecordedEntry, ...]]:
        """The entries of each search space, in their order."""
        found: dict[str, list[RecordedEntry]] = {}
        for entry in self.entries:
            found.setdefault(entry.space, []).append(entry)
        return {space: tuple(entries) for space, entries in found.items()}


def name_of(module: str, kernel: str) -> str:
    """The name by which people and archives call a recorded kernel: ``tilegym.ops.cutile.matmul._matmul``."""
    return f"{module}.{kernel}"


def file_name(module: str, kernel: str) -> str:
    """The name of a kernel's recorded table: ``tilegym.ops.cutile.matmul._matmul_kernel.json``.

    It has the module in it, so that two kernels of one name never meet, and a dot, so that it never meets the
    table of a declared kernel, whose name has none. The brackets of a function within a function are left
    out.
    """
    return f"{name_of(module, kernel)}.json".replace("<", "").replace(">", "")
