"""Measure on a GPU of a node for a driver elsewhere: the class of a Ray actor. Imports no Ray.

The actor holds a measuring session like the driver of a single machine, with a measuring process of its own
and all limits. Outcomes are streamed while a request runs.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue

from aot_tune.declare.discovery import FoundKernel, load
from aot_tune.errors import AotTuneError
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tables import files
from aot_tune.tuner.measure.blame import FaultCounts, Known
from aot_tune.tuner.measure.request import OnOutcome, Session, Spent
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.supervise import MeasuringStopped
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.tuner.outcome import Outcome
from aot_tune.tuner.ray.folder import node_folder
from aot_tune.tuner.ray.messages import Event, Noted, Raised, RemoteGpu, RemoteRequest, Reply

_LOOK_S = 0.1
"""Seconds between two interruptions of a request that has not ended yet."""


class GpuHost:
    """Measures one kernel after another on one GPU. Two threads may call: one measures, one may `close`."""

    def __init__(self) -> None:
        self._place = 0
        self._session: Session | None = None
        self._fault_counts = FaultCounts(_ignore)
        self._thread: threading.Thread | None = None
        self._notes: list[str] = []
        self._events: SimpleQueue[Event | BaseException] | None = None

    # Replaced by tests --------------------------------------------------------------------------------------

    def _gpu(self) -> RemoteGpu:
        gpus = visible_gpus() or ()
        if self._place >= len(gpus):
            return RemoteGpu(name="", arch="", uuid="", driver="")
        gpu = gpus[self._place]
        driver = gpu_state.identity(self._place)["driver"]
        return RemoteGpu(name=gpu.name, arch=str(gpu.arch or ""), uuid=gpu.uuid, driver=driver)

    def _start(
        self, kernel: FoundKernel, on_event: Callable[[str], None], fault_counts: FaultCounts
    ) -> Session:
        return MeasureSession(kernel, self._place, on_event=on_event, fault_counts=fault_counts)

    # Called by the driver -----------------------------------------------------------------------------------

    def gpu(self, place: int) -> RemoteGpu:
        """Choose the GPU, and describe it.

        Args:
            place: Its index among this process's GPUs; 0 where Ray assigned only one.
        """
        self._place = place
        return self._gpu()

    def open(self, module: str, name: str) -> Reply:
        """Open a session with its first kernel, in place of an open session; reply its identity."""
        self.close()

        def opened() -> dict[str, str]:
            kernel = FoundKernel(module=module, tunable=load(module, name))
            self._fault_counts = FaultCounts(
                _ignore
            )  # the driver's counts, which it reports, come with each request
            self._session = self._start(kernel, self._note, self._fault_counts)
            return dict(self._session.identity())

        return self._replied(opened)

    def turn_to(self, module: str, name: str) -> Reply:
        """Let the open session measure another kernel from here on."""

        def turned() -> None:
            kernel = FoundKernel(module=module, tunable=load(module, name))
            self._fault_counts = FaultCounts(_ignore)
            self._opened().turn_to(kernel, self._fault_counts)

        return self._replied(turned)

    def device(self) -> Reply:
        """Return the GPU as grids are computed for it; starts the measuring process."""
        return self._replied(lambda: self._opened().device())

    def stream(self, request: RemoteRequest, *cubins: bytes) -> Iterator[Event]:
        """Let the open session answer; yield each outcome at once, and at the end a reply.

        Args:
            request: The request.
            cubins: The request's cubins that this host has not received before.
        """
        events: SimpleQueue[Event | BaseException] = SimpleQueue()

        def work() -> None:
            try:
                events.put(self._replied(lambda: self._answer(request, cubins, events.put), request.known))
            except BaseException as error:  # raised by the thread that waits
                events.put(error)

        self._events = events
        thread = self._thread = threading.Thread(target=work, name="aot_tune measures", daemon=True)
        thread.start()
        while True:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Reply):
                self._events = None
                thread.join()
            yield event
            if isinstance(event, Reply):
                return

    def close(self) -> None:
        """End the measurement and close the session, if any."""
        session, thread = self._session, self._thread
        if session is None:
            return
        while thread is not None and thread.is_alive():
            session.interrupt()
            thread.join(_LOOK_S)
        session.close()
        self._session = None

    # Inside -------------------------------------------------------------------------------------------------

    def _answer(self, sent: RemoteRequest, cubins: Sequence[bytes], on_outcome: OnOutcome) -> list[Outcome]:
        folder = node_folder()
        for cubin in cubins:
            files.write_atomic(folder / _name(hashlib.sha256(cubin).hexdigest()), cubin, durable=False)
        paths = {
            config: None if digest is None else folder / _name(digest)
            for config, digest in sent.digests.items()
        }
        return self._opened().answer(replace(sent.request, configs=paths), on_outcome)

    def _opened(self) -> Session:
        assert self._session is not None, "the driver opens a session first"
        return self._session

    def _replied(self, work: Callable[[], object], known: Known | None = None) -> Reply:
        """Execute a call; reply its result or error, and the time spent."""
        if known is not None:
            self._fault_counts.replace(known)
        before = self._spent()
        value: object = None
        raised, stopped = None, False
        try:
            value = work()
        except AotTuneError as error:
            raised = Raised.of(error)
        except MeasuringStopped:
            stopped = True
        after, notes, self._notes = self._spent(), self._notes, []
        return Reply(
            value=value,
            notes=tuple(notes),
            error=raised,
            stopped=stopped,
            spent=after.since(before),
            known=self._fault_counts.known(),
        )

    def _spent(self) -> Spent:
        return Spent() if self._session is None else self._session.spent

    def _note(self, line: str) -> None:
        """Send a line at once, or with the next reply where no request is being streamed."""
        if self._events is not None:
            self._events.put(Noted(line=line))
        else:
            self._notes.append(line)


def _name(digest: str) -> str:
    return f"content-{digest}.cubin"


def _ignore(line: str) -> None:
    pass
