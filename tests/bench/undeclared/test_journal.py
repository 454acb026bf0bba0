"""The journal of samples: what several calls wrote adds up, whatever ended them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aot_tune.bench.undeclared.journal import Journal, Key, Taken

KEY = Key(
    kernel="matmul", problem="M=3", run=0, device="NVIDIA H200", source_hash="0" * 16, tileiras="13.4.92"
)
TAKEN = Taken(us={"a": {"read": [1.0, 2.0]}})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "regret.jsonl"


def test_what_was_kept_is_there_in_the_next_process(path: Path) -> None:
    Journal(path).keep(KEY, TAKEN)
    assert Journal(path).taken(KEY) == TAKEN


@pytest.mark.parametrize(
    "other", [{"run": 1}, {"device": "NVIDIA H100 PCIe"}, {"source_hash": "1" * 16}, {"tileiras": "13.5.37"}]
)
def test_other_runs_cards_code_and_compilers_are_others(path: Path, other: dict[str, object]) -> None:
    Journal(path).keep(KEY, TAKEN)
    assert Journal(path).taken(dataclasses.replace(KEY, **other)) is None  # type: ignore[arg-type]


def test_the_last_of_several_counts(path: Path) -> None:
    journal = Journal(path)
    journal.keep(KEY, Taken(us={}, failed="out of memory"))
    journal.keep(KEY, TAKEN)
    assert Journal(path).taken(KEY) == TAKEN


def test_a_problem_that_ended_two_processes_is_left_out(path: Path) -> None:
    for known in (None, "it ended the process 2 times"):
        Journal(path).begin(KEY)
        taken = Journal(path).taken(KEY)
        assert (taken.failed if taken else None) == known


def test_a_problem_that_ends_processes_after_it_was_measured_is_left_out_too(path: Path) -> None:
    """As where its samples are taken again, because launches were held up."""
    Journal(path).begin(KEY)
    Journal(path).keep(KEY, TAKEN)
    for known in (TAKEN, Taken(us={}, failed="it ended the process 2 times")):
        Journal(path).begin(KEY)
        assert Journal(path).taken(KEY) == known
    Journal(path).keep(KEY, TAKEN)
    assert Journal(path).taken(KEY) == TAKEN


@pytest.mark.parametrize(
    ("us", "disturbed"),
    [
        ([10.0] * 11, False),
        ([10.0] * 6 + [400.0] * 5, False),  # the median is one that was not held up
        ([10.0] * 5 + [12.0] + [400.0] * 5, False),
        ([10.0] * 5 + [13.0] + [400.0] * 5, True),
        ([10.0] * 5 + [13.0] * 6, False),  # other clocks
        ([1.0, 10.0, 10.0] + [10.0] * 7 + [400.0], False),  # a stroke of luck
        ([94.9, 95.1, 95.2, 96.7, 185.7, 188.9, 249.5, 254.5, 444.3, 759.5, 4172.6], True),
    ],
)
def test_samples_are_disturbed_where_half_of_them_are_slow_and_far_apart(
    us: list[float], *, disturbed: bool
) -> None:
    taken = Taken(us={"a": {"read": [10.0] * 11, "tight": us[::-1]}, "b": {"read": [1.0] * 11}})
    assert taken.disturbed == disturbed


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_off_loses_no_other(path: Path, cut: int) -> None:
    other = dataclasses.replace(KEY, problem="M=5")
    journal = Journal(path)
    journal.keep(KEY, TAKEN)
    journal.keep(other, TAKEN)
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path)
    assert again.taken(KEY) == TAKEN
    again.keep(other, TAKEN)
    assert Journal(path).taken(other) == TAKEN


@pytest.mark.parametrize("line", [b"{}", b"[]", b'{"key": {"kernel": 1}}', b"\xff", b"null"])
def test_what_is_no_line_of_it_is_left_out(path: Path, line: bytes) -> None:
    Journal(path).keep(KEY, TAKEN)
    path.write_bytes(line + b"\n" + path.read_bytes())
    assert Journal(path).taken(KEY) == TAKEN
