"""aot_tune.values.device: the reference device of every arch."""

from __future__ import annotations

import pytest

from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.device import Device


@pytest.mark.parametrize("arch", KNOWN_ARCHS)
def test_every_known_arch_has_a_reference_device_of_its_own(arch):
    device = Device.reference(arch)
    assert device.arch == arch
    assert 0 < device.shared_memory_per_block < device.shared_memory_per_sm
    assert device.threads_per_sm % 32 == 0
    assert 0 < device.blocks_per_sm <= device.threads_per_sm // 32
    assert (
        min(device.sm_count, device.l2_bytes, device.clock_mhz, device.tensor_tflops, device.memory_gbps) > 0
    )


def test_the_hopper_reference_has_the_figures_of_an_h200():
    device = Device.reference(Arch(9, 0))
    assert (device.name, device.sm_count, device.shared_memory_per_block) == ("NVIDIA H200", 132, 232448)


def test_another_product_of_an_arch_differs_in_name_and_count_alone():
    h20 = Device.reference(Arch(9, 0)).with_sm_count("NVIDIA H20", 78)
    assert (h20.name, h20.sm_count, h20.arch) == ("NVIDIA H20", 78, Arch(9, 0))
    assert h20.with_sm_count("NVIDIA H200", 132) == Device.reference(Arch(9, 0))
