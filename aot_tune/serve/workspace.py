"""Memory for kernels that split a sum over blocks, kept per device and stream. Imports no kernel.

Launches on a stream run one after another, so one workspace serves all of them. Graphs that were captured on
one stream must be replayed one after another too. A workspace that was handed out is never freed: a CUDA
graph may hold its address.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from aot_tune.errors import LaunchError
from aot_tune.serve.fork import ForkSafe
from aot_tune.serve.runtime import runtime
from aot_tune.values.bucket import edge

if TYPE_CHECKING:
    import torch

_FEWEST = 1 << 14
"""Number of elements of the smallest tensors, which take 64 KiB."""

_STEP = 1 << 20
"""Number of elements, 4 MiB, by which large tensors grow; smaller tensors double."""


class Workspace(NamedTuple):
    """Tensors that the launches of a stream share."""

    partials: torch.Tensor
    """Tensor of shape (n,), float32, with any content."""

    counters: torch.Tensor
    """Tensor of shape (m,), int32, zero between launches: a kernel that changes it resets it."""


_of_stream: dict[tuple[torch.device, int], Workspace] = {}
_spare: dict[torch.device, Workspace] = {}
"""One unused workspace per device, for a capture, which is on a new stream and cannot allocate."""

_outgrown: list[Workspace] = []
_changes = ForkSafe()
_posed = threading.local()


def workspace(device: torch.device, partials: int, counters: int) -> Workspace:
    """Return the workspace of a device's current stream.

    The graphs captured on one stream share a workspace: replay them one after another.

    Args:
        device: The device; on "meta" the tensors have no storage and are not kept.
        partials: The least number of elements of `Workspace.partials`.
        counters: The least number of elements of `Workspace.counters`.

    Raises:
        LaunchError: The workspace would have to grow while the stream is captured into a graph.
    """
    stream = runtime().raw_stream(device.index) if device.type == "cuda" else 0
    existing = _of_stream.get((device, stream))
    if existing is not None and _holds(existing, partials, counters):
        return existing
    if device.type == "meta":
        if (most := getattr(_posed, "most", None)) is not None:
            _posed.most = max(most[0], partials), max(most[1], counters)
        return _new(device, _rounded(partials), _rounded(counters))
    with _changes.lock:
        larger = (
            _from_spare(device, partials, counters)
            if _captures(device)
            else _new_for(device, partials, counters)
        )
        if existing is not None:
            _outgrown.append(existing)
        _of_stream[device, stream] = larger
    return larger


@contextmanager
def for_all_posed(device: torch.device) -> Iterator[None]:
    """On exit, allocate the workspace of a GPU's current stream for all problems posed on "meta" inside.

    Then graphs of all these problems can be captured, although only small ones were launched.
    """
    _posed.most = (0, 0)
    try:
        yield
        most = _posed.most
    finally:
        del _posed.most
    if any(most):
        workspace(device, *most)


def _rounded(elements: int) -> int:
    """Return the size of a tensor for this many elements, with or without storage: one signature for both."""
    return max(_FEWEST, edge(elements)) if elements <= _STEP else -(-elements // _STEP) * _STEP


def _holds(existing: Workspace, partials: int, counters: int) -> bool:
    return existing.partials.shape[0] >= partials and existing.counters.shape[0] >= counters


def _captures(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with runtime().entered(device.index):
        return runtime().capturing()


def _from_spare(device: torch.device, partials: int, counters: int) -> Workspace:
    spare = _spare.get(device)
    if spare is None or not _holds(spare, partials, counters):
        raise LaunchError(
            f"a workspace of {partials} float32 and {counters} int32 cannot be allocated while {device} is "
            "captured into a graph; run the same call once before, on the stream that captures"
        )
    return _spare.pop(device)


def _new_for(device: torch.device, partials: int, counters: int) -> Workspace:
    """Return a new workspace at least as large as any on this device; make an equally large spare."""
    known = [kept for (on, _), kept in _of_stream.items() if on == device]
    partials = max([_rounded(partials), *(kept.partials.shape[0] for kept in known)])
    counters = max([_rounded(counters), *(kept.counters.shape[0] for kept in known)])
    spare = _spare.get(device)
    if device.type == "cuda" and (spare is None or not _holds(spare, partials, counters)):
        _spare[device] = _new(device, partials, counters)  # no graph holds the old spare
    return _new(device, partials, counters)


def _new(device: torch.device, partials: int, counters: int) -> Workspace:
    import torch

    def allocated() -> Workspace:
        return Workspace(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )

    if device.type != "cuda":
        return allocated()

    def apart() -> Workspace:
        with runtime().relaxed_capture(), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            made = allocated()
            torch.cuda.current_stream(device).synchronize()
        return made

    # Allocate in a separate thread and on a separate stream: while torch.compile makes CUDA graphs, memory
    # that its own thread or stream allocates belongs to the graphs and is freed with them.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(apart).result()
