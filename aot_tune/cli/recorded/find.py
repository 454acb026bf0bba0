"""What the verbs ask of recorded tables: where they lie, and what is declared beside them. Prints nothing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from aot_tune import environment
from aot_tune.cli.show import named_folders, package_folders
from aot_tune.declare import discovery
from aot_tune.declare.discovery import FoundKernel, Survey, module_names
from aot_tune.errors import ArchError, StoreError, UsageError
from aot_tune.replay.files import listed_recorded
from aot_tune.tables import store
from aot_tune.values.arch import Arch


def folders(modules: Sequence[str] = ()) -> list[Path]:
    """The folders of tables that AOT_TUNE_TABLES names and that can be listed, then those of packages.

    Args:
        modules: Modules of the packages; without them, those of all installed entry points.

    Raises:
        StoreError: A named module's package has no folder.
    """
    return list(dict.fromkeys((*named_folders(), *package_folders(modules)[0])))


def survey(modules: Sequence[str] = ()) -> Survey:
    """Find declarations as `discovery.survey` does; a package that has recorded tables need declare nothing.

    Raises:
        UsageError: A named module cannot be imported, or has neither declarations nor recorded tables.
        DeclarationError: A named module's declaration contradicts itself.
    """
    bare = [name for name in (module_names(modules) if modules else ()) if _is_recorded(name)]
    return discovery.survey(modules, may_be_bare=bare) if bare else discovery.survey(modules)


def bare_folders(modules: Sequence[str] = ()) -> list[Path]:
    """The folders with recorded tables of the named modules' packages."""
    names = module_names(modules) if modules else ()
    return list(dict.fromkeys(store.folder_of_package(name) for name in names if _has_recorded(name)))


def declared(modules: Sequence[str] = ()) -> dict[str, FoundKernel]:
    """The declarations that `survey` finds; warns of each entry point that is left out."""
    if not any(map(_is_recorded, module_names(modules) if modules else ())):
        return discovery.find_tunables(modules)
    return survey(modules).found


def split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of declared kernels, and of recorded ones, which have a dot."""
    return [name for name in names if "." not in name], [name for name in names if "." in name]


def chosen(paths: Sequence[Path], names: Sequence[str], archs: Sequence[Arch]) -> tuple[Path, ...]:
    """The files of the recorded kernels called `names`, of `archs` alone.

    Raises:
        UsageError: A kernel was not recorded, or on none of `archs`.
    """
    for name in names:
        _check_archs(name, archs_of(paths, name), archs)
    wanted = set(map(str, archs))
    return tuple(path for path in paths if path.stem in names and path.parent.name in wanted)


def check_any(paths: Sequence[Path], archs: Sequence[Arch]) -> None:
    """Refuse archs of which none of the recorded tables is, where there is nothing else to do.

    Raises:
        UsageError: All recorded tables are of other archs, or lie in no arch's folder.
    """
    there = {arch for path in paths if (arch := _arch_of(path)) is not None}
    if not there:
        raise UsageError(f"{paths[0]} is in no arch's folder, such as sm90; move it to one")
    _check_archs("all that is here", there, archs)


def _check_archs(what: str, there: set[Arch], archs: Sequence[Arch]) -> None:
    if there.isdisjoint(archs):
        on, asked = " and ".join(map(str, sorted(there))), " or ".join(map(str, archs))
        options = " ".join(f"--arch {one}" for one in sorted(there))
        raise UsageError(f"{what} was recorded on {on}, not {asked}: write {options}")


def archs_of(paths: Sequence[Path], name: str) -> set[Arch]:
    """The archs that a kernel was recorded on; other folders than an arch's have no table that is read.

    Raises:
        UsageError: It was not recorded at all.
    """
    found = {path: arch for path in paths if (arch := _arch_of(path)) is not None}
    archs = {arch for path, arch in found.items() if path.stem == name}
    if not archs:
        there = {path.stem for path in found}
        near = difflib.get_close_matches(name, there, n=1)
        listed = " ".join(sorted(there)) or "none"
        raise UsageError(
            f"no recorded table is of {name!r}; there is {listed}"
            + "".join(f"; the nearest is {one}" for one in near)
            + f"; record it (aot-tune record), or name its folder in {environment.TABLES}"
        )
    return archs


def _arch_of(path: Path) -> Arch | None:
    """The arch in whose folder a table lies; None where the folder has another name."""
    try:
        arch = Arch.parse(path.parent.name)
    except ArchError:
        return None
    return arch if str(arch) == path.parent.name else None


def _is_recorded(module: str) -> bool:
    """Whether a package has recorded tables, its own or in a folder that AOT_TUNE_TABLES names."""
    top = module.partition(".")[0]
    beside = listed_recorded(named_folders())
    return _has_recorded(module) or any(path.name.startswith(f"{top}.") for path in beside)


def _has_recorded(module: str) -> bool:
    try:
        return bool(listed_recorded([store.folder_of_package(module)]))
    except StoreError:
        return False
