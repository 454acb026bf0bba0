"""What the shipped tables of libraries answer: for recorded models, and for others at odd sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.bench.libraries import fetched
from aot_tune.bench.libraries.sites import HELD_OUT, MODELS

ROOT = Path(__file__).parents[3]
FOLDERS = [fetched.FOLDER.absolute(), fetched.TILEGYM.absolute()]
MISSING = [
    name
    for name, folder in zip(("flashinfer", "tilegym"), FOLDERS, strict=True)
    if not (folder / name).is_dir()
]

FREE = ("matmul", "bmm_bf16")
"""Sites that compile no size in."""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(MISSING), reason=f"not fetched: {', '.join(MISSING)}"),
]


def answered_calls(*models: str) -> dict[str, tuple[int, int]]:
    """Return by site how many first calls are answered, of how many."""
    others = {name: value for name, value in os.environ.items() if name not in environment.DESCRIPTIONS}
    paths = os.pathsep.join(map(str, [ROOT, *FOLDERS]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.children.held_out", *models],
        env={**others, environment.ON_MISS: "error", "PYTHONPATH": paths},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answered: dict[str, tuple[int, int]] = json.loads(done.stdout.splitlines()[-1])
    return answered


def test_every_site_answers_every_call_of_recorded_models() -> None:
    """The key of a search is that of the tables, and no shape was left out."""
    answered = answered_calls(*(model for model in MODELS if model not in HELD_OUT))
    assert {site: counts for site, counts in answered.items() if counts[0] < counts[1]} == {}


def test_sites_that_compile_no_size_in_search_nothing_in_nine_of_ten_first_calls() -> None:
    answered = answered_calls(*HELD_OUT)
    for site, (count, calls) in answered.items():
        print(f"{site}: {count} of {calls}")
    assert all(answered[site][0] >= 0.9 * answered[site][1] > 0 for site in FREE), answered
    rotated, calls = answered_calls(*(name for name, model in HELD_OUT.items() if model.kv_heads))["rope"]
    assert rotated >= 0.9 * calls > 0  # it compiles in heads, which these models have as recorded ones do
    assert sum(count for count, _ in answered.values()) >= 210
