"""`aot-tune init`: let a package be found by the command line, and let its wheel carry its tables.

Only lines that are missing are added to the package's pyproject.toml; comments and order stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from aot_tune.declare import discovery
from aot_tune.errors import StoreError, UsageError
from aot_tune.tables import files
from aot_tune.tables.store import FOLDER_NAME

TASK = "check-tuned-configs"
"""The name of the task that runs ``aot-tune check``."""

_TASKS = (
    ("tool", "hatch", "envs", "default", "scripts"),
    ("tool", "pdm", "scripts"),
    ("tool", "pixi", "tasks"),
    ("tool", "poe", "tasks"),
    ("tool", "taskipy", "tasks"),
)
"""Where a pyproject.toml lists commands that people and CI run by name."""

_POINTS = ("project", "entry-points", discovery.GROUP)
"""The table of the entry points that the command line looks for."""

_ALL_FILES = "*/*"
"""The files of every arch's folder of tables: the tables and the archive."""


@dataclass(frozen=True, kw_only=True)
class Initialised:
    """What `aot-tune init` did."""

    path: Path
    """The pyproject.toml."""

    changes: tuple[str, ...]
    """What was added, one line each; empty where all was there."""

    check: str
    """The command that a pull request should pass."""


def initialise(path: Path, module: str | None) -> Initialised:
    """Add what is missing to a pyproject.toml.

    Args:
        path: The file.
        module: The module that declares kernels; None for that of the entry point that is there already.

    Raises:
        UsageError: The file or the module cannot be used; the message says why, and what to write by hand.
        StoreError: The file cannot be written.
    """
    text = _read(path)
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise UsageError(f"{path} is not valid TOML: {error}; correct it first") from error
    project = _Project(path.absolute().parent, document, module)
    changes = tuple(project.changes())
    if changes:
        files.write_atomic(path, (tomlkit.dumps(document).rstrip("\n") + "\n").encode())
    return Initialised(path=path, changes=changes, check=project.check)


def lines(done: Initialised) -> list[str]:
    """What was done, for a person."""
    added = [f"{done.path}: {change}" for change in done.changes]
    return [*(added or [f"{done.path}: nothing to change"]), f"in CI, before a merge: {done.check}"]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist; run this in the folder of a package's pyproject.toml"
        ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8, as TOML must be; save it as UTF-8") from error


class _Project:
    """A pyproject.toml that is being completed."""

    def __init__(self, folder: Path, document: tomlkit.TOMLDocument, module: str | None) -> None:
        self.folder = folder
        self.document = document
        self.backend = self._backend()
        self.module = module or self._declared()
        self.package = self.module.partition(".")[0]
        self.home = self._home()
        self.check = f"aot-tune check --module {self.module}"

    def changes(self) -> Iterator[str]:
        """Add what is missing, and say so."""
        had_points = self._table(*_POINTS, make=False) is not None
        yield from self._entry_point()
        yield from self._package_data()
        yield from self._task()
        points = self._table(*_POINTS)
        if not had_points and isinstance(points, Table):
            points.add(tomlkit.nl())  # before the table that was there and now follows

    # What the file says -------------------------------------------------------------------------------------

    def _backend(self) -> str:
        """The build backend's package.

        Raises:
            UsageError: It is none of the two that are known.
        """
        if "project" not in self.document:
            raise UsageError(
                f"{self.folder / 'pyproject.toml'} has no table [project]; describe the package there, with "
                "name and version, before its entry points"
            )
        build = self._table("build-system", make=False) or {}
        backend = str(build.get("build-backend", "setuptools.build_meta"))
        known = backend.partition(":")[0].partition(".")[0]
        if known not in ("hatchling", "setuptools"):
            raise UsageError(
                f"the build backend is {backend}, and init knows hatchling and setuptools; write by hand "
                f'[project.entry-points."{discovery.GROUP}"] mylib = "mylib.kernels", and let the wheel hold '
                f"all files of mylib/{FOLDER_NAME}"
            )
        return known

    def _declared(self) -> str:
        """The module of the entry point that is there."""
        points = self._table(*_POINTS, make=False) or {}
        if not points:
            raise UsageError("name the module that declares kernels: aot-tune init mylib.kernels")
        return str(next(iter(points.values()))).partition(":")[0]

    def _home(self) -> Path:
        """The folder of the top-level package.

        Raises:
            UsageError: The module is not below the pyproject.toml.
        """
        inside = Path(*self.module.split("."))
        for root in (self.folder, self.folder / "src"):
            if (root / inside.with_suffix(".py")).is_file() or (root / inside / "__init__.py").is_file():
                return root / self.package
        raise UsageError(
            f"there is no module {self.module!r} in {self.folder} or {self.folder / 'src'}; write it as "
            "Python imports it, mylib.kernels, and run this beside its pyproject.toml"
        )

    def _table(self, *names: str, make: bool = True) -> MutableMapping[str, Any] | None:
        """A table by its path; a missing one is made, or is None.

        Raises:
            UsageError: Something else stands there.
        """
        found: Any = self.document
        for depth, name in enumerate(names):
            if name not in found:
                if not make:
                    return None
                last = depth == len(names) - 1
                found[name] = tomlkit.table(is_super_table=not last)
            found = found[name]
            if not isinstance(found, MutableMapping):
                raise UsageError(f"{'.'.join(names[: depth + 1])} is no table; write it as a table")
        return found  # type: ignore[no-any-return]

    # What is added ------------------------------------------------------------------------------------------

    def _entry_point(self) -> Iterator[str]:
        project = self._table("project")
        assert project is not None
        if "entry-points" in project.get("dynamic", ()):
            raise UsageError(
                "project.dynamic lists entry-points, so that they are not in this file; add to them "
                f'{discovery.GROUP}: {self.package} = "{self.module}"'
            )
        points = self._table(*_POINTS)
        assert points is not None
        if self.module in [str(value).partition(":")[0] for value in points.values()]:
            return
        name = self.package if self.package not in points else self.module.replace(".", "_")
        points[name] = self.module
        yield f'entry point {discovery.GROUP}: {name} = "{self.module}"'

    def _package_data(self) -> Iterator[str]:
        beside = self.home.parent / FOLDER_NAME
        if beside.is_dir() and not (self.home / FOLDER_NAME).is_dir():
            yield from self._tables_beside(beside)
        elif self.backend == "setuptools":
            data = self._table("tool", "setuptools", "package-data")
            yield from self._listed(data, self.package, f"{FOLDER_NAME}/{_ALL_FILES}", "package data")
        else:
            # All files of a package are in its wheel, but for those that git ignores, as archives often are.
            wheel = self._table("tool", "hatch", "build", "targets", "wheel")
            place = (self.home / FOLDER_NAME).relative_to(self.folder).as_posix()
            yield from self._listed(wheel, "artifacts", f"{place}/{_ALL_FILES}", "files of the wheel")

    def _tables_beside(self, beside: Path) -> Iterator[str]:
        """Tables next to the package, as in a checkout, have to be put inside it in the wheel."""
        if self.backend == "setuptools":
            raise UsageError(
                f"{beside} lies beside the package {self.package}, and setuptools takes files of packages "
                f"alone; move it to {self.home / FOLDER_NAME}"
            )
        table = self._table("tool", "hatch", "build", "targets", "wheel", "force-include")
        assert table is not None
        place, inside = beside.relative_to(self.folder).as_posix(), f"{self.package}/{FOLDER_NAME}"
        if str(table.get(place, "")) != inside:
            table[place] = inside
            yield f'files of the wheel: "{place}" as "{inside}"'

    def _listed(
        self, table: MutableMapping[str, Any] | None, name: str, pattern: str, what: str
    ) -> Iterator[str]:
        """Add a pattern to a list in a table."""
        assert table is not None
        present = table.setdefault(name, [])
        if not isinstance(present, list):
            raise UsageError(f"{name} is {present!r:.80}; write a list of patterns")
        if pattern not in present:
            present.append(pattern)
            yield f'{what}: {name} has "{pattern}"'

    def _task(self) -> Iterator[str]:
        """The command that checks the tables, where the file lists commands; else in a comment."""
        places = [place for place in _TASKS if self._table(*place, make=False) is not None]
        if not places and self.backend == "hatchling":
            places = [_TASKS[0]]
        for place in places[:1]:
            tasks = self._table(*place)
            assert tasks is not None
            if not any(self.check in str(command) for command in tasks.values()):
                tasks[TASK] = self.check
                yield f"task in {'.'.join(place)}: {TASK} = {self.check!r}"
        if not places and self.check not in tomlkit.dumps(self.document):
            points = self._table(*_POINTS)
            assert isinstance(points, Table)
            points.add(tomlkit.comment(f"In CI, before a merge: {self.check}"))
            yield f"comment: in CI {self.check}"
