"""Time calls on the GPU, one after another, each with none of its data in the L2 cache. Knows no kernel.

CUDA events around the call are the clock. Before each sample a buffer several times the size of the L2 cache
is *read*, as a server reads its weights: the cache then holds nothing that must be written back while the
sample runs. A round is queued whole, and the reading takes the GPU longer than a launch takes the host. So no
sample includes waiting for the host, unless the call itself keeps the host for longer than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_FLUSH_BYTES = 512 << 20
"""Bytes read before each sample: four times the largest L2 cache (128 MiB), 120 us at 4.3 TB/s."""


class EventRound:
    """Times each call once, in order, on the current GPU and stream, in microseconds."""

    def __init__(self) -> None:
        self._read = torch.ones(_FLUSH_BYTES // 4, device="cuda")

    def flush(self) -> None:
        """Queue the reading that fills the L2 cache with unneeded data that nobody must write back."""
        self._read.sum()

    def __call__(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Queue every call between two events, each after a flush, then wait for all of them."""
        samples = []
        for call in calls:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.flush()
            start.record()
            call()
            end.record()
            samples.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in samples]
