"""What bounds a launch, the findings with their evidence, and the one change, on made-up facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aot_tune.declare.declaration import Work
from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.remarks import Remark
from aot_tune.nvidia.sass import Loop
from aot_tune.tuner.plan.model import Launched
from aot_tune.tuner.profile import facts as f
from aot_tune.tuner.profile.facts import Facts, classify, facts_of
from aot_tune.tuner.profile.rules import (
    RULES,
    SEVERITIES,
    Expected,
    at_ceiling,
    change,
    difference,
    findings,
)
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device

H200 = Device.reference(Arch.parse("sm90"))
CODE = Resources(registers=64, stack_bytes=0, shared_bytes=1024, threads=128)
LOOP = Loop(instructions=100, tensor_ops=8, selects=0, local_accesses=0, waits=1, pipelined=True)


def _facts(**changes: Any) -> Facts:
    """A launch of 100 us in 20 even waves, at 10 % of each roof: nothing is found."""
    base = Facts(
        us=100.0, blocks=132 * 8 * 20, tiles=132 * 8 * 20, load_bytes=1e6, memory_us=10.0, tensor_us=10.0,
        resources=CODE, loop=LOOP, resident=8, limiter="registers", sm_count=132, occupancy=0.5,
    )  # fmt: skip
    return replace(base, **changes)


SPILLING = replace(CODE, stack_bytes=64)

CASES: dict[str, dict[str, Any]] = {
    "launch": {"us": 4.0, "memory_us": 1.0, "tensor_us": 0.0},
    "memory roof": {"counters": {f.DRAM: 81.0}},
    "tensor roof": {"tensor_us": 80.0},
    "spills": {"resources": SPILLING, "loop": None},
    "too few blocks": {"blocks": 132, "tiles": 132},
    "no tensor core": {"remarks": (Remark(kind="Missed", name="RemarkTensorCoreMMA", text="t", times=1),)},
    "tail": {"blocks": int(132 * 8 * 1.2), "tiles": int(132 * 8 * 1.2)},
    "L2": {"counters": {f.L2: 75.0, f.DRAM: 20.0}},
    "occupancy": {"counters": {f.WARPS: 12.0, f.LONG_SCOREBOARD: 40.0}},
    "serial loop": {"loop": replace(LOOP, pipelined=False, waits=2)},
    "bank conflicts": {"counters": {f.CONFLICTS: 30.0, f.WAVEFRONTS: 200.0}},
    "compiler": {"remarks": (Remark(kind="Failure", name="RemarkMemoryTmaLoadFailed", text="t", times=2),)},
}
"""By a rule's name, what is changed of the facts so that it alone finds something."""


def test_nothing_is_found_where_nothing_is_proven() -> None:
    assert findings(_facts()) == ()
    assert findings(_facts(us=None, resources=None, resident=0, loop=None)) == ()
    assert findings(_facts(blocks=132 * 7, tiles=132 * 7)) == ()  # most of the GPU is in use


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_each_rule_finds_its_own_case_alone(name: str) -> None:
    (found,) = findings(_facts(**CASES[name]))
    assert (found.rule, bool(found.evidence)) == (name, True)


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"us": 5.9}, "launch"),
        ({"memory_us": 61.0}, "memory"),
        ({"tensor_us": 61.0}, "tensor"),
        ({"tensor_us": 90.0, "counters": {f.TENSOR: 30.0, f.DRAM: 70.0}}, "memory"),
        ({"resources": SPILLING, "loop": None, "blocks": 132, "tiles": 132}, "spills"),
        ({"blocks": 132, "tiles": 132}, "blocks"),
        ({"blocks": 132 * 7, "tiles": 132 * 7}, "blocks"),
        (CASES["tail"], "tail"),
        ({}, "latency"),
        ({"us": None}, None),
    ],
)
def test_what_bounds_a_launch(changes: dict[str, Any], bound: str | None) -> None:
    assert classify(_facts(**changes)) == bound


def test_the_more_severe_finding_comes_first() -> None:
    found = findings(
        _facts(**CASES["serial loop"] | {"resources": SPILLING, "counters": {f.LOCAL_STORES: 9.0}})
    )
    assert [each.rule for each in found] == ["spills", "serial loop"]
    order = [SEVERITIES.index(each.severity) for each in found]
    assert order == sorted(order)


def test_counters_overrule_what_the_code_suggests() -> None:
    serial = CASES["serial loop"]
    assert findings(_facts(**serial, counters={f.GMMA: 5.0})) == ()
    assert "waits 2 times a step for all products to end; 46 %" in (
        findings(_facts(**serial, counters={f.GMMA: 46.0}))[0].evidence
    )
    once = replace(LOOP, pipelined=False, waits=1)
    assert "waits 1 time a step" in findings(_facts(loop=once))[0].evidence


def _config(tile: int, workers: int = 4) -> Config:
    return Config(constants={"tile": tile}, hints={"num_worker_warps": workers})


def test_the_smallest_change_that_addresses_the_worst_finding_is_chosen() -> None:
    few = _facts(blocks=66, tiles=66)
    neighbours = {
        _config(128): _facts(blocks=33, tiles=33),
        _config(32): _facts(blocks=132, tiles=132),
        _config(16): _facts(blocks=264, tiles=264),
        _config(8): _facts(blocks=528, tiles=528, resources=SPILLING, loop=None),
    }
    chosen = change(_config(64), few, findings(few), neighbours, {})
    assert chosen is not None
    assert (chosen.config, chosen.finding.rule) == (_config(32), "too few blocks")
    spilling = {_config(8): neighbours[_config(8)]}
    assert change(_config(64), few, findings(few), spilling, {}) is None


def test_of_the_changes_that_address_it_the_fastest_expected_is_chosen() -> None:
    few = _facts(blocks=66, tiles=66)
    neighbours = {_config(tile): _facts(blocks=132, tiles=132) for tile in (32, 16, 8)}
    neighbours[_config(128)] = _facts(blocks=33, tiles=33)
    for ratios, tile in (
        ({32: 1.2, 16: 1.1, 8: 1.3}, 16),
        ({32: 1.2, 8: 1.1}, 16),  # nothing expects it to be slower
        ({16: 0.9, 8: 0.8, 128: 0.5}, 8),  # the fastest of all addresses nothing
        ({32: 0.9, 16: 0.9}, 32),
    ):
        expected = {_config(one): Expected(ratio=ratio, by="model") for one, ratio in ratios.items()}
        chosen = change(_config(64), few, findings(few), neighbours, expected)
        assert chosen is not None
        assert (chosen.config, chosen.expected) == (_config(tile), expected.get(_config(tile)))


def test_no_change_is_tried_at_a_ceiling_or_without_a_neighbour_that_helps() -> None:
    few = _facts(blocks=66, tiles=66)
    better = {_config(32): _facts(blocks=132, tiles=132)}
    ceiling = replace(few, us=4.0)
    assert at_ceiling(findings(ceiling))
    assert change(_config(64), ceiling, findings(ceiling), better, {}) is None
    assert change(_config(64), few, findings(few), {_config(128): _facts(blocks=33, tiles=33)}, {}) is None
    assert change(_config(64), _facts(), (), better, {}) is None


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("spills", {}),
        ("tail", {"blocks": 132 * 8 * 2, "tiles": 132 * 8 * 2}),
        ("L2", {"load_bytes": 5e5}),
        ("occupancy", {"occupancy": 0.75}),
        ("serial loop", {}),
        ("bank conflicts", {"resources": replace(CODE, shared_bytes=2048)}),
    ],
)
def test_each_remedy_is_recognised_in_a_neighbours_code(name: str, better: dict[str, Any]) -> None:
    present = _facts(**CASES[name])
    same = replace(present, counters={})
    assert change(_config(64), present, findings(present), {_config(32): same}, {}) is None
    chosen = change(
        _config(64), present, findings(present), {_config(32): same, _config(16): _facts(**better)}, {}
    )
    assert chosen is not None
    assert chosen.config == _config(16)


def test_warps_that_a_larger_tile_brings_hide_no_latency() -> None:
    present = _facts(**CASES["occupancy"])
    wider = _facts(occupancy=0.75, load_bytes=8e5)
    larger = _facts(occupancy=0.75, tiles=132 * 8 * 10)
    assert (
        change(_config(64), present, findings(present), {_config(96): wider, _config(128): larger}, {})
        is None
    )
    for fitting in (_facts(occupancy=0.75), _facts(occupancy=0.75, load_bytes=2e6, resident=12)):
        neighbours = {_config(96): wider, _config(32): fitting}
        chosen = change(_config(64), present, findings(present), neighbours, {})
        assert chosen is not None
        assert chosen.config == _config(32)


def test_neighbours_differ_in_one_value() -> None:
    assert difference(_config(64), _config(32)) == ("tile", 64, 32)
    assert difference(_config(64), _config(64, 8)) == ("num_worker_warps", 4, 8)
    assert difference(_config(64), _config(32, 8)) is None
    assert difference(_config(64), _config(64)) is None
    assert difference(_config(64), Config(constants={"tile": 32}, kernel="other")) is None


def test_facts_of_a_launch() -> None:
    work = Work(steps=4, flops=1e6, load_bytes=100.0)
    launched = Launched(work=work, tiles=264, blocks=132, ctas=2, memory_bytes=4.8e6)
    facts = facts_of(launched, H200, CODE, None, us=10.0, rate=2.0)
    assert (facts.blocks, facts.tiles, facts.load_bytes) == (264, 528, 264 * 400.0)
    assert facts.memory_us == pytest.approx(1.0)
    assert facts.tensor_us == pytest.approx(264 * 4e6 / (990 * 2 * 1e6))
    assert (facts.resident, facts.occupancy) == (8, 0.5)
    assert facts.limiter == "registers (64; 9 blocks need 56 at most)"
    assert facts.waves == 2.0  # persistent: tiles a block
    shared = facts_of(launched, H200, replace(CODE, shared_bytes=100_000), None)
    assert shared.limiter.startswith("shared memory (100000 bytes; 3 blocks need ")
    assert facts_of(launched, H200, None, None).waves is None


def test_a_launch_below_its_least_time_reads_a_part_of_its_arguments() -> None:
    launched = Launched(work=Work(), tiles=8448, blocks=8448, ctas=1, memory_bytes=4.8e7)
    facts = facts_of(launched, H200, CODE, None, us=9.0)
    assert facts.memory_us == 0.0
    assert classify(facts) == "latency"
    assert not any(finding.name == "memory roof" for finding in findings(facts))
