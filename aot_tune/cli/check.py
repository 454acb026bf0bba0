"""`aot-tune check`: faults of tables and archives, as findings and as lines.

Needs the kernels' declarations and no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from aot_tune.cli.documents.declared import declaration_remarks, tune_step
from aot_tune.cli.documents.document import Finding
from aot_tune.cli.documents.find import arch_called, kind_named, kind_of
from aot_tune.cubins.archive import FILE_NAME
from aot_tune.declare import checks
from aot_tune.errors import StoreError, TableError, UsageError
from aot_tune.replay.archives import RecordedTables
from aot_tune.tables import store
from aot_tune.tables.files import read_bytes
from aot_tune.tuner.archives import check as check_archives
from aot_tune.tuner.sweep.report import PREDICTED_FOLDER
from aot_tune.values.arch import Arch
from aot_tune.values.text import counted

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration
    from aot_tune.declare.discovery import Broken, FoundKernel

ROOT_FILES = ("README.md", "schema.json")
"""Files of a folder of tables that explain the tables to people and programs."""


RECORDED = RecordedTables()
"""Recorded tables, whose kernels no declaration names."""


def check(
    declared: Mapping[str, FoundKernel], path: Path | None = None, bare: Iterable[Path] = ()
) -> list[Finding]:
    """Check tables against the kernels' declarations, and recorded tables against the installed libraries.

    Args:
        declared: The declared kernels by name.
        path: A table, an archive, an arch's folder or a folder of those; None for the folders of the declared
            kernels' tables, and `bare`.
        bare: Folders of packages that declare no kernel and have recorded tables.

    Raises:
        UsageError: `path` does not exist, or holds nothing to check.
    """
    folders = _package_folders(declared.values(), bare)
    if path is None:
        own_findings = (_root(folder, kernels, own=True) for folder, kernels in folders.items())
        return [*chain.from_iterable(own_findings), *_at_former_places(declared.values())]
    path = _existing(path)
    home = _home(path, folders)
    shipped = store.libraries_folder().resolve()
    of_libraries = shipped in (path.resolve(), *path.resolve().parents)
    own = home is not None and not of_libraries
    kernels = {} if of_libraries else folders[home] if home is not None else declared
    if not own and path.is_dir() and not _holds_any(path):
        raise UsageError(f"no tables in {path}; give a table, an arch's folder or a folder of archs' folders")
    if path.name == FILE_NAME:
        return list(_archive(path.absolute(), kernels))
    if not path.is_dir():
        in_place = arch_called(path.absolute().parent.name) is not None
        return list(_table(path, kernels, own=own, place=in_place))
    if arch_called(path.name) is not None:
        return list(_arch_folder(path, kernels, own=own))
    return list(_root(path, kernels, own=own))


def archives(
    declared: Mapping[str, FoundKernel], path: Path | None = None, bare: Iterable[Path] = ()
) -> list[check_archives.Fit]:
    """Check archives of cubins against the sources and tables, as `make wheel` does.

    Args:
        declared: The declared kernels by name.
        path: An archive, an arch's folder or a folder of those; None for the folders of the declared kernels'
            tables, and `bare`.
        bare: Folders of packages that declare no kernel and have recorded tables.

    Returns:
        A result for each archive and for each stray file that a wheel would pack.

    Raises:
        UsageError: `path` does not exist.
    """
    folders = _package_folders(declared.values(), bare)
    if path is None:
        return [
            fit
            for folder, kernels in folders.items()
            for fit in check_archives.check(folder, kernels, RECORDED)
        ]
    path = _existing(path).absolute()
    home = _home(path, folders)
    kernels = folders[home] if home is not None else declared
    if not path.is_dir():
        return [check_archives.fit(path, path.parent.parent, kernels, RECORDED)]
    root = path.parent if arch_called(path.name) is not None else path
    return [fit for fit in check_archives.check(root, kernels, RECORDED) if path in fit.path.parents]


def archive_lines(fits: Sequence[check_archives.Fit]) -> list[str]:
    """Return the results of `archives` as text: a line for each archive that fits, more for others."""
    return [line for fit in fits for line in _fit_lines(fit)] or [
        "no archives of cubins here; aot-tune check FOLDER --archives looks elsewhere"
    ]


def _fit_lines(fit: check_archives.Fit) -> Iterator[str]:
    if fit.faults:
        yield f"{fit.path} does not fit the tables and sources here:"
        yield from (f"  {fault}" for fault in fit.faults)
        again = f"aot-tune compile --arch {fit.path.parent.name}"
        yield f"  build it again ({again}), or remove it: rm {fit.path}"
    else:
        lacks = f"; none of {' '.join(fit.missing)}" if fit.missing else ""
        yield f"{fit.path} fits: {fit.bytes / 1000:,.0f} KB, {counted(len(fit.kernels), 'kernel')}{lacks}"


def broken_findings(broken: Iterable[Broken]) -> list[Finding]:
    """Return findings for installed entry points whose kernels cannot be imported and checked."""
    return [Finding(path=point.point, what=point.what, fix=point.fix) for point in broken]


def _existing(path: Path) -> Path:
    """Return a path that exists, with a name that may be an arch's: neither ``.`` nor ``..``."""
    if not path.exists():
        raise UsageError(
            f"{path} does not exist; give a table, a folder of tables, or leave the path away to check "
            "the tables of all kernels, or of those of --module"
        )
    return path if path.name not in ("", "..") else path.resolve()


def _home(path: Path, folders: Iterable[Path]) -> Path | None:
    """Return the package's folder of tables that holds a path; None when no package's does."""
    here = path.resolve()
    return next((folder for folder in folders if folder.resolve() in (here, *here.parents)), None)


def _package_folders(
    kernels: Iterable[FoundKernel], bare: Iterable[Path]
) -> dict[Path, dict[str, FoundKernel]]:
    """Group kernels by their tables' folder, then name. A folder in `bare` has none."""
    folders: dict[Path, dict[str, FoundKernel]] = {folder: {} for folder in bare}
    for kernel in kernels:
        folders.setdefault(store.package_folder(kernel.tunable), {})[kernel.tunable.name] = kernel
    return folders


def _at_former_places(kernels: Iterable[FoundKernel]) -> Iterator[Finding]:
    """Yield tables in a folder that all distributions of a namespace package share."""
    for tunable in (kernel.tunable for kernel in kernels if kernel.tunable.tables is None):
        right = store.package_folder(tunable)
        for former in store.former_folders(tunable.package):
            for path in sorted(former.glob(f"*/{tunable.name}.json")):
                place = right / path.parent.name
                what = f"not read: tables of {tunable.package} lie in {right}"
                yield _finding(
                    path, what, f"mkdir -p {place} && mv {path} {place}, then compile its cubins again"
                )


def _root(folder: Path, kernels: Mapping[str, FoundKernel], *, own: bool) -> Iterator[Finding]:
    """Check a folder of archs' folders and everything in it."""
    archs = []
    for child in sorted(folder.iterdir()) if folder.is_dir() else ():
        if child.is_dir() and arch_called(child.name) is not None:
            archs.append(child)
        elif child.is_dir() and store.same_folder(child, store.libraries_folder()):
            yield from _root(child, {}, own=False)
        elif child.is_dir():
            step = "rename it to an arch's name, such as sm90, or remove it"
            yield _finding(child, "no GPU arch has this name", step)
        elif child.name not in ROOT_FILES or not child.is_file():
            yield _finding(child, "an unknown file", "a table's file is <arch>/<kernel>.json; remove it")
    if not archs:
        names = " ".join(kernels)
        options = _module_options(kernels)
        step = (
            f"tune them on a GPU of each arch: aot-tune tune {names}{options}; what was predicted without "
            f"one is checked by aot-tune check {PREDICTED_FOLDER}{options}"
        )
        yield _finding(folder, f"holds no tables for {names}", step)
        for kernel in kernels.values() if own else ():
            yield from _declaration_findings(folder, kernel.tunable, checks.first_arch(kernel.tunable))
    elif own and kernels and not any(any(arch_folder.glob("*.json")) for arch_folder in archs):
        what = "no kernel has a table for any arch: the archives serve the defaults alone"
        step = f"aot-tune tune{_module_options(kernels)} on a GPU of an arch makes its tables"
        yield Finding(path=str(folder), what=what, fix=step, remark=True)
    for arch_folder in archs:
        yield from _arch_folder(arch_folder, kernels, own=own)


def _arch_folder(folder: Path, kernels: Mapping[str, FoundKernel], *, own: bool) -> Iterator[Finding]:
    """Check one arch's folder. It may hold an archive or recorded tables alone."""
    children = sorted(folder.iterdir())
    for child in children:
        if child.name == FILE_NAME:
            yield from _archive(child, kernels)
        elif child.suffix != ".json":
            holds = f"an arch's folder holds <kernel>.json and {FILE_NAME}"
            yield _finding(child, "an unknown file", f"{holds}; remove it")
        elif kind_of(child).needs_declaration and child.stem not in kernels:
            yield _undeclared(child, "that", kernels)
        else:
            yield from _table(child, kernels, own=own)
    archived = any(child.name == FILE_NAME for child in children)
    kinds = [kind_named(child) for child in children if child.suffix == ".json"]
    tabled = any(kind.needs_declaration for kind in kinds)
    for name, kernel in kernels.items() if own and (tabled or not (archived or kinds)) else ():
        path = folder / f"{name}.json"
        if not path.exists():
            yield _finding(path, f"{name} has no table for {folder.name}", tune_step(kernel, folder.name))
            yield from _declaration_findings(path, kernel.tunable, Arch.parse(folder.name))


def _declaration_findings(path: Path, kernel: Declaration, arch: Arch) -> Iterator[Finding]:
    """Yield the mistakes in the declaration of a kernel without a table, and remarks on it."""
    yield from declaration_remarks(path, kernel, arch)
    for problem in checks.declaration_problems(kernel, arch):
        yield _finding(path, problem, "correct the declaration")


def _archive(path: Path, kernels: Mapping[str, FoundKernel]) -> Iterator[Finding]:
    """Check one archive of cubins, as `make wheel` does before it packs the archive."""
    fit = check_archives.fit(path, path.parent.parent, kernels, RECORDED)
    undeclared = [name for name in fit.kernels if name not in kernels and "." not in name]
    again = f"compile it again (aot-tune compile --arch {path.parent.name}{_module_options(kernels)})"
    for name in undeclared:
        yield _undeclared(path, name, kernels)
    for fault in fit.faults:
        if fault.partition(":")[0] not in undeclared:
            yield _finding(path, fault, f"{again}, or remove it")


def _table(
    path: Path, kernels: Mapping[str, FoundKernel], *, own: bool, place: bool = True
) -> Iterator[Finding]:
    """Check a table's file; with `place` also that its name and folder agree with its content."""
    kind = kind_of(path)
    try:
        data = read_bytes(path)
        table = kind.parse(data)
    except (TableError, StoreError) as error:
        where, what = (error.path, error.problem) if isinstance(error, TableError) else ("", str(error))
        again = f"restore it from version control, or {kind.again}"
        yield Finding(path=str(path), entry=where, what=what, fix=again)
        return
    document = kind(path, table)
    if (line := _differing_line(data, kind.dump(table))) is not None:
        what, fix = f"not the bytes that aot-tune writes, from {line} on", f"do not edit tables; {kind.again}"
        if data.replace(b"\r\n", b"\n") == kind.dump(table):
            what, fix = (
                "its lines end in CRLF",
                "write *.json eol=lf into .gitattributes, and check it out anew",
            )
        yield _finding(path, what, fix)
    if place and (right := kind.right_place(path, table)) is not None:
        what = f"it is the {kind.noun} of {document.name} on {table.arch}"
        yield _finding(path, what, f"move it to {right}")
    if kind.needs_declaration and document.name not in kernels:
        yield _undeclared(path, document.name, kernels)
    else:
        yield from document.faults(kernels.get(document.name), own=own)


def _differing_line(data: bytes, canonical: bytes) -> str | None:
    """Return where a file differs from what aot-tune would write; None where it does not."""
    if canonical == data:
        return None
    pairs = zip(data.splitlines(True), canonical.splitlines(True), strict=False)
    line = next((number for number, (old, new) in enumerate(pairs, 1) if old != new), None)
    return f"line {line}" if line else "the end"


def _holds_any(folder: Path) -> bool:
    """Return whether an arch's folder, or a folder of those, holds a table or an archive."""
    place = "" if arch_called(folder.name) is not None else "*/"
    return any(any(folder.glob(place + name)) for name in ("*.json", FILE_NAME))


def _finding(path: Path, what: str, fix: str) -> Finding:
    return Finding(path=str(path), what=what, fix=fix)


def _undeclared(path: Path, name: str, kernels: Mapping[str, FoundKernel]) -> Finding:
    """Report a kernel that is not declared here.

    Another module of the package may declare it, and then its measurements must not be lost.
    """
    modules = " and ".join(dict.fromkeys(kernel.module for kernel in kernels.values()))
    step = "if another module declares it, name that too (--module), else remove it"
    return _finding(path, f"no kernel of {modules} is called {name}", f"there is {' '.join(kernels)}; {step}")


def _module_options(kernels: Mapping[str, FoundKernel]) -> str:
    """Return the options that name the kernels' modules, each once."""
    return "".join(dict.fromkeys(kernel.module_option for kernel in kernels.values()))
