"""Interface of a table's file for the verbs, for both kinds of tables. Prints nothing."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from aot_tune.cli.documents.former import Form
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import NewerSchemaError, TableError
from aot_tune.tables.files import read_bytes


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Fault of a table, an archive or a folder of them, or a remark on it."""

    path: str
    """File or folder at fault."""

    entry: str = ""
    """Bucket, ``M=64 N=4096``, or another place in the file; empty for the whole file."""

    what: str
    """Description of the fault."""

    fix: str
    """Next step for the user."""

    remark: bool = False
    """Whether the finding is a remark, which fails no check."""

    def __str__(self) -> str:
        parts = ("remark" if self.remark else "", self.path, self.entry, self.what, self.fix)
        return ": ".join(part for part in parts if part)


class Winner(NamedTuple):
    """Entry of a table, as `aot-tune diff` compares and prints it."""

    entry: Any
    """Entry, with ``mean_us`` and ``gain``. Equal entries did not change."""

    parts: Mapping[str, str]
    """Parts of the config by name, as text: they differ where another config won."""

    place: object
    """Bucket or problem as data; its text is for the user."""

    config: str
    """Config as text."""

    data: Mapping[str, object]
    """Config and times as data."""

    evidence: str = "measured"
    """Evidence of the time: measured or predicted."""


@dataclass(frozen=True, kw_only=True)
class FileState:
    """File that may hold a kernel's table."""

    kernel: str
    """Kernel's name."""

    path: Path
    """Table's file, which need not exist."""

    state: str
    """File's contents or fault, in words."""

    usable: bool
    """Whether a launch would use entries of this table."""


Own = TypeVar("Own", bound="Document")


class Document(ABC):
    """Table and its file.

    Attributes:
        kind: The kind of the table.
        noun: The name of such a file.
        again: The command that makes such a table anew.
        baseline: The config that gains are relative to.
        place_name: The name of `Winner.place` in JSON.
        needs_declaration: Whether the kernel must be declared.
        heads: The heads of the columns of `overview`.
        parse: Reads a file's bytes; raises a `TableError`.
        dump: Table -> the bytes that aot-tune writes.
        form: The present form of such tables, for reading earlier forms.
        right_place: File and table -> the table's path in a folder of tables; None when it is there already.
    """

    kind: ClassVar[str]
    noun: ClassVar[str]
    again: ClassVar[str]
    baseline: ClassVar[str]
    place_name: ClassVar[str]
    needs_declaration: ClassVar[bool]
    heads: ClassVar[tuple[str, ...]]
    parse: ClassVar[staticmethod[..., Any]]
    dump: ClassVar[staticmethod[..., bytes]]
    form: ClassVar[Form]
    right_place: ClassVar[staticmethod[..., str | None]]

    def __init__(self, path: Path, table: Any) -> None:
        self.path = path
        self.table = table
        self.difference: str | None = None
        """Difference of the file's form from the present one, in words; None where there is none."""

    @classmethod
    def read(cls: type[Own], path: Path) -> Own:
        """Read and check a table.

        Raises:
            TableError: The file is not such a table. The message starts with the path.
            StoreError: The file does not exist, is not a regular file, or cannot be read.
        """
        data = read_bytes(path)
        try:
            return cls(path, cls.parse(data))
        except TableError as error:
            raise type(error)(f"{path}: {error.problem}", error.path) from None

    @classmethod
    def read_old(cls: type[Own], path: Path) -> Own:
        """Read a table that may have an earlier form, for `winners` and `remarks` alone.

        Raises:
            TableError: As of `read`.
            StoreError: As of `read`.
        """
        try:
            return cls.read(path)
        except NewerSchemaError:
            raise
        except TableError as error:
            try:
                former = cls.form.parse_former(read_bytes(path))
            except TableError:
                former = None
            if former is None:
                raise error from None
        document = cls(path, former[0])
        document.difference = former[1]
        return document

    def entries(self, older: Document | None) -> Iterator[Any]:
        """Return the entries. Where an older table has an earlier form, keep only fields that both have."""
        earlier = older is not None and older.difference is not None
        return map(self.form.only_compared, self.table.entries) if earlier else iter(self.table.entries)

    def form_remarks(self, old: Document) -> Iterator[str]:
        """Yield a line where the form of the older file differs."""
        if old.difference is not None:
            yield old.difference

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the kernel's name."""

    @abstractmethod
    def overview(self) -> tuple[str, ...]:
        """Return the table as a row below `heads`."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the whole table as text."""

    def in_names_of(self: Own, new: Document) -> tuple[Own, tuple[str, ...]]:
        """Return the table with a newer table's names, and a line for the names that differ."""
        return self, ()

    @abstractmethod
    def winners(self, older: Any = None) -> Mapping[Hashable, Winner]:
        """Return `entries` by bucket or search, in order."""

    @abstractmethod
    def remarks(self, old: Any) -> Iterator[str]:
        """Yield a line for each difference from an older table outside the entries."""

    @abstractmethod
    def faults(self, kernel: FoundKernel | None, *, own: bool) -> Iterator[Finding]:
        """Yield the table's faults, in comparison with the present kernel.

        Args:
            kernel: The kernel's declaration, for a table that needs one.
            own: Whether the table is in the folder of the kernel's own package.
        """

    @property
    def gains(self) -> list[float]:
        """Return the entries' gains that are known."""
        return [entry.gain for entry in self.table.entries if entry.gain is not None]

    @property
    def portfolio_regret(self) -> float:
        """Return the worst regret of the table's portfolio; 0 of a table without one."""
        return 0.0

    def finding(self, entry: str, what: str, fix: str, *, remark: bool = False) -> Finding:
        """Return a finding in this file."""
        return Finding(path=str(self.path), entry=entry, what=what, fix=fix, remark=remark)

    def data(self) -> dict[str, object]:
        """Return the table as data: its document, and the path of its file."""
        return {"path": self.path, **json.loads(type(self).dump(self.table))}

    def made_with(self) -> str:
        """Return the GPU and the versions that were measured, in a line."""
        built = self.table.built_with
        versions = f"cuda-tile {built.cuda_tile}, tileiras {built.tileiras}"
        versions += f", driver {built.driver}" if built.driver else ""
        source = self.table.source_hash
        return f"{built.device_name}, {built.sm_count} multiprocessors, {versions}; source {source}"

    def source_remarks(self, old: Document) -> Iterator[str]:
        """Yield a line where the kernel's code differs."""
        if old.table.source_hash != self.table.source_hash:
            yield f"source {old.table.source_hash} -> {self.table.source_hash}"

    def built_with_remarks(self, old: Document) -> Iterator[str]:
        """Yield a line for each difference of GPU and software."""
        for name in ("device_name", "sm_count", "cuda_tile", "tileiras", "driver"):
            before, after = getattr(old.table.built_with, name), getattr(self.table.built_with, name)
            if before != after:
                yield f"{name} {before or 'none'} -> {after or 'none'}"
