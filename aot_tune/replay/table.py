"""Recorded tables as frozen values: the winner of each search of one kernel on one arch. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aot_tune.replay.problem import Problem
from aot_tune.replay.spelling import Json, Space, text_of
from aot_tune.tables.table import BuiltWith
from aot_tune.values.arch import Arch
from aot_tune.values.lazy import lazy


@dataclass(frozen=True, kw_only=True)
class Library:
    """Distribution that a kernel came from."""

    name: str
    """Distribution's name; empty for a program's own kernel, which is in no distribution."""

    version: str
    """Distribution's version."""


@dataclass(frozen=True, kw_only=True)
class RecordedEntry:
    """Winner of one search."""

    space: str
    """Hash of the search space: of its configs in their order, and of the hints (`spelling.space_hash`)."""

    problem: Problem
    """Problem that was searched."""

    config: Json
    """Winner, as `aot_tune.replay.spelling.spelled` spells it."""

    hints: Mapping[str, int]
    """Hints of the winner's launch on this arch, with the kernel's own."""

    grid: tuple[int, ...]
    """Grid of the winner's launch."""

    mean_us: float
    """Winner's mean time, microseconds."""

    error_margin_us: float
    """Half of the 95 % confidence interval of `mean_us`, microseconds."""

    num_samples: int
    """Number of samples of `mean_us`."""

    first_us: float | None
    """First config's mean time in the same search, microseconds; None where that config failed."""

    signature: str
    """JIT signature of the winner's launch."""

    count: int = 1
    """Number of recorded searches of this problem that this config won."""

    @lazy
    def text(self) -> str:
        """Return the winner's spelling as a line, to be compared with a search space's configs."""
        return text_of(self.config)

    @property
    def gain(self) -> float | None:
        """Return the first config's time / the winner's time; None where the first config failed."""
        return None if self.first_us is None else self.first_us / self.mean_us


@dataclass(frozen=True, order=True)
class Launched:
    """A library's launch with hints or a signature of no winner, also of a kernel that nothing searched."""

    hints: tuple[tuple[str, int], ...]
    """Hints on this arch, with the kernel's own, in cuTile's order."""

    signature: str
    """JIT signature."""


@dataclass(frozen=True, kw_only=True)
class RecordedTable:
    """One kernel's recorded searches on one arch.

    Searches of one problem may have several winners, where the contents of an index tensor matter. Each
    winner has an entry, and the first is replayed.
    """

    module: str
    """Module of the kernel's function."""

    kernel: str
    """Qualified name of the kernel's function."""

    arch: Arch
    """Arch of the GPU that was measured."""

    source_hash: str
    """Hash of the kernel's code, without hints: one function may be searched with several."""

    library: Library
    """Distribution that the kernel came from."""

    built_with: BuiltWith
    """GPU and software that were measured."""

    entries: tuple[RecordedEntry, ...]
    """Winners."""

    launched: tuple[Launched, ...] = ()
    """Launches that no search measured. Cubins are made for them too."""

    @property
    def compilations(self) -> tuple[Launched, ...]:
        """Return all launches that need a cubin, sorted, each once."""
        return tuple(sorted({*self.won, *self.launched}))

    @property
    def won(self) -> tuple[Launched, ...]:
        """Return the winners' launches."""
        return tuple(Launched(tuple(entry.hints.items()), entry.signature) for entry in self.entries)

    @lazy
    def by_space(self) -> Mapping[str, tuple[RecordedEntry, ...]]:
        """Return the entries of each search space, in their order."""
        by_space: dict[str, list[RecordedEntry]] = {}
        for entry in self.entries:
            by_space.setdefault(entry.space, []).append(entry)
        return {space: tuple(entries) for space, entries in by_space.items()}

    def of(self, space: Space) -> Iterator[RecordedEntry]:
        """Yield the entries of a search space whose winner is in it, with the same hints as far as known."""
        for digest in space.hashes:
            for entry in self.by_space.get(digest, ()):
                if entry.text in space.launched and space.launched[entry.text] in (None, entry.hints):
                    yield entry


def name_of(module: str, kernel: str) -> str:
    """Return a recorded kernel's name for users and archives: ``tilegym.ops.cutile.matmul._matmul``."""
    return f"{module}.{kernel}"


def file_name(module: str, kernel: str) -> str:
    """Return the file name of a recorded table: ``tilegym.ops.cutile.matmul._matmul_kernel.json``.

    It contains the module, so that kernels of one name get different files. It contains a dot; the name of a
    declared kernel's table has none. The brackets of a function within a function are left out.
    """
    return f"{name_of(module, kernel)}.json".replace("<", "").replace(">", "")
