"""A measuring session on a GPU of another node, for the crew of the driver. Knows no Ray.

It has the methods of `aot_tune.tuner.measure.session.MeasureSession`, and each outcome comes to the driver as
soon as it stands, so that the driver's journal holds it. Where the node is lost, the GPU is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError
from aot_tune.tables.states import State
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.measure.trials import Conditions, Cubins, Known, Strikes, ignore
from aot_tune.tuner.outcome import Failure, Measurement, Outcome, Stage
from aot_tune.tuner.ray.messages import Event, Noted, Reply, Told
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


class HostLostError(Exception):
    """A host does not answer any more, nor will it: its node or its process has ended."""


class Host(Protocol):
    """A `aot_tune.tuner.ray.host.GpuHost` elsewhere."""

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method and wait for what it returns.

        Raises:
            HostLostError: The host is lost.
        """

    def stream(
        self,
        method: str,
        arguments: Mapping[str, Any],
        configs: Sequence[tuple[Config, str | None]],
        known: Known,
        *cubins: bytes,
    ) -> Iterator[Event]:
        """Call `GpuHost.stream`, and hand its events on as they come.

        Raises:
            HostLostError: The host is lost.
        """

    def kill(self) -> None:
        """End the host at once, with all that it started. It is lost then."""


class RemoteSession:
    """Measures on a host's GPU. For use by one thread.

    Args:
        found: The first kernel.
        host: The GPU's host, which has one session at a time.
        on_event: Receives one line for a person.
        strikes: The faults of the first kernel's configs, which the sessions of all GPUs share.

    Raises:
        TuneError: Another tuner holds the GPU.
        GpuLostError: The host is lost.
    """

    def __init__(
        self, found: FoundKernel, host: Host, *, on_event: Callable[[str], None], strikes: Strikes
    ) -> None:
        self._found, self._host, self._on_event, self._strikes = found, host, on_event, strikes
        self._stopped = self._is_open = False
        self._given: set[str] = set()
        self.conditions: list[Conditions] = []
        """The conditions of each request that was answered, in order."""
        self.verify_s = self.start_s = self.open_s = 0.0
        """Time that all requests so far spent verifying, starting workers and making arguments, seconds."""
        self._identity: dict[str, str] = {}
        self._open()

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def turn_to(self, found: FoundKernel, strikes: Strikes) -> None:
        """Measure another kernel from here on."""
        self._found, self._strikes = found, strikes
        if self._is_open:
            self._asked("turn_to", found.module, found.tunable.name)

    def close(self) -> None:
        """End what is measured there, and release the GPU."""
        self._is_open = False
        with suppress(HostLostError):  # nothing is left to be closed
            self._host.ask("close")

    def interrupt(self) -> None:
        """End the host, called by another thread; the measuring one gets a `MeasuringStopped`."""
        self._stopped = True
        self._host.kill()

    def identity(self) -> dict[str, str]:
        """The conditions without which times cannot be compared."""
        return dict(self._identity)

    def device(self) -> Device:
        """The GPU as grids are computed for it; starts the measuring process there."""
        device = self._asked("device")
        assert isinstance(device, Device)
        return device

    # Measuring: see `MeasureSession` for what each does -----------------------------------------------------

    def measure(
        self,
        problem: Problem,
        configs: Cubins,
        *,
        on_outcome: Callable[[Outcome], None] = ignore,
        known: Mapping[Config, Measurement] | None = None,
        least_us: float = 0.0,
    ) -> list[Outcome]:
        """Verify and time each config once."""
        arguments = {"problem": problem, "known": dict(known or {}), "least_us": least_us}
        return self._measured("measure", arguments, configs, lambda told: on_outcome(told.outcome))

    def finals(
        self,
        problem: Problem,
        configs: Cubins,
        *,
        on_round: Callable[[int, Outcome], None] = lambda number, outcome: None,
        taken: Mapping[Config, Sequence[Measurement]] | None = None,
    ) -> list[Outcome]:
        """Time verified configs again, interleaved in rounds."""
        arguments = {
            "problem": problem,
            "taken": {one: list(rounds) for one, rounds in (taken or {}).items()},
        }
        return self._measured(
            "finals", arguments, configs, lambda told: on_round(told.number or 0, told.outcome)
        )

    def time_in_state(
        self,
        state: State,
        problem: Problem,
        configs: Cubins,
        *,
        on_outcome: Callable[[Outcome], None] = ignore,
    ) -> list[Outcome]:
        """Time verified configs in one of the GPU's states."""
        arguments = {"state": state, "problem": problem}
        return self._measured("time_in_state", arguments, configs, lambda told: on_outcome(told.outcome))

    def recheck(self, problem: Problem, configs: Cubins) -> list[Failure]:
        """Verify winners again in a process that has timed nothing."""
        found = self._measured("recheck", {"problem": problem}, configs, lambda told: None)
        return [one for one in found if isinstance(one, Failure)]

    def remember_fault(self, problem: Problem, config: Config, message: str, stage: Stage = "fault") -> None:
        """Count what an earlier run recorded in the journal."""
        self._strikes.remember(problem, config, stage)

    def forget_faults(self, problem: Problem) -> None:
        """Count no fault on a problem any more, because another GPU, which is lost, reported them."""
        self._strikes.forget(problem)

    # Talking ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        identity = self._asked("open", self._found.module, self._found.tunable.name)
        assert isinstance(identity, dict)
        self._identity, self._given, self._is_open = identity, set(), True

    def _asked(self, method: str, *arguments: object) -> object:
        try:
            reply = self._host.ask(method, *arguments)
        except HostLostError as lost:
            raise self._lost(lost) from lost
        return self._taken(reply)

    def _measured(
        self,
        method: str,
        arguments: Mapping[str, Any],
        configs: Cubins,
        tell: Callable[[Told], None],
    ) -> list[Any]:
        if not self._is_open:
            self._open()
        before = self._strikes.known()
        named, cubins = self._packed(configs)
        reply: Reply | None = None
        try:
            for event in self._host.stream(method, arguments, named, before, *cubins):
                if isinstance(event, Told):
                    tell(event)
                elif isinstance(event, Noted):
                    self._on_event(event.line)
                else:
                    reply = event
        except HostLostError as lost:
            raise self._lost(lost) from lost
        except BaseException:
            self.close()  # else it goes on with what nobody waits for any more
            raise
        if reply is None:
            raise self._lost(HostLostError("it ended its answer before all was measured"))
        self._given.update(digest for _, digest in named if digest is not None)
        self._strikes.learn(before, reply.known)
        found = self._taken(reply)
        assert isinstance(found, list)
        return found

    def _packed(self, configs: Cubins) -> tuple[list[tuple[Config, str | None]], list[bytes]]:
        """Each config with the digest of its cubin, and the cubins that the host does not have."""
        named: list[tuple[Config, str | None]] = []
        cubins: dict[str, bytes] = {}
        for config, path in configs.items():
            digest = None
            if path is not None:
                cubin = _content(path)
                digest = hashlib.sha256(cubin).hexdigest()
                if digest not in self._given:
                    cubins[digest] = cubin
            named.append((config, digest))
        return named, list(cubins.values())

    def _taken(self, reply: Reply) -> object:
        """The value of a reply; its times and conditions are those of this session."""
        for line in reply.notes:
            self._on_event(line)
        self.conditions += reply.conditions
        self.verify_s += reply.verify_s
        self.start_s += reply.start_s
        self.open_s += reply.open_s
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
            f"{path} cannot be read ({error.strerror}); give the same command to go on"
        ) from error
