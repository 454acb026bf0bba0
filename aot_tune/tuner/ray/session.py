"""A measuring session on a GPU of another node, for the driver's GPU pool. Imports no Ray.

It is an `aot_tune.tuner.measure.request.Session`. Each outcome arrives at the driver while the request is
being answered, so that the driver's journal holds it. When the node is lost, its GPU is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.request import OnOutcome, Reported, Request, Spent, ignore
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.outcome import Outcome
from aot_tune.tuner.ray.messages import Event, Noted, RemoteRequest, Reply
from aot_tune.values.config import Config
from aot_tune.values.device import Device


class HostLostError(Exception):
    """A host will not answer any more: its node or its process has ended."""


class Host(Protocol):
    """An `aot_tune.tuner.ray.host.GpuHost` on another node."""

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method and wait for its result.

        Raises:
            HostLostError: The host is lost.
        """

    def stream(self, request: RemoteRequest, *cubins: bytes) -> Iterator[Event]:
        """Call `GpuHost.stream`, and yield its events as they arrive.

        Raises:
            HostLostError: The host is lost.
        """

    def kill(self) -> None:
        """End the host and its processes at once. The host is lost then."""


class RemoteSession:
    """Measures on a host's GPU. For use by one thread.

    Args:
        kernel: The first kernel.
        host: The GPU's host, which has one session at a time.
        on_event: Receives one line for the user.
        fault_counts: The faults of the first kernel's configs, which the sessions of all GPUs share.

    Raises:
        TuneError: Another tuner holds the GPU.
        GpuLostError: The host is lost.
    """

    def __init__(
        self, kernel: FoundKernel, host: Host, *, on_event: Callable[[str], None], fault_counts: FaultCounts
    ) -> None:
        self._kernel, self._host, self._on_event, self._fault_counts = kernel, host, on_event, fault_counts
        self._stopped = self._is_open = False
        self._given: set[str] = set()
        self.spent = Spent()
        """Time spent on all requests so far."""
        self._identity: dict[str, str] = {}
        self._open()

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def turn_to(self, kernel: FoundKernel, fault_counts: FaultCounts) -> None:
        """Measure another kernel from here on."""
        self._kernel, self._fault_counts = kernel, fault_counts
        if self._is_open:
            self._asked("turn_to", kernel.module, kernel.tunable.name)

    def close(self) -> None:
        """End the host's measurement and release the GPU."""
        self._is_open = False
        with suppress(HostLostError):  # a lost host has nothing to close
            self._host.ask("close")

    def interrupt(self) -> None:
        """End the host; called from another thread. The measuring thread gets a `MeasuringStopped`."""
        self._stopped = True
        self._host.kill()

    def identity(self) -> dict[str, str]:
        """Return the conditions under which times compare."""
        return dict(self._identity)

    def device(self) -> Device:
        """Return the GPU as grids are computed for it; starts the host's measuring process."""
        device = self._asked("device")
        assert isinstance(device, Device)
        return device

    def answer(self, request: Request, on_outcome: OnOutcome = ignore) -> list[Outcome]:
        """Execute a request: see `aot_tune.tuner.measure.request.Session`."""
        if not self._is_open:
            self._open()
        sent, cubins = self._packed(request)
        reply: Reply | None = None
        try:
            for event in self._host.stream(sent, *cubins):
                if isinstance(event, Reported):
                    on_outcome(event)
                elif isinstance(event, Noted):
                    self._on_event(event.line)
                else:
                    reply = event
        except HostLostError as lost:
            raise self._lost(lost) from lost
        except BaseException:
            self.close()  # else the host continues a request that nobody waits for
            raise
        if reply is None:
            raise self._lost(HostLostError("its answer ended before all configs were measured"))
        self._given.update(digest for digest in sent.digests.values() if digest is not None)
        self._fault_counts.learn(sent.known, reply.known)
        outcomes = self._taken(reply)
        assert isinstance(outcomes, list)
        return outcomes

    # Messages -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        identity = self._asked("open", self._kernel.module, self._kernel.tunable.name)
        assert isinstance(identity, dict)
        self._identity, self._given, self._is_open = identity, set(), True

    def _asked(self, method: str, *arguments: object) -> object:
        try:
            reply = self._host.ask(method, *arguments)
        except HostLostError as lost:
            raise self._lost(lost) from lost
        return self._taken(reply)

    def _packed(self, request: Request) -> tuple[RemoteRequest, list[bytes]]:
        """Return a request in the form to send, and its cubins that the host lacks."""
        digests: dict[Config, str | None] = {}
        cubins: dict[str, bytes] = {}
        for config, path in request.configs.items():
            digests[config] = None
            if path is not None:
                cubin = _content(path)
                digest = digests[config] = hashlib.sha256(cubin).hexdigest()
                if digest not in self._given:
                    cubins[digest] = cubin
        bare = replace(request, configs={})  # paths are of this machine
        sent = RemoteRequest(request=bare, digests=digests, known=self._fault_counts.known())
        return sent, list(cubins.values())

    def _taken(self, reply: Reply) -> object:
        """Return a reply's value, or raise its error; add the time spent."""
        for line in reply.notes:
            self._on_event(line)
        self.spent += reply.spent
        if reply.stopped:
            raise MeasuringStopped
        if reply.error is not None:
            raise reply.error.error()
        return reply.value

    def _lost(self, lost: HostLostError) -> Exception:
        if self._stopped:
            return MeasuringStopped()
        return GpuLostError(f"its node is lost: {lost}")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TuneError(
            f"{path} cannot be read ({error.strerror}); run the same command again to continue"
        ) from error
