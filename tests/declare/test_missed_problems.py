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


def test_lines_of_no_use_are_counted_by_their_reason(
    kernels: tuple[FoundKernel, ...], tmp_path: Path
) -> None:
    path = write(
        tmp_path / "missed",
        MISSED,
        "half a li",
        "[1]",
        {**MISSED, "problem": {"dtype": "bfloat16", "M": "x", "N": 1024}},
        {**MISSED, "problem": 7},
        {**MISSED, "arch": "sm100"},
        {**MISSED, "kernel": "gone"},
        {"search": "lib.ops.kernel", "arch": "sm90", "arguments": {}},
        {"search": "lib.ops.other", "arch": "sm90", "arguments": {}},
        {"kernel": "scale"},
    )
    chosen, notes = problems_of_files(kernels, [path], SM90)
    assert list(chosen) == ["scale"]
    places, said = zip(*(note.removeprefix(f"{path}, line ").split(": ", 1) for note in notes), strict=True)
    assert places == ("2", "4", "6", "7", "8")
    assert said[0] == "it is broken, no line that AOT_TUNE_RECORD writes; 4 such lines left out"
    assert said[1].startswith("scale: M=x is of another type than M=")
    assert said[2:] == (
        "it is of sm100, not sm90: name it, --arch sm100; 1 such line left out",
        "it is of gone, which is not among the chosen kernels: name it, or its --module; "
        "1 such line left out",
        "a library's search, which no sweep makes: run aot-tune record on that program again; "
        "2 such lines left out",
    )


def test_a_file_that_is_not_there_or_names_nothing_is_refused(
    kernels: tuple[FoundKernel, ...], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        problems_of_files(kernels, [tmp_path / "gone"], SM90)
    empty = write(tmp_path / "empty")
    with pytest.raises(UsageError, match="no line names a problem of these kernels on sm90"):
        problems_of_files(kernels, [empty], SM90)
    searches = write(tmp_path / "searches", {"search": "lib.ops.kernel", "arch": "sm90"}, "half a li")
    with pytest.raises(UsageError) as refused:
        problems_of_files(kernels, [searches], SM90)
    nothing, *reasons = str(refused.value).splitlines()
    assert nothing.endswith("no line names a problem of these kernels on sm90")
    assert [one.partition(": ")[2][:15] for one in reasons] == ["a library's sea", "it is broken, n"]


def test_a_line_of_any_depth_is_a_broken_line_with_its_number(
    kernels: tuple[FoundKernel, ...], tmp_path: Path
) -> None:
    path = write(tmp_path / "missed", MISSED, '{"kernel": ' + "[" * 100_000)
    _, notes = problems_of_files(kernels, [path], SM90)
    assert notes == [
        f"{path}, line 2: it is broken, no line that AOT_TUNE_RECORD writes; 1 such line left out"
    ]


def test_reading_takes_as_long_as_there_are_lines(
    kernels: tuple[FoundKernel, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each problem was hashed again for each later line: 4,000 lines took 23 s."""
    hashed = [0]
    hash_of = Problem.__hash__

    def counted(problem: Problem) -> int:
        hashed[0] += 1
        return hash_of(problem)

    monkeypatch.setattr(Problem, "__hash__", counted)
    missed = [{**MISSED, "problem": {**MISSED["problem"], "M": m}} for m in range(1, 401)]  # type: ignore[dict-item]
    chosen, _ = problems_of_files(kernels, [write(tmp_path / "missed", *missed)], SM90)
    assert len(chosen["scale"]) == 400
    assert hashed[0] < 20 * 400
