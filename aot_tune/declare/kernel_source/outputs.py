"""Which launch arguments a kernel only stores to, as its source says: they need not be named as outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aot_tune.declare.kernel_source.accesses import accesses
from aot_tune.declare.stand_in import NotFollowedError, handed_on
from aot_tune.nvidia import cutile


@dataclass(frozen=True, kw_only=True)
class Written:
    """The launch arguments that kernels write, by what they do to them."""

    whole: tuple[str, ...]
    """Arguments that are stored to, and neither loaded nor added to: outputs."""

    changed: tuple[str, ...]
    """Arguments that are loaded and stored to."""

    added: tuple[str, ...]
    """Arguments that an atomic operation changes."""


def written(kernel: Any, args_fn: Callable[..., object], parameters: Sequence[str]) -> Written:
    """What a kernel, or several by name, writes; nothing of a kernel whose source cannot be read.

    Args:
        kernel: A ``@ct.kernel``, or a mapping from names to such.
        args_fn: The declaration's function from launch arguments to those of a kernel.
        parameters: The names of the launch arguments.
    """
    loaded: set[str] = set()
    stored: set[str] = set()
    added: set[str] = set()
    for one in kernel.values() if isinstance(kernel, Mapping) else (kernel,):
        found = accesses(one)
        for parameter, argument in _arguments(one, args_fn, parameters):
            loaded |= {argument} if parameter in found.loaded | found.escaped else set()
            stored |= {argument} if parameter in found.stored else set()
            added |= {argument} if parameter in found.added else set()
    return Written(
        whole=tuple(name for name in parameters if name in stored - loaded - added),
        changed=tuple(name for name in parameters if name in (stored & loaded) - added),
        added=tuple(name for name in parameters if name in added),
    )


def _arguments(
    kernel: Any, args_fn: Callable[..., object], parameters: Sequence[str]
) -> list[tuple[str, str]]:
    """The kernel's parameters, each with the launch argument that arrives there: by `args_fn`, or by name."""
    names = [name for name, _ in cutile.parameters(kernel)]
    try:
        arriving = handed_on(args_fn, parameters)
    except NotFollowedError:
        arriving = ()
    if len(arriving) != len(names):
        arriving = tuple(name if name in parameters else None for name in names)
    return [(name, argument) for name, argument in zip(names, arriving, strict=True) if argument is not None]
