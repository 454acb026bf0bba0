"""Find named outputs that a kernel only loads, instead of stored arguments. Imports torch, uses no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from aot_tune.declare.argument_mistakes import shares
from aot_tune.declare.mistakes import Mistake, names

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration


def misnamed_mistakes(tunable: Declaration) -> Iterator[Mistake]:
    """Yield stored arguments that are not named, where the kernel only loads all named ones.

    An argument that arrives at a parameter of another name is left out: `args_fn` may confuse the two, which
    `remarks` reports.
    """
    if tunable.outputs is None:
        return
    written = tunable.written
    stored = [name for name in written.whole if name not in tunable.mutated]
    certain = set(tunable.mutated) <= set(written.only_loaded) and set(stored) <= set(written.by_name)
    if stored and certain and not _share_memory(tunable, stored):
        listed = f"({', '.join(map(repr, stored))}{',' if len(stored) == 1 else ''})"
        yield Mistake(
            "outputs",
            f"the kernel stores to {names(stored)}, which outputs, inplace and reset do not name; "
            f"write outputs={listed}",
        )


def _share_memory(tunable: Declaration, stored: Sequence[str]) -> bool:
    """Whether one of these arguments is a view of a mutated one, or this cannot be determined."""
    try:
        args = tunable.make_args(tunable.typical_problems[0], torch.device("meta"), 0)
        named = dict(zip(tunable.parameters, args, strict=True))
    except Exception:
        return True  # `argument_mistakes` reports it
    return any(shares(named[name])(named[other]) for name in stored for other in tunable.mutated)
