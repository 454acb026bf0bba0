"""The live search on a miss: whether it is made, over what, what is remembered. Never made by a rank.

How long it would take is told before it begins, from figures measured on an H200: a config that is not
compiled costs `_COMPILE_S`; a timing is `_RUNS` runs, each the time that the nearest entry's table tells for
the config, times the ratio of the sizes, plus `_RUN_OVERHEAD_S`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from math import prod
from typing import Any

from aot_tune import cutile, environment
from aot_tune.arch import Arch
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.problem import Problem
from aot_tune.serve import child, trial
from aot_tune.serve.cache import Key, UserCache, folder_here
from aot_tune.serve.hinted import HintedKernels
from aot_tune.serve.index import Found, Index
from aot_tune.serve.resolve import Legality
from aot_tune.serve.runtime import Runtime
from aot_tune.tunable import Tunable

_COMPILE_S = 0.8
"""Compiling one config, seconds: 0.72 to 0.78."""

_RUNS = 23
"""Three warm-ups and 20 samples; the search stops between 5 and some 50 samples."""

_RUN_OVERHEAD_S = 0.001
"""One run beside the kernel itself, seconds: flushing L2, events. 96 configs took 1.6 to 2.9 s."""

_MOST_SEARCHES = 32
"""Live searches of one declaration in a process: a server that meets more new shapes needs a table."""

_MOST_REMEMBERED = 4096
"""Buckets whose look-up in the user's cache is kept in memory."""


@dataclass(frozen=True, kw_only=True)
class Occasion:
    """One miss."""

    problem: Problem
    """What is launched."""

    args: tuple[Any, ...]
    """The launch arguments."""

    number: int
    """The GPU's index."""

    device: Device
    """The GPU."""

    index: Index
    """The tables of its arch."""

    legality: Legality
    """What may run."""

    nearest: Found | None
    """The nearest entry at any distance, whose times tell how long a search takes."""

    here: Runtime
    """The runtime."""


class LiveSearch:
    """The live searches of one declaration, and what they found."""

    def __init__(self, tunable: Tunable, kernels: HintedKernels) -> None:
        self._tunable = tunable
        self._kernels = kernels
        self._lock = threading.Lock()
        self._known: dict[tuple[Arch, str, Problem], Config | None] = {}
        self._tried: set[tuple[Arch, str, Problem]] = set()
        self._searches = 0

    def remembered(self, arch: Arch, device_name: str, bucket: Problem) -> Config | None:
        """The winner found before, by this process or by one that shares the user's cache."""
        place = (arch, device_name, bucket)
        if place not in self._known:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[place] = UserCache(folder_here()).read(self._key(arch, device_name, bucket))
        return self._known[place]

    def winner(self, occasion: Occasion) -> Config | None:
        """Search, where that is allowed and fits; None leaves the choice to the ladder's next step.

        Never during graph capture, in this thread or another. Each bucket is tried once in a process.
        """
        limit_s = environment.search_seconds()
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
        if occasion.here.capturing():
            return None  # not counted as tried: after the capture it may be searched
        way = self._in_process if self._is_verified(occasion.index) else self._in_child
        run = way(occasion, limit_s)
        if len(self._tried) >= _MOST_REMEMBERED:
            self._tried.clear()
        if run is None:
            self._tried.add(place)
            return None
        if occasion.here.captures_elsewhere(occasion.number):
            return None
        if not self._lock.acquire(timeout=limit_s):
            return None
        try:
            self._tried.add(place)
            self._searches += 1
            found = self._shared(self._key(arch, name, bucket), run, limit_s)
            self._known[place] = found
            return found
        finally:
            self._lock.release()

    def _shared(self, key: Key, run: Callable[[], trial.Winner | None], limit_s: float) -> Config | None:
        """Search unless another process of this host does; it is waited for, within the limit."""
        remembered = UserCache(folder_here())
        with remembered.locked(key, limit_s) as state:
            found = remembered.read(key)
            if found is not None or state == "busy":
                return found
            winner = run()
            if winner is None:
                return None
            remembered.write(key, *winner)
            return winner[0]

    # What is searched ---------------------------------------------------------------------------------------

    @staticmethod
    def _is_verified(index: Index) -> bool:
        """Whether the tables hold configs that were measured, and so checked, on this arch."""
        return any(e.evidence == "measured" for shipped in index.tables for e in shipped.table.entries)

    def _in_process(self, occasion: Occasion, limit_s: float) -> Callable[[], trial.Winner | None] | None:
        nearest = occasion.nearest
        if nearest is None or nearest.entry.evidence != "measured":
            return None  # nothing tells how long it would take, or that the configs are right
        times = _times_us(self._tunable, occasion, nearest)
        configs = [c for c in times if occasion.legality.refusal(c, occasion.problem) is None]
        compiles = sum(
            not self._kernels.is_compiled(c, self._tunable.args_fn(c, *occasion.args)) for c in configs
        )
        if len(configs) < 2 or estimate_s([times[c] for c in configs], compiles) > limit_s:
            return None
        return lambda: trial.fastest(
            self._tunable, occasion.problem, occasion.args, configs, lambda c: self._kernels.of(c.hints),
            device=occasion.device, number=occasion.number, here=occasion.here, limit_s=limit_s,
        )  # fmt: skip

    def _in_child(self, occasion: Occasion, limit_s: float) -> Callable[[], trial.Winner | None] | None:
        few = child.few(limit_s)
        if few < 2:
            return None
        arch = occasion.device.arch
        tabled = dict.fromkeys(c for shipped in occasion.index.tables for c in shipped.table.portfolio)
        default = self._tunable.default_config(arch, occasion.problem)
        legality, problem = occasion.legality, occasion.problem
        first = [c for c in dict.fromkeys((default, *tabled)) if legality.refusal(c, problem) is None][:few]
        rest = [c for c in self._tunable.candidates(arch, problem) if c not in first]
        more = min(few - len(first), len(rest))
        configs = first + [rest[place * len(rest) // more] for place in range(more)]  # spread evenly
        return lambda: child.fastest(
            self._tunable, occasion.problem, configs, number=occasion.number, limit_s=limit_s
        )

    # What is remembered -------------------------------------------------------------------------------------

    def _key(self, arch: Arch, device_name: str, bucket: Problem) -> Key:
        return Key(
            kernel=self._tunable.name, arch=str(arch), device_name=device_name,
            distribution=self._distribution, source_hash=self._source_hash, cuda_tile=cutile.version(),
            bucket=tuple(sorted(bucket.items())),
        )  # fmt: skip

    @cached_property
    def _distribution(self) -> str:
        name = self._tunable.distribution or self._tunable.package.partition(".")[0]
        try:
            return f"{name} {metadata.version(name)}"
        except (metadata.PackageNotFoundError, ValueError):  # a checkout; declared outside of any package
            return f"{name} (not installed)"

    @cached_property
    def _source_hash(self) -> str:
        from aot_tune.fingerprint import source_hash

        return source_hash(self._tunable)


def _times_us(tunable: Tunable, occasion: Occasion, nearest: Found) -> dict[Config, float]:
    """What each config of the portfolio and the default should take, told from the nearest entry's edge."""
    entry, table = nearest.entry, nearest.shipped.table
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


def estimate_s(times_us: Sequence[float], compiles: int) -> float:
    """How long a live search takes: the module's docstring says how that is told."""
    return compiles * _COMPILE_S + sum(_RUNS * (us * 1e-6 + _RUN_OVERHEAD_S) for us in times_us)
