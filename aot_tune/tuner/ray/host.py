"""One GPU of a node at work for a driver elsewhere: the class of a Ray actor. Knows no Ray.

The actor holds a measuring session as the driver of a single machine does, with a measuring process of its
own and all limits. What a request brings about is handed on while it runs.
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
from aot_tune.tuner.measure.blame import Known, Strikes
from aot_tune.tuner.measure.request import OnOutcome, Session, Spent
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.supervise import MeasuringStopped
from aot_tune.tuner.measure.worker import gpu_state
from aot_tune.tuner.outcome import Outcome
from aot_tune.tuner.ray.folder import node_folder
from aot_tune.tuner.ray.messages import Event, GpuThere, Noted, Raised, RemoteRequest, Reply

_LOOK_S = 0.1
"""Seconds between two interruptions of a request that has not ended yet."""


class GpuHost:
    """Measures one kernel after another on one GPU. Two threads may call: one measures, one may `close`."""

    def __init__(self) -> None:
        self._place = 0
        self._session: Session | None = None
        self._strikes = Strikes(_ignore)
        self._thread: threading.Thread | None = None
        self._notes: list[str] = []
        self._said: SimpleQueue[Event | BaseException] | None = None

    # What tests replace -------------------------------------------------------------------------------------

    def _gpu(self) -> GpuThere:
        gpus = visible_gpus() or ()
        if self._place >= len(gpus):
            return GpuThere(name="", arch="", uuid="", driver="")
        gpu = gpus[self._place]
        driver = gpu_state.identity(self._place)["driver"]
        return GpuThere(name=gpu.name, arch=str(gpu.arch or ""), uuid=gpu.uuid, driver=driver)

    def _start(self, found: FoundKernel, on_event: Callable[[str], None], strikes: Strikes) -> Session:
        return MeasureSession(found, self._place, on_event=on_event, strikes=strikes)

    # What the driver calls ----------------------------------------------------------------------------------

    def gpu(self, place: int) -> GpuThere:
        """Choose the GPU, and describe it.

        Args:
            place: Its place among those that this process may use; 0 where Ray gave it one alone.
        """
        self._place = place
        return self._gpu()

    def open(self, module: str, name: str) -> Reply:
        """Open a session, with its first kernel, in place of the one that is open; return its identity."""
        self.close()

        def opened() -> dict[str, str]:
            found = FoundKernel(module=module, tunable=load(module, name))
            self._strikes = Strikes(_ignore)  # the driver's, which tells of them, come with each request
            self._session = self._start(found, self._note, self._strikes)
            return dict(self._session.identity())

        return self._replied(opened)

    def turn_to(self, module: str, name: str) -> Reply:
        """Let the session that is open measure another kernel from here on."""

        def turned() -> None:
            found = FoundKernel(module=module, tunable=load(module, name))
            self._strikes = Strikes(_ignore)
            self._opened().turn_to(found, self._strikes)

        return self._replied(turned)

    def device(self) -> Reply:
        """The GPU as grids are computed for it; starts the measuring process."""
        return self._replied(lambda: self._opened().device())

    def stream(self, request: RemoteRequest, *cubins: bytes) -> Iterator[Event]:
        """Let the session that is open answer; hand each outcome on at once, and end with a reply.

        Args:
            request: What is asked.
            cubins: Those of its cubins that this host was not given before.
        """
        said: SimpleQueue[Event | BaseException] = SimpleQueue()

        def work() -> None:
            try:
                said.put(self._replied(lambda: self._answer(request, cubins, said.put), request.known))
            except BaseException as error:  # raised by the thread that waits
                said.put(error)

        self._said = said
        thread = self._thread = threading.Thread(target=work, name="aot_tune measures", daemon=True)
        thread.start()
        while True:
            event = said.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Reply):
                self._said = None
                thread.join()
            yield event
            if isinstance(event, Reply):
                return

    def close(self) -> None:
        """End what is measured, and close the session, if there is one."""
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
        """Do something, and describe what it returned or raised, and what it took."""
        if known is not None:
            self._strikes.replace(known)
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
            known=self._strikes.known(),
        )

    def _spent(self) -> Spent:
        return Spent() if self._session is None else self._session.spent

    def _note(self, line: str) -> None:
        """Hand a line on at once, or with the next reply where no request is answered bit by bit."""
        if self._said is not None:
            self._said.put(Noted(line=line))
        else:
            self._notes.append(line)


def _name(digest: str) -> str:
    return f"content-{digest}.cubin"


def _ignore(line: str) -> None:
    pass
