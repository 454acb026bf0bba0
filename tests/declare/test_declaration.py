"""aot_tune.declare.declaration: what a kernel may be called (FAULTS B14)."""

from __future__ import annotations

import dataclasses

import cuda.tile as ct
import pytest

from aot_tune.declare.declaration import check_name, is_name
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.errors import DeclarationError
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from tests.support.wide_samples import double, halve_kernel, row_sum, scale_each


@pytest.mark.parametrize("name", ["a", "rms_norm", "matmul2", "x" * 64])
def test_a_plain_lower_case_name_is_taken(name):
    check_name(name)
    assert is_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 65, "x" * 300, "Matmul", "mat mul", "1st", "_x",
     "a.json", "..", "café", "a\n", "a٣", None, 3, b"matmul"],
)  # fmt: skip
def test_b14_a_name_that_could_leave_its_folder_is_refused_and_told_what_to_write(name):
    assert not is_name(name)
    with pytest.raises(DeclarationError, match=r"lower-case name .* such as 'rms_norm'") as caught:
        check_name(name)
    assert len(str(caught.value)) < 300


def test_a_hint_by_target_is_the_archs_value_and_equal_configs_are_one():
    [problem] = double.typical_problems
    hints = {
        arch: [dict(config.hints) for config in double.space(arch, problem)]
        for arch in map(Arch.parse, ("sm90", "sm100"))
    }
    one, two = {"num_ctas": 1, "occupancy": 2}, {"num_ctas": 2, "occupancy": 2}
    assert list(hints.values()) == [[one], [one, two]]
    without = Config(constants={"tile": 256}, hints={"num_ctas": ct.ByTarget(sm_100=2), "occupancy": 2})
    by_target = dataclasses.replace(
        double, search_space=lambda arch, problem: [without], default=lambda arch, problem: without
    )
    assert dict(by_target.default_config(Arch.parse("sm90"), problem).hints) == {"occupancy": 2}
    assert dict(by_target.default_config(Arch.parse("sm100"), problem).hints) == two


def test_a_default_of_an_empty_space_is_refused_in_words():
    [problem] = double.typical_problems
    only_sm100 = dataclasses.replace(
        double,
        search_space=lambda arch, problem: double.space(arch, problem) if arch >= Arch(10, 0) else [],
        default=None,
    )
    with pytest.raises(DeclarationError, match=r"double: search_space\(sm90, .* is empty; return at least"):
        only_sm100.default_config(Arch.parse("sm90"), problem)


def test_the_hash_covers_every_kernel_and_its_name():
    kernels = {"one": double.kernel, "two": halve_kernel}
    space = [Config(kernel="one", constants={"tile": 256})]
    hashes = {
        source_hash(dataclasses.replace(double, kernel=kernel, search_space=space))
        for kernel in (
            kernels,
            {"one": double.kernel},
            {"one": halve_kernel},
            {"one": halve_kernel, "two": double.kernel},
        )
    }
    assert len(hashes) == 4
    assert source_hash(double) not in hashes


def test_a_keyword_parameter_called_device_is_given_the_device():
    device = Device.reference(Arch.parse("sm90"))
    assert scale_each.takes_device
    assert scale_each.args_fn_on(device)(Config(constants={"tile": 16}), [], [])[2] == 132
    by_place = dataclasses.replace(double, args_fn=lambda config, x, device: (x, device, config["tile"]))
    assert not by_place.takes_device  # a launch argument of that name
    assert by_place.args_fn_on(device) is by_place.args_fn


def test_each_kernel_has_the_constants_that_its_configs_name():
    sm90 = Arch.parse("sm90")
    assert row_sum.config_constants(sm90, "whole") == ("tile",)
    assert row_sum.config_constants(sm90, "looped") == ("step",)
    assert row_sum.constant_names == ("with_largest", "tile", "step")
