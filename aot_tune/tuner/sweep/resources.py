"""Open what a sweep runs on: GPUs and compilers, of this machine or of a Ray cluster."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import AotTuneError
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job_queue import JobQueue
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.measure.blame import Strikes
from aot_tune.tuner.measure.request import Session
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.ray.cluster import Cluster
from aot_tune.tuner.sweep.crew import Start
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.tuner.sweep.report import SweepRequest

CUBINS = Path("build/cubins")
"""The folder where cubins are kept between runs, for all archs: each name is a digest that contains the
arch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What one sweep runs on."""

    request: SweepRequest
    """The request; of a cluster it names all GPUs by their places there."""

    order: list[str]
    """The kernels' names in the order of their tasks and compilations; whoever opened this fills it."""

    choice: str
    """How a person chooses some of the GPUs; braces stand for their indexes."""

    session: Start
    """Opens a session on a GPU."""

    identity: Callable[[FoundKernel, int], Mapping[str, str]]
    """The conditions of a GPU's times."""

    feed: Callable[[], CompileFeed]
    """The feed of compilations; a new one where an error has ended the last."""


@contextmanager
def opened(request: SweepRequest, progress: Progress) -> Iterator[Resources]:
    """Open a sweep's resources. Processes of this machine start at once, GPUs' and compilers' alike."""
    with ExitStack() as stack:
        cluster = None
        if request.ray is not None:
            cluster = stack.enter_context(_cluster(request, progress))
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
            identity=sessions.identity,
            feed=feeds.living,
        )


class _Sessions:
    """Opens sessions on GPUs, on this machine's before they are asked for.

    A process that measures needs some seconds for its imports, and so do the checks of declarations, which
    pass meanwhile. A GPU on which no session can be opened says so when one is asked for.

    Args:
        start: Opens a session.
        found: Any kernel of the sweep.
        early: The GPUs on which to open one now.
        progress: Receives what these sessions tell.
    """

    def __init__(self, start: Start, found: FoundKernel, early: Sequence[int], progress: Progress) -> None:
        self._start, self._progress = start, progress
        self._opened: dict[int, Session] = {}
        for index in early:
            with suppress(AotTuneError):
                self._opened[index] = start(found, index, Strikes(progress.note))

    def __enter__(self) -> _Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        while self._opened:
            self._opened.popitem()[1].close()

    def __call__(self, found: FoundKernel, index: int, strikes: Strikes) -> Session:
        """A session that its caller closes: the one that is open, or a new one."""
        session = self._opened.pop(index, None)
        if session is None:
            return self._start(found, index, strikes)
        session.turn_to(found, strikes)
        return session

    def identity(self, found: FoundKernel, index: int) -> Mapping[str, str]:
        """The conditions of a GPU's times."""
        if index in self._opened:
            return self._opened[index].identity()
        with closing(self._start(found, index, Strikes(self._progress.note))) as session:
            return session.identity()


class _Feeds:
    """The compile feed of a sweep; a new one where an error has ended the last.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], CompileFeed]) -> None:
        self._make, self._lock, self._stack = make, threading.Lock(), ExitStack()
        self._feed: CompileFeed | None = None

    def __enter__(self) -> _Feeds:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def living(self) -> CompileFeed:
        """The feed that goes on."""
        with self._lock:
            if self._feed is None or self._feed.ended:
                self._feed = self._stack.enter_context(self._make())
            return self._feed


def _cluster(request: SweepRequest, progress: Progress) -> Cluster:
    """The Ray cluster that a request names."""
    return Cluster(request.ray or "", request.arch, request.kernels, progress.note)


def _start(request: SweepRequest, progress: Progress, cluster: Cluster | None) -> Start:
    """Opens sessions on the GPUs of a cluster, or of this machine."""

    def start(found: FoundKernel, index: int, strikes: Strikes) -> Session:
        where = f"GPU {index}: " if len(request.gpus) > 1 else ""

        def tell(line: str) -> None:
            progress.note(where + line)

        if cluster is not None:
            return cluster.session(found, index, tell, strikes)
        session = MeasureSession(found, index, on_event=tell, strikes=strikes)
        session.prepare()
        return session

    return start


def _pool(request: SweepRequest, cluster: Cluster | None) -> Callable[[], JobQueue]:
    """Makes the pool of compilers, on the nodes of a cluster or on this machine."""
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
