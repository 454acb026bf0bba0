"""Check what a declaration's `reference` returned, for a sweep and for the checks before one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aot_tune.errors import DeclarationError

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Close, Declaration


def closes_of(tunable: Declaration, found: object, named: Mapping[str, Any]) -> Mapping[str, Close]:
    """The `Close` of each mutated argument, by name.

    Args:
        tunable: The declaration.
        found: The result of its `reference`.
        named: The launch arguments by name.

    Raises:
        DeclarationError: `found` does not have a `Close` of the right shape for each mutated argument.
    """
    from aot_tune.declare.declaration import Close

    if isinstance(found, Close):
        if len(tunable.mutated) != 1:
            raise DeclarationError(
                f"{tunable.name}: reference returns one Close and {len(tunable.mutated)} arguments are "
                f"mutated ({', '.join(tunable.mutated)}); return a dict with one for each"
            )
        found = {tunable.mutated[0]: found}
    if not isinstance(found, Mapping) or set(found) != set(tunable.mutated):
        returned = _listed(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        alone = "a Close, or " if len(tunable.mutated) == 1 else ""
        raise DeclarationError(
            f"{tunable.name}: reference returns {returned}; "
            f"return {alone}a dict of a Close for each of {', '.join(tunable.mutated)}"
        )
    for name, close in found.items():
        if not isinstance(close, Close):
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} a {type(close).__name__}; "
                "write Close(value=..., rtol=..., atol=...)"
            )
        for bound, amount in (("rtol", close.rtol), ("atol", close.atol)):
            if not math.isfinite(amount):
                raise DeclarationError(
                    f"{tunable.name}: reference gives {name} {bound}={amount}; give a finite number"
                )
        shape = getattr(close.value, "shape", None)
        if shape is None:
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} a {type(close.value).__name__} as its value; "
                "return a tensor"
            )
        if tuple(shape) != tuple(named[name].shape):
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} the shape {tuple(shape)}, the argument has "
                f"{tuple(named[name].shape)}; return a value of the argument's shape"
            )
    return found


def _listed(found: Mapping[object, object]) -> str:
    return f"a dict of {', '.join(map(str, found))}" if found else "an empty dict"
