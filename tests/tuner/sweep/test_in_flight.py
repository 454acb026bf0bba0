"""A sweep of three kernels at once: the same bytes as one after another, whatever stops it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest
from tests.support import hashed_sessions
from tests.support.hashed_sessions import HashedSession
from tests.support.samples import SM90
from tests.support.several_kernels import several_in

pytestmark = pytest.mark.process  # a sweep compiles, but where an earlier run left its cubins

NAMES = ("short", "long", "middle")


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hashed_sessions.measuring(monkeypatch):
        yield


def _tune(folder: Path, *gpus: int) -> SweepReport:
    folder.mkdir(exist_ok=True)
    request = SweepRequest(
        kernels=several_in(folder / "tables"), arch=SM90, gpus=gpus, jobs=2, journal=folder / "journal"
    )
    with (folder / "said").open("a") as said:
        return sweep.run(request, PlainProgress(said))


def _tables(folder: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (folder / "tables" / "sm90").glob("*.json")}


ONE: list[dict[str, bytes]] = []


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The tables of one GPU and one kernel after another, made once."""
    if not ONE:
        with monkeypatch.context() as alone:
            alone.setattr(sweep, "may_begin", lambda *, running, **_: not running)
            assert _tune(tmp_path / "one", 0).complete
        HashedSession.reset()
        ONE.append(_tables(tmp_path / "one"))
    return ONE[0]


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4, 8))])
def test_kernels_in_flight_write_the_bytes_of_one_after_another(
    one: dict[str, bytes], tmp_path: Path, count: int
) -> None:
    report = _tune(tmp_path / "several", *range(count))
    assert report.complete
    assert [row.kernel for row in report.rows] == list(NAMES), "in the order of the request"
    assert _tables(tmp_path / "several") == one
    said = (tmp_path / "several" / "said").read_text()
    begun = [line.split()[0] for line in said.splitlines() if " compilations" in line]
    assert begun[0] == "long", "the longest first"
    assert said.index("short sm90") < said.index("kernel  "), "before the closing table"


@pytest.mark.parametrize(
    ("stopped", "goes_on"),
    [((0, 1), (0, 1)), pytest.param((0,), (2, 3), marks=pytest.mark.slow)],
)
def test_a_sweep_that_was_stopped_with_several_in_flight_ends_with_the_same_bytes(
    one: dict[str, bytes], tmp_path: Path, stopped: tuple[int, ...], goes_on: tuple[int, ...]
) -> None:
    folder = tmp_path / "several"
    for after in (60, 200):
        HashedSession.stops_after[:] = [after]
        with pytest.raises(KeyboardInterrupt):
            _tune(folder, *stopped)
    HashedSession.stops_after.clear()
    assert _tune(folder, *goes_on).complete
    assert _tables(folder) == one


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 30, 100])
def test_a_gpu_that_is_lost_with_several_in_flight_changes_no_byte(
    one: dict[str, bytes], tmp_path: Path, after: int
) -> None:
    HashedSession.lost_after[1] = after
    report = _tune(tmp_path / "several", 0, 1, 2)
    assert [bool(use.lost) for use in report.gpus] == [False, True, False]
    assert _tables(tmp_path / "several") == one
