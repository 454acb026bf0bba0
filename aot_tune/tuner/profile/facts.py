"""Facts of one launch: its code, its blocks, its roofs, its time, and what the GPU counted. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.remarks import Remark
from aot_tune.nvidia.sass import Loop
from aot_tune.tuner.plan.model import BLOCK_OVERHEAD_BYTES, Launched, residency, spills
from aot_tune.values.device import Device

LAUNCH_US = 6.0
"""Time below which a launch is bound by its start, microseconds (H200)."""

BOUND = 0.60
"""Part of a roof from which a launch is bound by it."""

TAIL = 1.15
"""Factor that the last, partly filled wave costs, from which it counts."""

MANY_WAVES = 4.0
"""Waves from which the last one hardly counts."""

DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__t_sectors.avg.pct_of_peak_sustained_elapsed"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
LOCAL_STORES = "smsp__inst_executed_op_local_st.sum"
LONG_SCOREBOARD = "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct"
GMMA = "smsp__warp_issue_stalled_gmma_per_warp_active.pct"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts.sum"

Class = Literal["launch", "memory", "tensor", "blocks", "tail", "spills", "latency"]
"""What bounds a launch: its start, the memory's or the tensor unit's rate, too few blocks, the last wave,
spilled registers, or, where none of these is proven, the latency of its instructions."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of one launch."""

    us: float | None
    """Its time, microseconds; None where there is none."""

    blocks: int
    """Blocks of the grid, with those of each cluster."""

    tiles: int
    """Tiles that they compute; more than blocks where the kernel is persistent."""

    load_bytes: float
    """Bytes that all tiles load, counted as often as they are loaded."""

    memory_us: float
    """Time in which the memory moves all arguments once, by the datasheet, microseconds; 0 where it is
    unknown, as for a launch that took less and so reads only a part of them."""

    tensor_us: float
    """Time in which the tensor units do all products, by the datasheet, microseconds; 0 likewise."""

    resources: Resources | None
    """Registers, stack, shared memory and threads; None where the config was not compiled."""

    loop: Loop | None
    """The inner loop with products; None without one."""

    resident: int
    """Blocks that a multiprocessor holds at a time; 0 where it was not compiled."""

    limiter: str
    """What allows no more of them, in words."""

    sm_count: int
    """Multiprocessors."""

    occupancy: float
    """Resident threads as a part of the most that a multiprocessor holds."""

    remarks: tuple[Remark, ...] = ()
    """The compiler's remarks."""

    counters: Mapping[str, float] = field(default_factory=dict)
    """The GPU's counters, by CUPTI's names; empty where they were not read."""

    @property
    def waves(self) -> float | None:
        """Return the number of times that the blocks or tiles fill the GPU; None where it is unknown."""
        places = self.sm_count * self.resident
        if not places:
            return None
        return max(self.blocks, 1) / places if self.tiles <= self.blocks else self.tiles / self.blocks

    @property
    def tail(self) -> float:
        """Return the factor that rounding up to whole waves costs; 1 where it is unknown."""
        return math.ceil(self.waves) / self.waves if self.waves and self.waves > 1 else 1.0

    @property
    def spills(self) -> bool:
        """Return whether spilled registers cost time."""
        return self.resources is not None and spills(self.resources, self.loop)

    def part_of(self, roof: Literal["memory", "tensor"]) -> float:
        """Return the reached part of a roof: counted, or the least time by the datasheet over the time."""
        counted = self.counters.get(DRAM if roof == "memory" else TENSOR)
        if counted is not None:
            return counted / 100
        least = self.memory_us if roof == "memory" else self.tensor_us
        return least / self.us if self.us else 0.0


def classify(facts: Facts) -> Class | None:
    """Return what bounds a launch; None where it has no time and no counters."""
    if facts.us is None and not facts.counters:
        return None
    if facts.us is not None and facts.us < LAUNCH_US:
        return "launch"
    if max(facts.part_of("memory"), facts.part_of("tensor")) >= BOUND:
        return "memory" if facts.part_of("memory") >= facts.part_of("tensor") else "tensor"
    if facts.spills:
        return "spills"
    if facts.waves is not None and facts.waves < 1:
        return "blocks"
    if facts.tail > TAIL and (facts.waves or 0) < MANY_WAVES:
        return "tail"
    return "latency"


def facts_of(
    launched: Launched,
    device: Device,
    resources: Resources | None,
    loop: Loop | None,
    *,
    us: float | None = None,
    rate: float = 1.0,
) -> Facts:
    """Derive the facts that need no GPU.

    Args:
        launched: The launch.
        device: The GPU.
        resources: What its code occupies; None where it is not compiled.
        loop: Its inner loop.
        us: Its time, microseconds.
        rate: The tensor unit's rate for its operands, relative to bfloat16.
    """
    work, tiles = launched.work, launched.tiles
    resident = residency(device, resources) if resources is not None else 0
    threads = resources.threads * resident if resources is not None else 0
    least = (
        launched.memory_bytes / (device.memory_gbps * 1e3),
        tiles * work.steps * work.flops / (device.tensor_tflops * rate * 1e6),
    )
    memory_us, tensor_us = (0.0 if us is not None and each > us else each for each in least)
    return Facts(
        us=us,
        blocks=launched.blocks * launched.ctas,
        tiles=tiles * launched.ctas,
        load_bytes=tiles * work.steps * work.load_bytes,
        memory_us=memory_us,
        tensor_us=tensor_us,
        resources=resources,
        loop=loop,
        resident=resident,
        limiter=_limiter(device, resources) if resources is not None else "",
        sm_count=device.sm_count,
        occupancy=threads / device.threads_per_sm,
    )


def _limiter(device: Device, resources: Resources) -> str:
    """Return what limits the resident blocks, with the number that one more block would need."""
    threads = max(resources.threads, 1)
    resident = residency(device, resources)
    limits = {
        "registers": device.registers_per_sm // max(resources.registers * threads, 1),
        "shared memory": device.shared_memory_per_sm // (resources.shared_bytes + BLOCK_OVERHEAD_BYTES),
        "threads": device.threads_per_sm // threads,
        "blocks": device.blocks_per_sm,
    }
    name = min(limits, key=lambda limit: limits[limit])
    if name == "registers":
        more = device.registers_per_sm // (threads * (resident + 1))
        return f"registers ({resources.registers}; {resident + 1} blocks need {more} at most)"
    if name == "shared memory":
        more = device.shared_memory_per_sm // (resident + 1) - BLOCK_OVERHEAD_BYTES
        return f"shared memory ({resources.shared_bytes} bytes; {resident + 1} blocks need {more} at most)"
    return name
