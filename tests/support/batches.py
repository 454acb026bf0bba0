"""Parts of a batch: the arguments of some of a launch's rows, and the results of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Args = Sequence[Any]


@dataclass(frozen=True)
class Batch:
    """How a kernel's arguments are cut into parts of their batch, the first dimension."""

    of: Callable[[Args, int, int], tuple[Any, ...]]
    """(arguments, first, last) -> arguments of the rows from the first to before the last, with outputs of
    their own."""

    results: Callable[[Args, int, int], list[torch.Tensor]]
    """(arguments, first, last) -> what the kernel has written for these rows."""


def cut_rows(rows: Sequence[int], out: Sequence[int], changed: Sequence[int] = ()) -> Batch:
    """Arguments at `rows` are cut along their first dimension; those at `out` are written, `changed` too."""

    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        parts = list(args)
        for place in (*rows, *out, *changed):
            if place in out:
                parts[place] = torch.empty_like(args[place][first:last])
            else:
                parts[place] = (
                    args[place][first:last].clone() if place in changed else args[place][first:last]
                )
        return tuple(parts)

    def results(args: Args, first: int, last: int) -> list[torch.Tensor]:
        return [args[place][first:last] for place in (*out, *changed)]

    return Batch(of, results)


def made_anew(batch: Batch, place: int, value: Callable[[Args], Any]) -> Batch:
    """The same, with an argument that is made of the others."""

    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        parts = list(batch.of(args, first, last))
        parts[place] = value(parts)
        return tuple(parts)

    return Batch(of, batch.results)


def batch_size(tunable: Any, args: Args) -> int:
    """The rows, or sequences, that these arguments hold."""
    return tunable.problem_of(*args).size(tunable.batch_axes[0])  # type: ignore[no-any-return]


def parts(size: int) -> list[tuple[int, int]]:
    """Parts of a batch: rows alone, a few, some that fill no tile, and all but one."""
    alone = [(0, 1), (size // 2, size // 2 + 1), (size - 1, size)]
    some = [(1, 4), (3, 19), (2, 67), (5, 205), (1, size)]
    return [(first, last) for first, last in (*alone, *some) if first < last <= size]
