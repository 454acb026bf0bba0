"""Time calls on the GPU, one after another, each with the L2 cache in a known state.

CUDA events around the call are the clock. Before a sample a buffer several times the size of the L2 cache is
*read*, as a server reads its weights: the cache then holds nothing that must be written back while the sample
runs. Or it is *written*, as a server writes activations: the cache's contents must then go to memory while
the sample runs. A round is queued whole, and filling the cache takes the GPU longer than a launch takes the
host. So no sample includes waiting for the host, unless the call itself keeps the host for longer than that.
A row of launches takes the host longer, and the clock checks whether the GPU had to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_FLUSH_BYTES = 512 << 20
"""Bytes read or written before each sample: four times the largest L2 cache (128 MiB), 120 us at 4.3 TB/s."""

_MOST_FILLS = 16
"""Times that the L2 cache is filled before a row of launches, at most: 2 ms at 4.3 TB/s."""


class EventRound:
    """Times each call once, in order, on the current GPU and stream, in microseconds."""

    def __init__(self) -> None:
        self._buffer = torch.ones(_FLUSH_BYTES // 4, device="cuda")
        self._fills = 1  # before a row of launches; more where the host is slow

    def flush(self) -> None:
        """Queue a read that fills the L2 cache with clean data."""
        self._buffer.sum()

    def fill(self) -> None:
        """Queue a write that fills the L2 cache with dirty data."""
        self._buffer.fill_(1.0)

    def __call__(self, calls: Sequence[Callable[[], object]], *, written: bool = False) -> list[float]:
        """Queue each call between two events, after filling the cache; then wait for all.

        Args:
            calls: The calls.
            written: Whether the cache is filled by writing; otherwise by reading.
        """
        samples = []
        for call in calls:
            (self.fill if written else self.flush)()
            samples.append(_between_events(call))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in samples]

    def tight(self, calls: Sequence[tuple[Callable[[], object], Callable[[], object]]]) -> float:
        """Queue launches with only their preparations in between; return the last one's time.

        Cache fills before the row keep the GPU busy until the host has queued it. Where they were too short,
        and the time may include a wait for the host, the row is queued again, the next times with more fills.

        Args:
            calls: Pairs of a preparation, which is not timed, and a launch.
        """
        for attempt in range(_MOST_FILLS):
            us, waited = self._row(calls)
            if not waited or self._fills >= _MOST_FILLS:
                break
            if attempt:  # in the first attempt a kernel may have been loaded
                self._fills *= 2
        return us

    def _row(self, calls: Sequence[tuple[Callable[[], object], Callable[[], object]]]) -> tuple[float, bool]:
        """Return the time of a row's last launch, and whether the GPU had to wait for the host."""
        for _ in range(self._fills):
            self.flush()
        for prepare, launch in calls[:-1]:
            prepare()
            launch()
        prepare, launch = calls[-1]
        prepare()
        start, end = _between_events(launch)
        waited = bool(start.query())  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3, waited


def _between_events(call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    return start, end
