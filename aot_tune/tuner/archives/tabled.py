"""A kernel, declared or not, and the cubins that its tables need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aot_tune.cubins.origin import KernelCode
from aot_tune.tuner.archives.signatures import Compilation
from aot_tune.values.arch import Arch


@dataclass(frozen=True, kw_only=True)
class TabledKernel:
    """A kernel, and the compilations that its tables in a folder need on an arch."""

    code: KernelCode
    """The kernel's code."""

    arch: Arch
    """The arch."""

    folder: Path
    """The folder of tables, ``tuned_configs``, with its archive."""

    compilations: tuple[Compilation, ...]
    """The hints and signatures, sorted, each once."""


class OtherTables(Protocol):
    """Tables of kernels without a declaration; the caller of `check` provides them."""

    def names(self, folder: Path) -> Sequence[str]:
        """Return the kernels with such a table in an arch's folder."""

    def may_have(self, name: str) -> bool:
        """Return whether a kernel of such a table could have this name, unlike a declared kernel."""

    def read(self, folder: Path, name: str) -> TabledKernel | str:
        """Read a kernel's table in an arch's folder; return a reason if its cubins are not served.

        Raises:
            AotTuneError: The table cannot be read or used.
        """
