"""Hosts of GPUs without a GPU: for the actors of a real Ray cluster, and in this process without Ray."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aot_tune.declare.discovery import FoundKernel
from aot_tune.tuner.compile.job import CompileJob
from aot_tune.tuner.measure import gpu_lock
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.supervise import Limits
from aot_tune.tuner.process.codec import decode
from aot_tune.tuner.ray.compiler import RemoteResult, compile_on_node
from aot_tune.tuner.ray.host import GpuHost
from aot_tune.tuner.ray.messages import Event, RemoteGpu, RemoteRequest
from aot_tune.tuner.ray.pool import RemotePool
from aot_tune.tuner.ray.session import HostLostError, RemoteSession
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device
from tests.support import hashed_sessions
from tests.support.hashed_sessions import HashedSession

NAME = Device.reference(Arch.parse("sm90")).name


class NamedSession(HashedSession):
    """A hashed session on a GPU that has a uuid of its own in a cluster."""

    def __init__(self, uuid: str, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self._uuid = uuid

    def identity(self) -> dict[str, str]:
        return {**super().identity(), "uuid": self._uuid}


class HashedHost(GpuHost):
    """A host whose times are a hash of problem and config. Its process stands for its GPU.

    ``FAKE_GPU`` in a node's environment is the GPU's name there, ``FAKE_PAUSE_S`` what an outcome takes.

    Args:
        uuid: The GPU's uuid; one of its own when None.
    """

    def __init__(self, uuid: str | None = None) -> None:
        super().__init__()
        self._uuid = uuid or f"GPU-{os.getpid()}"

    def _gpu(self) -> RemoteGpu:
        name = os.environ.get("FAKE_GPU", NAME)
        return RemoteGpu(name=name, arch="sm90", uuid=self._uuid, driver="580.1")

    def _start(self, found: Any, on_event: Callable[[str], None], fault_counts: FaultCounts) -> Any:
        hashed_sessions.PAUSE_S = float(os.environ.get("FAKE_PAUSE_S", hashed_sessions.PAUSE_S))
        return NamedSession(self._uuid, found, self._place, on_event=on_event, fault_counts=fault_counts)


class NearHost:
    """A `Host` in this process: what goes to and fro is pickled, as on the way to another node.

    Args:
        host: The host.
        lost_after: Number of events after which it is lost; never when None.
    """

    def __init__(self, host: GpuHost, lost_after: int | None = None) -> None:
        self.host, self.left = host, lost_after
        self.is_lost = False
        self.calls: list[str] = []
        self.cubins: list[bytes] = []

    def ask(self, method: str, *arguments: object) -> Any:
        self._check()
        self.calls.append(method)
        return _sent(getattr(self.host, method)(*_sent(arguments)))

    def stream(self, request: RemoteRequest, *cubins: bytes) -> Iterator[Event]:
        self._check()
        self.cubins += cubins
        for event in self.host.stream(*_sent((request, *cubins))):
            if self.left is not None:
                self.left -= 1
                self.is_lost |= self.left < 0
            self._check()
            yield _sent(event)

    def kill(self) -> None:
        self.is_lost = True
        self.host.close()

    def _check(self) -> None:
        if self.is_lost:
            raise HostLostError("its process has ended")


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class NearTasks:
    """Compiles in this process, when it is asked for a result."""

    def begin(self, job: CompileJob) -> Any:
        return SimpleNamespace(job=job)

    def wait(self, tasks: Sequence[Any], timeout_s: float) -> list[Any]:
        return list(tasks[:1])

    def result(self, task: Any) -> RemoteResult:
        there: RemoteResult = _sent(compile_on_node(_sent(task.job)))
        return there

    def cancel(self, task: Any) -> None:
        pass


class NearCluster:
    """What `aot_tune.tuner.ray.cluster.Cluster` is to a sweep, without Ray.

    Args:
        gpus: The hosts.
    """

    def __init__(self, *gpus: NearHost) -> None:
        self.gpus = gpus

    def __enter__(self) -> NearCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.gpus:
            host.kill()

    def choice(self) -> str:
        return "choose equal nodes"

    def session(
        self, found: FoundKernel, index: int, on_event: Callable[[str], None], fault_counts: FaultCounts
    ) -> RemoteSession:
        return RemoteSession(found, self.gpus[index], on_event=on_event, fault_counts=fault_counts)

    def pool(self, most: int | None, folder: Path) -> RemotePool:
        return RemotePool(NearTasks(), most or 2, folder)


class ScriptedHost(HashedHost):
    """A host with a real measuring session, whose process does as the script in ``FAKE_SCRIPT`` says."""

    def _start(self, found: Any, on_event: Callable[[str], None], fault_counts: FaultCounts) -> Any:
        gpu_lock.FOLDERS = (Path(os.environ["FAKE_LOCKS"]),)
        return MeasureSession(
            found,
            limits=Limits(start_s=60, canary_s=30, open_s=30, config_s=2.0, least_s=1.0, patience_s=0.0),
            on_event=on_event,
            backend="tests.support.scripted_backend:ScriptedBackend",
            arguments={"script": decode(os.environ["FAKE_SCRIPT"].encode())},
            fault_counts=fault_counts,
        )
