"""What the choice of a config leaves at undeclared problems, from samples. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aot_tune.bench.sections.inside import summary
from aot_tune.bench.undeclared.journal import Samples
from aot_tune.tables.table import geometric_mean
from aot_tune.tuner.measure.rounds import from_samples
from aot_tune.values.config import Config

RIVAL = "cuBLAS"
"""The name of the rival among a problem's samples."""

TOGETHER = "all kernels"
"""The name of the figures of all kernels together."""

RUNS = 2
"""Runs of each problem. A choice is behind the default where it is so in each."""

APART = 0.03
"""The choice is behind the default where its whole 95 % interval is slower than the default's by more."""

_NO_CONFIG = Config(constants={}, hints={})


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One problem with the samples of each run."""

    problem: str
    """The problem in words."""

    runs: Sequence[Samples]
    """The samples of each run."""

    chosen: str
    """The config that serving takes."""

    default: str
    """The kernel's default."""

    portfolio: Collection[str] = field(default_factory=tuple)
    """The configs of the table's portfolio."""

    whole: bool = False
    """Whether the whole search space was measured."""

    ragged: bool = False
    """Whether the batch is not divisible by 16."""

    def us(self, name: str) -> dict[str, float]:
        """A config's time by state: the mean of the runs' medians."""
        medians = [{state: statistics.median(us) for state, us in run[name].items()} for run in self.runs]
        return {state: statistics.fmean(one[state] for one in medians) for state in medians[0]}

    def regrets(self, name: str, against: Iterable[str]) -> dict[str, float]:
        """How much slower a config is than the fastest of some, by state, as a fraction."""
        times = [self.us(other) for other in dict.fromkeys((name, *against)) if self._is_in_all(other)]
        return {state: us / min(one[state] for one in times) - 1 for state, us in times[0].items()}

    def rivals(self) -> tuple[str, ...]:
        """The configs that serving could have taken: the portfolio and the default."""
        return tuple(dict.fromkeys((*self.portfolio, self.default)))

    def every(self) -> tuple[str, ...]:
        """All configs that were measured."""
        return tuple(name for name in self.runs[0] if name != RIVAL)

    def behind_default(self) -> list[str]:
        """The states in which the choice is behind the default in each run."""
        return [
            state
            for state in self.runs[0][self.chosen]
            if all(_behind(self, run, state) for run in self.runs)
        ]

    def over_choice(self) -> dict[str, float]:
        """The rival's time over the choice's, by state; empty without one."""
        if not self._is_in_all(RIVAL):
            return {}
        own = self.us(self.chosen)
        return {state: us / own[state] for state, us in self.us(RIVAL).items()}

    def _is_in_all(self, name: str) -> bool:
        return all(name in run for run in self.runs)


def _behind(seen: Seen, run: Samples, state: str) -> bool:
    chosen, default = (from_samples(_NO_CONFIG, run[name][state]) for name in (seen.chosen, seen.default))
    fastest = chosen.mean_us - chosen.error_margin_us
    return fastest > (default.mean_us + default.error_margin_us) * (1 + APART)


def figures(seen: Sequence[Seen], drawn: int, failed: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of a kernel, or of several together.

    Args:
        seen: The problems that were measured.
        drawn: How many were drawn.
        failed: Why others were not measured, in words.
    """
    if not seen:
        return {"problems": 0, "drawn": drawn, "not measured": list(failed)}
    ours = [one.regrets(one.chosen, one.rivals()) for one in seen]
    worst = max(range(len(seen)), key=lambda place: max(ours[place].values()))
    state = max(ours[worst], key=ours[worst].__getitem__)
    found: dict[str, Any] = {
        "problems": len(seen),
        "drawn": drawn,
        "runs": min(len(one.runs) for one in seen),
        "not divisible by 16": sum(one.ragged for one in seen),
        "regret": _by_state(ours),
        "default": _by_state([one.regrets(one.default, one.rivals()) for one in seen]),
        "worst at": f"{seen[worst].problem}, {state}: {seen[worst].chosen}",
        "behind the default": [
            f"{one.problem}: {', '.join(states)}" for one in seen if (states := one.behind_default())
        ],
    }
    if whole := [one.regrets(one.chosen, one.every()) for one in seen if one.whole]:
        found["regret against the whole space"] = {"problems": len(whole), **_by_state(whole)}
    if ratios := [ratio for one in seen if (ratio := one.over_choice())]:
        found[f"{RIVAL} over the choice"] = {
            state: {
                "geometric mean": round(geometric_mean(own), 3),
                "worst": round(min(own), 3),
                "problems": len(own),
            }
            for state in _states(ratios)
            if (own := [one[state] for one in ratios if state in one])
        }
    if failed:
        found["not measured"] = list(failed)
    return found


def _by_state(regrets: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {
        "worst state": summary(max(one.values()) for one in regrets),
        **{state: summary(one[state] for one in regrets if state in one) for state in _states(regrets)},
    }


def _states(by_problem: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(state for one in by_problem for state in one))
