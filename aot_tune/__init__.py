"""Tuned cuTile kernels, shipped and not discovered. Light and lazy: imports neither torch nor cuda.tile."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Close as Close
    from aot_tune.declare.declaration import Work as Work
    from aot_tune.replay.answer.door import exhaustive_search as exhaustive_search
    from aot_tune.replay.answer.install import install as install
    from aot_tune.replay.answer.install import uninstall as uninstall
    from aot_tune.serve.prime import prime as prime
    from aot_tune.serve.workspace import Workspace as Workspace
    from aot_tune.serve.workspace import workspace as workspace
    from aot_tune.tunable import Tunable as Tunable
    from aot_tune.values.arch import Arch as Arch
    from aot_tune.values.bucket import Exact as Exact
    from aot_tune.values.bucket import Pow2 as Pow2
    from aot_tune.values.config import Config as Config
    from aot_tune.values.device import Device as Device
    from aot_tune.values.problem import Problem as Problem

_HOMES = {
    "Arch": "values.arch",
    "Close": "declare.declaration",
    "Config": "values.config",
    "Device": "values.device",
    "Exact": "values.bucket",
    "Pow2": "values.bucket",
    "Problem": "values.problem",
    "Tunable": "tunable",
    "Work": "declare.declaration",
    "Workspace": "serve.workspace",
    "blank": "declare.blanks",
    "exhaustive_search": "replay.answer.door",
    "install": "replay.answer.install",
    "prime": "serve.prime",
    "uninstall": "replay.answer.install",
    "workspace": "serve.workspace",
}

__all__ = [
    "Arch",
    "Close",
    "Config",
    "Device",
    "Exact",
    "Pow2",
    "Problem",
    "Tunable",
    "Work",
    "Workspace",
    "__version__",
    "blank",
    "exhaustive_search",
    "install",
    "prime",
    "uninstall",
    "workspace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aot_tune' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"aot_tune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
