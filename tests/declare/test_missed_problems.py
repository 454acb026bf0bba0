"""The lines of servers that missed, as problems to sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.missed_problems import problems_of_files
from aot_tune.errors import UsageError
from aot_tune.values.problem import Problem
from tests.support.samples import SM90, scale_in

MISSED = {"kernel": "scale", "arch": "sm90", "problem": {"dtype": "bfloat16", "M": 300, "N": 1024}}


@pytest.fixture
def kernels(tmp_path: Path) -> tuple[FoundKernel, ...]:
    return (scale_in(tmp_path)["scale"],)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    return path


def test_the_files_of_all_processes_are_read(kernels: tuple[FoundKernel, ...], tmp_path: Path) -> None:
    other = {**MISSED, "problem": {**MISSED["problem"], "M": 5}}  # type: ignore[dict-item]
    write(tmp_path / "missed.12", MISSED, other)
    write(tmp_path / "missed.345", MISSED)
    write(tmp_path / "missed.json", {**MISSED, "problem": {}})
    chosen, notes = problems_of_files(kernels, [tmp_path / "missed"], SM90)
    assert chosen == {"scale": (Problem(MISSED["problem"]), Problem(other["problem"]))}  # type: ignore[arg-type]
    assert notes == []


def test_lines_of_no_use_are_told_or_left_out(kernels: tuple[FoundKernel, ...], tmp_path: Path) -> None:
    path = write(
        tmp_path / "missed",
        MISSED,
        "half a li",
        "[1]",
        {**MISSED, "problem": {"dtype": "bfloat16", "M": "x", "N": 1024}},
        {**MISSED, "problem": 7},
        {**MISSED, "arch": "sm100"},
        {**MISSED, "kernel": "gone"},
        {"search": "lib.ops:kernel", "arch": "sm90", "arguments": {}},
    )
    chosen, notes = problems_of_files(kernels, [path], SM90)
    assert list(chosen) == ["scale"]
    assert [note.partition(", line ")[2][:1] for note in notes] == ["2", "3", "4", "5"]
    assert "scale: M=x is of another type than M=" in notes[2]


def test_a_file_that_is_not_there_or_names_nothing_is_refused(
    kernels: tuple[FoundKernel, ...], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        problems_of_files(kernels, [tmp_path / "gone"], SM90)
    empty = write(tmp_path / "empty")
    with pytest.raises(UsageError, match="no line names a problem of these kernels on sm90"):
        problems_of_files(kernels, [empty], SM90)
