"""Kernels of other modules, swept by the real tuner and compiler; a session without a GPU takes the times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aot_tune.bench.sections import declared
from aot_tune.bench.sections.part import Request
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError, UsageError
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from tests.support import hashed_sessions, samples, several_kernels
from tests.support.hashed_sessions import HashedSession
from tests.support.samples import SM90, entry
from tests.support.tilegym_sites import FOLDER, MISSING


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose arch is known, and which is never used."""
    monkeypatch.setattr(declared, "chosen_arch", lambda name: SM90)
    with hashed_sessions.measuring(monkeypatch):
        yield


@pytest.mark.process
def test_a_kernel_of_another_module_is_swept_and_its_gain_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an earlier run has left: tables and journal are the sweep's own."""
    monkeypatch.setitem(declared.OWN_SEARCHES, "short", lambda config: config["tile_m"] == 16)
    [part] = declared.run(Request(modules=(several_kernels.MODULE,), kernels=("short",)))
    figures = part.figures
    assert (part.name, part.kernels) == ("short", ())
    assert (figures["module"], figures["problems"]) == (several_kernels.MODULE, 1)
    measured = {config for _, problem, config in HashedSession.told if problem.size("M") == 64}
    assert figures["candidates verified"] + figures["candidates failed"] == len(measured)
    [row] = figures["rows"]
    ratio = row["default_us"] / row["winner_us"]
    assert row["default over winner"] == ratio >= 1
    assert figures["default over winner"] == pytest.approx(
        {"geometric mean": ratio, "least": ratio, "most": ratio}
    )
    own = figures["best of their search over winner"]["geometric mean"]
    assert 1 <= own <= ratio, "the default is one of those that are searched"
    assert figures["sweep_s"] > 0


def test_the_best_of_the_authors_search_is_told_over_the_winner() -> None:
    bucket = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
    fast, theirs, slow = samples.SPACE[4], samples.SPACE[1], samples.SPACE[0]
    first = {bucket: {slow: 30.0, theirs: 24.0, fast: 12.0}}
    won = entry(bucket, fast, (fast,))
    own = {slow, theirs}
    told = declared.over_own_search([won], first, own.__contains__)
    assert told["best of their search over winner"]["geometric mean"] == pytest.approx(2.0)
    told = declared.over_own_search([won], first, {fast, slow}.__contains__)
    assert told["best of their search over winner"]["most"] == 1.0, "they find the winner too"
    assert declared.over_own_search([won], first, None) == {}
    assert declared.over_own_search([won], first, lambda config: False) == {}


def test_a_kernel_that_cannot_be_swept_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def swept(found: FoundKernel, arch: Arch) -> dict[str, str]:
        if found.tunable.name == "long":
            raise TuneError("nothing compiles")
        return {"kernel": found.tunable.name}

    monkeypatch.setattr(declared, "swept", swept)
    asked = Request(modules=(several_kernels.MODULE,))
    parts = {part.name: part.figures for part in declared.run(asked)}
    assert parts["long"] == {"failed": "nothing compiles"}
    assert parts["middle"] == {"kernel": "middle"}
    assert list(parts) == ["short", "long", "middle", "scale"], "as the module has them"


def test_no_kernel_begins_after_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter((0.0, 1.0, 61.0))
    monkeypatch.setattr(declared.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(declared, "swept", lambda found, arch: {})
    found = list(declared.run(Request(modules=(several_kernels.MODULE,), limit_s=60)))
    assert [part.name for part in found] == ["short"]
    assert "stopped before long: the limit of 60 s is over" in capsys.readouterr().out


def test_a_kernel_that_is_not_there_is_refused_before_a_sweep() -> None:
    with pytest.raises(UsageError, match="lunch; there is short long middle scale"):
        declared.chosen(Request(modules=(several_kernels.MODULE,), kernels=("lunch",)))


@pytest.mark.filterwarnings("ignore:Triton backend import failed")
@pytest.mark.skipif(not (FOLDER / "tilegym").is_dir(), reason=MISSING)
def test_the_authors_own_searches_are_in_the_spaces_of_tilegyms_products() -> None:
    for name, count in (("bmm", 18), ("group_gemm", 2)):
        [found] = declared.chosen(Request(modules=(f"tests.support.tilegym_declared.{name}",)))
        searched = declared.OWN_SEARCHES[found.tunable.name]
        bucket = found.tunable.buckets[0]
        assert sum(map(searched, found.tunable.space(SM90, bucket))) == count
        assert searched(found.tunable.default_config(SM90, bucket))
        assert declared.library_of(found.tunable) == "tilegym 1.5.1"
