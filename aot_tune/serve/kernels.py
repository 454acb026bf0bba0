"""A declaration's kernels with hints: made once per distinct set of hints, never dropped. Knows no table.

The process aborts when a launched kernel is collected while a graph is being captured, so they are kept for
ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.errors import LaunchError
from aot_tune.nvidia import cutile
from aot_tune.serve.cubins import Cubins
from aot_tune.serve.runtime import runtime
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config

Hints = tuple[tuple[str, int], ...]

_KEPT: list[dict[Hints, Any]] = []
"""Every hinted kernel of this process, whatever becomes of its declaration."""


class HintedKernels:
    """The kernels of one declaration, by their hints; what they launch is prebuilt where that may be."""

    def __init__(self, tunable: Declaration) -> None:
        self._tunable = tunable
        self.cubins = Cubins(tunable)
        self._made: dict[Hints, Any] = {}
        self._loaded: set[tuple[Hints, str, Arch]] = set()
        _KEPT.append(self._made)

    def of(self, hints: Mapping[str, int]) -> Any:
        """The kernel with these hints; making it costs 52-65 us, once."""
        key = tuple(hints.items())
        kernel = self._made.get(key)
        if kernel is None:
            made = cutile.with_hints(
                self._tunable.kernel, hints, lambda signature, arch: self._cubin(key, signature, arch)
            )
            kernel = self._made.setdefault(key, made)  # of two threads that make it, both take the first
        return kernel

    def is_ready(self, config: Config, kernel_args: tuple[Any, ...], arch: Arch) -> bool:
        """Whether launching this would compile nothing: it was loaded before, or has a cubin (1 ms)."""
        try:
            signature = cutile.signature_of(self._tunable.kernel, kernel_args)
        except Exception:  # an argument whose signature only cuTile itself can tell
            return False
        hints = tuple(config.hints.items())
        return (hints, signature, arch) in self._loaded or self.cubins.has(hints, signature, arch)

    def _cubin(self, hints: Hints, signature: str, arch: Arch) -> cutile.Cubin | None:
        """Asked for before cuTile loads or compiles: the last moment to leave a capture untouched."""
        name = self._tunable.name
        if runtime().capturing():
            raise LaunchError(
                f"{name} would be loaded during graph capture, for the signature {signature} on {arch}, and "
                f"that would break the graph; load it before: aot_tune.prime(...) with the declaration of "
                f"{name}, or one launch of these shapes"
            )
        self._loaded.add((hints, signature, arch))
        return self.cubins.find(hints, signature, arch)
