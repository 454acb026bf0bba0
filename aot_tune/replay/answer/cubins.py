"""Load prebuilt cubins at any launch of a recorded kernel, by the hints of that launch.

CuTile asks only for code that is not loaded yet, so that later launches cost nothing more. A kernel without a
recorded table is left to cuTile. One rule holds for it too: after `aot_tune.prime` nothing is compiled where
AOT_TUNE_ON_MISS is ``error``.
"""

from __future__ import annotations

import os
from typing import Any

from aot_tune.nvidia import cutile
from aot_tune.replay.answer.places import recorder
from aot_tune.replay.answer.records import ByCode, folders_of, paths_of
from aot_tune.replay.fit import recorded_code
from aot_tune.replay.table import name_of
from aot_tune.serve.kernels import Cubins, refuse_capture, refuse_compiling
from aot_tune.serve.rank import may_compile, set_replaying
from aot_tune.values.arch import Arch

_cubins = ByCode()
"""Cubins by kernel: a library makes many kernels of one function, with other hints."""


def begin() -> None:
    """Let launches of recorded kernels load cubins, from the folders that hold their tables."""
    _cubins.clear()
    cutile.let_kernels_ask(_source)
    set_replaying(True)


def end() -> None:
    """Let cuTile compile as before `begin`."""
    cutile.let_kernels_ask(None)
    set_replaying(False)
    _cubins.clear()


def _source(kernel: Any, arch: Arch) -> cutile.CubinSource | None:
    """Return the source of a kernel's cubins; None without a recorded table, or while recording."""
    if recorder() is not None:
        return None  # the present compiler's code is measured
    function = cutile.python_function(kernel)
    name = name_of(function.__module__, function.__qualname__)
    if not any(os.path.lexists(path) for path in paths_of(kernel, arch)):
        if may_compile():
            return None

        def refuse(signature: str, arch: Arch) -> cutile.Cubin | None:
            refuse_compiling(name, signature, arch)
            return None

        return refuse
    known = _cubins.of(kernel)
    if name not in known:
        # No lock: a fork could inherit it locked. Two threads may read; both take the first.
        code, folders = recorded_code(kernel), folders_of(kernel)
        known.setdefault(name, Cubins(code, lambda: folders))
    cubins: Cubins = known[name]
    hints = tuple(cutile.hints_of(kernel, arch).items())

    def find(signature: str, arch: Arch) -> cutile.Cubin | None:
        refuse_capture(name, signature, arch, "one launch of these shapes")
        cubin = cubins.find(hints, signature, arch)
        if cubin is None:
            refuse_compiling(name, signature, arch)
        return cubin

    return find
