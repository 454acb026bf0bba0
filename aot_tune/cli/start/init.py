"""`aot-tune init`: print the lines that a package's pyproject.toml needs. It writes nothing.

One line is the entry point by which the command line finds the kernels, the other puts tables into the wheel.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.declare import discovery
from aot_tune.errors import StoreError, UsageError
from aot_tune.tables.store import FOLDER_NAME, tables_at

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_POINTS = ("project", "entry-points", discovery.GROUP)
"""The table of the entry points that the command line looks for."""

_WHEEL = ("tool", "hatch", "build", "targets", "wheel")
"""The table of what hatchling puts into a wheel."""

_PACKAGE_DATA = ("tool", "setuptools", "package-data")
"""The table of the files that setuptools puts into a wheel, by package."""

_ALL_FILES = "*/*"
"""The files of every arch's folder of tables: the tables and the archive."""


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """A key of a pyproject.toml with its value."""

    table: tuple[str, ...]
    """Path of the table."""

    key: str
    """The key."""

    value: str | list[str]
    """The value that the file should have; of a list, with all patterns that it has already."""

    @property
    def header(self) -> str:
        """The table's header."""
        return f"[{'.'.join(map(_key, self.table))}]"

    @property
    def line(self) -> str:
        """The key and its value as TOML."""
        return f"{_key(self.key)} = {json.dumps(self.value, ensure_ascii=False)}"


def init_lines(path: Path, module: str | None) -> list[str]:
    """Return what to append to a pyproject.toml, as TOML whose comments say what the file has already.

    Args:
        path: The pyproject.toml.
        module: The module that declares kernels; None for the module of the file's own entry point.

    Raises:
        UsageError: The file or the module cannot be used; the message says why.
        StoreError: The file cannot be read.
    """
    text = _read(path)
    document = _parse(path, text)
    module = module or _declared(document)
    root, home = _home(path.absolute().parent, module)
    settings = (_entry_point(document, module), *_package_data(document, path.absolute().parent, root, home))
    lines = [line for setting in settings for line in _lines(path.name, text, document, setting)]
    if len(settings) == 1:
        lines.append(
            f"# {_backend(document)} is neither hatchling nor setuptools: let the wheel hold all files of "
            f"{home.relative_to(root)}/{FOLDER_NAME}"
        )
    return [*lines, f"# in CI, before a merge: aot-tune check --module {module}"]


def _lines(name: str, text: str, document: Mapping[str, Any], setting: _Setting) -> Iterator[str]:
    """How a setting gets into the file: it is there, or lines to append, or a line to write into a table."""
    if _value(document, (*setting.table, setting.key)) == setting.value:
        yield f"# {name} has {setting.header} {setting.line}"
        return
    lines = [setting.header, setting.line]
    if _is_appendable(text, setting):
        yield f"# append to {name}:"
        yield from lines
    else:
        yield f"# write into {setting.header} of {name}, in place of any line {setting.key}: {setting.line}"


def _is_appendable(text: str, setting: _Setting) -> bool:
    """Whether the file with the setting at its end is TOML that has it."""
    try:
        document = tomllib.loads(f"{text}\n{setting.header}\n{setting.line}\n")
    except tomllib.TOMLDecodeError:
        return False
    return bool(_value(document, (*setting.table, setting.key)) == setting.value)


# What the file has ------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}; run this in the folder of a package's pyproject.toml")
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8, as TOML must be; save it as UTF-8") from error


def _parse(path: Path, text: str) -> Mapping[str, Any]:
    if text.startswith("\ufeff"):
        raise UsageError(f"{path} begins with a byte order mark; save it as UTF-8 without one")
    try:
        document: Mapping[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}; correct it first") from error
    if not isinstance(document.get("project"), Mapping):
        raise UsageError(
            f"{path} has no table [project]; describe the package there, with name and version, before its "
            "entry points"
        )
    dynamic = _value(document, ("project", "dynamic"))
    if isinstance(dynamic, list) and "entry-points" in dynamic:
        raise UsageError(
            f"project.dynamic of {path} lists entry-points, which are then in another file; add to the group "
            f'{discovery.GROUP} there: mylib = "mylib.kernels"'
        )
    return document


def _value(document: Any, names: tuple[str, ...]) -> Any:
    """The value at a path; None where there is none."""
    for name in names:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _backend(document: Mapping[str, Any]) -> str:
    """The module of the build backend."""
    return str(_value(document, ("build-system", "build-backend")) or "setuptools.build_meta")


def _points(document: Mapping[str, Any]) -> dict[str, str]:
    """The module of each entry point, by its name."""
    points = _value(document, _POINTS)
    if not isinstance(points, Mapping):
        return {}
    return {name: str(declared).partition(":")[0] for name, declared in points.items()}


def _declared(document: Mapping[str, Any]) -> str:
    """The module of the first entry point."""
    points = _points(document)
    if not points:
        raise UsageError("name the module that declares kernels: aot-tune init mylib.kernels")
    return next(iter(points.values()))


def _home(folder: Path, module: str) -> tuple[Path, Path]:
    """The folder with a module's top-level package, and that of the package that its tables belong to.

    Raises:
        UsageError: The module is not below the folder of the pyproject.toml.
    """
    names = module.split(".")
    inside = Path(*names)
    for root in (folder, folder / "src") if all(name.isidentifier() for name in names) else ():
        if (root / inside.with_suffix(".py")).is_file() or (root / inside / "__init__.py").is_file():
            packages = [root.joinpath(*names[:end]) for end in range(1, len(names) + 1)]
            packages = [package for package in packages if package.is_dir()]
            regular = [package for package in packages if (package / "__init__.py").is_file()]
            return root, (regular or packages[-1:] or [root / names[0]])[0]
    raise UsageError(
        f"there is no module {module!r} in {folder} or {folder / 'src'}; write it as Python imports it, "
        "mylib.kernels, and run this beside its pyproject.toml"
    )


# What it should have ----------------------------------------------------------------------------------------


def _entry_point(document: Mapping[str, Any], module: str) -> _Setting:
    points = _points(document)
    package = module.partition(".")[0]
    name = next((name for name, declared in points.items() if declared == module), None)
    if name is not None:
        return _Setting(table=_POINTS, key=name, value=_value(document, (*_POINTS, name)))
    return _Setting(
        table=_POINTS, key=module.replace(".", "_") if package in points else package, value=module
    )


def _package_data(document: Mapping[str, Any], folder: Path, root: Path, home: Path) -> Iterator[_Setting]:
    """The setting that puts the tables into the wheel, for the backends that are known."""
    backend = _backend(document)
    beside, package = tables_at(home), home.relative_to(root).parts
    is_beside = beside.parent != home
    if backend.startswith("setuptools"):
        if is_beside:
            raise UsageError(
                f"{beside} lies beside the package {'.'.join(package)}, and setuptools takes files of "
                f"packages alone; move it to {home / FOLDER_NAME}"
            )
        yield _with_pattern(document, _PACKAGE_DATA, ".".join(package), f"{FOLDER_NAME}/{_ALL_FILES}")
    elif backend.startswith("hatchling") and is_beside:
        place, inside = beside.relative_to(folder).as_posix(), f"{'/'.join(package)}/{FOLDER_NAME}"
        yield _Setting(table=(*_WHEEL, "force-include"), key=place, value=inside)
    elif backend.startswith("hatchling"):
        # All files of a package are in its wheel, but for those that git ignores, as archives often are.
        place = (home / FOLDER_NAME).relative_to(folder).as_posix()
        yield _with_pattern(document, _WHEEL, "artifacts", f"{place}/{_ALL_FILES}")


def _with_pattern(document: Mapping[str, Any], table: tuple[str, ...], key: str, pattern: str) -> _Setting:
    """A list of patterns with one more."""
    present = _value(document, (*table, key)) or []
    if not isinstance(present, list):
        raise UsageError(f"{key} in [{'.'.join(table)}] is {present!r:.80}; write a list of patterns")
    return _Setting(table=table, key=key, value=[*present, *([pattern] if pattern not in present else [])])


def _key(name: str) -> str:
    """A key as TOML, in quotes where it needs them."""
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name, ensure_ascii=False)
