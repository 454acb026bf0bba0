"""aot_tune.nvidia.nvml: which GPUs a process may use, from a stand-in for NVML."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types

import pytest

from aot_tune.nvidia import nvml as own
from aot_tune.nvidia.nvml import driver_version, visible_gpus
from aot_tune.values.arch import Arch

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


MIG = {
    "mig 0": ("NVIDIA H200 MIG 1g.18gb", "MIG-cccc4444"),
    "mig 2": ("NVIDIA H200 MIG 2g.35gb", "MIG-dddd5555"),
}
"""The MIG devices of the first GPU, which has room for three; the others have none."""


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        ("MIG-cccc4444", ["MIG-cccc4444"]),
        ("MIG-dddd", ["MIG-dddd5555"]),
        ("MIG-dddd5555,MIG-cccc4444", ["MIG-dddd5555"]),  # CUDA uses one MIG device in a process
        ("1,MIG-cccc4444", ["GPU-bbbb2222", "MIG-cccc4444"]),
        ("MIG-eeee", []),
        ("3,MIG-cccc4444", []),
    ],
)
def test_a_mig_device_is_found_by_its_uuid(nvml, monkeypatch, variable, uuids):
    def most(gpu):
        if gpu:
            raise RuntimeError("not supported")
        return 3

    nvml.nvmlDeviceGetMaxMigDeviceCount = most
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = lambda gpu, place: MIG[f"mig {place}"] and f"mig {place}"
    nvml.nvmlDeviceGetUUID = lambda handle: MIG[handle][1] if handle in MIG else THREE[handle][2]
    nvml.nvmlDeviceGetName = lambda handle: MIG[handle][0] if handle in MIG else THREE[handle][0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    gpus = visible_gpus()
    assert [gpu.uuid for gpu in gpus] == uuids
    for gpu in gpus:
        if gpu.uuid.startswith("MIG-"):
            assert (gpu.name, gpu.arch) in [(name, Arch(9, 0)) for name, _ in MIG.values()]


def test_without_a_driver_the_gpus_are_unknown_and_not_absent(nvml):
    def fail():
        raise OSError("libnvidia-ml.so.1")

    nvml.nvmlInit = fail
    assert visible_gpus() is None
    assert driver_version() is None


def test_a_question_that_nvml_forbids_makes_the_gpus_unknown_and_closes_nvml(nvml):
    def fail(handle):
        raise RuntimeError("no permission")

    nvml.nvmlDeviceGetUUID = fail
    assert visible_gpus() is None
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize("told", ["580.159.04", b"580.159.04"])
def test_the_driver_tells_its_version_and_nvml_is_closed_again(nvml, told):
    nvml.nvmlSystemGetDriverVersion = lambda: told
    assert driver_version() == "580.159.04"
    assert nvml.calls == ["init", "shutdown"]


def test_the_gpus_are_asked_for_once_in_the_background(nvml, monkeypatch):
    monkeypatch.setattr(own._Question, "thread", None)
    monkeypatch.setattr(own._Question, "gpus", None)
    own.ask_for_gpus()
    own.ask_for_gpus()
    told = own.known_gpus()
    assert [gpu.uuid for gpu in told] == [one[2] for one in THREE]
    assert own.known_gpus() is told
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.process
def test_a_fork_waits_for_the_answer_so_that_no_child_inherits_nvmls_locks(nvml, monkeypatch):
    began = nvml.nvmlInit

    def slowly():
        time.sleep(0.2)
        began()

    nvml.nvmlInit = slowly
    monkeypatch.setattr(own._Question, "thread", None)
    monkeypatch.setattr(own._Question, "gpus", None)
    own.ask_for_gpus()
    child = os.fork()
    if child == 0:
        os._exit(own._Question.thread.is_alive())
    assert not own._Question.thread.is_alive()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.process
def test_an_nvml_that_hangs_costs_imports_and_forks_a_bounded_time(nvml, monkeypatch):
    go = threading.Event()
    nvml.nvmlInit = lambda: go.wait(60)
    monkeypatch.setattr(own._Question, "thread", None)
    monkeypatch.setattr(own._Question, "gpus", None)
    monkeypatch.setattr(own, "_PATIENCE_S", 0.5)
    waits: list[float] = []
    join = threading.Thread.join

    def counted(thread, seconds=None):
        waits.append(seconds)
        join(thread, seconds)

    monkeypatch.setattr(threading.Thread, "join", counted)
    try:
        for _ in range(20):
            assert own.known_gpus() is None
        for _ in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                os._exit(own.known_gpus() is not None)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sum(waits) < 1, "each wait begins anew"
    finally:
        go.set()
    own._Question.thread.join()
    assert len(own.known_gpus()) == len(THREE), "an answer that came late is used"


def test_an_nvml_that_fails_when_it_is_closed_has_answered_all_the_same(nvml):
    def fail():
        raise RuntimeError("closed already")

    nvml.nvmlShutdown = fail
    nvml.nvmlSystemGetDriverVersion = lambda: "580"
    assert len(visible_gpus()) == len(THREE)
    assert driver_version() == "580"
