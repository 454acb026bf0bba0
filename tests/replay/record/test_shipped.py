"""What was recorded and shipped is answered: the key of a search is that of the tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from aot_tune import environment
from aot_tune.bench.libraries import fetched
from tests.support.tuned_programs import ROOT

FOLDERS = [ROOT / fetched.FOLDER, ROOT / fetched.TILEGYM]
MISSING = [str(folder) for folder in FOLDERS if not folder.is_dir()]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(bool(MISSING), reason=f"not fetched: {', '.join(MISSING)}")
def test_the_shipped_tables_answer_each_site() -> None:
    others = {name: value for name, value in os.environ.items() if name not in environment.DESCRIPTIONS}
    paths = os.pathsep.join(map(str, [ROOT, *FOLDERS]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.children.recorded_models"],
        env={**others, environment.ON_MISS: "error", "PYTHONPATH": paths},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
