"""Load prebuilt cubins at any launch of a library's kernel, by the hints of that launch.

CuTile asks only for code that is not loaded yet, so that later launches cost nothing more. Where searches are
recorded, what was compiled is a launch that needs a cubin, and is handed to the recorder.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aot_tune.cubins.archive import FILE_NAME, Archive
from aot_tune.errors import AotTuneError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.replay.answer.places import recorder
from aot_tune.replay.answer.records import ByCode, folders_of
from aot_tune.replay.fit import recorded_code
from aot_tune.replay.table import Launched, name_of
from aot_tune.serve.kernels import Cubins, refuse_capture, refuse_compiling
from aot_tune.serve.rank import set_replaying
from aot_tune.values.arch import Arch


@dataclass(frozen=True, kw_only=True)
class LaunchCall:
    """Launch of a library that was compiled."""

    kernel: Any
    """Kernel."""

    arch: Arch
    """Arch of the GPU."""

    launched: Launched
    """Hints and signature."""


_cubins = ByCode()
"""Cubins by kernel: a library makes many kernels of one function, with other hints."""

_missing: dict[str, set[str]] = {}
"""Signatures without a cubin that were warned of, by the kernel's name, which all its closures have."""


def begin() -> None:
    """Let launches of libraries' kernels load cubins, from the folders that hold their tables."""
    _forget()
    cutile.let_kernels_ask(_source, _compiled)
    set_replaying(True)


def answer_for_compiler() -> None:
    """Let a library that asks for an absent compiler get the answer of its archive's compiler."""
    cutile.answer_for_compiler(_compiler_of)


def end() -> None:
    """Let cuTile compile as before `begin`."""
    cutile.let_kernels_ask(None)
    cutile.answer_for_compiler(None)
    set_replaying(False)
    _forget()


def _forget() -> None:
    _cubins.clear()
    _missing.clear()


def _source(kernel: Any, arch: Arch) -> cutile.CubinSource:
    """Return the source of a kernel's cubins."""
    function = cutile.python_function(kernel)
    name = name_of(function.__module__, function.__qualname__)
    known = _cubins.of(kernel)
    if name not in known:
        # No lock: a fork could inherit it locked. Two threads may read; both take the first.
        code, folders = recorded_code(kernel), folders_of(function.__module__)
        missing = _missing.setdefault(name, set())
        known.setdefault(name, Cubins(code, lambda: folders, missing))
    cubins: Cubins = known[name]
    hints = _hints(kernel, arch)

    def find(signature: str, arch: Arch) -> cutile.Cubin | None:
        if recorder() is not None:
            return None  # the present compiler's code is measured
        if cubins.sections(arch):
            refuse_capture(name, signature, arch, "one launch of these shapes")
        cubin = cubins.find(hints, signature, arch)
        if cubin is None:
            refuse_compiling(name, signature, arch)
        return cubin

    return find


def _hints(kernel: Any, arch: Arch) -> tuple[tuple[str, int], ...]:
    return tuple(cutile.hints_of(kernel, arch).items())


def _compiled(kernel: Any, signature: str, arch: Arch) -> None:
    """Hand a compiled launch to the recorder, where there is one."""
    recording = recorder()
    if recording is not None:
        launched = Launched(_hints(kernel, arch), signature)
        recording(LaunchCall(kernel=kernel, arch=arch, launched=launched))


def _compiler_of(module: str) -> str | None:
    """Return the compiler of the cubins of a module's library; None where it has no cubins."""
    archs = {str(gpu.arch) for gpu in visible_gpus() or ()}
    for folder in folders_of(module):
        paths = sorted(folder.glob(f"*/{FILE_NAME}"), key=lambda path: path.parent.name not in archs)
        for path in paths:
            with suppress(AotTuneError):
                archive = Archive(path)
                for name in archive.kernels:
                    section = archive.section(name)
                    if section is not None and name.startswith(f"{module.partition('.')[0]}."):
                        return section.origin.tileiras
    return None
