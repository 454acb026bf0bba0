"""A kernel's sweep on several GPUs: the same bytes from any number, whatever is lost on the way."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aot_tune.cli.check import check
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError
from aot_tune.tables import store
from aot_tune.tables.table import Entry, Table
from aot_tune.tuner.measure.supervise import GpuLostError
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.plan.candidates import ProblemPlan
from aot_tune.tuner.plan.sizes import MOST_ADDED
from aot_tune.tuner.sweep import decision
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.budget import Budget, OutOfTimeError
from aot_tune.tuner.sweep.kernel import KernelSweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest
from aot_tune.tuner.sweep.results import PASSES, Step, accepts, outcome_of
from aot_tune.tuner.sweep.stale import only_stale
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.faults import small_kernel
from tests.support import hashed_sessions, near_gpu
from tests.support.hashed_sessions import HashedSession
from tests.support.near_gpu import Launch, NearGpu
from tests.support.samples import DEFAULT, SM90, scale_in

pytestmark = pytest.mark.process  # a sweep compiles, but where an earlier run left its cubins

TYPICAL = [{"dtype": "bfloat16", "M": [1, 16, 64, 128, 256, 512], "N": 1024}]


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hashed_sessions.measuring(monkeypatch):
        yield


def _tune(folder: Path, *gpus: int, **changes: Any) -> SweepReport:
    found = scale_in(folder / "tables")["scale"]
    found = dataclasses.replace(found, tunable=dataclasses.replace(found.tunable, typical=TYPICAL))
    request = SweepRequest(
        kernels=(found,), arch=SM90, gpus=gpus, jobs=2, journal=folder / "journal", **changes
    )
    with (folder / "said").open("a") as said:
        return sweep.run(request, PlainProgress(said))


def _table(folder: Path) -> bytes:
    return store.table_path(folder / "tables", SM90, "scale").read_bytes()


def _said(folder: Path) -> str:
    return (folder / "said").read_text()


ONE: list[bytes] = []


@pytest.fixture
def one(tmp_path: Path) -> bytes:
    """The table of one GPU, made once."""
    if not ONE:
        folder = tmp_path / "one"
        folder.mkdir()
        assert _tune(folder, 0).complete
        HashedSession.reset()
        ONE.append(_table(folder))
    return ONE[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "several"
    folder.mkdir()
    return folder


def _gpus_of_passes(folder: Path) -> dict[tuple[str, str], set[str]]:
    """The GPUs of the times that count, by pass and problem: those of the last GPU that wrote of it."""
    content = journals.read(folder / "journal" / "sm90" / "scale.done", accepts)
    gpus: dict[tuple[str, str], set[str]] = {}
    last: dict[tuple[str, str], str] = {}
    for record in content.records:
        if record["kind"] != "result" or record["step"] == "recheck":
            continue
        if isinstance(outcome_of(record), Measurement):
            place = (PASSES[record["step"]], str(record["problem"]))
            if last.get(place) != record["gpu"]:
                gpus[place] = set()
            last[place] = record["gpu"]
            gpus[place].add(record["gpu"])
    return gpus


@pytest.mark.parametrize(
    "count",
    [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (4, 8))],
)
def test_several_gpus_write_the_bytes_that_one_writes(one: bytes, folder: Path, count: int) -> None:
    report = _tune(folder, *range(count))
    assert _table(folder) == one
    assert len({index for index, _, _ in HashedSession.told}) == count, "each of them measured"
    assert [use.gpu for use in report.gpus] == [f"GPU-{index}" for index in range(count)]
    assert all(len(gpus) == 1 for gpus in _gpus_of_passes(folder).values())
    assert f"GPU 1 GPU-1: busy {report.gpus[1].busy_s:.1f} s, idle" in _said(folder)
    points = {m: len(entry.points) for m, entry in _entries(folder).items()}
    assert points[1] == 1, "a bucket of one size"
    assert all(3 <= count <= 3 + MOST_ADDED for m, count in points.items() if m > 1)
    assert max(points.values()) == 3 + MOST_ADDED, "where times are chance, the rule leaves much"


def test_the_journal_tells_of_the_start_of_each_gpus_process_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HashedSession, "starting_s", 5.0)
    _tune(folder, 0, 1)
    records = journals.read(folder / "journal/sm90/scale.done", accepts).records
    spent = [record for record in records if record["kind"] == "spent"]
    assert sum(record["start_s"] for record in spent) == 10.0
    compiled = [record for record in records if record["kind"] == "compile"]
    assert compiled
    assert all(record["seconds"] >= 0 for record in compiled)


@pytest.mark.parametrize(
    "after", [33, *(pytest.param(after, marks=pytest.mark.slow) for after in (0, 1, 20, 70, 90))]
)
def test_a_gpu_that_is_lost_costs_its_problem_and_changes_no_byte(
    one: bytes, folder: Path, after: int
) -> None:
    HashedSession.lost_after[1] = after
    report = _tune(folder, 0, 1, 2)
    assert _table(folder) == one
    assert [bool(use.lost) for use in report.gpus] == [False, True, False]
    assert "GPU 1 (GPU-1) is lost and leaves the sweep: GPU 1 does not answer." in _said(folder)
    there = {
        record["gpu"]
        for record in journals.read(folder / "journal/sm90/scale.done", accepts).records
        if record["kind"] == "result"
    }
    assert ("GPU-1" in there) == (after > 0), "what it measured stays in the journal"


@pytest.mark.parametrize("gpus", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_gpu_that_is_wrong_alone_is_dismissed_and_changes_no_byte(
    one: bytes, folder: Path, gpus: int
) -> None:
    HashedSession.broken[1] = "always"
    report = _tune(folder, *range(gpus))
    assert report.complete
    assert _table(folder) == one
    (lost,) = (use.lost for use in report.gpus if use.lost)
    assert lost == report.gpus[1].lost
    assert f"it computes the default ({DEFAULT}) wrong at dtype=bfloat16 M=" in lost
    assert lost.endswith("and GPU-0 computes it right")
    assert f"the results of GPU-1 do not count: {lost}" in _said(folder)


def test_a_default_that_is_wrong_on_each_gpu_is_the_kernels_fault(folder: Path) -> None:
    HashedSession.broken.update({0: "always", 1: "always"})
    with pytest.raises(TuneError, match=r"the default .* computed a wrong result"):
        _tune(folder, 0, 1)
    assert "is lost" not in _said(folder)


@pytest.mark.parametrize("when", ["always", "late"])
def test_another_gpu_acquits_a_kernel_that_was_blamed_for_the_first(
    one: bytes, folder: Path, when: str
) -> None:
    HashedSession.broken[1] = when
    with pytest.raises(TuneError, match=r"the default .* computed a wrong result"):
        _tune(folder, 1)
    assert _tune(folder, 0).complete
    assert _table(folder) == one
    assert "the results of GPU-1 do not count" in _said(folder)


@pytest.mark.parametrize(
    ("stopped", "goes_on"),
    [
        ((0, 1), (0, 1)),
        pytest.param((0, 1), (1,), marks=pytest.mark.slow),
        pytest.param((0,), (2, 3), marks=pytest.mark.slow),
        pytest.param((0, 1, 2, 3), (4,), marks=pytest.mark.slow),
    ],
)
def test_a_stopped_sweep_goes_on_with_other_gpus_to_the_same_bytes(
    one: bytes, folder: Path, stopped: tuple[int, ...], goes_on: tuple[int, ...]
) -> None:
    for after in (40, 160):
        HashedSession.stops_after[:] = [after]
        with pytest.raises(KeyboardInterrupt):
            _tune(folder, *stopped)
        stopped = stopped[::-1]
    HashedSession.stops_after.clear()
    report = _tune(folder, *goes_on)
    assert report.resumed > 0
    assert _table(folder) == one


@pytest.mark.slow
def test_with_no_gpu_left_what_is_there_is_kept_and_taken_over(one: bytes, folder: Path) -> None:
    HashedSession.lost_after.update({0: 50, 1: 60})
    with pytest.raises(GpuLostError, match="does not answer"):
        _tune(folder, 0, 1)
    HashedSession.lost_after.clear()
    assert len(HashedSession.told) == 110
    assert _tune(folder, 0, 1).resumed > 0
    assert _table(folder) == one


def test_gpus_that_differ_are_refused_before_anything_is_measured(folder: Path) -> None:
    HashedSession.devices[1] = dataclasses.replace(Device.reference(SM90), sm_count=78)
    with pytest.raises(TuneError, match=r"the GPUs differ .*choose equal GPUs: --gpus 0"):
        _tune(folder, 0, 1)
    assert HashedSession.told == []


def test_gpus_that_disagree_on_defaults_are_named_whatever_they_draw(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = KernelSweep._owner

    def as_drawn(kernel: KernelSweep, step: Step, problem: Problem) -> str | None:
        """As chance may have it, a GPU draws all tasks of a bucket."""
        bucket = problem.replaced(M=1 << (problem.size("M") - 1).bit_length())
        if step == "recheck":
            return None
        return owner(kernel, step, problem) or f"GPU-{kernel._edges.index(bucket) % 2}"

    monkeypatch.setattr(KernelSweep, "_owner", as_drawn)
    HashedSession.slower[1] = 1.2
    _tune(folder, 0, 1)
    assert "GPU-1 takes 1.20 times as long as GPU-0 for the same defaults" in _said(folder)


# Limited time -----------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each outcome takes a second, and nothing else takes time."""
    monkeypatch.setattr(HashedSession, "seconds", 1.0)
    for module in ("budget", "problem"):
        monkeypatch.setattr(f"aot_tune.tuner.sweep.{module}.monotonic", lambda: HashedSession.now[0])


def _entries(folder: Path) -> dict[int, Entry]:
    table = store.read_table(store.table_path(folder / "tables", SM90, "scale"))
    return {entry.bucket.size("M"): entry for entry in table.entries}


def _edges(folder: Path) -> dict[int, float]:
    return {m: entry.mean_us for m, entry in _entries(folder).items()}


def test_a_limited_time_ends_with_the_buckets_that_were_reached(folder: Path, clock: None) -> None:
    report = _tune(folder, 0, time_budget_s=200.0)
    assert report.complete
    reached = _edges(folder)
    left = {f"dtype=bfloat16 M={m} N=1024 has no entry" for m in TYPICAL[0]["M"] if m not in reached}  # type: ignore[attr-defined]
    assert 1 <= len(reached) <= 4
    assert set(report.rows[0].unreached) == left
    assert f"scale: no time was left: {sorted(left)[0]}" in _said(folder)
    assert len(HashedSession.told) <= 260, "as long as the last problem and the recheck take"


def test_where_no_time_is_left_a_bucket_stays_without_the_sizes_to_add(
    folder: Path, clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(budget: Budget, step: Step, each: ProblemPlan, *, extra: bool) -> None:
        if extra:
            raise OutOfTimeError

    monkeypatch.setattr(Budget, "check", check)
    report = _tune(folder, 0, time_budget_s=1e6)
    assert report.complete
    assert report.rows[0].unreached == ()
    points = {m: [point.size["M"] for point in entry.points] for m, entry in _entries(folder).items()}
    assert points == {
        1: [1], 16: [11, 15, 16], 64: [41, 57, 64], 128: [69, 101, 128], 256: [149, 213, 256],
        512: [309, 437, 512],
    }  # fmt: skip


@pytest.mark.slow
def test_what_a_limited_time_does_not_reach_stays_as_it_was(folder: Path, clock: None) -> None:
    _tune(folder, 0)
    before = _edges(folder)
    portfolio = store.read_table(store.table_path(folder / "tables", SM90, "scale")).portfolio
    HashedSession.slower[0] = 1.5
    report = _tune(folder, 0, time_budget_s=200.0)
    assert report.complete
    after = _edges(folder)
    assert after.keys() == before.keys()
    assert all("keeps its entry" in line for line in report.rows[0].unreached)
    assert 0 < len(report.rows[0].unreached) < len(before)
    table = store.read_table(store.table_path(folder / "tables", SM90, "scale"))
    assert table.portfolio[: len(portfolio)] == portfolio


# Configs that are wrong here and there ----------------------------------------------------------------------


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A GPU in this process, with the real rules of measuring."""
    with near_gpu.measuring(monkeypatch, tmp_path):
        yield


WAYS: dict[str, tuple[float, Callable[[Launch], bool]]] = {
    "a declared size": (1.0, lambda launch: launch.m == 34),
    "odd sizes below 64": (1.0, lambda launch: launch.m % 2 == 1 and launch.m < 64),
    "written": (1.0, lambda launch: launch.kind == "written"),
    "tight": (1.0, lambda launch: launch.kind == "tight"),
    "read": (100.0, lambda launch: launch.kind == "read"),
    "load": (100.0, lambda launch: launch.kind == "load"),
}
"""Factors of the times, as short kernels are not timed under load, and launches that are wrong."""


def _tune_near(folder: Path, number: int) -> Table:
    """Tune a kernel of which one config, another by each number, is fast."""
    NearGpu.fast = small_kernel.SPACE[1:][number % 11]
    shutil.rmtree(folder / "tables", ignore_errors=True)
    return _tuned_near(folder)


def _near(folder: Path, m: Sequence[int] = (16, 34, 256), **changes: Any) -> FoundKernel:
    typical = [{"dtype": "bfloat16", "M": list(m), "N": 1024}]
    changes = {"tables": folder / "tables", "typical": typical, **changes}
    return FoundKernel(module=small_kernel.MODULE, tunable=dataclasses.replace(small_kernel.scale, **changes))


def _tuned_near(
    folder: Path, m: Sequence[int] = (16, 34, 256), *, stale: bool = False, **changes: Any
) -> Table:
    kernel = _near(folder, m, **changes)
    request = SweepRequest(
        kernels=(kernel,), arch=SM90, gpus=(0,), jobs=2, journal=folder / "journal", fresh=True
    )
    with (folder / "said").open("a") as said:
        request = only_stale(request, PlainProgress(said)) if stale else request
        assert request.kernels, "nothing is stale"
        assert sweep.run(request, PlainProgress(said)).complete, _said(folder)
    return store.read_table(store.table_path(folder / "tables", SM90, "scale"))


def _holds(table: Table, config: Config | None) -> bool:
    return config in (*table.portfolio, *(entry.config for entry in table.entries))


def _make_wrong(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Let the fast config be wrong in one of the ways alone."""
    slow, wrong = WAYS[way]
    monkeypatch.setattr(NearGpu, "slow", slow)
    monkeypatch.setattr(NearGpu, "wrong", lambda launch: launch.config == NearGpu.fast and wrong(launch))


@pytest.mark.parametrize("way", WAYS)
def test_a_fast_config_that_is_wrong_here_alone_is_not_published(
    near: None, folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    _make_wrong(monkeypatch, way)
    assert not _holds(_tune_near(folder, 4), NearGpu.fast)
    assert {entry.bucket["M"] for entry in _tune_near(folder, 4).entries} == {16, 64, 256}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_config_that_is_wrong_here_alone_is_published_in_none_of_25_sweeps(
    near: None, folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    _make_wrong(monkeypatch, way)
    published = [number for number in range(25) if _holds(_tune_near(folder, number), NearGpu.fast)]
    assert published == []


def test_a_bucket_whose_points_stay_even_is_verified_at_an_odd_size_too(
    near: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The points of the table that is there stay, so that its lines may."""
    even = lambda axes, bucket: [bucket.replaced(M=bucket.size("M") * 5 // 8)]  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(decision, "sizes_inside", even)
        assert _holds(_tune_near(folder, 4), NearGpu.fast), "it is right so far"
    NearGpu.launches.clear()
    table = _tuned_near(folder)
    odd = {(launch.m, launch.kind) for launch in NearGpu.launches if launch.m % 2}
    assert [[point.size["M"] for point in entry.points] for entry in table.entries] == [
        [10, 16], [40, 64], [160, 256]
    ]  # fmt: skip
    assert odd == {(15, "verify"), (57, "verify"), (213, "verify")}, "once, and not timed"
    verified = [launch for launch in NearGpu.launches if launch.m == 57]
    assert {launch.config for launch in verified} == {*table.portfolio, small_kernel.DEFAULT}
    assert len(verified) == len(set(verified))
    wrong = lambda launch: launch.config == NearGpu.fast and launch.m == 57  # noqa: E731
    monkeypatch.setattr(NearGpu, "wrong", wrong)
    assert not _holds(_tuned_near(folder), NearGpu.fast)


def test_a_declared_size_that_is_timed_anyway_is_not_verified_again(near: None, folder: Path) -> None:
    NearGpu.fast = small_kernel.SPACE[5]
    _tuned_near(folder, (15, 16, 41, 256))
    assert {launch.m for launch in NearGpu.launches if launch.kind == "again"} == {16, 64, 256}
    verified = [launch for launch in NearGpu.launches if launch.kind == "verify" and launch.m in (15, 41)]
    assert verified
    assert len(verified) == len(set(verified))


def test_a_default_that_is_wrong_at_a_declared_size_alone_is_named(
    near: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = lambda launch: launch.config == small_kernel.DEFAULT and launch.m == 34  # noqa: E731
    monkeypatch.setattr(NearGpu, "wrong", wrong)
    with pytest.raises(TuneError, match=r"M=34 N=1024: the default .* computed a wrong result"):
        _tuned_near(folder)


def test_a_default_that_fails_at_a_declared_size_alone_leaves_its_bucket_without_an_entry(
    near: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(launch: Launch) -> bool:
        if launch.config == small_kernel.DEFAULT and launch.m == 34:
            raise RuntimeError("too many resources")
        return False

    monkeypatch.setattr(NearGpu, "wrong", fails)
    with pytest.raises(AssertionError, match=r"no entry: its default .* failed at dtype=bfloat16 M=34"):
        _tuned_near(folder)
    table = store.read_table(store.table_path(folder / "tables", SM90, "scale"))
    assert [entry.bucket["M"] for entry in table.entries] == [16, 256]


# A corrected reference --------------------------------------------------------------------------------------


def _lines(table: Table) -> dict[object, str]:
    return {entry.bucket["M"]: str(entry) for entry in table.entries}


def test_a_table_of_another_reference_is_verified_anew_and_nothing_is_timed(near: None, folder: Path) -> None:
    before = _tune_near(folder, 4)
    NearGpu.launches.clear()
    NearGpu.timed.clear()
    table = _tuned_near(folder, stale=True, reference=small_kernel._stricter)
    assert NearGpu.timed == []
    sizes = {launch.m for launch in NearGpu.launches}
    assert sizes == {34} | {point.size["M"] for entry in before.entries for point in entry.points}
    assert {launch.config for launch in NearGpu.launches} == {*before.portfolio, small_kernel.DEFAULT}
    assert table == dataclasses.replace(before, check_hash=table.check_hash)
    assert table.check_hash != before.check_hash
    assert "make_args or reference has changed: its configs are verified again" in _said(folder)
    with pytest.raises(AssertionError, match="nothing is stale"):
        _tuned_near(folder, stale=True, reference=small_kernel._stricter)


@pytest.mark.parametrize("size", [256, 34], ids=["where it wins", "elsewhere"])
def test_what_another_reference_refuses_is_replaced_and_the_rest_stays(
    near: None, folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(NearGpu, "fast", small_kernel.SPACE[5])
    monkeypatch.setattr(NearGpu, "fast_at", 256)
    before = _tuned_near(folder)
    assert [entry.config == NearGpu.fast for entry in before.entries] == [False, False, True]
    monkeypatch.setattr(NearGpu, "wrong", lambda launch: launch.config == NearGpu.fast and launch.m == size)
    NearGpu.timed.clear()
    table = _tuned_near(folder, stale=True, reference=small_kernel._stricter)
    assert not _holds(table, NearGpu.fast)
    assert {m for _, m in NearGpu.timed} <= set(range(129, 257))
    for entry, was in zip(table.entries[:2], before.entries, strict=False):
        assert (entry.config, entry.mean_us, entry.default_us) == (was.config, was.mean_us, was.default_us)
    assert [entry.bucket["M"] for entry in table.entries] == [16, 64, 256]
    assert "swept again, because its configs fail now: dtype=bfloat16 M=256" in _said(folder)


def test_check_names_a_table_of_another_reference(near: None, folder: Path) -> None:
    _tune_near(folder, 4)
    kernel = _near(folder, reference=small_kernel._stricter)
    (finding,) = [one for one in check({"scale": kernel}) if "reference" in one.what]
    assert finding.entry == "check_hash"
    assert finding.fix.endswith("--only-stale")
