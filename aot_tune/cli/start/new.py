"""`aot-tune new`: the beginning of a declaration, written from a kernel's source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from aot_tune.cli.start.sketch import sketch_of
from aot_tune.cli.start.text import module_text, name_of
from aot_tune.declare import discovery
from aot_tune.declare.kernel_source.walk import facts_of
from aot_tune.errors import StoreError, UsageError
from aot_tune.nvidia import cutile


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


def begin(place: str) -> Begun:
    """Begin the declaration of a kernel.

    Args:
        place: Module and name of a ``@ct.kernel``, as in ``mylib.kernels:scale_kernel``.

    Raises:
        UsageError: There is no such kernel, or its source cannot be read.
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
    text = module_text(sketch, module, name)
    blanks = tuple(re.findall(r"^    (\w+)=blank\(", text, re.MULTILINE))
    return Begun(text=text, kinds=sketch.kinds, name=name_of(name), blanks=blanks, module=module)


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
