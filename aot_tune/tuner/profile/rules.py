"""Findings on a launch, each with its evidence and the neighbours in the search space that address it. Pure.

A rule states a fact and, where a change of config can help, by what the change is recognised in a neighbour's
machine code. A neighbour differs from the config in one constant or hint. What no figure proves is not found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aot_tune.tuner.profile import facts as f
from aot_tune.tuner.profile.facts import Facts
from aot_tune.values.config import Config
from aot_tune.values.text import counted

CEILING = 0.75
"""Part of a roof from which no change of config is worth trying."""

SEVERITIES = ("ceiling", "critical", "warning", "info")
"""Severities, the most severe first; at a ceiling no change of config is worth trying."""

FEW_WAVES = 0.5
"""Part of the GPU below which its blocks are too few."""

_CONFLICTS = 0.10
"""Part of the shared memory's accesses that are repeated for conflicts, from which they count."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding on a launch."""

    rule: str
    """Name of its rule."""

    severity: str
    """One of `SEVERITIES`."""

    evidence: str
    """The facts that prove it."""

    remedy: str = ""
    """The change that addresses it, in words; empty where none in the search space can."""


@dataclass(frozen=True)
class Rule:
    """When something is found, and which neighbours address it."""

    name: str
    """Its name."""

    severity: str
    """One of `SEVERITIES`."""

    evidence: Callable[[Facts], str]
    """Returns the facts that prove the finding; empty where it is not made."""

    remedy: str = ""
    """The change that addresses it, in words."""

    better: Callable[[Facts, Facts], bool] | None = None
    """Returns whether a neighbour's code addresses it, given the present facts and the neighbour's."""


def _launch(facts: Facts) -> str:
    is_short = facts.us is not None and facts.us < f.LAUNCH_US
    return f"{facts.us:.2f} us: a launch takes about as long before it computes" if is_short else ""


def _roof(facts: Facts, roof: Literal["memory", "tensor"], name: str) -> str:
    part = facts.part_of(roof)
    return f"{part:.0%} of the {name}" if part >= CEILING else ""


def _spills(facts: Facts) -> str:
    stored = facts.counters.get(f.LOCAL_STORES, 0.0)
    if facts.resources is None or not (facts.spills or (stored and facts.resources.stack_bytes)):
        return ""
    loop = f", {facts.loop.local_accesses} in each step of the loop" if facts.loop else ""
    stores = f", {stored:,.0f} stores to it" if stored else ""
    return f"registers spill to a stack of {facts.resources.stack_bytes} bytes a thread{loop}{stores}"


def _few(facts: Facts) -> str:
    if facts.waves is None or facts.waves >= FEW_WAVES:
        return ""
    return f"{facts.blocks} blocks, where the GPU holds {facts.sm_count * facts.resident} at a time"


def _tail(facts: Facts) -> str:
    if facts.waves is None or facts.tail <= f.TAIL or facts.waves >= f.MANY_WAVES:
        return ""
    return f"{facts.waves:.2f} waves take the time of {math.ceil(facts.waves)}: {facts.tail - 1:.0%} more"


def _occupancy(facts: Facts) -> str:
    warps, waiting = facts.counters.get(f.WARPS, 100.0), facts.counters.get(f.LONG_SCOREBOARD, 0.0)
    if warps >= 25 or waiting <= 30:
        return ""
    return (
        f"{warps:.0f} % of the warps are active, and {waiting:.0f} % of their time waits for memory; "
        f"limited by {facts.limiter}"
    )


def _serial(facts: Facts) -> str:
    if facts.loop is None or facts.loop.pipelined or not facts.loop.waits:
        return ""
    stalled = facts.counters.get(f.GMMA)
    if stalled is not None and stalled <= 30:
        return ""
    stalls = "" if stalled is None else f"; {stalled:.0f} % of the warps' time waits for products"
    return f"the loop waits {counted(facts.loop.waits, 'time')} a step for all products to end{stalls}"


def _l2(facts: Facts) -> str:
    l2, dram = facts.counters.get(f.L2, 0.0), facts.counters.get(f.DRAM, 100.0)
    return f"L2 at {l2:.0f} %, memory at {dram:.0f} % of their rates" if l2 > 70 and dram < 50 else ""


def _conflicts(facts: Facts) -> str:
    repeated, all_ = facts.counters.get(f.CONFLICTS, 0.0), facts.counters.get(f.WAVEFRONTS, 0.0)
    part = repeated / all_ if all_ else 0.0
    return (
        f"{part:.0%} of the accesses to shared memory are repeated for conflicts" if part > _CONFLICTS else ""
    )


def _refused(facts: Facts, tensor: bool) -> str:
    failed = [r for r in facts.remarks if r.failed and ("TensorCore" in r.name) == tensor]
    return "; ".join(f"{remark.text} ({remark.times} times)" for remark in failed)


def _more_resident(base: Facts, other: Facts) -> bool:
    """Return whether more warps are resident, and not only because a larger tile takes more of them."""
    same_tile = (other.tiles, other.load_bytes) == (base.tiles, base.load_bytes)
    is_denser = other.occupancy > base.occupancy and (other.resident > base.resident or same_tile)
    return is_denser and not other.spills


def _freer(base: Facts, other: Facts) -> bool:
    """Return whether another loop keeps products in flight, or waits less often for as many."""
    if base.loop is None or other.loop is None or other.spills:
        return False
    fewer = other.loop.waits * base.loop.tensor_ops < base.loop.waits * other.loop.tensor_ops
    return other.loop.pipelined or fewer


def _unspilled(base: Facts, other: Facts) -> bool:
    return other.resources is not None and not other.spills


def _more_blocks(base: Facts, other: Facts) -> bool:
    return other.blocks > base.blocks and not other.spills


def _fuller(base: Facts, other: Facts) -> bool:
    return other.waves is not None and other.tail < base.tail - 0.05 and not other.spills


def _loads_less(base: Facts, other: Facts) -> bool:
    return other.load_bytes < base.load_bytes and not other.spills


def _another_layout(base: Facts, other: Facts) -> bool:
    if base.resources is None or other.resources is None or other.spills:
        return False
    return other.resources.shared_bytes != base.resources.shared_bytes


RULES = (
    Rule("launch", "ceiling", _launch),
    Rule("memory roof", "ceiling", lambda facts: _roof(facts, "memory", "memory's rate")),
    Rule("tensor roof", "ceiling", lambda facts: _roof(facts, "tensor", "tensor unit's rate")),
    Rule("spills", "critical", _spills, "code without spills", _unspilled),
    Rule("too few blocks", "critical", _few, "more blocks", _more_blocks),
    Rule("no tensor core", "critical", lambda facts: _refused(facts, tensor=True)),
    Rule("tail", "warning", _tail, "fuller waves", _fuller),
    Rule("L2", "warning", _l2, "fewer bytes loaded by all blocks together", _loads_less),
    Rule("occupancy", "warning", _occupancy, "more resident warps", _more_resident),
    Rule("serial loop", "warning", _serial, "a loop with products in flight", _freer),
    Rule("bank conflicts", "warning", _conflicts, "another layout of shared memory", _another_layout),
    Rule("compiler", "info", lambda facts: _refused(facts, tensor=False)),
)
"""The rules."""

_BY_NAME = {rule.name: rule for rule in RULES}


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings on a launch, the most severe first."""
    found = [
        Finding(rule=rule.name, severity=rule.severity, evidence=evidence, remedy=rule.remedy)
        for rule in RULES
        if (evidence := rule.evidence(facts))
    ]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def at_ceiling(found: Sequence[Finding]) -> bool:
    """Return whether a finding says that no change of config is worth trying."""
    return any(finding.severity == "ceiling" for finding in found)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Time that is expected of a changed config."""

    ratio: float
    """It over the config's."""

    by: Literal["table", "model"]
    """What expects it: the table's times at and near the size, or the model."""

    worth: str = ""
    """How the model's choices did for this kernel, in words; empty for the table's times."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of config that addresses a finding."""

    finding: Finding
    """The finding."""

    config: Config
    """The config with the change."""

    expected: Expected | None
    """Its expected time; None where nothing expects one."""


def change(
    config: Config,
    facts: Facts,
    found: Sequence[Finding],
    neighbours: Mapping[Config, Facts],
    expected: Mapping[Config, Expected],
) -> Change | None:
    """Return the fastest change expected that addresses the most severe finding; None where there is none.

    Of equal ones it is the smallest; without an expected time a change counts as equal to the config.

    Args:
        config: The config.
        facts: Its facts.
        found: Its findings, the most severe first.
        neighbours: The facts of configs that differ from it in one value.
        expected: The expected times of those that have one.
    """

    def order(other: Config) -> tuple[float, float]:
        return expected[other].ratio if other in expected else 1.0, _distance(config, other)

    if at_ceiling(found):
        return None
    for finding in found:
        better = _BY_NAME[finding.rule].better
        fitting = [] if better is None else [c for c, own in neighbours.items() if better(facts, own)]
        if fitting:
            best = min(fitting, key=order)
            return Change(finding=finding, config=best, expected=expected.get(best))
    return None


def difference(config: Config, other: Config) -> tuple[str, object, object] | None:
    """Return the only value that two configs differ in, with both values; None unless there is just one."""
    if config.kernel != other.kernel:
        return None
    mine, theirs = ({**one.constants, **one.hints} for one in (config, other))
    changed = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return (changed[0], mine.get(changed[0]), theirs.get(changed[0])) if len(changed) == 1 else None


def _distance(config: Config, other: Config) -> float:
    changed = difference(config, other)
    if changed is None:
        return math.inf
    _, before, after = changed
    numbers = [value for value in (before, after) if isinstance(value, int) and value > 0]
    return abs(math.log2(numbers[0] / numbers[1])) if len(numbers) == 2 else 1.0
