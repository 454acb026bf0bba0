"""What importing aot_tune costs, and that its public names need neither torch nor cuTile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TIMED = """
import json, sys, time
before = set(sys.modules)
started = time.perf_counter()
import aot_tune
seconds = time.perf_counter() - started
print(json.dumps({"ms": seconds * 1e3, "modules": sorted(set(sys.modules) - before)}))
"""

TOUCHED = """
import json, sys
import aot_tune
for name in aot_tune.__all__:
    getattr(aot_tune, name)
print(json.dumps(sorted(sys.modules)))
"""


def _child(script: str):
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    return json.loads(done.stdout)


def test_importing_aot_tune_takes_under_15_ms_over_the_bare_interpreter():
    assert min(_child(TIMED)["ms"] for _ in range(7)) < 15


def test_importing_aot_tune_imports_nothing_heavy():
    modules = {name.partition(".")[0] for name in _child(TIMED)["modules"]}
    assert (
        modules & {"torch", "cuda", "numpy", "orjson", "pynvml", "filelock", "platformdirs", "rich"} == set()
    )


def test_every_public_name_is_there_without_torch_and_cuda_tile():
    modules = set(_child(TOUCHED))
    assert "aot_tune.tunable" in modules
    assert modules & {"torch", "cuda.tile", "numpy"} == set()


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known():
    import aot_tune

    with pytest.raises(AttributeError, match=r"no attribute 'tunable_'; it has .*Tunable"):
        _ = aot_tune.tunable_
    assert dir(aot_tune) == aot_tune.__all__
