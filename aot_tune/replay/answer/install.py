"""Replace cuTile's ``exhaustive_search`` in this process, and undo that. No line of a library changes.

Launches of recorded kernels load prebuilt cubins from then on.

Nothing heavy is imported: where a program has not imported cuTile yet, the function is replaced when it does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from aot_tune.nvidia import cutile
from aot_tune.replay.answer.places import use_folders

_HOME = "cuda.tile.tune"
"""Module whose ``exhaustive_search`` libraries import or call."""

_NAME = "exhaustive_search"


def install(*, tables: Path | str | Sequence[Path | str] = ()) -> None:
    """Answer every call of cuTile's ``exhaustive_search`` in this process from recorded tables.

    The function is replaced in cuTile's module and in every module that has imported it by name. Launches of
    recorded kernels load the cubins that `aot-tune compile` made for them. A second call changes only
    `tables`, which are then read anew.

    Args:
        tables: Folders of recorded tables that are read after a library's own. A missing folder is no error.
            Once it exists, it counts for kernels that search for the first time.
    """
    folders = [tables] if isinstance(tables, str | Path) else tables
    _use([Path(folder).absolute() for folder in folders])
    if _HOME in sys.modules:
        _replace()
    elif not _is_waiting():
        sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """Put cuTile's own function back wherever `install` replaced it.

    Libraries that import `aot_tune.exhaustive_search` themselves are answered as before.
    """
    _use([])
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    ours = getattr(sys.modules.get(_HOME), _NAME, None)
    if cutile.stands_in(ours):
        from aot_tune.replay.answer import cubins

        if "aot_tune.replay.answer.door" not in sys.modules:
            cubins.end()
        exchange(ours, cutile.own_search())


def installed() -> bool:
    """Return whether `install` is in force."""
    return _is_waiting() or cutile.stands_in(getattr(sys.modules.get(_HOME), _NAME, None))


def _is_waiting() -> bool:
    """Return whether the function will be replaced when cuTile is imported."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _use(folders: Sequence[Path]) -> None:
    """Read tables in these folders from now on, and forget tables of other folders."""
    searches = sys.modules.get("aot_tune.replay.answer.searches")
    if use_folders(folders) and searches is not None:
        searches.forget()


def _replace() -> None:
    from aot_tune.replay.answer import cubins
    from aot_tune.replay.answer.searches import answered

    own: Any = getattr(sys.modules[_HOME], _NAME)
    if not cutile.stands_in(own):
        exchange(own, answered(own))
    cubins.begin()


def exchange(old: object, new: object) -> None:
    """Replace a function in every module that has it as a global of any name."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that leaves cuTile's module to other finders, and replaces its function after the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See the base class."""
        if name != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loader that loads with another loader, then replaces the function."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """See the base class."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """See the base class."""
        self._loader.exec_module(module)
        _replace()
