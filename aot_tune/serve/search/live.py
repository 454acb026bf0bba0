"""Decide on a miss whether to search, over which configs, and what to cache. A rank never searches.

The time of a search is estimated before it begins, from constants measured on an H200. A config without a
cubin takes `_COMPILE_S`, a config with a cubin `_LOAD_S`. Timing takes `_RUNS` runs, and `_MORE_RUNS` more
for the best few. A run takes `_RUN_OVERHEAD_S` plus the time of the config in the nearest entry's table,
times the ratio of the sizes. Where timing all configs would take longer than `_AIM_S`, only the most
promising are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from aot_tune import environment
from aot_tune.choose.choice import tune_command
from aot_tune.choose.index import Index, Match
from aot_tune.choose.legality import Legality
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import MissWarning
from aot_tune.nvidia import cutile
from aot_tune.serve.fork import ForkSafe
from aot_tune.serve.kernels import HintedKernels
from aot_tune.serve.runtime import Runtime
from aot_tune.serve.search import child, trial
from aot_tune.serve.search.cache import MOST_REMEMBERED, Key, Winners
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.warn import warn

_COMPILE_S = 0.8
"""Seconds to compile a config; 0.72 to 0.78 were measured."""

_LOAD_S = 0.0012
"""Seconds to load a config's cubin."""

_RUNS = 8
"""Runs per config: three warm-ups and the five samples after which ``exhaustive_search`` may stop."""

_MORE_RUNS, _BEST, _SHORT_US = 10, 5, 100.0
"""Further runs of the `_BEST` best configs in ``exhaustive_search``, for means to 1 %. Means of `_SHORT_US`
microseconds or more need no further runs: the noise is 1 us."""

_RUN_OVERHEAD_S = 0.0005
"""Seconds of a run in addition to the kernel, to flush L2 and record events. Eight cubins took 44 ms."""

_AIM_S = 0.06
"""Seconds that timing may take for a kernel under 1 ms, so that the whole miss stays below 100 ms."""

_AIM_RUNS = 60
"""Time that timing may take for a longer kernel, in runs of that kernel."""

_MOST_SEARCHES = 32
"""Most live searches per declaration and process: a server that meets more new shapes needs a table."""


@dataclass(frozen=True, kw_only=True)
class Occasion:
    """Miss, with the values that a search needs."""

    problem: Problem
    """Launched problem."""

    args: tuple[Any, ...]
    """Launch arguments."""

    device_index: int
    """Index of the GPU."""

    device: Device
    """GPU of the launch."""

    index: Index
    """Tables of the GPU's arch."""

    legality: Legality
    """Legality of configs on the arch."""

    nearest: Match | None
    """Nearest entry at any distance; the duration of a search is estimated from its times."""

    runtime: Runtime
    """Runtime in use."""


class _NotNowError(Exception):
    """A capture began while the search waited for the lock, or another process searches in a child."""


_announced: list[str] = []
"""Warning of the first search in a child of this process."""


class LiveSearch:
    """Live searches of a declaration.

    Args:
        tunable: The declaration.
        kernels: Its kernels with hints.
        winners: Where the winners are kept.
    """

    def __init__(self, tunable: Declaration, kernels: HintedKernels, winners: Winners) -> None:
        self._tunable = tunable
        self._kernels = kernels
        self._winners = winners
        self._turn = ForkSafe()
        self._tried: set[tuple[Arch, str, Problem]] = set()
        self._searches = 0

    def winner(self, occasion: Occasion) -> Config | None:
        """Search where it is allowed and fits the time; None leaves the choice to `resolve`'s next step.

        It never searches during graph capture, in this thread or another. Each bucket is tried once per
        process; a search that a capture or another process prevents does not count: it may be made later.
        """
        is_verified = self._is_verified(occasion.index)
        if is_verified:
            limit_s = environment.search_seconds()
        else:
            limit_s = child.seconds_left(environment.search_seconds(environment.UNTABLED_SEARCH_SECONDS))
        arch, name = occasion.device.arch, occasion.device.name
        bucket = self._tunable.bucket_of(occasion.problem)
        place = (arch, name, bucket)
        if (
            not limit_s
            or environment.search_disabled()
            or place in self._tried
            or self._searches >= _MOST_SEARCHES
        ):
            return None
        if occasion.runtime.capturing():
            return None
        way = self._in_process if is_verified else self._in_child
        run = way(occasion, limit_s)
        if len(self._tried) >= MOST_REMEMBERED:
            self._tried.clear()
        if run is None:
            self._tried.add(place)
            return None
        if occasion.runtime.captures_elsewhere(occasion.device_index):
            return None
        turn = self._turn.lock
        if not turn.acquire(timeout=limit_s):
            return None
        try:
            self._tried.add(place)
            self._searches += 1
            key, may_run = self._winners.key(*place), partial(_may_run, occasion)
            winner = self._shared(key, run, limit_s if is_verified else None, may_run)
            if winner is not None:  # without a winner, another process may still find one
                self._winners.known[place] = winner
            return winner
        except _NotNowError:
            self._tried.discard(place)
            self._searches -= 1
            return None
        finally:
            turn.release()

    def _shared(
        self,
        key: Key,
        run: Callable[[], trial.Winner | None],
        limit_s: float | None,
        may_run: Callable[[Config], bool],
    ) -> Config | None:
        """Search, unless another process of this host searches; then wait for its winner, within the limit.

        Without a limit the search is in a child, and nothing is waited for. A cached winner that may not run
        any more, or not on this GPU, is replaced.
        """
        with self._winners.cache.locked(key, limit_s or 0.0, of_children=limit_s is None) as state:
            cached = self._winners.cache.read(key)
            if cached is not None and may_run(cached):
                return cached
            if state == "busy":
                if limit_s is None:
                    raise _NotNowError
                return cached
            winner = run()
            if winner is not None:
                self._winners.cache.write(key, *winner)
            return None if winner is None else winner[0]

    # What is searched ---------------------------------------------------------------------------------------

    @staticmethod
    def _is_verified(index: Index) -> bool:
        """Whether the tables hold configs that were measured, and so checked, on this arch."""
        return any(e.evidence == "measured" for table in index.tables.values() for e in table.entries)

    def _in_process(self, occasion: Occasion, limit_s: float) -> Callable[[], trial.Winner | None] | None:
        nearest = occasion.nearest
        if nearest is None or nearest.entry.evidence != "measured":
            return None  # neither the duration of a search nor the correctness of the configs is known
        configs = self._affordable(occasion, nearest, limit_s)
        if len(configs) < 2:
            return None

        def run() -> trial.Winner | None:
            # A capture may have begun since `winner` asked.
            if occasion.runtime.captures_elsewhere(occasion.device_index):
                raise _NotNowError
            return trial.fastest(
                self._tunable,
                occasion.problem,
                occasion.args,
                configs,
                self._kernels.of,
                device=occasion.device,
                device_index=occasion.device_index,
                runtime=occasion.runtime,
                limit_s=limit_s,
            )

        return run

    def _affordable(self, occasion: Occasion, nearest: Match, limit_s: float) -> list[Config]:
        """Return the most promising configs of portfolio and default that fit the time, in their order."""
        tunable, arch = self._tunable, occasion.device.arch
        times = _times_us(tunable, occasion, nearest)
        allowed = [c for c in times if occasion.legality.refusal(c, occasion.problem) is None]
        default = tunable.default_config(arch, occasion.problem)
        index, problem = occasion.index, occasion.problem
        estimator = index.estimator(nearest, partial(tunable.default_config, arch))
        expected = estimator.estimates(
            problem, default, estimator.near(index.bucket_of(problem)), occasion.device.sm_count
        )
        ranked = [expected.configs[place] for _, place in expected.ranked]
        promising = [config for config in ranked if config in allowed]
        chosen: list[Config] = []
        compiles = 0
        for config in dict.fromkeys((*promising, *allowed)):
            kernel_args = tunable.args_fn_on(occasion.device)(config, *occasion.args)
            ready = self._kernels.is_ready(config, kernel_args, arch)
            timing_s = timing_estimate_s([times[c] for c in (*chosen, config)])
            aim_s = max(_AIM_S, _AIM_RUNS * min(times[c] for c in (*chosen, config)) * 1e-6)
            more = compiles + (not ready)
            if timing_s + more * _COMPILE_S > limit_s or (len(chosen) >= 2 and timing_s > aim_s):
                continue  # a cheaper config may still fit
            compiles = more
            chosen.append(config)
        return [config for config in times if config in chosen]

    def _in_child(self, occasion: Occasion, limit_s: float) -> Callable[[], trial.Winner | None] | None:
        few, here = child.few(limit_s), occasion.runtime
        if few < 2 or here.free_memory(occasion.device_index) < child.FREE_BYTES:
            return None
        if not cutile.may_have_compiler():
            return None
        arch = occasion.device.arch
        tabled = dict.fromkeys(c for table in occasion.index.tables.values() for c in table.portfolio)
        default = self._tunable.default_config(arch, occasion.problem)
        legality, problem = occasion.legality, occasion.problem
        first = [c for c in dict.fromkeys((default, *tabled)) if legality.refusal(c, problem) is None][:few]
        rest = [c for c in self._tunable.candidates(arch, problem) if c not in first]
        more = min(few - len(first), len(rest))
        configs = first + [rest[place * len(rest) // more] for place in range(more)]  # spread evenly
        # A capture that begins meanwhile does no harm: the other process has its own CUDA context.

        def run() -> trial.Winner | None:
            _announce(self._tunable, arch, problem, limit_s)
            return child.fastest(
                self._tunable, problem, configs, device_index=occasion.device_index, limit_s=limit_s
            )

        return run


def _announce(tunable: Declaration, arch: Arch, problem: Problem, limit_s: float) -> None:
    """Warn once in a process that misses are searched in a child, for seconds, and how to avoid it."""
    if _announced:
        return
    _announced.append(
        f"no table for {arch} holds measured configs of {tunable.name}: each bucket that misses is searched "
        f"live once, for {limit_s:.0f} s at most and {child.TOTAL_S:.0f} s in the process, and the winner is "
        f"kept in the user's cache. Tune it: {tune_command(tunable, arch, problem)}; or take the default at "
        f"once: {environment.SEARCH_SECONDS}=0"
    )
    warn(_announced[0], MissWarning)


def _may_run(occasion: Occasion, config: Config) -> bool:
    """Whether a config from a file may run for a miss."""
    try:
        return occasion.legality.refusal(config, occasion.problem) is None
    except Exception as error:  # whatever the author's `legal` raises
        occasion.legality.failed(error, occasion.problem, str(config))
        return False


def _times_us(tunable: Declaration, occasion: Occasion, nearest: Match) -> dict[Config, float]:
    """Return the expected times of the portfolio and the default, from the nearest entry's edge."""
    entry, table = nearest.entry, nearest.table
    default = tunable.default_config(occasion.device.arch, occasion.problem)
    larger = prod(
        max(occasion.problem.size(axis), 1) / max(entry.bucket.size(axis), 1) for axis in tunable.axes
    )
    edge = entry.points[-1].us if entry.points else ()
    worst = max([entry.mean_us, entry.default_us, *(us for us in edge if us is not None)])
    times: dict[Config, float] = {}
    for place, config in enumerate((*table.portfolio, default)):
        us = edge[place] if place < len(edge) else None
        times.setdefault(config, (worst if us is None else us) * larger)
    return times


def timing_estimate_s(times_us: Sequence[float]) -> float:
    """Estimate the seconds to load and time configs, as the module's docstring explains."""
    runs = [_RUNS] * len(times_us)
    ranked = sorted(times_us)
    runs[:_BEST] = [_RUNS + (_MORE_RUNS if us < _SHORT_US else 0) for us in ranked[:_BEST]]
    spent_s = sum(count * (us * 1e-6 + _RUN_OVERHEAD_S) for count, us in zip(runs, ranked, strict=True))
    return len(ranked) * _LOAD_S + spent_s
