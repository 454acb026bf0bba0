"""Open a sweep's GPUs and compilers, on this machine or on a Ray cluster."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import AotTuneError
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job_queue import JobQueue
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.request import Session
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.ray.cluster import Cluster
from aot_tune.tuner.sweep.gpus import Start
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.tuner.sweep.report import SweepRequest

CUBINS = Path("build/cubins")
"""Folder of cubins to keep between runs, for all archs: each name is a digest that includes the arch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """The GPUs and compilers of a sweep."""

    request: SweepRequest
    """The request; with a cluster it names all of the cluster's GPUs by index."""

    order: list[str]
    """The kernels' names in the order of their tasks and compilations; filled by the caller."""

    choice: str
    """Advice how to choose some of the GPUs; braces stand for their indexes."""

    session: Start
    """Opens a session on a GPU."""

    feed: Callable[[], CompileFeed]
    """Returns the compile feed; a new feed where an error has ended the last."""


@contextmanager
def opened(request: SweepRequest, progress: Progress) -> Iterator[Resources]:
    """Open a sweep's resources. This machine's measuring and compiling processes start at once."""
    with ExitStack() as stack:
        cluster = None
        if request.ray is not None:
            cluster = stack.enter_context(Cluster(request.ray, request.arch, request.kernels, progress.note))
            request = dataclasses.replace(request, gpus=tuple(range(len(cluster.gpus))))
        order: list[str] = []
        feeds = stack.enter_context(_Feeds(partial(CompileFeed, _pool(request, cluster), order)))
        here = cluster is None and not request.predicts
        sessions = stack.enter_context(
            _Sessions(
                _start(request, progress, cluster),
                request.kernels[0],
                request.gpus if here else (),
                progress,
            )
        )
        if here:
            feeds.living()
        yield Resources(
            request=request,
            order=order,
            choice="--gpus {}" if cluster is None else cluster.choice(),
            session=sessions,
            feed=feeds.living,
        )


class _Sessions:
    """Opens sessions on GPUs, on this machine's GPUs in advance.

    A measuring process needs some seconds for its imports, during which declarations are checked. An error
    is raised when the GPU's session is needed.

    Args:
        start: Opens a session.
        kernel: Any kernel of the sweep.
        early: The GPUs on which to open a session now.
        progress: Receives these sessions' lines for the user.
    """

    def __init__(self, start: Start, kernel: FoundKernel, early: Sequence[int], progress: Progress) -> None:
        self._start = start
        self._opened: dict[int, Session] = {}
        for index in early:
            with suppress(AotTuneError):
                self._opened[index] = start(kernel, index, FaultCounts(progress.note))

    def __enter__(self) -> _Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        while self._opened:
            self._opened.popitem()[1].close()

    def __call__(self, kernel: FoundKernel, index: int, fault_counts: FaultCounts) -> Session:
        """Return an open or a new session, which the caller closes."""
        session = self._opened.pop(index, None)
        if session is None:
            return self._start(kernel, index, fault_counts)
        session.turn_to(kernel, fault_counts)
        return session


class _Feeds:
    """The compile feed of a sweep, replaced where an error has ended it.

    Args:
        make: Makes a feed.
    """

    def __init__(self, make: Callable[[], CompileFeed]) -> None:
        self._make, self._lock, self._stack = make, threading.Lock(), ExitStack()
        self._feed: CompileFeed | None = None

    def __enter__(self) -> _Feeds:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def living(self) -> CompileFeed:
        """Return the running feed."""
        with self._lock:
            if self._feed is None or self._feed.ended:
                self._feed = self._stack.enter_context(self._make())
            return self._feed


def _start(request: SweepRequest, progress: Progress, cluster: Cluster | None) -> Start:
    """Make the function that opens sessions on the GPUs of a cluster, or of this machine."""

    def start(kernel: FoundKernel, index: int, fault_counts: FaultCounts) -> Session:
        where = f"GPU {index}: " if len(request.gpus) > 1 else ""

        def note(line: str) -> None:
            progress.note(where + line)

        if cluster is not None:
            return cluster.session(kernel, index, note, fault_counts)
        return MeasureSession(kernel, index, on_event=note, fault_counts=fault_counts)

    return start


def _pool(request: SweepRequest, cluster: Cluster | None) -> Callable[[], JobQueue]:
    """Make the function that makes the compile pool, on a cluster's nodes or on this machine."""
    cubins = request.cubins or CUBINS
    if cluster is not None:
        return partial(cluster.pool, request.jobs, cubins)
    return partial(
        CompilePool,
        request.jobs or usable_cores(),
        folder=cubins,
        # Where nothing is compiled yet, children start while the GPUs' processes do.
        at_once=not request.predicts and not any(cubins.glob("*.cubin")),
    )
