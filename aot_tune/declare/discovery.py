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
from typing import Any, cast

from aot_tune.declare.declaration import Declaration
from aot_tune.errors import AotTuneError, DeclarationError, EntryPointWarning, UsageError

GROUP = "aot_tune.tunables"
"""Entry-point group whose members name modules that declare kernels: ``mylib = "mylib.kernels"``."""

OWN_KERNELS = "aot_tune.kernels"
"""Module of the shipped kernels. They need no entry point, so that a checkout works uninstalled."""


@dataclass(frozen=True, kw_only=True)
class FoundKernel:
    """Declaration with its module."""

    module: str
    """Module whose import makes the declaration; other processes find it by module and kernel name."""

    tunable: Declaration
    """Declaration of the kernel."""

    @property
    def module_option(self) -> str:
        """Option --module by which a command finds the kernel; empty for a shipped kernel.

        `Declaration.module_option` names the module of the author's functions. A factory of declarations may
        be in another module, which declares nothing.
        """
        return f" --module {self.module}" if self.tunable.module_option else ""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Installed entry point whose kernels cannot be loaded, or a kernel of it whose name is taken."""

    point: str
    """Description of the entry point: ``entry point mylib = mylib.kernels of mylib 1.0``."""

    what: str
    """Reason why it is left out."""

    fix: str
    """Advice what to do about it."""

    def __str__(self) -> str:
        return f"{self.point} is left out: {self.what}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All declarations, and the entry points that failed."""

    found: dict[str, FoundKernel]
    """Declarations by kernel name, in the order of discovery."""

    broken: tuple[Broken, ...]
    """Entry points and kernels that were left out."""


def find_tunables(modules: Sequence[str] = ()) -> dict[str, FoundKernel]:
    """Return the declarations that `survey` finds; warn of each entry point that is left out."""
    result = survey(modules)
    warn_of(result.broken)
    return result.found


def survey(modules: Sequence[str] = (), *, may_be_bare: Container[str] = ()) -> Survey:
    """Find all declarations of the named modules; without names, of every installed entry point.

    Modules are found in the current folder too, after installed ones. A module's globals are examined,
    including imported ones; the files of a package are not walked. A broken entry point of another package is
    left out, because the other kernels must stay usable; so is a kernel whose name an earlier entry point
    has.

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
            declared = list(_tunables_in(module)) if module in may_be_bare else _declared_in(module)
        except AotTuneError as error:
            if modules or module == OWN_KERNELS:
                raise
            broken.append(
                broken_point(module, error.what if isinstance(error, _ImportFailed) else str(error))
            )
            continue
        for kernel in declared:
            other = found.setdefault(kernel.tunable.name, kernel)
            if other.tunable is kernel.tunable:
                continue
            if modules or other.module == module:
                raise UsageError(_twice(kernel.tunable.name, other.module, module))
            broken.append(
                Broken(
                    point=f"kernel {kernel.tunable.name!r} of {module}",
                    what=f"{other.module} declares a kernel of that name too",
                    fix=f"name its module, --module {module}, or give it another name",
                )
            )
    return Survey(found=found, broken=tuple(broken))


def _twice(name: str, first: str, second: str) -> str:
    if first == second:
        return f"two kernels of {first} are called {name!r}; give one of them another name"
    return f"two kernels are called {name!r}, in {first} and in {second}; name one module with --module"


def broken_point(module: str, what: str) -> Broken:
    """Describe the entry point that names `module`; it cannot be loaded for the reason `what`."""
    points = metadata.entry_points(group=GROUP)
    point = next(named for named in points if _module_of(named) == module)
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
    for point in broken:
        warnings.warn(str(point), EntryPointWarning, stacklevel=3)


def module_names(modules: Sequence[str] = ()) -> list[str]:
    """Return the import names of the named modules; without names, of every installed entry point.

    Afterwards modules are found in the current folder too. None of the modules is imported.

    Raises:
        UsageError: A path is outside the current folder.
    """
    _add_current_folder()
    return [_module_name(module) for module in modules] or installed_modules()


def module_of(tunable: Declaration) -> str | None:
    """Return a module with the declaration among its globals, for `load`; None without such a module.

    The module of its functions and its package come first, then all imported modules; none is imported.
    """
    for name in dict.fromkeys([getattr(tunable.problem, "__module__", None), tunable.package, *sys.modules]):
        values = list(getattr(sys.modules.get(name or ""), "__dict__", {}).values())
        if any(member is tunable for value in values for member in _members(value)):
            return name
    return None


def load(module: str, name: str) -> Declaration:
    """Return the declaration called `name` in a module, so that a child process finds its parent's.

    The child imports by its own ``sys.path``, which equals its parent's.

    Raises:
        UsageError: The module cannot be imported or has no such kernel; the message lists its kernels.
    """
    declared = {kernel.tunable.name: kernel.tunable for kernel in _tunables_in(module)}
    if name not in declared:
        raise UsageError(
            f"module {module} declares no kernel {name!r}; it has {' '.join(sorted(declared)) or 'none'}"
        )
    return declared[name]


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
    """Return the modules of the installed entry points, after the shipped kernels' module."""
    named = map(_module_of, metadata.entry_points(group=GROUP))
    return list(dict.fromkeys([OWN_KERNELS, *sorted(named)]))


def _module_of(point: metadata.EntryPoint) -> str:
    return point.value.partition(":")[0]


def _declared_in(module: str) -> list[FoundKernel]:
    declared = list(_tunables_in(module))
    if not declared:
        raise UsageError(
            f"module {module} declares no kernel: it has no global that is a Tunable, or a list or dict "
            "of them; name the module that holds them, or import them in this one"
        )
    return declared


def _tunables_in(module: str) -> Iterable[FoundKernel]:
    """Yield the declarations among a module's globals, each once, in the order of definition.

    Lists, tuples and dicts of declarations count too, as a loop over variants makes them. Members of a
    module's tuple ``TUNABLES`` come first, where it has one; it may be an attribute of PEP 562.
    """
    seen: set[int] = set()
    found = imported(module, "TUNABLES")
    listed = getattr(found, "TUNABLES", ())
    for value in (*(listed if isinstance(listed, tuple) else ()), *vars(found).values()):
        for member in _members(value):
            if isinstance(member, Declaration) and id(member) not in seen:
                seen.add(id(member))
                yield FoundKernel(module=module, tunable=member)


def _members(value: object) -> Iterable[object]:
    """Return the members of a list or tuple, or a dict's values; for other globals the value itself."""
    if issubclass(type(value), list | tuple):  # `isinstance` reads `__class__`, which acts in lazy modules
        return cast(Iterable[object], value)
    return tuple(cast(dict[object, object], value).values()) if issubclass(type(value), dict) else (value,)


def _add_current_folder() -> None:
    """Add the current folder to the path, after all installed modules: no file in it replaces them."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


class _ImportFailed(UsageError):
    """A module cannot be imported. `what` is the message without the advice for the user who named it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what


def imported(module: str, *attributes: str) -> object:
    """Import a user's module, and the `attributes` that it has and imports when they are read.

    Raises:
        UsageError: It cannot be imported; the message gives the reason and the next step.
        DeclarationError: A declaration in it contradicts itself.
    """
    try:
        found = importlib.import_module(module)
        for name in attributes:
            getattr(found, name, None)
        return found
    except DeclarationError:
        raise  # its message already names the place and the next step
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
    """Return the file and line that raised, in a syntax error's form; empty where the import failed."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"


def _module_name(text: str) -> str:
    """Return ``mylib.kernels`` for ``mylib/kernels.py`` and ``mylib/kernels``; keep a module name."""
    if not text.endswith(".py") and os.sep not in text:
        return text
    relative = os.path.relpath(text) if os.path.isabs(text) else os.path.normpath(text)
    if relative.startswith(os.pardir):
        raise UsageError(
            f"{text} is outside the current folder; go to its package's folder, or name the module"
        )
    return relative.removesuffix(".py").removesuffix(os.sep).replace(os.sep, ".")
