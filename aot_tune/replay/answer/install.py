"""Replace cuTile's ``exhaustive_search`` in this process, and undo that. No line of a library changes.

Launches of recorded kernels load prebuilt cubins from then on.

A library may ask for an absent compiler while it is imported; its archive's compiler answers then.

Nothing heavy is imported: where a program has not imported cuTile yet, the function is replaced when it does,
and again whenever it does so anew. Where it cannot be replaced, one warning reports that; where a miss is an
error, that is one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from aot_tune import environment
from aot_tune.errors import MissError, MissWarning
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.places import use_folders
from aot_tune.warn import warn_once

_HOME = "cuda.tile.tune"
"""Module whose ``exhaustive_search`` libraries import or call. A module below it defines the function."""

_NAME = "exhaustive_search"

_exchanged: list[tuple[Any, Any]] = []
"""Each of cuTile's functions that was replaced, with ours. A reload of cuTile's module makes another."""


def install(*, tables: Path | str | Sequence[Path | str] = ()) -> None:
    """Answer every call of cuTile's ``exhaustive_search`` in this process from recorded tables.

    The function is replaced in cuTile's module and in every module that has imported it by name. Launches of
    recorded kernels load the cubins that `aot-tune compile` made for them. A second call changes only
    `tables`, which are then read anew.

    Args:
        tables: Folders of recorded tables that are read after a library's own. A missing folder is no error.
            Once it exists, it counts for kernels that search for the first time.

    Raises:
        TypeError: `tables` is neither a folder nor a sequence of folders.
        MissError: The function cannot be replaced, and AOT_TUNE_ON_MISS is ``error``; else a warning says so.
    """
    _use(_absolute(tables))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in (cutile.COMPILING, _HOME):
        if sys.modules.get(name) is not None:
            _replace_in(name)


def uninstall() -> None:
    """Put cuTile's own function back wherever `install` replaced it.

    Libraries that import `aot_tune.exhaustive_search` themselves are answered as before.
    """
    _use([])
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    if _exchanged and "aot_tune.replay.answer.door" not in sys.modules:
        from aot_tune.replay.answer import cubins

        cubins.end()
    while _exchanged:
        own, ours = _exchanged.pop()
        exchange(ours, own)


def _absolute(tables: Path | str | Sequence[Path | str]) -> list[Path]:
    """Return folders as absolute paths; a relative one as it is where the current folder was removed."""
    try:
        folders = [Path(folder) for folder in ([tables] if isinstance(tables, str | Path) else tables)]
    except TypeError:
        raise TypeError(f"tables={tables!r:.80}: pass a folder, or a sequence of folders") from None
    with suppress(OSError):
        folders = [folder.absolute() for folder in folders]
    return folders


def _use(folders: Sequence[Path]) -> None:
    """Read tables in these folders from now on, and forget tables of other folders."""
    searches = sys.modules.get("aot_tune.replay.answer.searches")
    if use_folders(folders) and searches is not None:
        searches.forget()


def _replace_in(name: str) -> None:
    """Replace the function in a module of cuTile, and wherever else it is; or an absent compiler's answer.

    Raises:
        MissError: It cannot be replaced, and AOT_TUNE_ON_MISS is ``error``.
    """
    try:
        from aot_tune.replay.answer import cubins

        if name == cutile.COMPILING:
            cubins.answer_for_compiler()
            return
        own: Any = getattr(import_module(name), _NAME)  # another thread may be importing it
        from aot_tune.replay.answer.searches import answered

        if not cutile.stands_in(own):
            ours = answered(own)
            _exchanged.append((own, ours))
            exchange(own, ours)
        cubins.begin()
    except Exception as error:
        message = f"searches in this process are not replayed: {type(error).__name__}: {error}"
        if environment.on_miss() == "error":
            raise MissError(f"{message}, and {environment.ON_MISS}=error") from error
        warn_once(message, MissWarning)


_CONTENTS = vars(ModuleType)["__dict__"].__get__
"""Returns a module's globals and runs none of its code: a lazy module would be loaded by an attribute."""


def exchange(old: object, new: object) -> None:
    """Replace a function in every module that has it as a global of any name."""
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):  # isinstance would ask an object for its class
            contents: dict[str, Any] = _CONTENTS(module) or {}  # None where it was never initialised
            for name, value in list(contents.items()):
                if value is old:
                    contents[name] = new


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that leaves cuTile's modules to other finders, and replaces their function after the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See the base class."""
        if name not in (cutile.COMPILING, _HOME) and not name.startswith(f"{_HOME}."):
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None
            if not isinstance(finder, _Finder) and find is not None:
                spec = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loader that loads with another loader, then replaces the function. The module keeps the other one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """See the base class."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """See the base class."""
        contents = _CONTENTS(module)
        contents["__loader__"] = contents["__spec__"].loader = self._loader
        self._loader.exec_module(module)
        if module.__name__ in (cutile.COMPILING, _HOME) or _NAME in contents:
            _replace_in(module.__name__)
