"""A declaration's kernels with hints: made once per distinct set of hints, never dropped. Knows no table.

The process aborts when a launched kernel is collected while a graph is being captured, so they are kept for
ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aot_tune import cutile
from aot_tune.config import Config
from aot_tune.errors import LaunchError
from aot_tune.serve.runtime import runtime
from aot_tune.tunable import Tunable

Hints = tuple[tuple[str, int], ...]

_KEPT: list[dict[Hints, Any]] = []
"""Every hinted kernel of this process, whatever becomes of its declaration."""


class HintedKernels:
    """The kernels of one declaration, by their hints."""

    def __init__(self, tunable: Tunable) -> None:
        self._tunable = tunable
        self._made: dict[Hints, Any] = {}
        self._compiled: set[tuple[Hints, str]] = set()
        _KEPT.append(self._made)

    def of(self, hints: Mapping[str, int]) -> Any:
        """The kernel with these hints; making it costs 52-65 us, once."""
        key = tuple(hints.items())
        kernel = self._made.get(key)
        if kernel is None:
            made = cutile.with_hints(
                self._tunable.kernel, hints, lambda symbol, arch: self._cubin(key, symbol)
            )
            kernel = self._made.setdefault(key, made)  # of two threads that make it, both take the first
        return kernel

    def is_compiled(self, config: Config, kernel_args: tuple[Any, ...]) -> bool:
        """Whether launching this would compile nothing: it was compiled before, in this process."""
        try:
            signature = cutile.signature_of(self._tunable.kernel, kernel_args)
        except Exception:  # an argument whose signature only cuTile itself can tell
            return False
        return (tuple(config.hints.items()), signature) in self._compiled

    def _cubin(self, hints: Hints, signature: str) -> cutile.Cubin | None:
        """Asked for before cuTile compiles: the last moment at which a capture can be left untouched."""
        if runtime().capturing():
            raise LaunchError(
                f"{self._tunable.name} would be compiled during graph capture for the signature {signature}; "
                "launch it once with these shapes before the capture"
            )
        self._compiled.add((hints, signature))
        return None
