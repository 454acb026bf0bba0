"""`--verify`: what is checked, what is remembered of it, what is asked again. The session is scripted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aot_tune.bench.kernels import verify
from aot_tune.declare.discovery import FoundKernel
from aot_tune.inputs import has_odd_sizes
from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.nvml import Gpu
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileResult
from aot_tune.tuner.measure.request import Recheck
from aot_tune.tuner.outcome import Failure
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import SM90, scale_in, scale_table, write


class Feed:
    """Compiles everything at once but what is named as broken."""

    def __init__(self, *_: object) -> None:
        self.broken: set[str] = set()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, jobs: Iterable[Any]) -> None:
        pass

    def wait(self, keys: Iterable[str], progress: object) -> Mapping[str, CompileResult]:
        held = Resources(registers=32, stack_bytes=0, shared_bytes=0, threads=128)
        return {
            key: Compiled(
                key=key, path=Path(key), code="", resources=held, loop=None, seconds=0.1, cached=False
            )
            for key in keys
        }


class Session:
    """Every config is right but those that a test says are wrong."""

    checked: list[tuple[Problem, int]]
    wrong: list[Config]

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def answer(self, request: Recheck) -> list[Failure]:
        assert request.launches == 0, "each config once: there are thousands"
        assert [has_odd_sizes(seed) for seed in request.seeds] == [False, True]
        assert [seed % 2 for seed in request.seeds] == [0, 1], "each poisons in its own way"
        Session.checked.append((request.problem, len(request.configs)))
        return [
            Failure(config=config, stage="verify", message="out: 3 elements are wrong")
            for config in request.configs
            if config in Session.wrong
        ]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FoundKernel:
    monkeypatch.setattr(verify, "CompileFeed", Feed)
    monkeypatch.setattr(verify, "MeasureSession", Session)
    monkeypatch.setattr(
        verify, "visible_gpus", lambda: (Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="GPU-0"),)
    )
    Session.checked, Session.wrong = [], []
    write(tmp_path, scale_table())
    return scale_in(tmp_path)["scale"]


def run(found: FoundKernel, tmp_path: Path, limit_s: float = 60.0) -> int:
    return verify.run([found], limit_s=limit_s, checked=tmp_path / "build" / "verified.jsonl")


def test_every_config_of_the_portfolio_and_the_default_is_checked_on_every_declared_shape(
    found: FoundKernel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(found, tmp_path) == 0
    assert Session.checked == [(problem, 3) for problem in found.tunable.typical_problems]
    told = capsys.readouterr().out
    assert "scale: 3 of 3 declared shapes, 18 results: none wrong" in told
    assert "held: no wrong result of any portfolio on any declared shape" in told


def test_what_was_right_is_not_checked_again_and_what_was_wrong_is(
    found: FoundKernel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Session.wrong = [scale_table().portfolio[1]]
    assert run(found, tmp_path) == 1
    assert "occupancy=2 on dtype=bfloat16 M=1 N=1024: verify: out: 3 elements" in capsys.readouterr().out
    Session.checked, Session.wrong = [], []
    assert run(found, tmp_path) == 0
    assert len(Session.checked) == 3
    Session.checked = []
    assert run(found, tmp_path) == 0
    assert Session.checked == []
    assert "3 of 3 declared shapes, 18 results" in capsys.readouterr().out


def test_another_portfolio_is_checked_anew(found: FoundKernel, tmp_path: Path) -> None:
    run(found, tmp_path)
    path = tmp_path / "sm90" / "scale.json"
    path.unlink()
    Session.checked = []
    run(found, tmp_path)
    assert [count for _, count in Session.checked] == [1, 1, 1]


def test_out_of_time_it_says_that_the_same_command_goes_on(
    found: FoundKernel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(found, tmp_path, limit_s=0) == 1
    told = capsys.readouterr().out
    assert "0 of 3 declared shapes" in told
    assert "not complete: the same command goes on" in told


def test_a_line_cut_off_by_a_kill_is_passed_over(found: FoundKernel, tmp_path: Path) -> None:
    run(found, tmp_path)
    path = tmp_path / "build" / "verified.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    Session.checked = []
    assert run(found, tmp_path) == 0
    assert len(Session.checked) == 1


def test_what_does_not_compile_is_told(
    found: FoundKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(
        Feed,
        "wait",
        lambda self, keys, progress: {
            k: CompileFailure(key=k, message="no such op", seconds=0.1) for k in keys
        },
    )
    assert run(found, tmp_path) == 1
    assert "does not compile: no such op" in capsys.readouterr().out
    assert Session.checked == []
