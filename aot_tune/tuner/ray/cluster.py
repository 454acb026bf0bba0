"""A Ray cluster as the GPUs and compilers of a sweep. The only module that imports Ray.

Ray does placement, retries and transport. There is an actor for each GPU of the arch, a task for each
compilation, and a task on each node that reports the node's software. Nodes that join later are not used.
"""

from __future__ import annotations

import importlib
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError, UsageError
from aot_tune.tuner.compile.job import CompileJob
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.process.worker import START_SECONDS
from aot_tune.tuner.ray.compiler import RemoteResult, compile_on_node
from aot_tune.tuner.ray.host import GpuHost
from aot_tune.tuner.ray.identity import described, differences
from aot_tune.tuner.ray.messages import Event, RemoteGpu, RemoteRequest
from aot_tune.tuner.ray.pool import RemotePool, TaskLostError
from aot_tune.tuner.ray.session import HostLostError, RemoteSession
from aot_tune.values.arch import Arch
from aot_tune.values.text import counted

ACTOR: type[GpuHost] = GpuHost
"""The class of the actors; tests name one without a GPU."""

_NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""


def resource(arch: Arch) -> str:
    """Return the custom resource with a node's number of GPUs of an arch; it overrides Ray's count."""
    return f"aot_tune_{arch}"


def installed() -> Any:
    """Import Ray.

    Raises:
        UsageError: Ray is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UsageError("--ray needs Ray: pip install 'aot-tune[ray]'") from None


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A node of the cluster."""

    key: str
    """Ray's identifier."""

    name: str
    """Its name and address, for messages."""

    resources: Mapping[str, float]
    """Its resources as counted by Ray."""


class Cluster:
    """A cluster that a sweep runs on, until it is closed. Closing ends a cluster that was started here.

    Args:
        address: Address of a running cluster. When empty, Ray looks for a cluster, else starts one on this
            machine.
        arch: The arch to tune for.
        kernels: The kernels to sweep.
        on_event: Receives one line for the user.

    Attributes:
        gpus: The hosts of all GPUs of the arch.

    Raises:
        UsageError: Ray is not installed.
        TuneError: There is no such cluster, it has no GPU of the arch, or its GPUs differ.
    """

    def __init__(
        self, address: str, arch: Arch, kernels: Sequence[FoundKernel], on_event: Callable[[str], None]
    ) -> None:
        self._ray, self._arch, self._on_event = installed(), arch, on_event
        self.gpus: tuple[RayHost, ...] = ()
        self._ours = not self._ray.is_initialized()
        if self._ours:
            self._connect(address)
        try:
            self._nodes = self._agreeing(kernels)
            self.gpus = self._hosts()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the GPUs and disconnect from the cluster."""
        for host in self.gpus:
            host.kill()
        if self._ours:
            self._ray.shutdown()

    def session(
        self, kernel: FoundKernel, index: int, on_event: Callable[[str], None], fault_counts: FaultCounts
    ) -> RemoteSession:
        """Open a session of a kernel on the GPU at an index."""
        return RemoteSession(kernel, self.gpus[index], on_event=on_event, fault_counts=fault_counts)

    def pool(self, most: int | None, folder: Path) -> RemotePool:
        """Make a pool that compiles on at most `most` of the nodes' CPUs; on all when None."""
        cpus = int(sum(node.resources.get("CPU", 0) for node in self._nodes))
        if not cpus:
            raise TuneError("the cluster has no CPU to compile on; start nodes with ray start --num-cpus")
        return RemotePool(_RayTasks(self._ray, self._selector()), min(most or cpus, cpus), folder)

    # The cluster --------------------------------------------------------------------------------------------

    def _connect(self, address: str) -> None:
        if "://" in address:
            raise UsageError(
                f"--ray {address}: a Ray Client cannot stream outcomes; run this command on a machine of the "
                "cluster, or with ray job submit"
            )
        with _own_signals():
            try:
                self._ray.init(
                    address=address or None,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = f"at {address}" if address else "here"
                raise TuneError(
                    f"no Ray cluster can be used {where}: {_first_line(error)}; check ray status, or leave "
                    "the address out to start a cluster on this machine"
                ) from error

    def _agreeing(self, kernels: Sequence[FoundKernel]) -> list[_Node]:
        """Return the nodes whose aot_tune, declarations and compiler equal this process's."""
        ray, named = self._ray, [(kernel.module, kernel.tunable.name) for kernel in kernels]
        here = described(named)
        at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        describe = ray.remote(described)
        nodes = {
            describe.options(num_cpus=0, max_retries=0, scheduling_strategy=at(node.key, soft=False)).remote(
                named
            ): node
            for node in self._alive()
        }
        answered, _ = ray.wait(list(nodes), num_returns=len(nodes), timeout=START_SECONDS)
        agreeing = []
        for answer, node in nodes.items():
            try:
                differs = (
                    differences(here, ray.get(answer))
                    if answer in answered
                    else f"it does not report its software within {START_SECONDS:g} s"
                )
            except ray.exceptions.RayError as error:
                differs = f"it cannot report its software: {_first_line(error)}"
            if differs:
                self._on_event(f"node {node.name} is refused: {differs}")
            else:
                agreeing.append(node)
        if not agreeing:
            raise TuneError(
                "every node of the cluster is refused: install there the same aot_tune, kernels, cuda-tile "
                "and compiler as here"
            )
        return agreeing

    def _alive(self) -> list[_Node]:
        return [
            _Node(
                key=node["NodeID"],
                name=f"{node['NodeManagerHostname']} ({node['NodeName']})",
                resources=node["Resources"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _selector(self) -> dict[str, str]:
        """Return the label selector of the nodes that may be used."""
        return {_NODE_ID: f"in({','.join(node.key for node in self._nodes)})"}

    # GPUs ---------------------------------------------------------------------------------------------------

    def _hosts(self) -> tuple[RayHost, ...]:
        """Start an actor on each GPU of the arch; return them in a fixed order."""
        ray, marked = self._ray, resource(self._arch)
        kind = marked if any(node.resources.get(marked) for node in self._nodes) else "GPU"
        count = int(sum(node.resources.get(kind, 0) for node in self._nodes))
        if not count:
            raise TuneError(
                f"the cluster has no GPU that Ray knows of; where it detects none, give their number: "
                f"ray start --resources '{{\"{marked}\": 1}}'"
            )
        placed = ray.remote(ACTOR).options(
            num_cpus=0,
            num_gpus=1 if kind == "GPU" else 0,
            resources={} if kind == "GPU" else {marked: 1},
            max_restarts=0,
            max_concurrency=2,  # one thread measures, another may end it
            label_selector=self._selector(),
        )
        actors = [placed.remote() for _ in range(count)]
        names = {node.key: node.name for node in self._nodes}
        usable, left_out, places = list[RayHost](), Counter[str](), Counter[str]()
        answers = {actor.__ray_call__.remote(_node_id): actor for actor in actors}
        ready, _ = ray.wait(list(answers), num_returns=count, timeout=START_SECONDS)
        for ref, actor in answers.items():
            if ref not in ready:
                left_out["in use by others"] += 1
                continue
            try:
                node = ray.get(ref)
                places[node] += 1
                gpu: RemoteGpu = ray.get(actor.gpu.remote(places[node] - 1 if kind == marked else 0))
            except ray.exceptions.RayError as error:
                left_out[f"lost ({_first_line(error)})"] += 1
                continue
            if not gpu.name:
                left_out["not found by NVML"] += 1
            elif gpu.arch != str(self._arch):
                left_out[f"of {gpu.arch or 'an arch that cuTile does not know'}"] += 1
            else:
                usable.append(RayHost(ray, actor, names[node], gpu))
        kept = {host.actor for host in usable}
        for actor in actors:
            if actor not in kept:
                ray.kill(actor)
        for reason, number in left_out.items():
            self._on_event(f"left out: {counted(number, 'GPU')} of the cluster, {reason}")
        if not usable:
            raise TuneError(f"no {self._arch} GPU of the cluster can be used")
        hosts = tuple(sorted(usable, key=lambda host: (host.node, host.gpu.uuid)))
        self._check_equal(hosts)
        for index, host in enumerate(hosts):
            self._on_event(f"GPU {index} is {host.gpu.name} {host.gpu.uuid} of node {host.node}")
        return hosts

    def _check_equal(self, hosts: Sequence[RayHost]) -> None:
        """Refuse GPUs whose times cannot be compared."""
        kinds = Counter(f"{host.gpu.name} with driver {host.gpu.driver}" for host in hosts)
        if len(kinds) > 1:
            numbers = ", ".join(f"{number} of {kind}" for kind, number in kinds.items())
            raise TuneError(
                f"the {self._arch} GPUs of the cluster differ ({numbers}), and their times cannot be "
                f"compared; {self.choice()}"
            )

    def choice(self) -> str:
        """Describe how to choose some of the GPUs."""
        return (
            f"choose nodes with equal GPUs: where nodes are started with ray start --resources "
            f"'{{\"{resource(self._arch)}\": 8}}', only the GPUs of such nodes are used"
        )


class RayHost:
    """An actor on a GPU (`aot_tune.tuner.ray.session.Host`).

    Attributes:
        actor: Ray's handle.
        node: The name of its node.
        gpu: The GPU.
    """

    def __init__(self, ray: Any, actor: Any, node: str, gpu: RemoteGpu) -> None:
        self._ray, self.actor, self.node, self.gpu = ray, actor, node, gpu

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method and wait for its result."""
        with self._host_errors():
            return self._ray.get(getattr(self.actor, method).remote(*arguments))

    def stream(self, request: RemoteRequest, *cubins: bytes) -> Iterator[Event]:
        """Call `GpuHost.stream`, and yield its events as they arrive."""
        with self._host_errors():
            # Ray keeps large arguments in its object store.
            streamed = self.actor.stream.options(num_returns="streaming")
            for event in streamed.remote(request, *cubins):
                yield self._ray.get(event)

    def kill(self) -> None:
        """End the actor; its measuring process ends with it."""
        with suppress(Exception):  # it may be gone, and the cluster too
            self._ray.kill(self.actor)

    @contextmanager
    def _host_errors(self) -> Iterator[None]:
        """Raise `HostLostError` where Ray reports the actor's end; errors of its code pass."""
        errors = self._ray.exceptions
        try:
            yield
        except errors.RayTaskError:
            raise
        except errors.RayError as error:
            raise HostLostError(_first_line(error)) from error


class _RayTasks:
    """Compilations as Ray's tasks (`aot_tune.tuner.ray.pool.Tasks`). Ray repeats a task whose node ended."""

    def __init__(self, ray: Any, selector: Mapping[str, str]) -> None:
        self._ray = ray
        self._task = ray.remote(compile_on_node).options(
            num_cpus=1, scheduling_strategy="SPREAD", label_selector=dict(selector)
        )

    def begin(self, job: CompileJob) -> Any:
        """Begin a task."""
        return self._task.remote(job)

    def wait(self, tasks: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return the ended tasks among some tasks."""
        first, _ = self._ray.wait(tasks, num_returns=1, timeout=timeout_s, fetch_local=False)
        if not first:
            return []
        ended, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=0, fetch_local=False)
        return list(ended)

    def result(self, task: Any) -> RemoteResult:
        """Return the result of an ended task."""
        errors = self._ray.exceptions
        try:
            result = self._ray.get(task)
        except errors.RayTaskError:
            raise
        except errors.RayError as error:
            raise TaskLostError(_first_line(error)) from error
        assert isinstance(result, RemoteResult)
        return result

    def cancel(self, task: Any) -> None:
        """End a task with its process."""
        with suppress(Exception):  # it may have ended, and the cluster too
            self._ray.cancel(task, force=True)


def _node_id(host: GpuHost) -> str:
    """Return the id of an actor's node; runs in the actor."""
    return str(installed().get_runtime_context().get_node_id())


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's signal handler: Ray sets a handler of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
