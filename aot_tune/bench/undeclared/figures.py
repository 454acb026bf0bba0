"""Regret of the chosen configs at undeclared problems, from samples. Pure."""

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
"""Name of the rival among a problem's samples."""

TOGETHER = "all kernels"
"""Name of the figures of all kernels together."""

RUNS = 2
"""Runs of each problem. A choice is behind the default where it is behind in each run."""

APART = 0.03
"""Slowdown of the choice's whole 95 % interval over the default's beyond which it is behind."""

_NO_CONFIG = Config(constants={}, hints={})


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One problem with the samples of each run."""

    problem: str
    """Problem as text."""

    runs: Sequence[Samples]
    """Samples of each run."""

    chosen: str
    """Config that serving takes."""

    default: str
    """Kernel's default."""

    portfolio: Collection[str] = field(default_factory=tuple)
    """Configs of the table's portfolio."""

    whole: bool = False
    """Whether the whole search space was measured."""

    ragged: bool = False
    """Whether the batch is not divisible by 16."""

    def us(self, name: str) -> dict[str, float]:
        """Return a config's time by state: the mean of the runs' medians."""
        medians = [{state: statistics.median(us) for state, us in run[name].items()} for run in self.runs]
        return {state: statistics.fmean(median[state] for median in medians) for state in medians[0]}

    def regrets(self, name: str, against: Iterable[str]) -> dict[str, float]:
        """Return a config's regret against the fastest of some, by state, as a fraction."""
        times = [self.us(config) for config in dict.fromkeys((name, *against)) if self._is_in_all(config)]
        return {state: us / min(config[state] for config in times) - 1 for state, us in times[0].items()}

    def rivals(self) -> tuple[str, ...]:
        """Return the configs that serving could have taken: the portfolio and the default."""
        return tuple(dict.fromkeys((*self.portfolio, self.default)))

    def every(self) -> tuple[str, ...]:
        """Return all configs that were measured."""
        return tuple(name for name in self.runs[0] if name != RIVAL)

    def behind_default(self) -> list[str]:
        """Return the states in which the choice is behind the default in each run."""
        return [
            state
            for state in self.runs[0][self.chosen]
            if all(_behind(self, run, state) for run in self.runs)
        ]

    def over_choice(self) -> dict[str, float]:
        """Return the rival's time over the choice's, by state; empty without a rival."""
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
    """Return the figures of a kernel, or of several together.

    Args:
        seen: The measured problems.
        drawn: Number of drawn problems.
        failed: Reasons why other problems were not measured.
    """
    if not seen:
        return {"problems": 0, "drawn": drawn, "not measured": list(failed)}
    ours = [measured.regrets(measured.chosen, measured.rivals()) for measured in seen]
    worst = max(range(len(seen)), key=lambda place: max(ours[place].values()))
    state = max(ours[worst], key=ours[worst].__getitem__)
    result: dict[str, Any] = {
        "problems": len(seen),
        "drawn": drawn,
        "runs": min(len(measured.runs) for measured in seen),
        "not divisible by 16": sum(measured.ragged for measured in seen),
        "regret": _by_state(ours),
        "default": _by_state([measured.regrets(measured.default, measured.rivals()) for measured in seen]),
        "worst at": f"{seen[worst].problem}, {state}: {seen[worst].chosen}",
        "behind the default": [
            f"{measured.problem}: {', '.join(states)}"
            for measured in seen
            if (states := measured.behind_default())
        ],
    }
    if whole := [measured.regrets(measured.chosen, measured.every()) for measured in seen if measured.whole]:
        result["regret against the whole space"] = {"problems": len(whole), **_by_state(whole)}
    if ratios := [ratio for measured in seen if (ratio := measured.over_choice())]:
        result[f"{RIVAL} over the choice"] = {
            state: {
                "geometric mean": round(geometric_mean(own), 3),
                "worst": round(min(own), 3),
                "problems": len(own),
            }
            for state in _states(ratios)
            if (own := [times[state] for times in ratios if state in times])
        }
    if failed:
        result["not measured"] = list(failed)
    return result


def _by_state(regrets: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {
        "worst state": summary(max(by_state.values()) for by_state in regrets),
        **{
            state: summary(by_state[state] for by_state in regrets if state in by_state)
            for state in _states(regrets)
        },
    }


def _states(by_problem: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(state for states in by_problem for state in states))
