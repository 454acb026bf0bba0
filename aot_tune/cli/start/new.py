"""`aot-tune new`: the beginning of a declaration, by a kernel's source and its recorded searches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from aot_tune.cli.documents.find import folder_remarks, named_folders
from aot_tune.cli.start.kinds import KINDS, proven_kind
from aot_tune.cli.start.recordings import recordings_of, tables_of, tuned_in
from aot_tune.cli.start.text import Start, module_text
from aot_tune.cli.start.triton import tiles_of
from aot_tune.declare import discovery
from aot_tune.declare.kernel_source.facts import Facts
from aot_tune.declare.kernel_source.walk import facts_of
from aot_tune.errors import StoreError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.replay.table import name_of as recorded_name
from aot_tune.tables.store import folder_of_package


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A declaration that was begun."""

    text: str
    """The module that holds it."""

    kind: str
    """The kind whose template it was written by."""

    name: str
    """The name of the declaration."""

    blanks: tuple[str, ...]
    """The fields that are blank in it."""

    module: str
    """The module that holds the kernel."""

    notes: tuple[str, ...] = ()
    """What was taken from recorded tables, and which were left out, a line each."""


def begin(
    place: str,
    kind: str | None = None,
    tables: Iterable[Path] = (),
    triton: str | None = None,
    constants: str = "",
) -> Begun:
    """Begin the declaration of a kernel.

    Args:
        place: Module and name of a ``@ct.kernel``, as in ``mylib.kernels:scale_kernel``.
        kind: One of `KINDS`; None for the kind that the source proves.
        tables: Folders of recorded tables, beside those of the library and of AOT_TUNE_TABLES.
        triton: Triton configs as `tiles_of` takes them, for the search space; no recorded table is read then.
        constants: The kernel's constants and the names in these configs, ``tile_m=BLOCK_SIZE_M,...``.

    Raises:
        UsageError: There is no such kernel, kind or folder, or the source cannot be read or proves no kind.
        StoreError: A folder cannot be listed.
    """
    written, _, name = place.partition(":")
    (module,) = discovery.module_names([written])
    names = vars(discovery.imported(module))
    kernels = sorted(one for one, value in names.items() if cutile.is_kernel(value))
    if name not in kernels:
        asked = f"{module} has no kernel {name!r}" if name else f"{place!r} names no kernel"
        known = ", ".join(f"{module}:{one}" for one in kernels) or f"none: {module} has no @ct.kernel"
        raise UsageError(f"{asked}; write one of {known}" if kernels else f"{asked}: it has {known}")
    kernel, named = names[name], tuple(tables)
    facts = facts_of(kernel)
    if iscoroutinefunction(cutile.python_function(kernel)):
        raise UsageError(f"{place} is an async function, which cuTile cannot compile; write def")
    if not facts.readable:
        raise UsageError(f"the source of {place} cannot be read; write the kernel into a file of a package")
    tiles = None if triton is None else tiles_of(triton, constants, facts.tiles, tuple(facts.constants))
    found, left_out = ([], []) if tiles else tables_of(kernel, _folders(kernel, named))
    varied = tiles.names if tiles else tuned_in(found)
    tuned = tuple(one for one in facts.constants if one in varied or one in facts.tiles)
    values = tiles.values if tiles else ()
    start = Start(facts=facts, kind=_kind(facts, kind), module=module, kernel=name, tuned=tuned, tiles=values)
    recorded = recordings_of(found, tuned, start.launched, start.problem_code())
    text = module_text(replace(start, recorded=recorded))
    notes = [*folder_remarks(), *left_out, *([tiles.note] if tiles else [])]
    if recorded is not None:
        notes.append(f"search_space and typical are of {recorded.origin}")
    elif found:
        paths = " ".join(str(path) for path, _ in found)
        notes.append(f"nothing is taken from {paths}: no search in it has a value of each constant")
    elif named and not tiles:
        function = cutile.python_function(kernel)
        label = recorded_name(function.__module__, function.__qualname__)
        notes.append(f"no recorded table in {' '.join(map(str, named))} is of {label} as it is here")
    return Begun(
        text=text,
        kind=start.kind,
        name=start.name,
        blanks=tuple(re.findall(r"^    (\w+)=blank\(", text, re.MULTILINE)),
        module=module,
        notes=tuple(notes),
    )


def _kind(facts: Facts, named: str | None) -> str:
    """The kind that is named, else the one that the source proves."""
    if named is not None and named not in KINDS:
        raise UsageError(f"--kind {named!r}: there is no such kind; write one of {', '.join(KINDS)}")
    kind = named or proven_kind(facts)
    if kind is None:
        raise UsageError(
            "loads, stores and products do not prove of which kind the kernel is; name the nearest, on "
            f"which only blanks depend: --kind with one of {', '.join(KINDS)}"
        )
    return kind


def _folders(kernel: Any, named: Iterable[Path]) -> Iterator[Path]:
    """The folders that may have recorded tables of a kernel: its library's own first."""
    with suppress(StoreError):  # a module of its own has none
        yield folder_of_package(cutile.python_function(kernel).__module__)
    yield from named_folders()
    for folder in named:
        if not folder.is_dir():
            raise UsageError(f"--tables {folder}: there is no such folder; aot-tune record --out writes one")
        yield folder


def summary(begun: Begun, path: Path | None) -> str:
    """What was begun, and what comes next."""
    if path is None:
        beside = f"{begun.module.rpartition('.')[0] or begun.module}.{begun.name}"
        return (
            f"{begun.name}: {begun.kind}; save it in a module of its own, such as {beside}, fill "
            f"in {', '.join(begun.blanks)}, then run aot-tune doctor {begun.name} --module {beside}"
        )
    file, module = str(path), discovery.module_names([str(path)])[0]
    return (
        f"{begun.name}: {begun.kind}; fill in {', '.join(begun.blanks)} in {file}, then run "
        f"aot-tune doctor {begun.name} --module {module}"
    )


def write(begun: Begun, path: Path) -> None:
    """Write a declaration into a new file.

    Raises:
        UsageError: The file exists already, or no module in it could be named from the current folder.
        StoreError: It cannot be written.
    """
    discovery.module_names([str(path)])
    try:
        with path.open("x") as file:
            file.write(begun.text)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already; name another file with --out, or remove it") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from error
