"""What a pull request's tables must satisfy, as a list of findings. Needs the declarations, and no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aot_tune.cubins.archive import FILE_NAME
from aot_tune.declare import checks
from aot_tune.declare.fingerprint import hashing
from aot_tune.errors import ArchError, StoreError, TableError, UsageError
from aot_tune.tables import files, reader, store, writer
from aot_tune.tables.fit import entry_complaints, portfolio_complaints
from aot_tune.tables.table import Table
from aot_tune.tuner.archives import check as check_archives
from aot_tune.values.arch import Arch

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration
    from aot_tune.declare.discovery import Broken, Found


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    path: str
    """The file or folder."""

    entry: str
    """The bucket, ``M=64 N=4096``, or another place in the file; empty for the whole."""

    what: str
    """What is wrong."""

    fix: str
    """What to do about it."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.path, self.entry, self.what, self.fix) if part)


def check(found: Mapping[str, Found], path: Path | None = None) -> list[Finding]:
    """Check tables against their kernels' declarations.

    Args:
        found: The declared kernels by name.
        path: A table, an archive, an arch's folder or a folder of those; None for what lies in the
            folders of every kernel in `found`.

    Raises:
        UsageError: `path` does not exist, or nothing that could be checked lies there.
    """
    folders = _package_folders(found.values())
    if path is None:
        return [
            finding for folder, kernels in folders.items() for finding in _root(folder, kernels, own=True)
        ]
    if not path.exists():
        raise UsageError(
            f"{path} does not exist; give a table, a folder of tables, or nothing for all kernels' own"
        )
    here = path.resolve()
    path = path if path.name not in ("", "..") else here  # whose name says which arch it is of
    home = next((folder for folder in folders if folder.resolve() in (here, *here.parents)), None)
    own = home is not None
    kernels = folders[home] if home is not None else found
    if not own and path.is_dir() and not _holds_any(path):
        raise UsageError(f"no tables in {path}; give a table, an arch's folder or a folder of those")
    if path.name == FILE_NAME:
        return list(_archive(path.absolute(), kernels))
    if not path.is_dir():
        return list(_table(path, kernels, own=own, place=False))
    if _arch_called(path.name) is not None:
        return list(_arch_folder(path, kernels, own=own))
    return list(_root(path, kernels, own=own))


def broken_findings(broken: Iterable[Broken]) -> list[Finding]:
    """Installed kernels that could not be checked."""
    return [Finding(path=one.point, entry="", what=one.what, fix=one.fix) for one in broken]


def _package_folders(found: Iterable[Found]) -> dict[Path, dict[str, Found]]:
    folders: dict[Path, dict[str, Found]] = {}
    for one in found:
        folders.setdefault(store.package_folder(one.tunable), {})[one.tunable.name] = one
    return folders


def _root(folder: Path, kernels: Mapping[str, Found], *, own: bool) -> Iterator[Finding]:
    """All of a folder of arch folders."""
    archs = []
    for child in sorted(folder.iterdir()) if folder.is_dir() else ():
        if child.is_dir() and _arch_called(child.name) is not None:
            archs.append(child)
        elif child.is_dir():
            yield _finding(child, "no GPU arch is called that", "rename it as sm90 is written, or remove it")
        else:
            yield _finding(child, "an unknown file", "tables lie in <arch>/<kernel>.json; remove it")
    if not archs:
        names = " ".join(kernels)
        step = f"tune them: aot-tune tune {names}{_module_options(kernels)}"
        yield _finding(folder, f"holds no tables for {names}", step)
        for one in kernels.values() if own else ():
            yield from _declaration_findings(folder, one.tunable, checks.first_arch(one.tunable))
    for arch_folder in archs:
        yield from _arch_folder(arch_folder, kernels, own=own)


def _arch_folder(folder: Path, kernels: Mapping[str, Found], *, own: bool) -> Iterator[Finding]:
    """All of one arch's folder. Where an archive lies alone no table is missing: it holds the defaults."""
    children = sorted(folder.iterdir())
    for child in children:
        if child.name == FILE_NAME:
            yield from _archive(child, kernels)
        elif child.suffix != ".json":
            holds = f"an arch's folder holds <kernel>.json and {FILE_NAME}"
            yield _finding(child, "an unknown file", f"{holds}; remove it")
        elif child.stem not in kernels:
            yield _undeclared(child, "that", kernels)
        else:
            yield from _table(child, kernels, own=own)
    archived = any(child.name == FILE_NAME for child in children)
    tabled = any(child.suffix == ".json" for child in children)
    for name, one in kernels.items() if own and (tabled or not archived) else ():
        path = folder / f"{name}.json"
        if not path.exists():
            yield _finding(path, f"{name} has no table for {folder.name}", _tune(one.tunable, folder.name))
            yield from _declaration_findings(path, one.tunable, Arch.parse(folder.name))


def _declaration_findings(path: Path, kernel: Declaration, arch: Arch) -> Iterator[Finding]:
    """What is wrong with the declaration of a kernel that has no table."""
    for problem in checks.declaration_problems(kernel, arch):
        yield _finding(path, problem, "correct the declaration")


def _archive(path: Path, kernels: Mapping[str, Found]) -> Iterator[Finding]:
    """One archive of cubins: what a wheel with it is refused for."""
    fit = check_archives.fit(path, path.parent.parent, kernels)
    undeclared = [name for name in fit.kernels if name not in kernels]
    again = f"compile it again (aot-tune compile --arch {path.parent.name}{_module_options(kernels)})"
    for name in undeclared:
        yield _undeclared(path, name, kernels)
    for fault in fit.faults:
        if fault.partition(":")[0] not in undeclared:
            yield _finding(path, fault, f"{again}, or remove it")


def _table(path: Path, kernels: Mapping[str, Found], *, own: bool, place: bool = True) -> Iterator[Finding]:
    """One file; `place` says whether its name and folder must agree with its content."""
    try:
        data = files.read_bytes(path)
        table = reader.parse(data)
    except (TableError, StoreError) as error:
        where, what = (error.path, error.problem) if isinstance(error, TableError) else ("", str(error))
        yield Finding(
            path=str(path), entry=where, what=what, fix="restore it from version control, or tune again"
        )
        return
    yield from _bytes_findings(path, table, data)
    if place and (right := store.right_place(path, table)) is not None:
        yield _finding(path, f"it is the table of {table.kernel} on {table.arch}", f"move it to {right}")
    if table.kernel not in kernels:
        yield _undeclared(path, table.kernel, kernels)
        return
    tunable = kernels[table.kernel].tunable
    for place_in_file, what, fix in _table_complaints(table, tunable, own=own):
        yield Finding(path=str(path), entry=place_in_file, what=what, fix=fix)


def _bytes_findings(path: Path, table: Table, data: bytes) -> Iterator[Finding]:
    canonical = writer.dump(table)
    if canonical == data:
        return
    pairs = zip(data.splitlines(True), canonical.splitlines(True), strict=False)
    line = next((i for i, (one, other) in enumerate(pairs, 1) if one != other), None)
    where = f"line {line}" if line else "the end"
    yield _finding(
        path, f"not the bytes that aot-tune writes, from {where} on", "do not edit tables; tune again"
    )


def _table_complaints(table: Table, tunable: Declaration, *, own: bool) -> Iterator[tuple[str, str, str]]:
    """(place, what, what to do) for all that holds against one table."""
    again = _tune(tunable, str(table.arch))
    if list(table.axes.items()) != list(tunable.axes.items()):
        declared = " ".join(f"{name}:{axis.kind}" for name, axis in tunable.axes.items())
        yield "axes", f"the declaration has {declared}", again
        return
    if table.source_hash != (fresh := hashing.source_hash(tunable)):
        yield (
            "source_hash",
            f"the kernel's code has changed: it is {table.source_hash}, the code's {fresh}",
            again,
        )
    for problem in checks.declaration_problems(tunable, table.arch):
        yield "", problem, "correct the declaration"
    for what, fix in portfolio_complaints(table, tunable):
        yield "portfolio", what, fix or again
    for entry in table.entries:
        complaints = entry_complaints(table, tunable, entry, own=own)
        yield from ((str(entry.bucket), what, fix or again) for what, fix in complaints)
    for bucket in tunable.buckets:
        if table.entry(bucket) is None:
            yield str(bucket), "a declared shape has no entry", again


def _holds_any(folder: Path) -> bool:
    """Whether a table or an archive lies where those of an arch, or of a folder of archs, are looked for."""
    place = "" if _arch_called(folder.name) is not None else "*/"
    return any(any(folder.glob(place + name)) for name in ("*.json", FILE_NAME))


def _arch_called(name: str) -> Arch | None:
    try:
        arch = Arch.parse(name)
    except ArchError:
        return None
    return arch if str(arch) == name else None


def _finding(path: Path, what: str, fix: str) -> Finding:
    return Finding(path=str(path), entry="", what=what, fix=fix)


def _undeclared(path: Path, name: str, kernels: Mapping[str, Found]) -> Finding:
    """A kernel that other modules of the package may declare: what was measured of it is not to be lost."""
    modules = " and ".join(dict.fromkeys(one.module for one in kernels.values()))
    step = "if another module declares it, name that too (--module), else remove it"
    return _finding(path, f"no kernel of {modules} is called {name}", f"there is {' '.join(kernels)}; {step}")


def _module_options(kernels: Mapping[str, Found]) -> str:
    return "".join(dict.fromkeys(one.tunable.module_option for one in kernels.values()))


def _tune(tunable: Declaration, arch: str) -> str:
    return f"run aot-tune tune {tunable.name} --arch {arch}{tunable.module_option}"
