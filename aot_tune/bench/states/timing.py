"""Time launches in each state of this machine's GPU, one after another and in turn.

States: before each launch L2 is filled by reading (read) or by writing (written); launches in a tight row
(tight); the first two also after twenty large products, at the power cap (loaded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aot_tune.tuner.measure.rounds import in_turn
from aot_tune.tuner.measure.worker.clock import EventRound

COOL = ("read", "written", "tight")
"""States in which nothing large runs before a launch."""

LOADED = ("read, loaded", "written, loaded")
"""States at the power cap."""

_PRODUCTS, _SIDE = 20, 4096
"""Products of square matrices before each launch of a loaded state: 4 ms on an H200."""

Launch = Callable[[], object]


class StateClock:
    """Takes samples of launches in the states of the GPU."""

    def __init__(self) -> None:
        self._clock = EventRound()
        self._factors = torch.randn((2, _SIDE, _SIDE), device="cuda").bfloat16()
        self._product = torch.empty_like(self._factors[0])

    def samples(
        self,
        runs: Mapping[str, Sequence[Launch]],
        renewed: Sequence[Launch],
        states: Sequence[str],
        count: int,
    ) -> dict[str, dict[str, list[float]]]:
        """Return the microseconds of each run in each state, taken launch by launch, in turn.

        Args:
            runs: Launches on two sets of arguments, by name.
            renewed: For each set of arguments, a function that restores the state that a launch expects.
            states: Some of `COOL` and `LOADED`.
            count: Samples of each run in each state.
        """
        taken: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
        for state in states:
            for launches in runs.values():
                self._sample(state, launches, renewed)
            for number in range(count):
                for name in in_turn(list(runs), number):
                    us = self._sample(state, runs[name], renewed)
                    taken[name].setdefault(state, []).append(us)
        return taken

    def once(self, launches: Sequence[Launch], renewed: Sequence[Launch]) -> float:
        """Return the microseconds of one launch in the first state, after one that is not timed."""
        for _ in range(2):
            us = self._sample(COOL[0], launches, renewed)
        return us

    def _sample(self, state: str, launches: Sequence[Launch], renewed: Sequence[Launch]) -> float:
        if state == "tight":
            return self._clock.tight([(renewed[i], launches[i]) for i in (0, 1, 0)])
        renewed[0]()
        if state in LOADED:
            for _ in range(_PRODUCTS):
                torch.mm(self._factors[0], self._factors[1], out=self._product)
        return self._clock([launches[0]], written=state.startswith("written"))[0]


def renewing(tunable: Any, seeds: Sequence[tuple[Any, ...]]) -> list[Launch]:
    """Return functions that zero the arguments that the kernel expects to be zero, for each set."""

    def zeroed(args: tuple[Any, ...]) -> Launch:
        named = dict(zip(tunable.parameters, args, strict=True))
        return lambda: [named[name].zero_() for name in tunable.reset]

    return [zeroed(args) for args in seeds]
