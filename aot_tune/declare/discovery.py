"""Find declarations by the entry-point group ``aot_tune.tunables`` or by module name. Touches no GPU."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.errors import AotTuneError, DeclarationError, EntryPointWarning, UsageError

GROUP = "aot_tune.tunables"
"""The entry-point group whose members name modules that declare kernels: ``mylib = "mylib.kernels"``."""

OWN_KERNELS = "aot_tune.kernels"
"""The module of the shipped kernels. They need no entry point, so that a checkout works uninstalled."""


@dataclass(frozen=True, kw_only=True)
class FoundKernel:
    """A declaration and where it was found."""

    module: str
    """The module whose import makes it; another process finds it by this and the kernel's name."""

    tunable: Declaration
    """The declaration."""

    @property
    def module_option(self) -> str:
        """The option --module by which a command finds the kernel here; empty for a shipped kernel.

        `Declaration.module_option` names the module of the author's functions: a factory of declarations may
        stand in another one, which declares nothing.
        """
        return f" --module {self.module}" if self.tunable.module_option else ""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An installed entry point whose kernels cannot be loaded, or one kernel of it whose name is taken."""

    point: str
    """Its description: ``entry point mylib = mylib.kernels of mylib 1.0``."""

    what: str
    """The reason why it is left out."""

    fix: str
    """The advice what to do about it."""

    def __str__(self) -> str:
        return f"{self.point} is left out: {self.what}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All declarations, and the entry points that gave none."""

    found: dict[str, FoundKernel]
    """The declarations by kernel name, in the order in which they were found."""

    broken: tuple[Broken, ...]
    """Entry points and kernels that were left out."""


def find_tunables(modules: Sequence[str] = ()) -> dict[str, FoundKernel]:
    """The declarations that `survey` finds; warns of each entry point that is left out."""
    result = survey(modules)
    warn_of(result.broken)
    return result.found


def survey(modules: Sequence[str] = (), *, may_be_bare: Container[str] = ()) -> Survey:
    """Find all declarations of the named modules; without names, those of every installed entry point.

    Modules are found in the current folder too, after installed ones. A module's globals are examined,
    imported ones too; the files of a package are not walked. A broken entry point of another package is left
    out, because it must not keep anybody from the other kernels; so is a kernel whose name is one of an
    earlier entry point.

    Args:
        modules: Module names such as ``mylib.kernels``, or paths such as ``mylib/kernels.py``.
        may_be_bare: Names of modules that may declare nothing.

    Raises:
        UsageError: A named module cannot be imported or declares nothing, or two declare the same name.
        DeclarationError: A named module's declaration contradicts itself.
    """
    found: dict[str, FoundKernel] = {}
    broken: list[Broken] = []
    for module in module_names(modules):
        try:
            here = list(_tunables_in(module)) if module in may_be_bare else _declared_in(module)
        except AotTuneError as error:
            if modules or module == OWN_KERNELS:
                raise
            broken.append(
                broken_point(module, error.what if isinstance(error, _ImportFailed) else str(error))
            )
            continue
        for one in here:
            other = found.setdefault(one.tunable.name, one)
            if other.tunable is one.tunable:
                continue
            if modules or other.module == module:
                raise UsageError(_twice(one.tunable.name, other.module, module))
            broken.append(
                Broken(
                    point=f"kernel {one.tunable.name!r} of {module}",
                    what=f"{other.module} declares one of that name too",
                    fix=f"name its module, --module {module}, or give it another name",
                )
            )
    return Survey(found=found, broken=tuple(broken))


def _twice(name: str, one: str, other: str) -> str:
    if one == other:
        return f"two kernels of {one} are called {name!r}; give one of them another name"
    return f"two kernels are called {name!r}: one in {one}, one in {other}; name one module with --module"


def broken_point(module: str, what: str) -> Broken:
    """Describe the entry point that names `module`, which cannot be loaded for the reason `what`."""
    point = next(one for one in metadata.entry_points(group=GROUP) if _module_of(one) == module)
    described = f"entry point {point.name} = {point.value}"
    if point.dist is None:
        return Broken(point=described, what=what, fix="repair its package or uninstall it")
    name = point.dist.metadata["Name"]
    return Broken(
        point=f"{described} of {name} {point.dist.version}",
        what=what,
        fix=f"repair {name} or uninstall it (pip uninstall {name})",
    )


def warn_of(broken: Iterable[Broken]) -> None:
    """Give one warning for each broken entry point."""
    for one in broken:
        warnings.warn(str(one), EntryPointWarning, stacklevel=3)


def module_names(modules: Sequence[str] = ()) -> list[str]:
    """The import names of the named modules; without names, of those of every installed entry point.

    From then on modules are found in the current folder too. None of the modules is imported.

    Raises:
        UsageError: A path is outside the current folder.
    """
    _add_current_folder()
    return [_module_name(module) for module in modules] or installed_modules()


def load(module: str, name: str) -> Declaration:
    """The declaration called `name` in a module: how a child process finds what its parent found.

    The child imports by its own ``sys.path``, which is that of its parent.

    Raises:
        UsageError: The module cannot be imported or has no such kernel; it lists those that it has.
    """
    here = {found.tunable.name: found.tunable for found in _tunables_in(module)}
    if name not in here:
        raise UsageError(
            f"module {module} declares no kernel {name!r}; it has {' '.join(sorted(here)) or 'none'}"
        )
    return here[name]


def declared_kernel(module: str, name: str, kernel: str | None) -> Any:
    """Import a kernel of a declaration.

    Args:
        module: The module that declares it.
        name: The declaration's name.
        kernel: The name that configs call the kernel, where the declaration has several.

    Raises:
        UsageError: The module cannot be imported or has no such declaration.
    """
    return load(module, name).kernels[kernel]


def installed_modules() -> list[str]:
    """The modules that the installed entry points name, after that of the shipped kernels."""
    named = map(_module_of, metadata.entry_points(group=GROUP))
    return list(dict.fromkeys([OWN_KERNELS, *sorted(named)]))


def _module_of(point: metadata.EntryPoint) -> str:
    return point.value.partition(":")[0]


def _declared_in(module: str) -> list[FoundKernel]:
    here = list(_tunables_in(module))
    if not here:
        raise UsageError(
            f"module {module} declares no kernel: it has no global that is a Tunable, or a list or dict "
            "of them; name the module that holds one, or import them there"
        )
    return here


def _tunables_in(module: str) -> Iterable[FoundKernel]:
    """The declarations among a module's globals, each once, in the order of their definition.

    Lists, tuples and dicts of declarations are such globals too, as a loop over variants makes them. Those in
    a module's tuple ``TUNABLES`` come first, where it has one.
    """
    seen: set[int] = set()
    names = vars(imported(module))
    listed = names.get("TUNABLES", ())
    for value in (*(listed if isinstance(listed, tuple) else ()), *names.values()):
        for one in _members(value):
            if isinstance(one, Declaration) and id(one) not in seen:
                seen.add(id(one))
                yield FoundKernel(module=module, tunable=one)


def _members(value: object) -> Iterable[object]:
    """The members of a list, a tuple or a dict's values; of any other global the value itself."""
    if isinstance(value, list | tuple):
        return value
    return tuple(value.values()) if isinstance(value, dict) else (value,)


def _add_current_folder() -> None:
    """Let modules be found in the current folder, after all installed ones: no file there replaces these."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


class _ImportFailed(UsageError):
    """A module cannot be imported. `what` is the message without the advice for the person who named it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what


def imported(module: str) -> object:
    """Import a module of somebody's.

    Raises:
        UsageError: It cannot be imported; the message says why, and what to do.
        DeclarationError: A declaration in it contradicts itself.
    """
    try:
        return importlib.import_module(module)
    except DeclarationError:
        raise  # it names the place and the next step already
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module == missing or module.startswith(missing + "."):
            raise _ImportFailed(
                f"there is no module {module!r} here ({os.getcwd()}) or on the Python path",
                "write it as Python imports it, mylib.kernels",
            ) from error
        raise UsageError(
            f"module {module} needs {missing!r}, which is not installed; install it, or declare the kernel "
            "from a module that does without"
        ) from error
    except (
        Exception,
        SystemExit,
    ) as error:  # a script without a guard would end the process silently, with 0
        place = "" if isinstance(error, SyntaxError) else _raised_at(error)
        raise _ImportFailed(
            f"module {module} cannot be imported: {type(error).__name__}: {error}{place}", "repair it"
        ) from error


def _raised_at(error: BaseException) -> str:
    """The file and line that raised, in a syntax error's form; empty where the import itself failed."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"


def _module_name(text: str) -> str:
    """``mylib.kernels`` for ``mylib/kernels.py`` and ``mylib/kernels``; a module name stays as it is."""
    if not text.endswith(".py") and os.sep not in text:
        return text
    relative = os.path.relpath(text) if os.path.isabs(text) else os.path.normpath(text)
    if relative.startswith(os.pardir):
        raise UsageError(
            f"{text} is outside the current folder; go to its package's folder, or name the module"
        )
    return relative.removesuffix(".py").removesuffix(os.sep).replace(os.sep, ".")
