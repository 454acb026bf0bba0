"""Limits and rates of a GPU, for grids, rules and the performance model. Pure values.

The limits of an architecture are from the CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; the other figures of each reference device are from its product datasheet.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from aot_tune.values.arch import Arch


class DeviceProperties(Protocol):
    """Fields of ``torch.cuda.get_device_properties(index)`` that `Device.of` reads."""

    name: str
    """Product name."""

    major: int
    """Compute capability, major."""

    minor: int
    """Compute capability, minor."""

    multi_processor_count: int
    """Streaming multiprocessors."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU model: ``grid_fn`` reads ``sm_count``, ``legal`` and ``fits`` the limits, the tuner the rates."""

    arch: Arch
    """Architecture."""

    name: str
    """Product name."""

    sm_count: int
    """Streaming multiprocessors."""

    shared_memory_per_block: int
    """Largest shared memory of one block, bytes."""

    shared_memory_per_sm: int
    """Shared memory of one multiprocessor, bytes."""

    registers_per_sm: int
    """32-bit registers of one multiprocessor."""

    threads_per_sm: int
    """Most resident threads of one multiprocessor."""

    blocks_per_sm: int
    """Most resident blocks of one multiprocessor."""

    l2_bytes: int
    """Second-level cache, bytes."""

    clock_mhz: float
    """Boost clock, MHz."""

    tensor_tflops: float
    """Dense bf16 matrix rate, 10^12 operations a second."""

    memory_gbps: float
    """Memory bandwidth, 10^9 bytes a second."""

    @classmethod
    def reference(cls, arch: Arch) -> Device:
        """Return the arch's reference device, for which `tune` predicts where no GPU is used.

        It is the arch's data-center product, or its best known product where there is none.
        """
        return _REFERENCE[arch]

    @classmethod
    def of(cls, properties: DeviceProperties) -> Device:
        """Return the GPU that torch describes: the arch's reference device with its name and multiprocessors.

        Args:
            properties: The result of ``torch.cuda.get_device_properties``.
        """
        arch = Arch.parse((properties.major, properties.minor))
        return cls.reference(arch).with_sm_count(properties.name, properties.multi_processor_count)

    def refusal(self, occupancy: int) -> str | None:
        """Return why a multiprocessor cannot hold `occupancy` blocks at a time; None where it can."""
        most = self.blocks_per_sm
        if occupancy <= most:
            return None
        return f"occupancy {occupancy}: a multiprocessor of {self.name} holds at most {most} blocks"

    def with_sm_count(self, name: str, sm_count: int) -> Device:
        """Return equal limits and rates for another product of the arch, with the size the driver reports."""
        return dataclasses.replace(self, name=name, sm_count=sm_count)


_KIB = 1024
_MIB = 1024 * 1024


def _device(
    arch: tuple[int, int],
    name: str,
    sms: int,
    smem: tuple[int, int],
    threads: int,
    blocks: int,
    *,
    l2: int,
    mhz: float,
    tflops: float,
    gbps: float,
) -> Device:
    return Device(
        arch=Arch(*arch), name=name, sm_count=sms,
        shared_memory_per_block=smem[0] * _KIB, shared_memory_per_sm=smem[1] * _KIB,
        registers_per_sm=65536, threads_per_sm=threads, blocks_per_sm=blocks,
        l2_bytes=l2 * _MIB, clock_mhz=mhz, tensor_tflops=tflops, memory_gbps=gbps,
    )  # fmt: skip


_REFERENCE: dict[Arch, Device] = {
    device.arch: device
    for device in (
        _device((8, 0), "NVIDIA A100", 108, (163, 164), 2048, 32, l2=40, mhz=1410, tflops=312, gbps=2039),
        _device((8, 6), "NVIDIA A10", 72, (99, 100), 1536, 16, l2=6, mhz=1695, tflops=125, gbps=600),
        _device((8, 7), "NVIDIA AGX Orin", 16, (163, 164), 1536, 16, l2=4, mhz=1300, tflops=43, gbps=205),
        _device((8, 8), "sm88", 16, (99, 100), 1536, 16, l2=4, mhz=1300, tflops=43, gbps=205),
        _device((8, 9), "NVIDIA L40S", 142, (99, 100), 1536, 24, l2=96, mhz=2520, tflops=362, gbps=864),
        _device((9, 0), "NVIDIA H200", 132, (227, 228), 2048, 32, l2=50, mhz=1980, tflops=990, gbps=4800),
        _device((10, 0), "NVIDIA B200", 148, (227, 228), 2048, 32, l2=126, mhz=1965, tflops=2250, gbps=8000),
        _device((10, 3), "NVIDIA B300", 148, (227, 228), 2048, 32, l2=126, mhz=1965, tflops=2250, gbps=8000),
        _device((10, 7), "sm107", 148, (227, 228), 2048, 32, l2=126, mhz=1965, tflops=2250, gbps=8000),
        _device((11, 0), "NVIDIA Thor", 20, (227, 228), 1536, 24, l2=32, mhz=1575, tflops=250, gbps=273),
        _device((12, 0), "RTX PRO 6000", 188, (99, 100), 1536, 24, l2=128, mhz=2617, tflops=500, gbps=1792),
        _device((12, 1), "NVIDIA GB10", 48, (99, 100), 1536, 24, l2=24, mhz=2418, tflops=100, gbps=273),
    )
}
