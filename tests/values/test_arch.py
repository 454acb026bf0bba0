"""aot_tune.values.arch: names of architectures."""

from __future__ import annotations

import pytest

from aot_tune.errors import ArchError, UsageError
from aot_tune.values.arch import KNOWN_ARCHS, Arch


@pytest.mark.parametrize(
    "name",
    [
        "sm90",
        "sm_90",
        "SM90",
        "sm_90a",
        "90",
        "90a",
        "9.0",
        " sm90 ",
        "compute_90",
        (9, 0),
        [9, 0],
        Arch(9, 0),
    ],
)
def test_all_common_spellings_name_the_same_arch(name):
    assert Arch.parse(name) == Arch(9, 0)


@pytest.mark.parametrize("arch", KNOWN_ARCHS)
def test_every_known_arch_survives_being_printed_in_either_style(arch):
    assert Arch.parse(str(arch)) == arch
    assert Arch.parse(arch.cutile_name) == arch
    assert Arch.parse((arch.major, arch.minor)) == arch


@pytest.mark.parametrize(
    "name",
    ["", "sm", "sm9", "hopper", "sm_1000", "sm090", "9.0.0", "sm\uff19\uff10", "../sm90", "sm90\0",
     None, 90, 9.0, (9,), (9, 0, 0), (9.0, 0), ("9", "0"), (True, False), "sm70", "sm91", (7, 5)],
)  # fmt: skip
def test_what_names_no_arch_is_refused_with_the_names_that_do(name):
    with pytest.raises(ArchError, match=r"sm80 .*sm90 .*sm121") as caught:
        Arch.parse(name)
    assert isinstance(caught.value, UsageError)


def test_a_long_bad_name_is_cut_in_the_message():
    with pytest.raises(ArchError) as caught:
        Arch.parse("x" * 10_000)
    assert len(str(caught.value)) < 300


def test_archs_are_ordered_by_compute_capability_and_not_by_name():
    assert Arch(9, 0) < Arch(10, 0) < Arch(10, 3) < Arch(12, 0)
    assert list(KNOWN_ARCHS) == sorted(KNOWN_ARCHS)
