"""`aot-tune new`: the beginning of a declaration, by a kernel's source and its recorded searches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.cli.documents.find import folder_remarks, named_folders
from aot_tune.cli.start.recordings import recordings_of, settle, tables_of
from aot_tune.cli.start.sketch import sketch_of
from aot_tune.cli.start.text import module_text, name_of
from aot_tune.declare import discovery
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

    kinds: tuple[str, ...]
    """The kind of its kernel."""

    name: str
    """The name of the declaration."""

    blanks: tuple[str, ...]
    """The fields that are blank in it."""

    module: str
    """The module that holds the kernel."""

    notes: tuple[str, ...] = ()
    """What was taken from recorded tables, and which were left out, a line each."""


def begin(place: str, tables: Iterable[Path] = ()) -> Begun:
    """Begin the declaration of a kernel.

    Args:
        place: Module and name of a ``@ct.kernel``, as in ``mylib.kernels:scale_kernel``.
        tables: Folders of recorded tables, beside those of the library and of AOT_TUNE_TABLES.

    Raises:
        UsageError: There is no such kernel, or its source cannot be read, or a folder is not there.
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
    facts = facts_of(names[name])
    if not facts.readable:
        raise UsageError(f"the source of {place} cannot be read; write the kernel into a file of a package")
    sketch = sketch_of(facts)
    kernel, named = names[name], tuple(tables)
    found, left_out = tables_of(kernel, _folders(kernel, named))
    settle(sketch, found)
    recorded = recordings_of(sketch, found)
    if recorded is None:
        sketch = sketch_of(facts)
    text = module_text(sketch, module, name, recorded)
    blanks = tuple(re.findall(r"^    (\w+)=blank\(", text, re.MULTILINE))
    notes = [*folder_remarks(), *left_out]
    if recorded is not None:
        notes.append(f"search_space and typical are of {recorded.origin}")
    elif found:
        paths = " ".join(str(path) for path, _ in found)
        notes.append(f"nothing is taken from {paths}: no search in it tells all sizes and constants")
    elif named:
        function = cutile.python_function(kernel)
        label = recorded_name(function.__module__, function.__qualname__)
        notes.append(f"no recorded table in {' '.join(map(str, named))} is of {label} as it is here")
    return Begun(
        text=text,
        kinds=sketch.kinds,
        name=name_of(name),
        blanks=blanks,
        module=module,
        notes=tuple(notes),
    )


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
            f"{begun.name}: {', '.join(begun.kinds)}; save it in a module of its own, such as {beside}, fill "
            f"in {', '.join(begun.blanks)}, then run aot-tune doctor {begun.name} --module {beside}"
        )
    file, module = str(path), discovery.module_names([str(path)])[0]
    return (
        f"{begun.name}: {', '.join(begun.kinds)}; fill in {', '.join(begun.blanks)} in {file}, then run "
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
