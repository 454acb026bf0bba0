"""A Ray cluster as GPUs and compilers. Those marked `ray` start one of three nodes: `make test-ray`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError, UsageError
from aot_tune.tables import store
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.request import Measure
from aot_tune.tuner.outcome import Failure
from aot_tune.tuner.process.codec import encode
from aot_tune.tuner.ray import cluster
from aot_tune.tuner.ray.cluster import Cluster
from aot_tune.tuner.sweep import resources
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest
from aot_tune.values.problem import Problem
from tests.support import other_source
from tests.support.gpu_locks import shared_folder
from tests.support.hashed_sessions import HashedSession
from tests.support.ray_hosts import HashedHost, ScriptedHost
from tests.support.samples import MODULE, SM90, scale, scale_in
from tests.support.scripted_backend import Does, Script, config, plain

ROOT = Path(__file__).parents[3]

NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"--ray needs Ray: pip install 'aot-tune\[ray\]'"):
        Cluster("", SM90, (), print)


def test_a_client_address_is_refused_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "installed", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(UsageError, match="run this command on a machine of the cluster"):
        Cluster("ray://head:10001", SM90, (), print)


# A real cluster ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three nodes on this machine, a, b and c, with a fake GPU each."""
    from ray.cluster_utils import Cluster as Nodes

    folder = tmp_path_factory.mktemp("nodes")
    does = {"first": Does(), "hangs": Does(fault="hang"), "last": Does()}
    script = Script(folder=folder, configs=does)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join((str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        )
        patch.setenv("FAKE_PAUSE_S", "0.02")
        patch.setenv("FAKE_LOCKS", str(shared_folder(folder / "locks")))
        patch.setenv("FAKE_SCRIPT", encode(plain(script)).decode())
        nodes = Nodes(
            initialize_head=True, head_node_args={**NODE, "node_name": "a", "include_dashboard": False}
        )
        try:
            nodes.add_node(**NODE, node_name="b")
            nodes.add_node(**NODE, node_name="c")
            yield nodes
        finally:
            nodes.shutdown()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cluster, "ACTOR", HashedHost)
    monkeypatch.setattr(resources, "MeasureSession", HashedSession)
    HashedSession.reset()
    yield
    HashedSession.reset()


def _request(folder: Path, **changes: Any) -> SweepRequest:
    folder.mkdir(exist_ok=True)
    kernels = (scale_in(folder / "tables")["scale"], other_source.other_in(folder / "tables"))
    return SweepRequest(
        kernels=kernels, arch=SM90, jobs=2, journal=folder / "journal", cubins=folder / "cubins", **changes
    )


def _tune(folder: Path, **changes: Any) -> SweepReport:
    request = _request(folder, **changes)
    with (folder / "said").open("a") as said:
        return sweep.run(request, PlainProgress(said))


def _tables(folder: Path) -> list[bytes]:
    return [store.table_path(folder / "tables", SM90, name).read_bytes() for name in ("scale", "other")]


def _said(folder: Path) -> str:
    return (folder / "said").read_text()


def _lines(folder: Path) -> list[str]:
    return [
        line
        for name in ("scale", "other")
        for journal in folder.glob(f"journal/sm90/{name}.*")
        for line in journal.read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The tables of one machine."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "MeasureSession", HashedSession)
        assert _tune(folder, gpus=(0,)).complete
    HashedSession.reset()
    return _tables(folder)


def _uuid(said: str, node: str) -> str:
    """The GPU of a node, by what was said of it."""
    (line,) = {line for line in said.splitlines() if " is NVIDIA" in line and line.endswith(f"({node})")}
    return line.partition(" of node ")[0].rpartition(" ")[2]


def _once(
    happens: Callable[[], bool], then: Callable[[], object], within_s: float = 120.0
) -> threading.Thread:
    """Do something in a thread as soon as something has happened."""

    def watch() -> None:
        until = time.monotonic() + within_s
        while not happens():
            if time.monotonic() > until:
                return
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.ray
def test_three_nodes_write_the_bytes_of_one_machine(
    nodes: Any, one: list[bytes], fake: None, tmp_path: Path
) -> None:
    folder = tmp_path / "three"
    report = _tune(folder, ray=nodes.address)
    assert _tables(folder) == one
    assert [use.lost for use in report.gpus] == ["", "", ""]
    assert all(use.busy_s > 0 for use in report.gpus), "each of them measured"
    assert len({_uuid(_said(folder), name) for name in "abc"}) == 3
    assert len(list((folder / "cubins").glob("*.cubin"))) > 10, "the driver keeps what the nodes compiled"


@pytest.mark.ray
def test_a_node_removed_in_the_middle_costs_its_problem_and_changes_no_byte(
    nodes: Any, one: list[bytes], fake: None, tmp_path: Path
) -> None:
    folder = tmp_path / "removed"
    victim = nodes.add_node(**NODE, node_name="victim")

    def is_at_it() -> bool:
        return sum(_uuid(_said(folder), "victim") in line for line in _lines(folder)) > 5

    folder.mkdir()
    (folder / "said").touch()
    thread = _once(
        lambda: "(victim)" in _said(folder) and is_at_it(),
        lambda: nodes.remove_node(victim, allow_graceful=False),
    )
    report = _tune(folder, ray=nodes.address)
    thread.join()
    assert _tables(folder) == one
    assert [bool(use.lost) for use in report.gpus] == [False, False, False, True]
    assert "is lost and leaves the sweep: its node is lost: " in _said(folder)


@pytest.mark.ray
def test_a_driver_that_is_killed_goes_on_from_its_journal_to_the_same_bytes(
    nodes: Any, one: list[bytes], fake: None, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_driver", nodes.address, str(folder)], cwd=ROOT
    )
    try:
        until = time.monotonic() + 120
        while (
            sum('"result"' in line for line in _lines(folder)) < 40
            and driver.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(0.01)
        assert driver.poll() is None, "it ended too early"
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    report = _tune(folder, ray=nodes.address)
    assert report.resumed > 20
    assert _tables(folder) == one


@pytest.mark.ray
def test_a_node_with_another_source_is_refused_with_what_differs(
    nodes: Any, fake: None, tmp_path: Path
) -> None:
    other = nodes.add_node(**NODE, node_name="other", env_vars={"FAKE_SOURCE": "1"})
    said: list[str] = []
    found = FoundKernel(module=other_source.MODULE, tunable=other_source.other)
    try:
        with Cluster(nodes.address, SM90, (found,), said.append) as there:
            assert len(there.gpus) == 3
    finally:
        nodes.remove_node(other)
    (line,) = [line for line in said if "is refused" in line]
    assert "(other) is refused: the source of other is " in line


@pytest.mark.ray
def test_gpus_that_differ_are_refused_and_a_resource_chooses_and_counts_them(nodes: Any, fake: None) -> None:
    lying = nodes.add_node(
        **{**NODE, "num_gpus": 0}, node_name="lying", resources={cluster.resource(SM90): 2},
        env_vars={"FAKE_GPU": "NVIDIA H100"},
    )  # fmt: skip
    found = FoundKernel(module=MODULE, tunable=scale)
    said: list[str] = []
    try:
        with Cluster(nodes.address, SM90, (found,), said.append) as there:
            assert [(gpu.gpu.name, gpu.node.endswith("(lying)")) for gpu in there.gpus] == [
                ("NVIDIA H100", True)
            ] * 2
    finally:
        nodes.remove_node(lying)
    other = nodes.add_node(**NODE, node_name="h100", env_vars={"FAKE_GPU": "NVIDIA H100"})
    try:
        with pytest.raises(TuneError, match=r"GPUs of the cluster differ .*choose nodes with equal GPUs"):
            Cluster(nodes.address, SM90, (found,), said.append)
    finally:
        nodes.remove_node(other)


@pytest.mark.ray
def test_a_config_that_hangs_is_killed_by_the_limits_of_its_session(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ACTOR", ScriptedHost)
    found = FoundKernel(module=MODULE, tunable=scale)
    said: list[str] = []
    with Cluster(nodes.address, SM90, (found,), said.append) as there:
        session = there.session(found, 0, said.append, FaultCounts(said.append))
        configs = dict.fromkeys(map(config, ("first", "hangs", "last")))
        outcomes = session.answer(Measure(Problem({"M": 16}), configs))
        session.close()
    stages = [one.stage if isinstance(one, Failure) else "ok" for one in outcomes]
    assert stages == ["ok", "timeout", "ok"]
    assert any("worker replaced" in line for line in said)


@pytest.mark.ray
def test_where_no_cluster_is_one_is_started_here_and_ends_with_the_sweep(
    one: list[bytes], fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 1, "CPU": 1}')
    monkeypatch.setenv("PYTHONPATH", str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    before = signal.getsignal(signal.SIGTERM)
    folder = tmp_path / "own"
    assert _tune(folder, ray="local").complete
    assert _tables(folder) == one
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == before
