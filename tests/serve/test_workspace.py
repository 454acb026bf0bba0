"""Workspaces without a GPU: kept per stream, grown by doubling, never allocated during a capture."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.serve import workspace as module
from aot_tune.serve.workspace import for_all_posed, workspace
from tests.support.forks import right_in_a_fork

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One GPU whose current stream and capture a test chooses; what is allocated lies on the CPU."""
    state = SimpleNamespace(stream=0, captures=False, allocated=0)
    here = SimpleNamespace(
        raw_stream=lambda index: state.stream,
        capturing=lambda: state.captures,
        entered=lambda index: nullcontext(),
    )
    new = module._new

    def counted(device: torch.device, partials: int, counters: int) -> Any:
        assert not state.captures, "allocated while capturing"
        state.allocated += 1
        return new(torch.device("cpu"), partials, counters)

    monkeypatch.setattr(module, "runtime", lambda: here)
    monkeypatch.setattr(module, "_new", counted)
    for name in ("_of_stream", "_spare", "_outgrown"):
        monkeypatch.setattr(module, name, type(getattr(module, name))())
    return state


def test_it_is_zeroed_where_it_counts_and_has_at_least_the_elements_asked_for(
    machine: SimpleNamespace,
) -> None:
    partials, counters = workspace(GPU, 100_000, 70_000)
    assert (partials.dtype, counters.dtype) == (torch.float32, torch.int32)
    assert partials.shape == counters.shape == (131072,)
    assert bool((counters == 0).all())


def test_one_stream_gets_the_same_again_and_another_one_its_own(machine: SimpleNamespace) -> None:
    first = workspace(GPU, 10, 10)
    assert workspace(GPU, 5, 10) is first
    machine.stream = 7
    assert workspace(GPU, 5, 10).partials.data_ptr() != first.partials.data_ptr()
    machine.stream = 0
    assert workspace(GPU, 10, 5) is first


def test_one_that_grows_shrinks_nowhere_and_keeps_the_old_one_alive(machine: SimpleNamespace) -> None:
    first = workspace(GPU, 10, 100_000)
    second = workspace(GPU, 100_000, 10)
    assert second.counters.shape == first.counters.shape
    assert module._outgrown == [first]


def test_a_capture_on_a_stream_that_ran_the_call_uses_that_streams_own(machine: SimpleNamespace) -> None:
    before = workspace(GPU, 10, 10)
    machine.captures = True
    assert workspace(GPU, 10, 10) is before


def test_a_capture_on_a_new_stream_takes_the_spare_and_keeps_it(machine: SimpleNamespace) -> None:
    eager = workspace(GPU, 100_000, 10)
    machine.stream, machine.captures = 7, True
    captured = workspace(GPU, 100_000, 10)
    assert captured.partials.data_ptr() != eager.partials.data_ptr()
    assert workspace(GPU, 100_000, 10) is captured
    machine.captures = False
    assert workspace(GPU, 100_000, 10) is captured


@pytest.mark.parametrize("warm", [False, True])
def test_growth_while_capturing_is_refused_with_the_way_out(warm: bool, machine: SimpleNamespace) -> None:
    if warm:
        workspace(GPU, 10, 10)
    machine.captures = True
    with pytest.raises(LaunchError, match="run the same call once before, on the stream that captures"):
        workspace(GPU, 100_000, 10)
    machine.captures = False
    assert workspace(GPU, 100_000, 10).partials.shape[0] >= 100_000


def test_growth_brings_a_spare_as_large(machine: SimpleNamespace) -> None:
    workspace(GPU, 10, 10)
    workspace(GPU, 100_000, 10)
    machine.stream, machine.captures = 7, True
    assert workspace(GPU, 100_000, 10).partials.shape[0] >= 100_000


def test_a_large_one_grows_in_steps_and_not_twofold(machine: SimpleNamespace) -> None:
    step = 1 << 20
    partials, counters = workspace(GPU, step + 1, 40 * step + 1)
    assert (partials.shape[0], counters.shape[0]) == (2 * step, 41 * step)


def test_after_all_were_posed_a_graph_of_the_largest_can_be_captured(machine: SimpleNamespace) -> None:
    meta = torch.device("meta")
    workspace(meta, 500_000, 500_000)  # posed before, by somebody else
    with for_all_posed(GPU):
        workspace(GPU, 10, 10)
        for asked in ((10, 70_000), (100_000, 20), (5, 5)):
            workspace(meta, *asked)
    workspace(meta, 500_000, 500_000)
    machine.captures, kept = True, workspace(GPU, 100_000, 70_000)
    assert kept.partials.shape[0] < 500_000
    machine.stream = 7  # which torch captures on
    assert workspace(GPU, 100_000, 70_000) is not kept
    with pytest.raises(LaunchError, match="cannot be allocated while"):
        workspace(GPU, 500_000, 10)


def test_where_nothing_is_posed_nothing_is_allocated(machine: SimpleNamespace) -> None:
    with for_all_posed(GPU):
        pass
    assert machine.allocated == 0


def test_without_storage_it_has_the_size_of_a_real_one_and_is_not_kept(machine: SimpleNamespace) -> None:
    for asked in ((10, 20), (100_000, 70_001)):
        without = workspace(torch.device("meta"), *asked)
        real = workspace(GPU, *asked)
        assert [tensor.shape for tensor in without] == [tensor.shape for tensor in real]
    assert not any(device.type == "meta" for device, _ in module._of_stream)


@pytest.mark.process
def test_a_child_forked_while_a_thread_allocates_gets_its_own(machine: SimpleNamespace) -> None:
    def allocates() -> bool:
        return workspace(GPU, 10, 10).partials.numel() >= 10

    assert right_in_a_fork(module._changes.lock, allocates, within_s=30)
