"""Find outputs that a kernel only loads, in place of what it stores to. Imports torch, needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from aot_tune.declare.argument_mistakes import shares
from aot_tune.declare.mistakes import Mistake, names

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration


def misnamed_mistakes(tunable: Declaration) -> Iterator[Mistake]:
    """Outputs in place of which other arguments are named, all of which the kernel only loads.

    One that arrives at a parameter of another name is left out: `args_fn` may confuse the two, of which
    `remarks` tells.
    """
    if tunable.outputs is None:
        return
    found = tunable.written
    stored = [name for name in found.whole if name not in tunable.mutated]
    certain = set(tunable.mutated) <= set(found.only_loaded) and set(stored) <= set(found.by_name)
    if stored and certain and not _share_memory(tunable, stored):
        listed = f"({', '.join(map(repr, stored))}{',' if len(stored) == 1 else ''})"
        yield Mistake(
            "outputs",
            f"the kernel stores to {names(stored)}, which outputs, inplace and reset do not name; "
            f"write outputs={listed}",
        )


def _share_memory(tunable: Declaration, stored: Sequence[str]) -> bool:
    """Whether an argument of these is a view of a mutated one, or that cannot be seen."""
    try:
        args = tunable.make_args(tunable.typical_problems[0], torch.device("meta"), 0)
        named = dict(zip(tunable.parameters, args, strict=True))
    except Exception:
        return True  # it is told where the arguments are looked at
    return any(shares(named[one])(named[other]) for one in stored for other in tunable.mutated)
