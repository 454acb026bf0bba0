"""Find tables' files, and read each by its kind. Prints nothing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from aot_tune import environment
from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.documents.document import Document
from aot_tune.cli.documents.recorded import RecordedDocument
from aot_tune.declare import discovery
from aot_tune.declare.discovery import (
    OWN_KERNELS,
    Broken,
    FoundKernel,
    Survey,
    broken_point,
    module_names,
    warn_of,
)
from aot_tune.errors import AotTuneError, ArchError, StoreError, TableError, UsageError
from aot_tune.replay.files import has_recorded_name, is_recorded_file, listed_recorded, shipped_for
from aot_tune.serve import loader
from aot_tune.tables import store
from aot_tune.values.arch import Arch
from aot_tune.values.text import counted

KINDS: tuple[type[Document], ...] = (DeclaredDocument, RecordedDocument)
"""Kinds of tables, in the order in which the verbs print them."""


def kind_named(path: Path) -> type[Document]:
    """Return the kind of the table in an arch's folder, by its file's name."""
    return RecordedDocument if has_recorded_name(path) else DeclaredDocument


def kind_of(*paths: Path) -> type[Document]:
    """Return the kind of the table in files, by name and content: recorded, where one of them is."""
    return RecordedDocument if any(map(is_recorded_file, paths)) else DeclaredDocument


# Folders ----------------------------------------------------------------------------------------------------


def folders(modules: Sequence[str] = ()) -> list[Path]:
    """Return the folders of AOT_TUNE_TABLES that can be listed, then the packages' folders.

    Args:
        modules: Modules of the packages; without them, the modules of all installed entry points.

    Raises:
        StoreError: A named module's package has no folder.
    """
    return list(dict.fromkeys((*named_folders(), *package_folders(modules)[0])))


def named_folders() -> list[Path]:
    """Return the folders of AOT_TUNE_TABLES that can be listed. `folder_remarks` reports the others."""
    return [folder for folder in environment.table_folders() if _folder_mistake(folder) is None]


def folder_remarks() -> list[str]:
    """Return the fault of each folder of AOT_TUNE_TABLES that no verb reads, with the next step."""
    mistakes = map(_folder_mistake, environment.table_folders())
    return [mistake for mistake in mistakes if mistake is not None]


def _folder_mistake(folder: Path) -> str | None:
    if (mistake := loader.folder_mistake(folder)) is not None:
        return mistake
    try:
        store.listed(folder)
    except StoreError as error:
        return f"{environment.TABLES}: {error}; let it be read or leave it out"
    return None


def package_folders(modules: Sequence[str]) -> tuple[list[Path], list[Broken]]:
    """Return the tables' folders of the named modules' packages, or of all installed packages.

    The second list has the entry points whose package cannot be found.
    """
    packages, broken = [], []
    for module in module_names(modules):
        try:
            packages.append(store.folder_of_package(module))
        except StoreError as error:
            if modules or module == OWN_KERNELS:
                raise
            broken.append(broken_point(module, str(error)))
    return packages, broken


# Tables -----------------------------------------------------------------------------------------------------


def tables_found(
    kernel: str | None,
    arch: Arch | None,
    modules: Sequence[str] = (),
    only: Path | None = None,
    *,
    libraries: bool = False,
) -> tuple[list[Document], list[AotTuneError]]:
    """Find tables in AOT_TUNE_TABLES, then in the installed packages or those of `modules`.

    Kernels are imported only when no table is found otherwise: a declaration may name a folder of its own.

    Args:
        kernel: Find this kernel's tables only.
        arch: Find this arch's tables only.
        modules: Modules that declare kernels.
        only: Search this folder only, or this folder of one arch.
        libraries: Find the shipped tables of all libraries too, not of those that `modules` name alone.

    Returns:
        The tables, and one error for each file that is not a table.

    Raises:
        UsageError: There is no such table. The message lists the existing ones.
        StoreError: A folder cannot be read.
    """
    if only is not None:
        if only.name in ("", ".."):
            only = only.resolve()  # an arch's folder is known by its name
        paths = store.listed(only) or store.listed_in(only)
        chosen = _chosen(paths, kernel, arch)
    else:
        chosen, paths = _installed_tables(kernel, arch, modules, libraries=libraries and not modules)
    if not chosen:
        wanted = (f"of {kernel} " if kernel else "") + (f"for {arch} " if arch else "")
        where = "there" if only is None else f"in {only}"
        names = " ".join(f"{path.parent.name}/{path.stem}" for path in paths)
        step = f"make one with aot-tune tune, or name a folder of tables in {environment.TABLES}"
        raise UsageError(f"no table {wanted}is {where}; {f'there is {names}' if names else step}")
    tables: list[Document] = []
    unreadable: list[AotTuneError] = []
    for path in chosen:
        try:
            tables.append(kind_named(path).read(path))
        except (TableError, StoreError) as error:
            unreadable.append(error)
    return sorted(tables, key=lambda table: KINDS.index(type(table))), unreadable


def _installed_tables(
    kernel: str | None, arch: Arch | None, modules: Sequence[str], *, libraries: bool
) -> tuple[list[Path], list[Path]]:
    """Return the chosen tables' files, and the files of all tables that were found."""
    installed, broken = package_folders(modules)
    named = [*named_folders(), *installed]
    paths = [path for folder in dict.fromkeys(named) for path in store.listed(folder)]
    if libraries:
        paths += listed_recorded([store.libraries_folder()])
    else:
        paths += shipped_for([*modules, *([kernel] if kernel else [])])
    chosen = _chosen(paths, kernel, arch)
    if chosen:
        warn_of(broken)
    else:  # find_tunables warns of the broken entry points itself
        own = [store.package_folder(kernel.tunable) for kernel in discovery.find_tunables(modules).values()]
        paths = [path for folder in dict.fromkeys((*named, *own)) for path in store.listed(folder)]
        chosen = _chosen(paths, kernel, arch)
    return chosen, paths


def _chosen(paths: Sequence[Path], kernel: str | None, arch: Arch | None) -> list[Path]:
    return [
        path
        for path in paths
        if kernel in (None, path.stem) and (arch is None or str(arch) == path.parent.name)
    ]


# Packages that declare no kernel and have recorded tables ---------------------------------------------------


def survey(modules: Sequence[str] = ()) -> Survey:
    """Find declarations as `discovery.survey` does. A package with recorded tables need not have any.

    Raises:
        UsageError: A named module cannot be imported, or has neither declarations nor recorded tables.
        DeclarationError: A named module's declaration contradicts itself.
    """
    bare = [name for name in (module_names(modules) if modules else ()) if _is_recorded(name)]
    return discovery.survey(modules, may_be_bare=bare) if bare else discovery.survey(modules)


def bare_folders(modules: Sequence[str] = ()) -> list[Path]:
    """Return the folders of the named modules' packages that hold recorded tables."""
    names = module_names(modules) if modules else ()
    return list(dict.fromkeys(store.folder_of_package(name) for name in names if _has_recorded(name)))


def declared(modules: Sequence[str] = ()) -> dict[str, FoundKernel]:
    """Return the declarations of `survey`, and warn of each entry point that is left out."""
    if not any(map(_is_recorded, module_names(modules) if modules else ())):
        return discovery.find_tunables(modules)
    return survey(modules).found


def _is_recorded(module: str) -> bool:
    """Return whether a package has recorded tables: its own, in AOT_TUNE_TABLES, or shipped."""
    top = module.partition(".")[0]
    named = listed_recorded(named_folders())
    return _has_recorded(module) or any(
        path.name.startswith(f"{top}.") for path in (*named, *shipped_for([module]))
    )


def _has_recorded(module: str) -> bool:
    try:
        return bool(listed_recorded([store.folder_of_package(module)]))
    except StoreError:
        return False


# Recorded kernels by name -----------------------------------------------------------------------------------


def split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names into declared kernels' and recorded kernels', which have a dot."""
    return [name for name in names if "." not in name], [name for name in names if "." in name]


def chosen(paths: Sequence[Path], names: Sequence[str], archs: Sequence[Arch]) -> tuple[Path, ...]:
    """Return the files of recorded kernels by name, for `archs` alone.

    Raises:
        UsageError: A kernel was not recorded, or on none of `archs`.
    """
    for name in names:
        _check_archs(name, archs_of(paths, name), archs)
    wanted = set(map(str, archs))
    return tuple(path for path in paths if path.stem in names and path.parent.name in wanted)


def left_out_remarks(paths: Sequence[Path], modules: Sequence[str], archs: Sequence[Arch]) -> list[str]:
    """Return how many shipped tables of the modules' libraries are not among `paths`, with what adds one."""
    shipped = [path for path in shipped_for(modules) if path.parent.name in map(str, archs)]
    kernels = {path.stem for path in shipped if path not in paths} - {path.stem for path in paths}
    if not kernels:
        return []
    count = counted(len(kernels), "kernel")
    return [f"shipped tables of {count} are left out beside your own; add one: --kernel {min(kernels)}"]


def check_any(paths: Sequence[Path], archs: Sequence[Arch]) -> None:
    """Check that a recorded table is for one of some archs.

    Raises:
        UsageError: All recorded tables are for other archs, or are in no arch's folder.
    """
    recorded_on = {arch for path in paths if (arch := arch_called(path.parent.name)) is not None}
    if not recorded_on:
        raise UsageError(f"{paths[0]} is in no arch's folder, such as sm90; move it to one")
    _check_archs("all that is here", recorded_on, archs)


def _check_archs(what: str, recorded_on: set[Arch], archs: Sequence[Arch]) -> None:
    if recorded_on.isdisjoint(archs):
        on, asked = " and ".join(map(str, sorted(recorded_on))), " or ".join(map(str, archs))
        options = " ".join(f"--arch {arch}" for arch in sorted(recorded_on))
        raise UsageError(f"{what} was recorded on {on}, not {asked}: write {options}")


def archs_of(paths: Sequence[Path], name: str) -> set[Arch]:
    """Return the archs that a kernel was recorded on. Tables outside archs' folders are not read.

    Raises:
        UsageError: The kernel was not recorded.
    """
    arch_of = {path: arch for path in paths if (arch := arch_called(path.parent.name)) is not None}
    archs = {arch for path, arch in arch_of.items() if path.stem == name}
    if not archs:
        names = {path.stem for path in arch_of}
        close = difflib.get_close_matches(name, names, n=1)
        listed = " ".join(sorted(names)) or "none"
        raise UsageError(
            f"no recorded table is of {name!r}; there is {listed}"
            + "".join(f"; the nearest is {match}" for match in close)
            + f"; record it (aot-tune record), or name its folder in {environment.TABLES}"
        )
    return archs


def arch_called(name: str) -> Arch | None:
    """Return the arch of a folder's name; None when it is not an arch's name."""
    try:
        arch = Arch.parse(name)
    except ArchError:
        return None
    return arch if str(arch) == name else None
