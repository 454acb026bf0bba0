"""A whole measuring sweep on the real compiler, with a scripted session in place of the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from aot_tune.declare.declaration import Close, Work
from aot_tune.declare.fingerprint.hashing import check_hash
from aot_tune.errors import AotTuneError, DeclarationError, JournalMismatchError, StoreError, TuneError
from aot_tune.tables import store, writer
from aot_tune.tables.table import Entry, Table
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import CompileFailure
from aot_tune.tuner.measure.request import (
    Finals,
    Measure,
    OnOutcome,
    Recheck,
    Reported,
    Request,
    Spent,
    TimeInState,
    ignore,
)
from aot_tune.tuner.measure.supervise import GpuLostError, ProblemFailedError
from aot_tune.tuner.outcome import Failure, Measurement, Outcome, Stage
from aot_tune.tuner.sweep import decision, resources
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.journal import Journal, JournalWriteError, read
from aot_tune.tuner.sweep.progress import CandidateFailed, Event, Progress, closing_table
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.tuner.sweep.stale import only_stale
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SM90, scale_in, write


class Session:
    """Times by a formula: tall tiles are fast from M = 64 on, at M = 1 the default. Counts requests."""

    wrong: frozenset[int] = frozenset()
    """Values of tile_m that compute a wrong result."""

    wrong_at: frozenset[tuple[int, int]] = frozenset()
    """Values of tile_m and M: with that tile the result is wrong at that size alone."""

    wrong_late: frozenset[tuple[int, int]] = frozenset()
    """Values of tile_m and M: with that tile the result is wrong there when it is verified again."""

    late_stage: Stage = "verify"
    """The stage at which they fail then."""

    default_fails: frozenset[int] = frozenset()
    """Values of M at which the default faults."""

    raises: ClassVar[dict[str, Exception]] = {}
    """Errors by the name of the kernel whose first measurement meets them."""

    provisional = False
    """Whether each time is told as provisional first, when all of them are taken."""

    unopened: frozenset[int] = frozenset()
    """Values of M of the problems whose arguments cannot be made."""

    fails_after: int | None = None
    """Outcomes, rounds counted one by one, after which the GPU is lost."""

    noise = 1.0
    driver = "580.1"
    disturbed: str | None = None

    fastest: Callable[[Problem], int] | None = None
    """The tile_m that is fastest, where a test wants another than the formula's."""

    meanwhile: ClassVar[list[Callable[[], object]]] = []
    """What happens while winners are checked: others' tunes, each once."""

    def __init__(self, found: Any, gpu_index: int, *, on_event: Any = None, fault_counts: Any = None) -> None:
        self.index = gpu_index
        self.spent = Spent()
        self.fault_counts = fault_counts
        self.name = found.tunable.name
        self.asked: list[tuple[str, Problem, frozenset[Config]]] = []
        self.told: list[tuple[str, Problem, Config, int | None]] = []
        self.known: set[Config] = set()
        self.least: dict[Problem, float] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def turn_to(self, found: Any, fault_counts: Any) -> None:
        self.name, self.fault_counts = found.tunable.name, fault_counts

    def identity(self) -> dict[str, str]:
        return {
            "gpu": "NVIDIA H200",
            "uuid": f"GPU-{self.index}",
            "driver": self.driver,
            "cuda_tile": "1.7.0",
            "tileiras": "13.4.92",
        }

    def device(self) -> Device:
        return Device.reference(SM90)

    def answer(self, request: Request, on_outcome: OnOutcome = ignore) -> list[Outcome]:
        match request:
            case Measure():
                return self._measure(request, on_outcome)
            case Finals():
                return self._finals(request, on_outcome)
            case TimeInState():
                self._open(request.state, request.problem, request.configs)
                return self._each(request.state, request, on_outcome)
            case Recheck():
                return self._recheck(request)
        raise TypeError(request)

    def _measure(self, request: Measure, on_outcome: OnOutcome) -> list[Outcome]:
        problem = request.problem
        self._open("measure", problem, request.configs)
        self.known |= request.known.keys()
        self.least[problem] = request.least_us
        for config in request.configs if self.provisional else ():
            first = self._outcome(problem, config)
            if isinstance(first, Measurement) and config not in request.known:
                self._told("alone", problem, config)
                on_outcome(Reported(outcome=dataclasses.replace(first, provisional=True)))
        return self._each("measure", request, on_outcome)

    def _each(self, what: str, request: Request, on_outcome: OnOutcome) -> list[Outcome]:
        outcomes = []
        for config in request.configs:
            outcomes.append(self._outcome(request.problem, config))
            self._told(what, request.problem, config)
            on_outcome(Reported(outcome=outcomes[-1]))
        return outcomes

    def _finals(self, request: Finals, on_outcome: OnOutcome) -> list[Outcome]:
        problem = request.problem
        self._open("finals", problem, request.configs)
        for number in range(3):
            for config in request.configs:
                if len(request.taken.get(config, ())) <= number:
                    self._told("finals", problem, config, number)
                    on_outcome(Reported(outcome=self._outcome(problem, config), number=number))
        outcomes = [self._outcome(problem, config) for config in request.configs]
        for outcome in outcomes:
            on_outcome(Reported(outcome=outcome))
        return outcomes

    def _recheck(self, request: Recheck) -> list[Outcome]:
        self._begin()
        self.asked.append(("recheck", request.problem, frozenset(request.configs)))
        if self.meanwhile:
            self.meanwhile.pop()()
        return [
            Failure(config=config, stage=self.late_stage, message="a race")
            for config in request.configs
            if (int(config["tile_m"]), request.problem.size("M")) in self.wrong_late
        ]

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _begin(self) -> None:
        if self not in sessions:  # one that is asked for its identity or device alone measures nothing
            sessions.append(self)

    def _open(self, what: str, problem: Problem, configs: Mapping[Config, Path | None]) -> None:
        self._begin()
        if self.name in self.raises:
            raise self.raises[self.name]
        if problem.size("M") in self.unopened:
            raise ProblemFailedError(problem, "make_args was killed by SIGKILL")
        self.asked.append((what, problem, frozenset(configs)))
        assert all(path is not None and path.read_bytes()[:4] == b"\x7fELF" for path in configs.values())

    def _told(self, what: str, problem: Problem, config: Config, number: int | None = None) -> None:
        if self.fails_after is not None and len(self.told) >= self.fails_after:
            raise GpuLostError("the GPU is lost")
        self.told.append((what, problem, config, number))

    def _outcome(self, problem: Problem, config: Config) -> Outcome:
        tall = int(config["tile_m"])
        if config == DEFAULT and problem.size("M") in self.default_fails:
            return Failure(config=config, stage="fault", message="an illegal memory access\nat 0x0")
        if tall in self.wrong or (tall, problem.size("M")) in self.wrong_at:
            return Failure(config=config, stage="verify", message="half of it is NaN")
        us = 10.0 + problem.size("M") / tall + (tall if problem.size("M") == 1 else 0)
        if self.fastest is not None:
            us = 10.0 if tall == self.fastest(problem) else 20.0
        us += config.hints["num_ctas"] + config.hints["occupancy"] + int(config["tile_n"]) / 64
        return Measurement(
            config=config,
            mean_us=us * self.noise,
            error_margin_us=0.01,
            num_samples=5,
            disturbed=self.disturbed,
        )


pytestmark = pytest.mark.process  # a sweep compiles, but where an earlier run left its cubins

sessions: list[Session] = []


class Quiet(Progress):
    """A progress that keeps each event, in words."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def show(self, event: Event) -> None:
        self.said.append(str(event))

    def close(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose sweeps use `Session`; cubins are shared by all tests of this file."""
    monkeypatch.setattr(resources, "MeasureSession", Session)
    monkeypatch.setattr(resources, "CUBINS", Path("build/test-cubins").absolute())
    monkeypatch.setattr("aot_tune.tuner.sweep.report.JOURNALS", tmp_path / "journal")
    monkeypatch.setattr(Session, "meanwhile", [])
    monkeypatch.setattr(Session, "raises", {})
    sessions.clear()
    return tmp_path


def _tune(folder: Path, progress: Quiet | None = None, **changes: Any) -> SweepReport:
    request = SweepRequest(
        kernels=(scale_in(folder / "tables")["scale"],), arch=SM90, gpus=(0,), jobs=2, **changes
    )
    return sweep.run(request, progress or Quiet())


def _bucket(m: int, dtype: str = "bfloat16") -> Problem:
    return Problem({"dtype": dtype, "M": m, "N": 1024})


def _of(*buckets: Problem) -> dict[str, Any]:
    return {"problems": {"scale": buckets}}


def _path(folder: Path) -> Path:
    return store.table_path(folder / "tables", SM90, "scale")


def test_a_sweep_publishes_the_fastest_right_config_of_each_bucket(folder: Path) -> None:
    report = _tune(folder)
    table = store.read_table(_path(folder))
    assert report.complete
    assert report.rows[0].problems == len(table.entries) == 3
    winners = {entry.bucket.size("M"): entry.config for entry in table.entries}
    assert winners[1] == DEFAULT
    assert winners[256]["tile_m"] == 64
    assert all(entry.mean_us <= entry.default_us for entry in table.entries)
    assert writer.dump(table) == _path(folder).read_bytes()


def test_verbose_tells_each_choice_and_its_reason(folder: Path) -> None:
    request = SweepRequest(
        kernels=(scale_in(folder / "tables")["scale"],), arch=SM90, gpus=(0,), jobs=2, verbose=True
    )
    progress = Quiet()
    sweep.run(request, progress)
    told = [line for line in progress.said if "us measured" in line]
    assert len(told) == 3
    assert any("no config beats it" in line for line in told)
    assert any("x the default's" in line for line in told)


@pytest.mark.parametrize("verbose", [False, True])
def test_candidates_that_spill_are_counted_and_verbose_lists_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    """Also where an error ends the only kernel."""

    def measure(*args: Any) -> Any:
        for tile in (64, 128):
            config = Config(constants={"tile_m": tile})
            spills = Failure(config=config, stage="resources", message="registers spill to a stack")
            args[-1].show(CandidateFailed(kernel="scale", problem=_bucket(1), failure=spills))
        raise TuneError("nothing is left")

    monkeypatch.setattr(sweep, "measure_kernel", measure)
    request = SweepRequest(
        kernels=(scale_in(folder / "tables")["scale"],), arch=SM90, gpus=(0,), jobs=2, verbose=verbose
    )
    progress = Quiet()
    with pytest.raises(TuneError, match="nothing is left"):
        sweep.run(request, progress)
    each = [line for line in progress.said if "registers spill" in line]
    counts = [line for line in progress.said if "2 configs left out, whose code spills" in line]
    assert (len(each), len(counts)) == ((2, 0) if verbose else (0, 1))


def test_winners_are_rechecked_before_they_are_published(folder: Path) -> None:
    _tune(folder)
    rechecked = {problem.size("M") for what, problem, _ in sessions[0].asked if what == "recheck"}
    assert rechecked == {1, 64, 256}


def test_a_second_sweep_with_the_same_outcome_changes_no_byte(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tune(folder)
    first = _path(folder).read_bytes()
    monkeypatch.setattr(Session, "noise", 1.008)
    report = _tune(folder)
    assert len(sessions[1].asked) == len(sessions[0].asked), "it measured again"
    assert _path(folder).read_bytes() == first
    assert report.rows[0].changed == 0


def test_a_config_that_is_wrong_wins_nowhere_and_is_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "wrong", frozenset({64}))
    report = _tune(folder)
    table = store.read_table(_path(folder))
    assert all(config["tile_m"] != 64 for config in table.portfolio)
    assert all(entry.config["tile_m"] != 64 for entry in table.entries)
    assert report.rows[0].failures > 0


@pytest.mark.parametrize("lost_after", [1, 30, 47, 75, 120])
def test_a_sweep_that_was_stopped_goes_on_and_repeats_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lost_after: int
) -> None:
    monkeypatch.setattr(Session, "fails_after", lost_after)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    assert not _path(folder).exists()
    monkeypatch.setattr(Session, "fails_after", None)
    _tune(folder)
    first, second = sessions[0].told, sessions[1].told
    assert len(first) == lost_after
    whole = _path(folder).read_bytes()
    _path(folder).unlink()
    _tune(folder)
    assert _path(folder).read_bytes() == whole, "stopped and resumed, or in one go: the same table"
    # The order is chance: a problem whose compilations are done comes before one that still waits for some.
    assert Counter(sessions[2].told) == Counter(first + second)


def test_a_wrong_result_in_the_journal_is_told_to_the_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "wrong", frozenset({64}))
    monkeypatch.setattr(Session, "fails_after", 30)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    monkeypatch.setattr(Session, "fails_after", None)
    _tune(folder)
    assert sessions[0].fault_counts.wrong == set()
    assert {config["tile_m"] for config in sessions[1].fault_counts.wrong} == {64}


def test_a_changed_driver_is_not_mixed_with_what_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fails_after", 20)
    with pytest.raises(TuneError):
        _tune(folder)
    monkeypatch.setattr(Session, "driver", "590.2")
    with pytest.raises(JournalMismatchError, match=r"driver.*580\.1.*590\.2"):
        _tune(folder)
    monkeypatch.setattr(Session, "fails_after", None)
    assert _tune(folder, fresh=True).complete


def test_a20_a_compiler_that_is_gone_is_named_and_not_a_journal_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fails_after", 20)
    with pytest.raises(TuneError):
        _tune(folder)
    identity = Session.identity
    monkeypatch.setattr(Session, "identity", lambda session: {**identity(session), "tileiras": ""})
    monkeypatch.setattr(sweep.cutile, "compiler_version", lambda: None)
    with pytest.raises(TuneError, match=r"no cuTile compiler .* is installed here"):
        _tune(folder)


def test_a_journal_of_a_smaller_gpu_of_the_same_name_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fails_after", 20)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    smaller = dataclasses.replace(Device.reference(SM90), sm_count=66)
    monkeypatch.setattr(Session, "device", lambda self: smaller)
    with pytest.raises(JournalMismatchError, match="sm_count was 132, is 66"):
        _tune(folder)


def test_a_journal_checked_against_another_reference_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fails_after", 20)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    found = scale_in(folder / "tables")["scale"]
    looser = dataclasses.replace(
        found.tunable, reference=lambda source, target: Close(value=source.double() * 2, rtol=0.5, atol=0.01)
    )
    request = SweepRequest(
        kernels=(dataclasses.replace(found, tunable=looser),), arch=SM90, gpus=(0,), jobs=2
    )
    with pytest.raises(JournalMismatchError, match="check_hash was"):
        sweep.run(request, Quiet())


def test_a_kernel_whose_outputs_its_source_tells_is_swept_as_one_that_names_them(folder: Path) -> None:
    _tune(folder)
    named = _path(folder).read_bytes()
    _path(folder).unlink()
    found = scale_in(folder / "tables")["scale"]
    untold = dataclasses.replace(found, tunable=dataclasses.replace(found.tunable, outputs=None))
    assert untold.tunable.output_names == ("target",)
    assert check_hash(untold.tunable) == check_hash(found.tunable)
    assert sweep.run(SweepRequest(kernels=(untold,), arch=SM90, gpus=(0,), jobs=2), Quiet()).complete
    assert _path(folder).read_bytes() == named


def test_a_result_is_taken_over_whatever_it_was_measured_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fastest", lambda self, problem: 32)
    _tune(folder)
    monkeypatch.setattr(Session, "fastest", None)
    monkeypatch.setattr(Session, "fails_after", 70)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    _path(folder).unlink()  # without the incumbent other configs are timed again
    monkeypatch.setattr(Session, "fails_after", None)
    _tune(folder)
    _path(folder).unlink()
    _tune(folder)
    before, after, whole = (Counter(session.told) for session in sessions[1:])
    assert before - whole, "it timed the incumbent too"
    assert not after - (whole - before), "it measured again what was there"


def test_what_compiles_after_a_stop_is_measured_at_every_problem(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tune(folder)
    whole = _path(folder).read_bytes()
    _path(folder).unlink()
    wait = CompileFeed.wait

    def killed(feed: CompileFeed, keys: Iterable[str], progress: Callable[[], None]) -> Any:
        tall = {key for key, jobs in feed._wanted.items() if "_I64_I" in next(iter(jobs.values())).signature}
        gone = {key: CompileFailure(key=key, message="was killed by SIGKILL", seconds=1.0) for key in tall}
        return {key: gone.get(key, result) for key, result in wait(feed, keys, progress).items()}

    monkeypatch.setattr(Session, "fails_after", 75)
    with monkeypatch.context() as patch:
        patch.setattr(CompileFeed, "wait", killed)
        with pytest.raises(TuneError, match="lost"):
            _tune(folder)
    assert len({problem for what, problem, _ in sessions[1].asked if what == "measure"}) >= 3
    # The first problem is listed again, and the tuner stops once more.
    monkeypatch.setattr(Session, "fails_after", 1)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    monkeypatch.setattr(Session, "fails_after", None)
    _tune(folder)
    assert _path(folder).read_bytes() == whole


def test_a_provisional_time_is_handed_back_and_not_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "provisional", True)
    monkeypatch.setattr(Session, "fails_after", 12)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    alone = [config for what, _, config, _ in sessions[0].told if what == "alone"]
    monkeypatch.setattr(Session, "fails_after", None)
    _tune(folder)
    assert sessions[1].known
    assert sessions[1].known <= set(alone)
    _path(folder).unlink()
    _tune(folder)
    assert Counter(sessions[2].told) == Counter(sessions[0].told + sessions[1].told)


def test_a_journal_that_cannot_be_renamed_is_a_note_after_a_good_publish(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "retire", lambda self: "it cannot be renamed; remove it")
    progress = Quiet()
    assert _tune(folder, progress).complete
    assert any("it cannot be renamed; remove it" in line for line in progress.said)


# Members that fall ------------------------------------------------------------------------------------------


def _bytes_without_tall_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The table of a sweep in which 64 rows are wrong from the start."""
    with monkeypatch.context() as patch:
        patch.setattr(Session, "wrong", frozenset({64}))
        patch.setattr("aot_tune.tuner.sweep.report.JOURNALS", folder / "other journal")
        _tune(folder)
    whole = _path(folder).read_bytes()
    _path(folder).unlink()
    sessions.clear()
    return whole


@pytest.mark.parametrize("size", [213, 149, 64, 256])
def test_a_member_that_is_wrong_at_one_size_is_replaced_by_the_next_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    whole = _bytes_without_tall_tiles(folder, monkeypatch)
    monkeypatch.setattr(Session, "wrong_at", frozenset({(64, size)}))
    assert _tune(folder).complete
    assert _path(folder).read_bytes() == whole
    assert max(entry.gain for entry in store.read_table(_path(folder)).entries) > 1.2


@pytest.mark.parametrize("killed", [False, True])
def test_a_winner_that_falls_in_the_recheck_is_replaced_also_after_a_resume(
    folder: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    whole = _bytes_without_tall_tiles(folder, monkeypatch)
    monkeypatch.setattr(Session, "wrong_late", frozenset({(64, 256)}))
    if killed:

        def full(path: Path, table: Table) -> bool:
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr("aot_tune.tuner.publish.publish", full)
            with pytest.raises(StoreError):
                _tune(folder)
    report = _tune(folder)
    assert _path(folder).read_bytes() == whole
    assert report.rows[0].failures > 0
    if killed:
        assert not sessions[1:], "it measured, or verified again, what was there"


def test_twins_of_a_config_that_is_found_wrong_late_fall_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "wrong_late", frozenset({(64, 256)}))
    _tune(folder)
    asked = [configs for *at, configs in sessions[0].asked if at == ["recheck", _bucket(256)]]
    verified = [config for configs in asked for config in configs if config["tile_m"] == 64]
    records = read(folder / "journal/sm90/scale.done", accepts).records
    candidates = scale_in(folder)["scale"].tunable.candidates(SM90, _bucket(256))
    order = [DEFAULT, *(config for config in candidates if config != DEFAULT)]
    listed = SweepResults(None, records).listed(_bucket(256), order, exhaustive=False)
    assert listed is not None
    assert {config["tile_m"] for config in listed.twins} >= {64}
    leaders = [listed.twins.get(config, config) for config in verified]
    assert len(leaders) == len(set(leaders)) > 0


def test_a_winner_that_fails_in_another_way_does_not_win_there_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fastest", lambda self, problem: 64)
    monkeypatch.setattr(Session, "wrong_late", frozenset({(64, 64)}))
    monkeypatch.setattr(Session, "late_stage", "memory")
    _tune(folder)
    winners = {
        entry.bucket.size("M"): entry.config["tile_m"] for entry in store.read_table(_path(folder)).entries
    }
    assert winners == {1: 64, 64: 16, 256: 64}


# Defaults that fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 41], ids=["at an edge", "inside a bucket"])
def test_a_bucket_whose_default_faults_is_left_out_and_the_sweep_is_incomplete(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(Session, "default_fails", frozenset({size}))
    report = _tune(folder)
    assert not report.rows[0].refusals
    assert not report.complete
    assert [entry.bucket.size("M") for entry in store.read_table(_path(folder)).entries] == [1, 256]
    (line,) = report.rows[0].left_out
    assert line == (
        f"{_bucket(64)}: no entry: its default ({DEFAULT}) failed at {_bucket(size)}: "
        "fault: an illegal memory access"
    )
    assert f"scale: left out: {line}" in closing_table(report.rows)


def test_a_default_that_is_wrong_late_ends_the_kernel_and_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "wrong_late", frozenset({(16, 256)}))
    for _ in range(2):  # also where the journal has its failure
        with pytest.raises(TuneError, match=r"scale dtype=bfloat16 M=256 .*the default .* a wrong result"):
            _tune(folder)
    assert not _path(folder).exists()
    monkeypatch.setattr(Session, "late_stage", "memory")
    report = _tune(folder, fresh=True)
    assert not report.complete
    assert [entry.bucket.size("M") for entry in store.read_table(_path(folder)).entries] == [1, 64]


# Entries that would be worse --------------------------------------------------------------------------------


def test_an_entry_that_gains_less_for_no_reason_is_published_only_when_allowed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tune(folder)
    before = _path(folder).read_bytes()
    monkeypatch.setattr(Session, "fastest", lambda self, problem: 16)
    report = _tune(folder)
    assert not report.complete
    assert any("gain over the default falls from" in reason for reason in report.rows[0].refusals)
    assert all("--allow-worse" in reason for reason in report.rows[0].refusals)
    assert _path(folder).read_bytes() == before
    progress = Quiet()
    assert _tune(folder, progress, allow_worse=True).complete
    assert not sessions[2:], "it measured again"
    assert any("gain over the default falls from" in line for line in progress.said)
    assert _path(folder).read_bytes() != before


def test_an_entry_whose_old_winner_is_wrong_now_may_gain_less(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tune(folder)
    monkeypatch.setattr(Session, "wrong", frozenset({32, 64}))
    progress = Quiet()
    assert _tune(folder, progress).complete
    assert all(entry.gain == 1 for entry in store.read_table(_path(folder)).entries)
    assert any("gain over the default falls from" in line for line in progress.said)


def test_disturbed_samples_are_told_in_the_table_and_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "disturbed", "another process used the GPU")
    report = _tune(folder)
    assert len(report.rows[0].disturbed) == 3
    table = store.read_table(_path(folder))
    assert {entry.disturbed for entry in table.entries} == {"another process used the GPU"}
    assert "disturbed samples: dtype=bfloat16 M=1" in "\n".join(closing_table(report.rows))
    monkeypatch.setattr(Session, "disturbed", None)
    _tune(folder)
    assert {entry.disturbed for entry in store.read_table(_path(folder)).entries} == {None}


# Problems and kernels that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 213])
def test_a_problem_that_cannot_be_opened_is_left_out_and_the_others_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(Session, "unopened", frozenset({size}))
    report = _tune(folder)
    assert not report.rows[0].refusals
    assert not report.complete
    (told,) = report.rows[0].left_out
    assert f"M={size} N=1024: make_args was killed by SIGKILL" in told
    assert f"left out: dtype=bfloat16 M={size}" in "\n".join(closing_table(report.rows))
    entries = store.read_table(_path(folder)).entries
    assert [entry.bucket.size("M") for entry in entries] == ([1, 256] if size == 64 else [1, 64, 256])
    assert all(point.size["M"] != size for entry in entries for point in entry.points)


@pytest.mark.parametrize(
    "error",
    [DeclarationError("the kernel changes its argument source"), TuneError("the default is wrong")],
)
def test_a_kernel_that_fails_at_its_turn_leaves_the_others_running(folder: Path, error: Exception) -> None:
    Session.raises["other"] = error
    report, progress = _two(folder)
    assert not report.complete
    assert [row.failed for row in report.rows] == [True, False]
    assert report.rows[0].refusals == (str(error),)
    assert any(f"other: cannot be swept: {error}" in line for line in progress.said)
    assert _path(folder).exists()
    assert "other: not published: " + str(error) in closing_table(report.rows)


@pytest.mark.parametrize("error", [GpuLostError("the GPU is lost"), JournalWriteError("no space left")])
def test_a_lost_gpu_and_a_full_disk_stop_all_kernels(folder: Path, error: Exception) -> None:
    Session.raises["other"] = error
    with pytest.raises(TuneError, match=str(error)):
        _two(folder)
    assert len(sessions) == 1
    # The GPU may have begun with the other kernel before all were told to stop.
    assert not store.table_path(folder / "tables", SM90, "scale").exists()


def test_a_grid_that_fails_for_one_config_is_told_and_the_least_time_goes_to_the_session(
    folder: Path,
) -> None:
    found = scale_in(folder / "tables")["scale"]

    def grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
        if config["tile_m"] == 64 and config.hints["occupancy"] == 2:
            raise KeyError("no such row")
        return found.tunable.grid_fn(config, device, problem)

    tunable = dataclasses.replace(
        found.tunable, grid_fn=grid, work=lambda config, problem: Work(load_bytes=1e9)
    )
    progress = Quiet()
    request = SweepRequest(
        kernels=(dataclasses.replace(found, tunable=tunable),), arch=SM90, gpus=(0,), jobs=2
    )
    sweep.run(request, progress)
    assert any("launch" in line and "grid_fn raised KeyError" in line for line in progress.said)
    assert all(0 < least < 1 for least in sessions[0].least.values())


@pytest.mark.parametrize("first", [True, False], ids=["before", "ahead"])
def test_a_kernel_that_a_child_cannot_import_leaves_the_others_compiling(folder: Path, first: bool) -> None:
    report, _ = _two(folder, first=first, grid_fn=lambda config, device, problem: (1, 1))
    rows = {row.kernel: row for row in report.rows}
    assert "no kernel 'other'" in rows["other"].refusals[0]
    assert (rows["other"].failed, rows["scale"].complete) == (True, True)


def test_the_next_kernel_begins_before_the_last_round_of_the_one_before_is_over(folder: Path) -> None:
    progress = Quiet()

    def wait() -> None:
        until = time.monotonic() + 30
        while not any("Started" in line and "scale" in line for line in progress.said):
            assert time.monotonic() < until, "it waits for the end of the one before"
            time.sleep(0.01)

    Session.meanwhile.append(wait)
    report, _ = _two(folder, progress=progress)
    assert report.complete
    assert [row.kernel for row in report.rows] == ["other", "scale"]
    assert len(sessions) == 1, "one process a GPU serves both"


def test_a_stale_journal_is_told_before_the_first_kernel_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fails_after", 5)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    monkeypatch.setattr(Session, "fails_after", None)
    monkeypatch.setattr(Session, "driver", "590.2")
    sessions.clear()
    report, progress = _two(folder)
    assert "scale: cannot be swept" in progress.said[0]
    assert "driver was 580.1, is 590.2" in progress.said[0]
    assert [session.name for session in sessions] == ["other"]
    assert [row.failed for row in report.rows] == [False, True]


def test_fresh_leaves_the_journal_of_a_running_sweep_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second() -> None:
        with pytest.raises(TuneError, match="holds this journal"):
            _tune(folder, fresh=True)

    Session.meanwhile.append(second)
    assert _tune(folder).complete
    assert not list((folder / "journal/sm90").glob("*.old"))


def test_a_partial_sweep_keeps_the_other_entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tune(folder)
    before = store.read_table(_path(folder))
    monkeypatch.setattr(Session, "noise", 1.005)
    bucket = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
    _tune(folder, problems={"scale": (bucket,)})
    after = store.read_table(_path(folder))
    assert [entry.bucket for entry in after.entries] == [entry.bucket for entry in before.entries]
    assert {problem.size("M") for _, problem, _ in sessions[1].asked} <= set(range(33, 65))


def test_a_selection_published_meanwhile_leaves_the_journal_of_a_stopped_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fails_after", 40)
    with pytest.raises(TuneError, match="lost"):
        _tune(folder)
    monkeypatch.setattr(Session, "fails_after", None)
    bucket = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
    assert _tune(folder, problems={"scale": (bucket,)}).rows[0].resumed == 0
    assert _tune(folder).rows[0].resumed > 0


def test_a_whole_sweep_counts_and_names_the_entries_that_it_removes(folder: Path) -> None:
    _tune(folder)
    whole = _path(folder).read_bytes()
    _tune(folder, **_of(_bucket(64, "float16")))
    assert len(store.read_table(_path(folder)).entries) == 4
    progress = Quiet()
    report = _tune(folder, progress)
    assert _path(folder).read_bytes() == whole
    assert report.rows[0].changed == 1
    (said,) = [line for line in progress.said if "removed" in line]
    assert "dtype=float16 M=64 N=1024: its entry is removed: no declared problem needs it" in said
    assert "add it to `typical`" in said


def _installs_what_the_tables_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuTile and its compiler be those of the tables that these tests write."""
    monkeypatch.setattr("aot_tune.tuner.sweep.stale.cutile.version", lambda: "1.7.0")
    monkeypatch.setattr("aot_tune.tuner.sweep.stale.cutile.compiler_version", lambda: "13.4.92")


def test_only_what_is_stale_is_swept_and_nothing_where_nothing_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installs_what_the_tables_are_of(monkeypatch)
    found = scale_in(folder / "tables")["scale"]
    request = SweepRequest(kernels=(found,), arch=SM90, gpus=(0,), jobs=2)
    assert only_stale(request, Quiet()) == request, "there is no table"
    _tune(folder)
    assert only_stale(request, Quiet()).kernels == ()
    whole = store.read_table(_path(folder))
    _path(folder).write_bytes(writer.dump(dataclasses.replace(whole, entries=whole.entries[:2])))
    progress = Quiet()
    left = only_stale(request, progress)
    assert left.problems == {"scale": (_bucket(256),)}
    assert any("M=256 N=1024 is stale: it has no entry" in line for line in progress.said)
    assert sweep.run(left, progress).complete
    assert only_stale(request, Quiet()).kernels == ()


def test_a_prediction_of_what_is_stale_is_of_what_no_fresh_table_measures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installs_what_the_tables_are_of(monkeypatch)
    found = scale_in(folder / "tables")["scale"]
    request = SweepRequest(kernels=(found,), arch=SM90, out=folder / "predicted")
    assert only_stale(request, Quiet()) == request, "there is no table"
    _tune(folder)
    assert only_stale(request, Quiet()).kernels == ()
    whole = store.read_table(_path(folder))
    _path(folder).write_bytes(writer.dump(dataclasses.replace(whole, entries=whole.entries[:2])))
    assert only_stale(request, Quiet()).problems == {"scale": (_bucket(256),)}

    def predicted(*entries: Entry) -> Table:
        made = tuple(dataclasses.replace(entry, evidence="predicted") for entry in entries)
        return dataclasses.replace(whole, entries=made)

    path = write(folder / "predicted", predicted(*whole.entries))
    progress = Quiet()
    assert only_stale(request, progress).kernels == ()
    (said,) = progress.said
    assert f"scale: it has no entry; the stale buckets are already predicted in {path}" in said
    _path(folder).unlink()
    assert only_stale(request, Quiet()).kernels == ()
    write(folder / "predicted", predicted(*whole.entries[:2]))
    assert only_stale(request, Quiet()).problems == {"scale": (_bucket(256),)}
    write(folder / "predicted", dataclasses.replace(predicted(*whole.entries), source_hash="0" * 16))
    progress = Quiet()
    assert only_stale(request, progress) == request
    (said,) = progress.said
    assert "scale: all of it is stale: it has no table" in said


# Two tunes at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there_before", [False, True])
def test_two_tunes_of_parts_at_once_lose_no_entry_and_share_a_portfolio(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there_before: bool
) -> None:
    if there_before:
        _tune(folder, **_of(_bucket(1)))
    monkeypatch.setattr(Session, "fastest", lambda self, problem: 64 if problem.size("M") > 64 else 32)
    Session.meanwhile.append(lambda: _tune(folder, **_of(_bucket(256))))
    report = _tune(folder, **_of(_bucket(64)))
    assert report.complete
    table = store.read_table(_path(folder))
    assert [entry.bucket.size("M") for entry in table.entries] == [1] * there_before + [64, 256]
    assert writer.dump(table) == _path(folder).read_bytes()
    ours, theirs = table.entries[-2:]
    assert (ours.config["tile_m"], theirs.config["tile_m"]) == (32, 64)
    for one, other in ((ours, theirs), (theirs, ours)):
        for point in one.points:
            times = dict(zip((*table.portfolio, DEFAULT), point.us, strict=True))
            assert times[one.config] == 13.0
            assert times[other.config] is None, "the two were never timed together"
    assert report.rows[0].changed == len(table.entries), "each has a column more"
    assert list((folder / "journal/sm90").glob("*.jsonl")) == []


def test_a_whole_sweep_takes_in_what_was_published_of_its_buckets_meanwhile(folder: Path) -> None:
    Session.meanwhile.append(lambda: _tune(folder, **_of(_bucket(64))))
    assert _tune(folder).complete
    assert [entry.bucket.size("M") for entry in store.read_table(_path(folder)).entries] == [1, 64, 256]


def test_a_whole_sweep_does_not_remove_what_was_added_meanwhile(folder: Path) -> None:
    Session.meanwhile.append(lambda: _tune(folder, **_of(_bucket(64, "float16"))))
    with pytest.raises(TuneError, match=r"added 1 entries meanwhile.*float16 M=64.*to `typical`"):
        _tune(folder)
    assert [entry.bucket["dtype"] for entry in store.read_table(_path(folder)).entries] == ["float16"]
    assert _tune(folder).resumed > 0


@pytest.mark.parametrize("chosen", [{}, _of(_bucket(64))], ids=["whole", "part"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda t: dataclasses.replace(t, source_hash="0" * 16),
            "the source's hash was 0000000000000000, is",
        ),
        (
            lambda t: dataclasses.replace(t, built_with=dataclasses.replace(t.built_with, sm_count=78)),
            "multiprocessors was 78, is 132",
        ),
    ],
    ids=["source", "device"],
)
def test_a_table_of_other_code_or_of_another_gpu_that_came_meanwhile_stays_and_so_does_the_journal(
    folder: Path, change: Callable[[Table], Table], told: str, chosen: dict[str, Any]
) -> None:
    _tune(folder)
    other = writer.dump(change(store.read_table(_path(folder))))
    Session.meanwhile.append(lambda: _path(folder).write_bytes(other))
    with pytest.raises(TuneError, match=f"replaced meanwhile.*{told}.*run the same command again"):
        _tune(folder, **chosen)
    assert _path(folder).read_bytes() == other
    _path(folder).unlink()
    assert _tune(folder, **chosen).resumed > 0


def test_a_table_that_was_removed_meanwhile_is_written_with_what_was_swept(folder: Path) -> None:
    _tune(folder)
    Session.meanwhile.append(lambda: _path(folder).unlink())
    assert _tune(folder, **_of(_bucket(64))).complete
    assert [entry.bucket for entry in store.read_table(_path(folder)).entries] == [_bucket(64)]


# What stands in the way -------------------------------------------------------------------------------------


def _contents(folder: Path) -> dict[str, str | bytes]:
    return {
        file.name: os.readlink(file) if file.is_symlink() else file.read_bytes() for file in folder.iterdir()
    }


def _of_sm100(path: Path, whole: Table) -> None:
    path.write_bytes(writer.dump(dataclasses.replace(whole, arch=Arch.parse("sm100"))))


def _linked(path: Path, whole: Table) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _dangling(path: Path, whole: Table) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("put", "told"),
    [
        (_of_sm100, r"scale on sm100; move it to sm100/scale\.json, or remove it"),
        (_linked, "it is a link to elsewhere; remove it or tune there"),
        (_dangling, "it is a link to nowhere; remove it or tune there"),
        (lambda path, whole: path.chmod(0o444), "it is read-only; allow writing or choose another folder"),
    ],
    ids=["another arch", "link", "dangling link", "read-only"],
)
def test_a_table_that_cannot_be_replaced_is_refused_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path, Table], None], told: str
) -> None:
    _tune(folder)
    path, whole = _path(folder), store.read_table(_path(folder))
    put(path, whole)
    # Root may write anywhere: what access() says to others.
    monkeypatch.setattr("os.access", lambda path, mode: bool(os.stat(path).st_mode & 0o200))
    before = _contents(path.parent)
    with pytest.raises(AotTuneError, match=told):
        _tune(folder)
    assert len(sessions) == 1, "it began to measure"
    assert _contents(path.parent) == before


def _two(
    folder: Path, *, first: bool = True, progress: Quiet | None = None, **changes: Any
) -> tuple[SweepReport, Quiet]:
    """A sweep of `scale` and of `other`, the same under another name with `changes`; `other` may be first."""
    scale = scale_in(folder / "tables")["scale"]
    tunable = dataclasses.replace(scale.tunable, name="other", **changes)
    other = dataclasses.replace(scale, tunable=tunable)
    progress = progress or Quiet()
    kernels = (other, scale) if first else (scale, other)
    request = SweepRequest(kernels=kernels, arch=SM90, gpus=(0,), jobs=2)
    return sweep.run(request, progress), progress


def test_a_table_that_cannot_be_replaced_is_told_first_and_another_kernel_is_swept(folder: Path) -> None:
    store.table_path(folder / "tables", SM90, "other").parent.mkdir(parents=True)
    store.table_path(folder / "tables", SM90, "other").write_bytes(b"{")
    report, progress = _two(folder)
    assert not report.complete
    assert "other: cannot be swept" in progress.said[0]
    assert "remove it to start over" in report.rows[0].refusals[0]
    assert report.rows[0].failed
    assert report.rows[1].complete
    assert [session.name for session in sessions] == ["scale"]


def test_a_truncated_table_stops_the_sweep_and_is_left_as_it_was(folder: Path) -> None:
    _tune(folder)
    whole = _path(folder).read_bytes()
    _path(folder).write_bytes(whole[:100])
    with pytest.raises(TuneError, match=r"scale\.json.*remove it"):
        _tune(folder)
    assert _path(folder).read_bytes() == whole[:100]


def test_a_read_only_folder_is_refused_before_anything_is_measured(folder: Path) -> None:
    (folder / "tables").write_text("in the way")
    with pytest.raises(Exception, match="tables"):
        _tune(folder)
    assert not sessions


def test_a_wrong_declaration_is_refused_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "declaration_problems", lambda tunable, arch: ["scale: its space is empty"])
    with pytest.raises(DeclarationError, match="space is empty"):
        _tune(folder)
    assert not sessions


@pytest.mark.parametrize("wrong", [False, True])
def test_the_gpu_is_taken_before_declarations_are_checked_and_let_go_with_the_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """It is the only one, whether anything is measured or not."""
    happened: list[str] = []

    class Told(Session):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            happened.append("opened")

        def close(self) -> None:
            happened.append("closed")
            super().close()

    def problems(tunable: object, arch: object) -> list[str]:
        happened.append("checked")
        return ["scale: its space is empty"] if wrong else []

    monkeypatch.setattr(resources, "MeasureSession", Told)
    monkeypatch.setattr(sweep, "declaration_problems", problems)
    with pytest.raises(DeclarationError) if wrong else contextlib.nullcontext():
        _tune(folder)
    assert happened == ["opened", "checked", "closed"]


def test_what_a_declaration_may_not_mean_is_noted_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "declaration_remarks", lambda tunable, arch: ["scale: rows is compiled in"])
    progress = Quiet()
    _tune(folder, progress)
    assert progress.said[0] == "Note(text='remark: scale: rows is compiled in')"


def test_a_declaration_that_raises_between_its_sizes_is_noted_and_its_table_published(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*args: object) -> None:
        raise ZeroDivisionError("no tiles")

    monkeypatch.setattr(decision, "fitted_slopes", raising)
    progress = Quiet()
    assert _tune(folder, progress).complete
    [told] = [line for line in progress.said if "slopes" in line]
    assert told.startswith("Note(text='scale: slopes are not fitted, because the declaration raises Z")
    assert len(store.read_table(_path(folder)).entries) == 3
