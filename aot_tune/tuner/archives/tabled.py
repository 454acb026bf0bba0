"""A kernel and the cubins that its tables ask for, whatever names the kernel. Pure."""

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
    """A kernel, and what its tables in one folder ask for on one arch."""

    code: KernelCode
    """The kernel's code."""

    arch: Arch
    """The arch."""

    folder: Path
    """The folder of tables, ``tuned_configs``, in which its archive lies."""

    compilations: tuple[Compilation, ...]
    """The hints and signatures, sorted, each once."""


class OtherTables(Protocol):
    """Tables of kernels that no declaration names; the caller of `check` hands them in."""

    def names(self, folder: Path) -> Sequence[str]:
        """The kernels that have such a table in an arch's folder."""

    def may_have(self, name: str) -> bool:
        """Whether a kernel of such a table could have this name, unlike a declared one."""

    def read(self, folder: Path, name: str) -> TabledKernel | str:
        """A kernel whose table is in an arch's folder; or why its cubins are not served, in words.

        Raises:
            AotTuneError: The table cannot be read or used.
        """
