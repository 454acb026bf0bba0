"""The project's values as JSON data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aot_tune.cli.json_text import json_text, plain
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import scale_table


def test_each_kind_of_value_has_its_form() -> None:
    config = Config(constants={"fast": True, "tile_m": 64}, hints={"occupancy": 2})
    assert plain([Arch.parse("sm90"), Path("a/b"), Pow2(), Exact(), None]) == [
        "sm90",
        "a/b",
        "pow2",
        "exact",
        None,
    ]
    assert plain(config) == {"constants": {"fast": True, "tile_m": 64}, "hints": {"occupancy": 2}}
    assert plain(Problem({"M": 3, "dtype": "bfloat16"})) == {"M": 3, "dtype": "bfloat16"}


def test_a_whole_table_survives_json() -> None:
    data = json.loads(json_text(scale_table()))
    assert data["arch"] == "sm90"
    assert data["axes"] == {"M": "pow2", "N": "exact"}
    assert data["entries"][1]["bucket"]["M"] == 64
    assert data["entries"][1]["points"][-1]["size"] == {"M": 64}


def test_a_value_without_a_form_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match="set has no JSON form"):
        plain({1})
