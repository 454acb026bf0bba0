"""What one config for every batch costs: the worst over its sizes, as counted by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.bench.every_batch import cost
from tests.support.samples import SM90, scale, scale_table, write


def test_it_is_the_worst_over_the_batch_and_says_where_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each config takes 1.5 times as long as the winner where it does not win itself."""
    for name in environment.DESCRIPTIONS:
        monkeypatch.delenv(name, raising=False)
    write(tmp_path, scale_table())
    tunable = dataclasses.replace(scale, tables=tmp_path, batch_axes=("M",))
    found = cost(tunable, SM90)
    assert (found.mean, found.worst) == (pytest.approx(50.0), pytest.approx(50.0))
    assert (found.axes, found.groups, found.partly) == (("M",), 1, 0)
    empty = cost(dataclasses.replace(tunable, tables=tmp_path / "none"), SM90)
    assert (empty.mean, empty.worst, empty.partly) == (None, None, 1)
