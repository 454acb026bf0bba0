"""The section `replay` without a GPU: its processes are scripted, or run on the stand-in driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aot_tune.bench.libraries import fetched
from aot_tune.bench.sections import replay
from aot_tune.bench.sections.part import Part, Request
from aot_tune.errors import UsageError
from tests.support.children.replay_on_the_stand_in import SMALL
from tests.support.tilegym_sites import FOLDER, MISSING

SCRIPTED = "tests.support.children.scripted_replay"

ON_THE_STAND_IN = "tests.support.children.replay_on_the_stand_in"

SHAPES = {"softmax": ((64, 512), (64, 1024)), "rope": ((1, 8), (2, 8))}

BARE = {
    "first0": {"ms": 1000.0, "searches": 1},
    "first1": {"ms": 600.0, "searches": 1},
    "gpu": {"us": 10.0},
    "later": {"us": 20.0},
}
COMPILED = {
    "first0": {"ms": 100.0, "searches": 0},
    "first1": {"ms": 50.0, "searches": 0},
    "gpu": {"us": 8.0},
    "later": {"us": 21.0},
}
CUBINS = {
    "first0": {"ms": 10.0, "searches": 0},
    "first1": {"ms": 2.0, "searches": 0},
    "gpu": {"us": 8.2},
    "later": {"us": 20.2},
}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Scripted processes; the file that they note their commands in."""
    monkeypatch.setattr(replay, "COMMAND_LINE", SCRIPTED)
    monkeypatch.setattr(replay, "SHAPES", SHAPES)
    return tmp_path / "log"


def parts(
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: Sequence[str] = ("softmax",),
    *,
    searches: bool = True,
    answer_s: float = 30.0,
    limit_s: float = 100.0,
    **answers: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    answers = {"bare": BARE, "compiled": COMPILED, "cubins": CUBINS, **answers}
    script = {"answers": answers, "searches": searches, "log": str(log)}
    monkeypatch.setenv("REPLAY_SCRIPT", json.dumps(script))
    found = replay.measured(names, "sm90", child=SCRIPTED, answer_s=answer_s, limit_s=limit_s)
    return {part.name: dict(part.figures) for part in found}


@pytest.mark.process
def test_the_processes_of_an_operation_are_compared_shape_by_shape(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = parts(log, monkeypatch)
    figures = found["softmax"]
    assert (figures["searches"], figures["tables"]) == (2, 1)
    assert figures["record_ms"] == {"64x512": 100.0, "64x1024": 100.0}
    one = figures["shapes"]["64x512"]
    assert one["first_ms"] == {"bare": 1000.0, "compiled": 100.0, "cubins": 10.0}
    assert one["speed-up"] == {"compiled": 10.0, "cubins": 100.0}
    assert one["gpu_us"] == {"bare": 10.0, "compiled": 8.0, "cubins": 8.2}
    assert one["later, replayed / bare"]["cubins"] == {"median": 1.01, "least": 1.01, "most": 1.01}
    assert one["gpu, two processes with one config"]["median"] == 1.025
    said = found["summary"]
    assert said["operations"] == ["softmax"]
    assert said["speed-up, compiled"] == {
        "geometric mean": 11.0, "least": 10.0, "at": "softmax 64x512",
    }  # fmt: skip
    assert said["first call from cubins, ms"] == {"most": 10.0, "at": "softmax 64x512"}
    assert said["next first calls from cubins, ms"] == {"most": 2.0, "at": "softmax 64x1024"}
    assert said["recorded winner over own"] == {
        "most": 0.82, "at": "softmax 64x512, cubins", "slower beyond noise": [],
    }  # fmt: skip
    assert said["later calls over bare"]["slower beyond noise"] == [
        "softmax 64x512, compiled", "softmax 64x1024, compiled",
    ]  # fmt: skip


@pytest.mark.process
def test_first_calls_come_process_by_process_and_later_ones_in_turns(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "ROUNDS", 2)
    parts(log, monkeypatch)
    lines = log.read_text().splitlines()
    processes = ["bare", "compiled", "cubins"]
    assert lines[:3] == ["record prepare", "record first0", "record first1"]
    del lines[:3]
    assert lines[:3] == [f"{one} prepare" for one in processes]
    assert lines[3:9] == [f"{one} first{place}" for one in processes for place in (0, 1)]
    assert lines[9:21] == [
        f"{one} {do}{place}" for place in (0, 1) for do in ("gpu", "later") for one in processes
    ]
    assert lines[21:24] == [f"{one} gpu0" for one in reversed(processes)]
    assert len(lines) == 33


@pytest.mark.process
def test_what_makes_no_search_is_called_as_it_comes_and_behind_the_door(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {"first": {"ms": 100.0, "searches": 0}, "gpu": {"us": 10.0}, "later": {"us": 20.0}}
    found = parts(log, monkeypatch, searches=False, bare=bare)
    figures = found["softmax"]
    assert (figures["searches"], figures["tables"]) == (0, 0)
    assert list(figures["shapes"]["64x512"]["first_ms"]) == ["bare", "compiled"]
    assert found["summary"]["without a search"] == ["softmax"]
    assert "speed-up, compiled" not in found["summary"]
    assert "cubins" not in log.read_text()


@pytest.mark.process
@pytest.mark.parametrize(
    ("faults", "failed"),
    [
        ({"record": {"first1": {"failed": "ValueError: no config"}}}, "record: ValueError: no config"),
        (
            {"bare": {**BARE, "first1": {"failed": "OutOfMemoryError: 8 GB"}}},
            "bare: OutOfMemoryError: 8 GB",
        ),
        ({"cubins": {"later0": "dies"}}, "cubins: CUDA error: out of memory"),
    ],
)
def test_an_operation_that_fails_says_why_and_the_others_go_on(
    faults: dict[str, Any], failed: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = parts(log, monkeypatch, ("softmax", "rope"), **faults)
    assert found["softmax"] == {"failed": failed}
    assert list(found) == ["softmax", "rope", "summary"]
    assert "softmax" in found["summary"]["not measured"]


@pytest.mark.process
def test_a_process_that_hangs_is_killed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = parts(log, monkeypatch, compiled={"first0": "hangs"}, answer_s=3.0)
    assert found["softmax"] == {"failed": "compiled: killed after 3 s without an answer"}


@pytest.mark.process
def test_a_replaying_process_that_searches_is_a_failure_with_its_figures(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = {**COMPILED, "first1": {"ms": 500.0, "searches": 1}}
    figures = parts(log, monkeypatch, compiled=compiled)["softmax"]
    assert figures["failed"] == "a replaying process searched: compiled at 64x1024"
    assert figures["shapes"]["64x1024"]["first_ms"]["compiled"] == 500.0


@pytest.mark.process
def test_a_launch_without_a_cubin_is_told_and_is_no_figure_of_cubins(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"ms": 900.0, "searches": 0, "missing": "no cubin was shipped for softmax_K1"}
    found = parts(log, monkeypatch, cubins={**CUBINS, "first0": missing})
    one = found["softmax"]["shapes"]["64x512"]
    assert one["compiled although cubins were given"] == "no cubin was shipped for softmax_K1"
    said = found["summary"]
    assert said["compiled although cubins were given"] == ["softmax 64x512"]
    assert "first call from cubins, ms" not in said
    assert said["speed-up, cubins"]["least"] == 300.0


@pytest.mark.process
def test_no_operation_begins_after_the_limit(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(parts(log, monkeypatch, ("softmax", "rope"), limit_s=0.01)) == ["softmax", "summary"]
    assert "stopped before rope" in capsys.readouterr().out


@pytest.mark.process
def test_the_next_operation_imports_while_one_is_recorded_and_none_is_left(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, str, Any]] = []

    class Noted(replay._Child):
        def __init__(self, name: str, *rest: Any) -> None:
            super().__init__(name, *rest)
            started.append((rest[2].name, name, self))

    monkeypatch.setattr(replay, "_Child", Noted)
    parts(log, monkeypatch, ("softmax", "rope"), limit_s=0.01)
    assert [(operation, name) for operation, name, _ in started] == [
        ("softmax", "record"), ("softmax", "bare"), ("softmax", "compiled"), ("softmax", "cubins"),
        ("rope", "record"), ("softmax", "compile"),
    ]  # fmt: skip
    assert all(child._process.poll() is not None for _, _, child in started)


def test_an_operation_that_is_unknown_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="replay has no operation sofmax; there is matmul "):
        next(replay.run(Request(kernels=("sofmax",))))


def test_a_missing_library_is_said_with_the_command_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replay, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"make third-party .* name that folder in PYTHONPATH"):
        replay.library_paths(["tilegym"])
    (tmp_path / "build" / "third-party" / "tilegym" / "tilegym").mkdir(parents=True)
    assert replay.library_paths(["tilegym"]) == [tmp_path / "build" / "third-party" / "tilegym"]


@pytest.mark.parametrize(
    ("ratio", "slower"),
    [
        ({"median": 1.03, "least": 1.01}, True),
        ({"median": 1.03, "least": 0.99}, False),  # not in every round
        ({"median": 1.01, "least": 1.005}, False),  # a tie
    ],
)
def test_slower_is_more_than_a_tie_and_in_every_round(ratio: dict[str, float], slower: bool) -> None:
    assert replay.is_slower(ratio) is slower


# TileGym on the stand-in driver -----------------------------------------------------------------

NEEDS_TILEGYM = pytest.mark.skipif(not (FOLDER / "tilegym").is_dir(), reason=MISSING)

NEEDS_FLASHINFER = pytest.mark.skipif(
    not (fetched.FOLDER / "flashinfer").is_dir(), reason="FlashInfer is not fetched: make flashinfer"
)

TILEGYM = [name for name in SMALL if name not in replay.FLASHINFER]

SHORT = ("softmax",)
"""The operation of `make test`: its configs compile fast."""

SEARCHES = {name: 0 if name in ("rms_norm", "layer_norm") else 1 for name in SMALL}


def test_every_operation_is_called_on_the_stand_in_at_small_sizes() -> None:
    assert list(SMALL) == list(replay.SHAPES)
    assert all(len(shapes) == 3 == len(set(shapes)) for shapes in replay.SHAPES.values())


def answers(name: str, *options: str, commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", ON_THE_STAND_IN, name, *options],
        input="".join(json.dumps(one) + "\n" for one in commands),
        env={**os.environ, "CUDA_TILE_CACHE_DIR": "off"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.process
@NEEDS_TILEGYM
@pytest.mark.parametrize(
    "name",
    [
        *(one if one in SHORT else pytest.param(one, marks=pytest.mark.slow) for one in TILEGYM),
        *(pytest.param(one, marks=(pytest.mark.slow, NEEDS_FLASHINFER)) for one in replay.FLASHINFER),
    ],
)
def test_an_operation_is_called_as_its_library_has_it(name: str) -> None:
    commands = [{"do": "prepare"}, *({"do": do, "shape": 0} for do in ("first", "gpu", "later", "first"))]
    prepared, first, gpu, later, again = answers(name, commands=commands)
    assert prepared == {}
    assert first["searches"] == SEARCHES[name]
    assert again["searches"] == 0  # the library's own cache answers
    assert again["ms"] < first["ms"]
    assert gpu["us"] == 1000.0  # the stand-in's events are 1 ms apart
    assert later["us"] > 0


@pytest.mark.process
@pytest.mark.slow
@NEEDS_TILEGYM
def test_without_a_compiler_a_call_says_what_it_lacks() -> None:
    commands = [{"do": "prepare"}, *({"do": "first", "shape": place} for place in (0, 1, 2))]
    _, first, after, wrong = answers("rms_norm", "--no-compiler", commands=commands)
    assert first["missing"] == "the compiler was asked for"
    assert "missing" not in after
    assert wrong == {"failed": "IndexError: list index out of range"}


@pytest.mark.slow
@pytest.mark.process
@NEEDS_TILEGYM
def test_an_operation_is_recorded_compiled_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SHAPES", SMALL)
    found = list(replay.measured(["silu_and_mul"], "sm90", paths=[FOLDER], child=ON_THE_STAND_IN))
    assert [one.name for one in found] == ["silu_and_mul", "summary"], found
    figures = found[0].figures
    assert "failed" not in figures, figures
    assert (figures["searches"], figures["tables"]) == (2, 1)
    for one in figures["shapes"].values():
        assert one["first_ms"]["bare"] > one["first_ms"]["compiled"] > one["first_ms"]["cubins"]
        assert "compiled although cubins were given" not in one
        assert 0 < sum(one[replay.OURS].values()) < one["first_ms"]["cubins"]
        assert {"answers", "archives", "decompression"} <= {
            part for part, ms in one[replay.OURS].items() if ms
        }
    assert isinstance(found[1], Part)


@pytest.mark.slow
@pytest.mark.process
@NEEDS_FLASHINFER
@pytest.mark.parametrize("name", ["decode_paged"])
def test_flashinfer_s_operations_are_replayed_from_cubins_without_a_compiler(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "SHAPES", SMALL)
    paths = [fetched.FOLDER.absolute()]
    figures = next(iter(replay.measured([name], "sm90", paths=paths, child=ON_THE_STAND_IN))).figures
    assert "failed" not in figures, figures
    assert figures["searches"] == 1
    (one,) = figures["shapes"].values()
    assert "compiled although cubins were given" not in one, one
    assert one["first_ms"]["bare"] > one["first_ms"]["cubins"]
