"""Ours in the place of cuTile's own search: same signature, results and errors, on each release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from aot_tune.nvidia import cutile
from tests.support.other_releases import OTHERS, other_release

ROOT = Path(__file__).parents[3]
RELEASES = ["installed", *OTHERS]

pytestmark = [pytest.mark.process, pytest.mark.parametrize("release", RELEASES)]


@cache
def told(release: str) -> dict[str, Any]:
    """What cuTile's and ours did in a process under a release."""
    paths = [*([] if release == "installed" else [str(other_release(release))]), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.children.search_contract"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["version"] == (cutile.version() if release == "installed" else release)
    return told


def test_it_looks_like_cutiles(release: str) -> None:
    theirs, ours = told(release)["described"]
    assert ours == theirs
    assert ours[0].startswith("(search_space")


def test_it_answers_and_raises_as_cutiles_does(release: str) -> None:
    answers = told(release)["answers"]
    assert len(answers) > 20
    assert {name: ours for name, (_, ours) in answers.items()} == {
        name: theirs for name, (theirs, _) in answers.items()
    }
    assert answers["an empty space"][1] == ["ValueError", "Search space is empty."]
    assert len(answers["by position"][1]["successes"]) == 3


def test_it_is_put_into_cutiles_module_and_taken_back(release: str) -> None:
    stands_in, signature = told(release)["installed"]
    assert stands_in
    assert signature == told(release)["described"][0][0]
    assert told(release)["given_back"]
