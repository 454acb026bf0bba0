"""A sweep's request chooses its buckets and says the command that resumes it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from aot_tune.declare.discovery import FoundKernel
from aot_tune.tables.table import geometric_mean
from aot_tune.tuner.plan.sizes import spread
from aot_tune.tuner.sweep.report import FIRST_LOOK_BUCKETS, SweepRequest
from aot_tune.values.problem import Problem, problem_option
from tests.support.samples import MODULE, SM90, scale, scale_in


def _request(tmp_path: Path, **values: object) -> SweepRequest:
    found = tuple(scale_in(tmp_path).values())
    return SweepRequest(kernels=found, arch=SM90, **values)  # type: ignore[arg-type]


def test_all_declared_buckets_are_swept_unless_problems_or_a_limit_choose(tmp_path: Path) -> None:
    request = _request(tmp_path)
    (found,) = request.kernels
    assert [bucket["M"] for bucket in request.buckets(found)] == [1, 64, 256]
    assert [bucket["M"] for bucket in _request(tmp_path, limit=2).buckets(found)] == [1, 256]
    problems = tuple(Problem({"dtype": "bfloat16", "M": m, "N": 8}) for m in (300, 500, 3))
    chosen = _request(tmp_path, problems={"scale": problems}).buckets(found)
    assert [(bucket["M"], bucket["N"]) for bucket in chosen] == [(512, 8), (4, 8)]


def test_the_command_asks_for_the_same_again_without_starting_over(tmp_path: Path) -> None:
    request = _request(
        tmp_path,
        modules=("tests.support.samples",),
        problems={"scale": (Problem({"dtype": "bfloat16", "M": 3, "N": 8}),)},
        limit=4,
        exhaustive=True,
        require_measured=True,
        out=Path("a folder"),
        jobs=2,
        gpus=(0,),
        journal=Path("j"),
        cubins=Path("c"),
        fresh=True,
    )
    assert shlex.split(request.command()) == [
        "aot-tune", "tune", "scale", "--arch", "sm90", "--module", "tests.support.samples",
        "--problem", "dtype=bfloat16,M=3,N=8", "--limit", "4", "--out", "a folder", "--jobs", "2",
        "--gpus", "0", "--journal", "j", "--cubins", "c", "--exhaustive", "--require", "measured",
    ]  # fmt: skip


def test_the_command_of_a_sweep_that_verifies_alone_asks_for_what_is_stale(tmp_path: Path) -> None:
    request = _request(tmp_path, problems={"scale": ()}, gpus=(0,))
    (found,) = request.kernels
    assert request.buckets(found) == ()
    assert shlex.split(request.command())[2:] == ["scale", "--arch", "sm90", "--only-stale", "--gpus", "0"]


def test_a_first_look_is_a_fixed_count_of_buckets_evenly_spread() -> None:
    typical = [{"dtype": "bfloat16", "M": [2**k for k in range(28)], "N": 1024}]
    found = FoundKernel(module=MODULE, tunable=dataclasses.replace(scale, typical=typical))
    request = SweepRequest(kernels=(found,), arch=SM90, first_look=True)
    chosen = [bucket["M"] for bucket in request.buckets(found)]
    assert FIRST_LOOK_BUCKETS == len(chosen) == 10
    assert chosen == [2**k for k in range(0, 28, 3)]
    everything = dataclasses.replace(request, first_look=False)
    assert everything.buckets(found) == found.tunable.buckets


def test_a_first_looks_commands_name_no_kernel_and_only_one_says_full(tmp_path: Path) -> None:
    request = _request(tmp_path, first_look=True, out=Path("a folder"))
    assert request.command() == "aot-tune tune --arch sm90 --out 'a folder'"
    installed, checkout = request.commands_for_everything()
    assert installed == "aot-tune tune --arch sm90 --out 'a folder' --full"
    arguments = checkout.removeprefix("make tune ARGS=")
    assert shlex.split(*shlex.split(arguments)) == ["--arch", "sm90", "--out", "a folder", "--full"]


def test_a_spread_keeps_the_first_and_the_last_and_never_repeats() -> None:
    assert spread("abcdefg", None) == tuple("abcdefg")
    assert spread("abcdefg", 3) == ("a", "d", "g")
    assert spread("abcdefg", 1) == ("a",)
    for most in range(1, 9):
        assert len(set(spread("abcdefg", most))) == min(most, 7)


def test_a_problem_is_written_as_the_command_line_reads_it() -> None:
    problem = Problem({"M": 3, "causal": True, "dtype": "bfloat16"})
    assert problem_option(problem) == "M=3,causal=true,dtype=bfloat16"


def test_the_geometric_mean_of_nothing_is_one() -> None:
    assert geometric_mean([]) == 1.0
    assert round(geometric_mean([1, 4]), 9) == 2.0
