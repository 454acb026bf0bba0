"""Which launch arguments a kernel only stores to, as its source says: they need not be named as outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aot_tune.declare.kernel_source.walk import facts_of
from aot_tune.declare.probe import NotFollowedError, handed_on
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

    only_loaded: tuple[str, ...]
    """Arguments that are loaded, and surely not written."""

    by_name: tuple[str, ...]
    """Arguments that arrive at parameters of their own name, and `args_fn` was followed to see it."""


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
    escaped: set[str] = set()
    renamed: set[str] = set()
    for one in kernel.values() if isinstance(kernel, Mapping) else (kernel,):
        found = facts_of(one)
        arguments, followed = _arguments(one, args_fn, parameters)
        for parameter, argument in arguments:
            loaded |= {argument} if parameter in found.loaded | found.escaped else set()
            stored |= {argument} if parameter in found.stored else set()
            added |= {argument} if parameter in found.added else set()
            escaped |= {argument} if parameter in found.escaped else set()
            renamed |= {argument} if parameter != argument or not followed else set()
    return Written(
        whole=tuple(name for name in parameters if name in stored - loaded - added),
        changed=tuple(name for name in parameters if name in (stored & loaded) - added),
        added=tuple(name for name in parameters if name in added),
        only_loaded=tuple(name for name in parameters if name in loaded - stored - added - escaped),
        by_name=tuple(name for name in parameters if name not in renamed),
    )


def _arguments(
    kernel: Any, args_fn: Callable[..., object], parameters: Sequence[str]
) -> tuple[list[tuple[str, str]], bool]:
    """The kernel's parameters, each with the launch argument that arrives there.

    That is by `args_fn` where it can be followed, of which the second value tells, or else by name.
    """
    names = [name for name, _ in cutile.parameters(kernel)]
    try:
        arriving = handed_on(args_fn, parameters)
    except NotFollowedError:
        arriving = ()
    followed = len(arriving) == len(names)
    if not followed:
        arriving = tuple(name if name in parameters else None for name in names)
    pairs = zip(names, arriving, strict=True)
    return [(name, argument) for name, argument in pairs if argument is not None], followed
