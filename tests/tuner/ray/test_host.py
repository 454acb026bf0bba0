"""Whole sweeps on hosts elsewhere, without Ray: the bytes of one machine, whatever is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aot_tune.tables import store
from aot_tune.tuner.measure.supervise import GpuLostError
from aot_tune.tuner.ray import compiler
from aot_tune.tuner.ray import host as hosts
from aot_tune.tuner.sweep import resources
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest
from tests.support import hashed_sessions
from tests.support.other_source import other_in
from tests.support.ray_hosts import HashedHost, NearCluster, NearHost
from tests.support.samples import SM90, scale_in

pytestmark = pytest.mark.process  # a sweep compiles, but where an earlier run left its cubins


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (hosts, compiler):
        monkeypatch.setattr(module, "node_folder", lambda: hashed_sessions.CUBINS)
    with hashed_sessions.measuring(monkeypatch):
        yield


def _tune(folder: Path, **changes: Any) -> SweepReport:
    folder.mkdir(exist_ok=True)
    request = SweepRequest(
        limit=2,
        kernels=(scale_in(folder / "tables")["scale"], other_in(folder / "tables")),
        arch=SM90,
        jobs=2,
        journal=folder / "journal",
        **changes,
    )
    with (folder / "said").open("a") as said:
        return sweep.run(request, PlainProgress(said))


def _tables(folder: Path) -> list[bytes]:
    return [store.table_path(folder / "tables", SM90, name).read_bytes() for name in ("scale", "other")]


def _on(monkeypatch: pytest.MonkeyPatch, *lost_after: int | None) -> tuple[NearHost, ...]:
    """Let sweeps run on as many hosts, which are lost after that many events."""
    there = tuple(
        NearHost(HashedHost(f"GPU-{place}"), lost_after=after) for place, after in enumerate(lost_after)
    )
    monkeypatch.setattr(resources, "Cluster", lambda *_: NearCluster(*there))
    return there


def test_hosts_elsewhere_write_the_bytes_of_this_machine_whoever_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _tune(tmp_path / "here", gpus=(0,)).complete
    there = _on(monkeypatch, None, 20, None)
    folder = tmp_path / "there"
    report = _tune(folder, ray="")
    assert _tables(folder) == _tables(tmp_path / "here")
    assert [bool(use.lost) for use in report.gpus] == [False, True, False]
    assert all(host.calls.count("open") == 1 for host in there[1:]), "one session for the whole sweep"
    assert "turn_to" in there[2].calls
    said = (folder / "said").read_text()
    assert "GPU 1 (GPU-1) is lost and leaves the sweep: its node is lost: its process has ended" in said


@pytest.mark.slow
def test_a_sweep_whose_hosts_are_all_lost_goes_on_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _tune(tmp_path / "here", gpus=(0,)).complete
    folder = tmp_path / "there"
    _on(monkeypatch, 30, 40)
    with pytest.raises(GpuLostError, match="its node is lost"):
        _tune(folder, ray="auto")
    _on(monkeypatch, None)
    report = _tune(folder, ray="auto")
    assert report.resumed > 0
    assert _tables(folder) == _tables(tmp_path / "here")
