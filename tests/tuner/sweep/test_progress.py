"""Progress as a person sees it: plain lines, live bars on a pretended terminal, the closing table."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

from aot_tune.tuner.outcome import Failure, Stage
from aot_tune.tuner.plan.judged import NOT_JUDGED
from aot_tune.tuner.sweep.progress import (
    CandidateFailed,
    Compiling,
    Estimate,
    Finished,
    InTurn,
    KernelEnded,
    LiveProgress,
    Measuring,
    PlainProgress,
    Started,
    closing_table,
    failure_line,
    progress_on,
)
from aot_tune.tuner.sweep.report import SweptKernel
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

SM90 = Arch.parse("sm90")
PROBLEM = Problem({"M": 64, "N": 4096})
CONFIG = Config(constants={"tile_m": 64}, hints={"num_ctas": 1})


class _Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _row(**values: object) -> SweptKernel:
    row = SweptKernel(
        kernel="matmul",
        evidence="measured",
        problems=26,
        speedup=1.234,
        failures=3,
        compile_s=14.0,
        measure_s=61.25,
        verify_s=9.0,
        path=Path("tuned_configs/sm90/matmul.json"),
        changed=2,
    )
    return dataclasses.replace(row, **values)  # type: ignore[arg-type]


def _failed(config: Config, stage: Stage, message: str) -> CandidateFailed:
    failure = Failure(config=config, stage=stage, message=message)
    return CandidateFailed(kernel="matmul", problem=PROBLEM, failure=failure)


def _measured(kernel: str, done: int, total: int) -> Measuring:
    return Measuring(kernel=kernel, problem=PROBLEM, done=done, total=total)


def test_plain_lines_come_at_most_every_ten_seconds_and_at_the_end() -> None:
    stream, clock = io.StringIO(), _Clock()
    progress = PlainProgress(stream, clock=clock)
    progress.show(Started(kernel="matmul", arch=SM90, problems=2, jobs=100, device="NVIDIA H200"))
    for done in range(101):
        progress.show(Compiling(kernel="matmul", done=done, total=100, failures=0))
        clock.now += 0.25
    lines = stream.getvalue().splitlines()
    assert lines[0] == "matmul sm90 on NVIDIA H200: 2 problems, 100 compilations"
    assert "about 15 s left" in lines[1]
    assert [line.split(",")[0] for line in lines[1:]] == [
        "matmul: compiled 40/100",
        "matmul: compiled 80/100",
        "matmul: compiled 100/100",
    ]


def test_the_time_left_is_that_of_the_slower_of_compiling_and_measuring() -> None:
    clock = _Clock()
    estimate = Estimate(clock)
    assert estimate.left_s() == 0.0
    estimate.take(Compiling(kernel="matmul", done=0, total=10, failures=0))
    estimate.take(_measured("matmul", 0, 5))
    clock.now += 10
    estimate.take(Compiling(kernel="matmul", done=5, total=10, failures=0))  # 2 s each, 10 s left
    estimate.take(_measured("matmul", 1, 5))  # 10 s each, 40 s left
    assert estimate.left_s() == 40.0
    clock.now += 15
    assert estimate.left_s() == 25.0


def test_what_a_journal_answers_at_once_does_not_shorten_the_estimate() -> None:
    clock = _Clock()
    estimate = Estimate(clock)
    estimate.take(_measured("matmul", 20, 30))  # twenty were in the journal
    clock.now += 10
    estimate.take(_measured("matmul", 21, 30))
    assert estimate.left_s() == 90.0


def test_the_time_left_is_that_of_all_kernels_that_have_begun() -> None:
    clock = _Clock()
    estimate = Estimate(clock)
    estimate.take(_measured("matmul", 0, 10))
    clock.now += 10
    estimate.take(_measured("matmul", 5, 10))  # 2 s each
    estimate.take(_measured("rope", 0, 10))
    assert estimate.left_s() == 30.0
    estimate.take(KernelEnded(kernel="rope"))
    assert estimate.left_s() < 30.0


def test_spilling_candidates_are_counted_and_other_failures_told_at_once() -> None:
    stream = io.StringIO()
    progress = InTurn(PlainProgress(stream), brief=True)
    other = Config(constants={"tile_m": 128}, hints={"num_ctas": 1})
    spill = "registers spill to a stack of 40 bytes a thread"
    for config in (CONFIG, other, CONFIG):  # one config at two problems is one
        progress.show(_failed(config, "resources", spill))
    assert stream.getvalue() == ""
    progress.show(_failed(CONFIG, "compile", "internal error"))
    assert stream.getvalue().endswith("compile: tile_m=64 num_ctas=1: internal error\n")
    progress.show(KernelEnded(kernel="rope"))
    for _ in range(2):
        progress.show(KernelEnded(kernel="matmul"))
    assert stream.getvalue().splitlines()[1:] == [
        "matmul: 2 configs left out, whose code spills registers or does not fit a multiprocessor; "
        "-v lists them"
    ]


def test_the_lines_of_two_kernels_at_once_each_name_their_own() -> None:
    stream, clock = io.StringIO(), _Clock()
    progress = PlainProgress(stream, clock=clock)
    for kernel in ("matmul", "rope"):
        progress.show(Started(kernel=kernel, arch=SM90, problems=2, jobs=9, device="NVIDIA H200"))
    clock.now += 20
    for kernel in ("matmul", "rope"):
        progress.show(Compiling(kernel=kernel, done=4, total=9, failures=0))
        progress.show(Measuring(kernel=kernel, problem=PROBLEM, done=1, total=6))
    lines = [line.partition(",")[0] for line in stream.getvalue().splitlines()[2:]]
    assert lines == [
        "matmul: compiled 4/9", "matmul: measured 1/6", "rope: compiled 4/9", "rope: measured 1/6"
    ]  # fmt: skip


def test_a_failure_is_one_line_however_long_its_message() -> None:
    line = failure_line(_failed(CONFIG, "compile", "\n  error: no\n" + "trace " * 1000))
    assert line == "matmul M=64 N=4096: compile: tile_m=64 num_ctas=1: error: no"
    long = failure_line(_failed(CONFIG, "fault", "x" * 1000))
    assert long.startswith("matmul M=64 N=4096: fault: ")
    assert long.endswith("…")
    assert len(long) < 250


def test_the_closing_table_lines_up_and_gives_the_reasons_of_what_was_not_published() -> None:
    refused = _row(kernel="rope", path=None, refusals=("fewer entries than before: 3, it had 9",))
    heads, matmul, rope, reason = closing_table([_row(), refused])
    assert " ".join(heads.split()) == "kernel problems speed-up failures compile s measure s verify s table"
    assert (
        " ".join(matmul.split())
        == "matmul 26 1.23x 3 14.0 61.2 9.0 tuned_configs/sm90/matmul.json (2 changes)"
    )
    assert rope.endswith("not published")
    assert matmul.index("14.0") == rope.index("14.0") == heads.index("compile s")
    assert reason == "rope: not published: fewer entries than before: 3, it had 9"


def test_a_predicted_gain_is_never_shown_without_its_worth() -> None:
    rows = [
        _row(evidence="predicted", leaves=20, worth="0.970 of the default's time, slower at 4% of 491 sizes"),
        _row(evidence="predicted", kernel="mine", leaves=3, worth=NOT_JUDGED),
        _row(
            evidence="predicted", kernel="rope", leaves=0, speedup=1.0, worth="not ranked: the default stays"
        ),
    ]
    heads, *lines, worth = closing_table(rows)
    columns = ["kernel", "problems", "not default", "by the model", "failures", "compile s", "table", "worth"]
    assert re.split("   *", heads) == columns
    for row, line in zip(rows, lines, strict=True):
        assert line.endswith(row.worth)
    assert [re.split("   *", line)[2:4] for line in lines] == [["20", "1.23x"], ["3", "1.23x"], ["0", "-"]]
    assert worth.startswith("Nothing was measured.")
    assert "slower is by more than 2%. Where" in worth


def test_a_terminal_gets_bars_and_a_pipe_gets_lines() -> None:
    assert isinstance(progress_on(_Terminal()), LiveProgress)
    assert isinstance(progress_on(io.StringIO()), PlainProgress)


def test_live_progress_keeps_failures_and_leaves_the_closing_table() -> None:
    stream = _Terminal()
    progress = LiveProgress(stream)
    progress.show(Started(kernel="matmul", arch=SM90, problems=2, jobs=4, device="NVIDIA H200"))
    progress.show(Compiling(kernel="matmul", done=4, total=4, failures=1))
    progress.show(_failed(CONFIG, "verify", "out[0, 3] is nan, expected [1.0]"))
    progress.show(Measuring(kernel="matmul", problem=PROBLEM, done=1, total=2))
    progress.show(Started(kernel="rope", arch=SM90, problems=1, jobs=1, device="NVIDIA H200"))
    progress.show(Measuring(kernel="matmul", problem=PROBLEM, done=2, total=2))
    assert [task.completed for task in progress._bars.tasks] == [4, 2, 0, 0], "each kernel has its own"
    progress.show(KernelEnded(kernel="matmul"))
    assert [task.description for task in progress._bars.tasks] == ["rope compile", "rope measure"]
    progress.show(Finished(rows=[_row()]))
    progress.close()
    shown = stream.getvalue()
    assert "matmul M=64 N=4096: verify: tile_m=64 num_ctas=1: out[0, 3] is nan, expected [1.0]" in shown
    assert shown.rstrip().splitlines()[-1].startswith("matmul")


def test_progress_that_was_closed_before_anything_started_leaves_the_terminal_alone() -> None:
    stream = _Terminal()
    progress = LiveProgress(stream)
    progress.close()
    progress.close()
    assert stream.getvalue() == ""
