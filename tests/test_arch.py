"""aot_tune.arch: names of architectures, and which GPUs a process may use."""

from __future__ import annotations

import sys
import types

import pytest

from aot_tune import arch
from aot_tune.arch import KNOWN_ARCHS, Arch, visible_gpus
from aot_tune.errors import ArchError, UsageError


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


# The GPUs of this machine, from a stand-in for NVML ---------------------------------------------------------

THREE = [
    ("NVIDIA H200", (9, 0), "GPU-aaaa1111"),
    ("NVIDIA A2", (8, 6), "GPU-bbbb2222"),
    ("Tesla T4", (7, 5), "GPU-bbbb3333"),
]


@pytest.fixture
def nvml(monkeypatch):
    """Put in a module that answers as NVML does; returns the calls made to it."""
    calls = []
    module = types.ModuleType("pynvml")
    module.nvmlInit = lambda: calls.append("init")
    module.nvmlShutdown = lambda: calls.append("shutdown")
    module.nvmlDeviceGetCount = lambda: len(THREE)
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetUUID = lambda index: THREE[index][2].encode()
    module.nvmlDeviceGetName = lambda index: THREE[index][0]
    module.nvmlDeviceGetCudaComputeCapability = lambda index: THREE[index][1]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    module.calls = calls
    return module


def test_all_gpus_are_listed_and_one_that_cutile_does_not_know_has_no_arch(nvml):
    gpus = visible_gpus()
    assert [(gpu.index, gpu.name, gpu.arch) for gpu in gpus] == [
        (0, "NVIDIA H200", Arch(9, 0)), (1, "NVIDIA A2", Arch(8, 6)), (2, "Tesla T4", None),
    ]  # fmt: skip
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("variable", "places"),
    [
        ("", []),
        ("1,0", [1, 0]),
        (" 2 , 1 ", [2, 1]),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("0,0", []),
        ("GPU-bbbb3", [2]),
        ("GPU-bbbb", []),
        ("GPU-aaaa1111,1", [0, 1]),
        ("nonsense", []),
    ],
)
def test_cuda_visible_devices_is_read_as_the_driver_reads_it(nvml, monkeypatch, variable, places):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    gpus = visible_gpus()
    assert [gpu.uuid for gpu in gpus] == [THREE[place][2] for place in places]
    assert [gpu.index for gpu in gpus] == list(range(len(places)))


def test_without_a_driver_the_gpus_are_unknown_and_not_absent(nvml):
    def fail():
        raise OSError("libnvidia-ml.so.1")

    nvml.nvmlInit = fail
    assert visible_gpus() is None


def test_a_question_that_nvml_forbids_makes_the_gpus_unknown_and_closes_nvml(nvml):
    def fail(handle):
        raise RuntimeError("no permission")

    nvml.nvmlDeviceGetUUID = fail
    assert visible_gpus() is None
    assert nvml.calls == ["init", "shutdown"]


def test_the_gpus_are_asked_for_once_in_the_background(nvml, monkeypatch):
    monkeypatch.setattr(arch._Question, "thread", None)
    monkeypatch.setattr(arch._Question, "gpus", None)
    arch.ask_for_gpus()
    arch.ask_for_gpus()
    told = arch.gpus_asked_for()
    assert [gpu.uuid for gpu in told] == [one[2] for one in THREE]
    assert arch.gpus_asked_for() is told
    assert nvml.calls == ["init", "shutdown"]


def test_a_fork_waits_for_the_answer_so_that_no_child_inherits_nvmls_locks(nvml, monkeypatch):
    import os
    import time

    began = nvml.nvmlInit

    def slowly():
        time.sleep(0.2)
        began()

    nvml.nvmlInit = slowly
    monkeypatch.setattr(arch._Question, "thread", None)
    monkeypatch.setattr(arch._Question, "gpus", None)
    arch.ask_for_gpus()
    child = os.fork()
    if child == 0:
        os._exit(arch._Question.thread.is_alive())
    assert not arch._Question.thread.is_alive()
    assert os.waitpid(child, 0)[1] == 0
