"""Define what the verbs ask of a table's file, whichever kind of table it holds. Prints nothing."""

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
    """One fault of a table, an archive or a folder of them, or something else to know of it."""

    path: str
    """The file or folder that is at fault."""

    entry: str = ""
    """The bucket, ``M=64 N=4096``, or another place in the file; empty when the whole file is at fault."""

    what: str
    """What is wrong."""

    fix: str
    """What to do about it."""

    remark: bool = False
    """Whether it is no fault, so that it fails no check."""

    def __str__(self) -> str:
        parts = ("remark" if self.remark else "", self.path, self.entry, self.what, self.fix)
        return ": ".join(part for part in parts if part)


class Winner(NamedTuple):
    """One entry of a table, as `aot-tune diff` compares and prints it."""

    entry: Any
    """The entry, with ``mean_us`` and ``gain``; equal ones did not change."""

    choice: object
    """What differs where another config won."""

    place: object
    """Its bucket or problem, for a script; the text of it is for people."""

    config: str
    """The config in words."""

    data: Mapping[str, object]
    """The config and its times, for a script."""

    evidence: str = "measured"
    """Whether its time was measured or predicted."""


@dataclass(frozen=True, kw_only=True)
class FileState:
    """One file in which a kernel's table is looked for."""

    kernel: str
    """The kernel's name."""

    path: Path
    """The table's file; it need not exist."""

    state: str
    """What the file holds, or what is wrong with it."""

    usable: bool
    """Whether a launch would use entries of this table."""


Own = TypeVar("Own", bound="Document")


class Document(ABC):
    """A table and its file.

    Attributes:
        kind: The kind of the table.
        noun: What such a file is called.
        again: How such a table is made anew.
        baseline: The config that gains are over.
        place_name: The name of `Winner.place` in JSON.
        needs_declaration: Whether the kernel must be declared.
        heads: The heads of the columns of `overview`.
        parse: Reads a file's bytes; raises a `TableError`.
        dump: Table -> the bytes that aot-tune writes.
        form: The form of such tables, by which earlier ones are read.
        right_place: File and table -> the path where it belongs in a folder of tables; None when it is there.
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
        """How the form of the file differs from the present one, in words; None where it does not."""

    @classmethod
    def read(cls: type[Own], path: Path) -> Own:
        """Read and check a table.

        Raises:
            TableError: The file is not such a table; the message starts with the path.
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
        one = cls(path, former[0])
        one.difference = former[1]
        return one

    def entries(self, beside: Document | None) -> Iterator[Any]:
        """The table's entries, with what an older table `beside` has of them too."""
        earlier = beside is not None and beside.difference is not None
        return map(self.form.only_compared, self.table.entries) if earlier else iter(self.table.entries)

    def form_remarks(self, old: Document) -> Iterator[str]:
        """A line where the form of the older file differs."""
        if old.difference is not None:
            yield old.difference

    @property
    @abstractmethod
    def name(self) -> str:
        """The kernel's name."""

    @abstractmethod
    def overview(self) -> tuple[str, ...]:
        """The table in a row below `heads`."""

    @abstractmethod
    def lines(self) -> list[str]:
        """The whole table for a person."""

    @abstractmethod
    def winners(self, beside: Any = None) -> Mapping[Hashable, Winner]:
        """The entries by bucket or search, in order, with what an older table `beside` has of them too."""

    @abstractmethod
    def remarks(self, old: Any) -> Iterator[str]:
        """What differs from an older table of the kernel beside the entries, a line each."""

    @abstractmethod
    def faults(self, found: FoundKernel | None, *, own: bool) -> Iterator[Finding]:
        """What is wrong with the table, compared with the kernel that is here.

        Args:
            found: The kernel's declaration, for a table that needs one.
            own: Whether the table lies in the folder of the kernel's own package.
        """

    def finding(self, entry: str, what: str, fix: str, *, remark: bool = False) -> Finding:
        """A finding in this file."""
        return Finding(path=str(self.path), entry=entry, what=what, fix=fix, remark=remark)

    def data(self) -> dict[str, object]:
        """The table for a script: its document, and the path of its file."""
        return {"path": self.path, **json.loads(type(self).dump(self.table))}

    def made_with(self) -> str:
        """The GPU and the versions behind the times, in a line."""
        built = self.table.built_with
        versions = f"cuda-tile {built.cuda_tile}, tileiras {built.tileiras}"
        versions += f", driver {built.driver}" if built.driver else ""
        source = self.table.source_hash
        return f"{built.device_name}, {built.sm_count} multiprocessors, {versions}; source {source}"

    def source_remarks(self, old: Document) -> Iterator[str]:
        """A line where the kernel's code differs."""
        if old.table.source_hash != self.table.source_hash:
            yield f"source {old.table.source_hash} -> {self.table.source_hash}"

    def built_with_remarks(self, old: Document) -> Iterator[str]:
        """A line for each part of the GPU and the software that differs."""
        for name in ("device_name", "sm_count", "cuda_tile", "tileiras", "driver"):
            before, after = getattr(old.table.built_with, name), getattr(self.table.built_with, name)
            if before != after:
                yield f"{name} {before or 'none'} -> {after or 'none'}"
