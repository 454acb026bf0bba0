"""Find declarations by the entry-point group ``aot_tune.tunables`` or by module name. Touches no GPU."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata

from aot_tune.declare.declaration import Declaration
from aot_tune.errors import AotTuneError, DeclarationError, EntryPointWarning, UsageError

GROUP = "aot_tune.tunables"
"""Each entry point of this group names a module that declares kernels: ``mylib = "mylib.kernels"``."""

OWN_KERNELS = "aot_tune.kernels"
"""The shipped kernels: found in a checkout too, where nothing installed declares an entry point."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A declaration and where it was found."""

    module: str
    """The module whose import makes it; another process finds it again by this and its name."""

    tunable: Declaration
    """The declaration."""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An installed entry point whose kernels cannot be had."""

    point: str
    """Which one: ``entry point mylib = mylib.kernels of mylib 1.0``."""

    what: str
    """Why."""

    fix: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.point} is left out: {self.what}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All declarations, and where some should have been."""

    found: dict[str, Found]
    """Kernel name to declaration, in the order found."""

    broken: tuple[Broken, ...]
    """Entry points that were left out."""


def find_tunables(modules: Sequence[str] = ()) -> dict[str, Found]:
    """As `survey`, with a warning for each entry point that is left out."""
    result = survey(modules)
    warn_of(result.broken)
    return result.found


def survey(modules: Sequence[str] = ()) -> Survey:
    """All declarations of the named modules; without names, those of every installed entry point.

    The current folder is importable, as it is for ``python -m``. A module's globals are looked at, imported
    ones too; the files of a package are not walked. Another package's broken entry point is left out: it
    must not keep anybody from the other kernels.

    Args:
        modules: Module names such as ``mylib.kernels``; or a path to one, ``mylib/kernels.py``.

    Raises:
        UsageError: A named module cannot be imported or declares nothing, or two declare the same name.
        DeclarationError: A named module's declaration contradicts itself.
    """
    found: dict[str, Found] = {}
    broken: list[Broken] = []
    for module in module_names(modules):
        try:
            here = _declared_in(module)
        except AotTuneError as error:
            if modules or module == OWN_KERNELS:
                raise
            broken.append(
                broken_point(module, error.what if isinstance(error, _ImportFailed) else str(error))
            )
            continue
        for one in here:
            other = found.get(one.tunable.name)
            if other is not None and other.tunable is not one.tunable:
                raise UsageError(
                    f"two kernels are called {one.tunable.name!r}: one in {other.module}, one in {module}; "
                    "name one module with --module"
                )
            found.setdefault(one.tunable.name, one)
    return Survey(found=found, broken=tuple(broken))


def broken_point(module: str, what: str) -> Broken:
    """The entry point that names a module of which `what` is wrong."""
    point = next(one for one in metadata.entry_points(group=GROUP) if _module_of(one) == module)
    told = f"entry point {point.name} = {point.value}"
    if point.dist is None:
        return Broken(point=told, what=what, fix="repair its package or uninstall it")
    name = point.dist.metadata["Name"]
    of_it = f"{told} of {name} {point.dist.version}"
    return Broken(point=of_it, what=what, fix=f"repair {name} or uninstall it (pip uninstall {name})")


def warn_of(broken: Iterable[Broken]) -> None:
    """One warning for each."""
    for one in broken:
        warnings.warn(str(one), EntryPointWarning, stacklevel=3)


def module_names(modules: Sequence[str] = ()) -> list[str]:
    """The named modules as Python imports them; without names, those of every installed entry point.

    The current folder is importable from then on. Imports none of them.

    Raises:
        UsageError: A path lies outside of the current folder.
    """
    _add_current_folder()
    return [_module_name(module) for module in modules] or installed_modules()


def load(module: str, name: str) -> Declaration:
    """The declaration called `name` in a module: how a child process finds what its parent found.

    Raises:
        UsageError: The module cannot be imported or has no such kernel; it lists those that it has.
    """
    here = {found.tunable.name: found.tunable for found in _tunables_in(module)}
    if name not in here:
        raise UsageError(
            f"module {module} declares no kernel {name!r}; it has {' '.join(sorted(here)) or 'none'}"
        )
    return here[name]


def installed_modules() -> list[str]:
    """The modules of the entry points, the shipped kernels first."""
    named = map(_module_of, metadata.entry_points(group=GROUP))
    return list(dict.fromkeys([OWN_KERNELS, *sorted(named)]))


def _module_of(point: metadata.EntryPoint) -> str:
    return point.value.partition(":")[0]


def _declared_in(module: str) -> list[Found]:
    here = list(_tunables_in(module))
    if not here:
        raise UsageError(
            f"module {module} declares no kernel: it has no global that is a Tunable; "
            "name the module that holds one, or import them there"
        )
    return here


def _tunables_in(module: str) -> Iterable[Found]:
    """The declarations among a module's globals, each once, in the order of their definition.

    A module that holds a tuple ``TUNABLES`` of them states another order: those come first.
    """
    seen: set[int] = set()
    names = vars(_imported(module))
    listed = names.get("TUNABLES", ())
    for value in (*(listed if isinstance(listed, tuple) else ()), *names.values()):
        if isinstance(value, Declaration) and id(value) not in seen:
            seen.add(id(value))
            yield Found(module=module, tunable=value)


def _add_current_folder() -> None:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


class _ImportFailed(UsageError):
    """A module cannot be imported; `what` leaves out the advice for whoever named it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what


def _imported(module: str) -> object:
    _add_current_folder()
    try:
        return importlib.import_module(module)
    except DeclarationError:
        raise  # it names the place and the next step already
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module == missing or module.startswith(missing + "."):
            raise _ImportFailed(
                f"no module is called {module!r} here ({os.getcwd()}) or on the Python path",
                "write it as Python imports it, mylib.kernels",
            ) from error
        raise UsageError(f"module {module} needs {missing!r}, which is not installed") from error
    except (Exception, SystemExit) as error:  # a script without a guard ends the process: with 0, in silence
        place = "" if isinstance(error, SyntaxError) else _raised_at(error)
        raise _ImportFailed(
            f"module {module} cannot be imported: {type(error).__name__}: {error}{place}", "repair it"
        ) from error


def _raised_at(error: BaseException) -> str:
    """The file and line that raised, as a syntax error tells them; empty where it was the import itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"


def _module_name(text: str) -> str:
    """``mylib/kernels.py`` and ``mylib/kernels`` as ``mylib.kernels``; a module name as it is."""
    if not text.endswith(".py") and os.sep not in text:
        return text
    relative = os.path.relpath(text) if os.path.isabs(text) else os.path.normpath(text)
    if relative.startswith(os.pardir):
        raise UsageError(
            f"{text} lies outside of the current folder; go to its package's folder, or name the module"
        )
    return relative.removesuffix(".py").removesuffix(os.sep).replace(os.sep, ".")
