"""Predict a candidate's time from the declaration and the cubin. Pure: runs and measures nothing.

There is one model for every kernel and arch. It predicts the time of the busiest multiprocessor for its
sequence of tiles. That is their number (by waves, and by the residency that registers and shared memory
allow), times the steps of the inner loop, times the slowest of

- the tensor unit, shared by all resident blocks;
- one block's serial chain: its own tensor time, the waits of a loop that is not pipelined, a cluster's cost;
- shared-memory traffic of the tensor unit, and the issue of the loop's other instructions;
- loads: bytes at the second-level cache's rate, or their latency over the pipeline's depth;

plus an epilogue for each tile. It is never less than the memory's time to move all arguments once. The
costs below are cycles of one multiprocessor. They were fitted to an exhaustive sweep of an H200 and rounded:
the model's form matters, their exact values hardly do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from aot_tune.declare.declaration import Work
from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.sass import Loop
from aot_tune.values.device import Device

LAUNCH_US = 10.0
"""Time from the launch to the first useful byte after an L2 flush, microseconds."""

WAIT_CYCLES = 50.0
"""One wait until the tensor unit has drained. A loop without a pipeline waits at least once in each step."""

PIPELINED_WAIT_CYCLES = 10.0
"""One wait where the next step's matrix operations are already queued."""

STEP_CYCLES = 40.0
"""Barriers and addresses of a step, on its serial chain."""

CLUSTER_CYCLES = 250.0
"""Additional cost of a step's barrier across the blocks of a cluster."""

ISSUE_CYCLES = 5.5
"""Issue of one instruction of the loop for the warps of one block."""

SELECT_CYCLES = 4.0
"""One further pass over an accumulator register in each step."""

SPILL_CYCLES = 8.0
"""One load or store of a spilled register, on the serial chain."""

LOAD_LATENCY_CYCLES = 2800.0
"""Latency of a load from its issue to its data, under load."""

L2_BYTES_PER_CYCLE = 64.0
"""Rate at which one multiprocessor reads from the second-level cache."""

SHARED_BYTES_PER_CYCLE = 80.0
"""Rate at which the tensor unit reads shared memory, bank conflicts included; it is 128 without them."""

ROWS_PER_READ = 64.0
"""Rows of the result per read of the second operand from shared memory, at 2 bytes an element."""

ROWS_PER_READ_TENSOR_MEMORY = 128.0
"""`ROWS_PER_READ` on sm_100 to sm_110, whose matrix operations take 128 rows at a time."""

EPILOGUE_CYCLES = 2000.0
"""Filling the pipeline before a tile and draining it after."""

STORE_CYCLES_PER_BYTE = 0.05
"""Converting and storing a result."""

BLOCK_OVERHEAD_BYTES = 1024
"""Shared memory that the system reserves in every block since sm_80 (CUDA C++ Programming Guide)."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch of a config on a problem: all facts of the declaration that the model needs."""

    work: Work
    """The cost of one tile."""

    tiles: int
    """Number of tiles of the problem."""

    blocks: int
    """Number of clusters in the grid; less than `tiles` where the kernel is persistent."""

    ctas: int
    """Number of blocks that share a tile as a cluster."""

    memory_bytes: float
    """Bytes of all tensors, each counted once."""


def residency(device: Device, resources: Resources) -> int:
    """Return number of blocks that one multiprocessor holds at a time; 0 where not even one fits."""
    if resources.shared_bytes > device.shared_memory_per_block:
        return 0
    threads = max(resources.threads, 1)
    return min(
        device.blocks_per_sm,
        device.threads_per_sm // threads,
        device.registers_per_sm // max(resources.registers * threads, 1),
        device.shared_memory_per_sm // (resources.shared_bytes + BLOCK_OVERHEAD_BYTES),
    )


_FEW = 100
"""A loop with at most one load or store of a spilled register in this many instructions does not count as
spilling."""


def spills(resources: Resources, loop: Loop | None) -> bool:
    """Return whether spilled registers cost time.

    They do in the inner loop, and anywhere if no loop is known. A few bytes of stack outside of the loop cost
    little: on an H200 such configs won 2 of 27 matmul problems. A few accesses in a long loop cost little
    too: in attention_decode's first code, a config with 6 of them in 1025 instructions won 15 of 68 problems.
    """
    if loop is None:
        return resources.stack_bytes > 0
    return loop.local_accesses * _FEW > loop.instructions


def predict_us(launched: Launched, device: Device, resources: Resources | None, loop: Loop | None) -> float:
    """Predict the time of one launch, microseconds.

    Args:
        launched: The config on its problem.
        device: The GPU.
        resources: The cubin's resources. Before it is compiled they are None, and one block is assumed to
            fill each multiprocessor's shared memory.
        loop: The cubin's inner loop; None assumes a plain loop that waits once in each step.
    """
    groups = max(device.sm_count // launched.ctas, 1)
    blocks = max(min(launched.blocks, launched.tiles), 1)
    most = max(residency(device, resources), 1) if resources is not None else 1
    share = math.ceil(blocks / groups)
    resident = min(share, most)
    sequential = math.ceil(share / most) * math.ceil(launched.tiles / blocks)
    busy = min(blocks * launched.ctas, device.sm_count)
    per_sm = min(blocks * launched.ctas, device.sm_count * resident) / busy
    shared = resources.shared_bytes if resources is not None else device.shared_memory_per_block
    step = _step_cycles(launched, device, resident, per_sm, shared, loop)
    store = launched.work.store_bytes / launched.ctas
    epilogue = EPILOGUE_CYCLES + STORE_CYCLES_PER_BYTE * store * resident
    cycles = sequential * (launched.work.steps * step + epilogue)
    memory_us = launched.memory_bytes / (device.memory_gbps * 1e3)
    return LAUNCH_US + max(cycles / device.clock_mhz, memory_us)


CAUTION = 4.0
"""Factor by which `least_us` assumes the memory to be faster than its datasheet. Another product of the arch
may have faster memory than the reference device, and masked loads count here: at twice the bandwidth the
bound would be 85 % of a time of grouped_matmul on an H200, where few rows touch few of the experts."""


def least_us(launches: Iterable[Launched], device: Device) -> float:
    """Return the least possible time of some launches, microseconds. A shorter time is a wrong measurement.

    Each launch must read its loads from memory once, because the L2 cache is flushed before it: the bytes
    that its tiles load, or all of its tensors where tiles load the same data. Its stores may stay in the
    cache.

    Args:
        launches: Launches of one problem.
        device: The GPU.

    Returns:
        The time at `CAUTION` times the datasheet's bandwidth; 0 for a kernel without `work`.
    """
    loaded = (
        min(launched.tiles * launched.work.steps * launched.work.load_bytes, launched.memory_bytes)
        for launched in launches
    )
    return min(loaded, default=0.0) / (CAUTION * device.memory_gbps * 1e3)


def _step_cycles(
    launched: Launched, device: Device, resident: int, per_sm: float, shared: int, loop: Loop | None
) -> float:
    """Return the cycles of one step of all resident blocks: the slowest of the shared units and waits."""
    flops, loaded = launched.work.flops / launched.ctas, launched.work.load_bytes / launched.ctas
    tensor = flops / _flops_per_cycle(device)
    chain = tensor + STEP_CYCLES + (CLUSTER_CYCLES if launched.ctas > 1 else 0.0)
    issue = 0.0
    if loop is None:
        chain += WAIT_CYCLES if flops else 0.0
    else:
        chain += PIPELINED_WAIT_CYCLES if loop.pipelined else WAIT_CYCLES * loop.waits
        chain += SELECT_CYCLES * loop.selects + SPILL_CYCLES * loop.local_accesses
        issue = ISSUE_CYCLES * loop.instructions
    depth = max(shared // loaded, 1.0) if loaded else 1.0
    rows = ROWS_PER_READ_TENSOR_MEMORY if device.arch.major in (10, 11) else ROWS_PER_READ
    operands = (flops / rows + loaded / 2) if flops else 0.0
    return max(
        tensor * resident,
        chain,
        issue * resident,
        operands / SHARED_BYTES_PER_CYCLE * resident,
        loaded * per_sm / L2_BYTES_PER_CYCLE,
        LOAD_LATENCY_CYCLES / depth if loaded else 0.0,
    )


def _flops_per_cycle(device: Device) -> float:
    """Return the matrix operations of one multiprocessor in one cycle."""
    return device.tensor_tflops * 1e6 / (device.sm_count * device.clock_mhz)
