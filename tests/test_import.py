"""What importing aot_tune costs and what it leaves alone: torch, cuTile, the tuner, files and GPUs."""

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
started = time.process_time()
import aot_tune
seconds = time.process_time() - started
print(json.dumps({"ms": seconds * 1e3, "modules": sorted(set(sys.modules) - before)}))
"""

TOUCHED = """
import json, sys
import aot_tune
for name in aot_tune.__all__:
    if name != "exhaustive_search":  # it has the signature of cuTile's own
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


@pytest.mark.process
def test_importing_aot_tune_takes_milliseconds_over_the_bare_interpreter():
    assert min(_child(TIMED)["ms"] for _ in range(3)) < 30  # CPU time, some 5 ms; numpy alone takes 100


@pytest.mark.process
def test_importing_aot_tune_imports_nothing_heavy():
    modules = {name.partition(".")[0] for name in _child(TIMED)["modules"]}
    assert (
        modules & {"torch", "cuda", "numpy", "orjson", "pynvml", "filelock", "platformdirs", "rich"} == set()
    )


@pytest.mark.process
def test_every_public_name_is_there_without_torch_and_cuda_tile():
    modules = set(_child(TOUCHED))
    assert "aot_tune.tunable" in modules
    assert modules & {"torch", "cuda.tile", "numpy"} == set()


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known():
    import aot_tune

    with pytest.raises(AttributeError, match=r"no attribute 'tunable_'; it has .*Tunable"):
        _ = aot_tune.tunable_
    assert dir(aot_tune) == aot_tune.__all__


# Its parts --------------------------------------------------------------------------------------------------


_REPORT = """
import json, sys
import os
written = []
def audit(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        written.append(str(args[0]))
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
        written.append(str(args[0]))
sys.dont_write_bytecode = True
{before}
sys.addaudithook(audit)
{code}
import json
print(json.dumps({{"modules": sorted(sys.modules), "written": written, "more": more}}))
"""


def report(code: str, before: str = "") -> dict[str, object]:
    """The modules loaded and the files opened for writing by some code in a fresh process."""
    program = _REPORT.format(before=before, code="more = None\n" + code)
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    answer: dict[str, object] = json.loads(told.stdout.splitlines()[-1])
    return answer


@pytest.mark.process
def test_import_aot_tune_loads_neither_torch_nor_cuda_tile() -> None:
    modules = report("import aot_tune")["modules"]
    assert not {"torch", "cuda.tile", "orjson", "pynvml", "filelock"} & set(modules)  # type: ignore[call-overload]


@pytest.mark.process
def test_nothing_that_a_serving_process_imports_imports_the_tuner() -> None:
    files = (ROOT / "aot_tune" / "serve").rglob("[!_]*.py")
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    assert "aot_tune.serve.launch.dispatch" in names
    modules = report(
        "from aot_tune.kernels import TUNABLES\n" + "\n".join(f"import {name}" for name in names)
    )["modules"]
    tools = [name for name in modules if name.startswith("aot_tune.tuner") or name in ("typer", "rich")]  # type: ignore[attr-defined]
    assert tools == []


@pytest.mark.process
def test_b4_importing_the_shipped_kernels_writes_no_file_and_makes_no_context() -> None:
    """B4: no file is opened for writing, no folder made; torch has not touched a GPU."""
    answer = report(
        "from aot_tune.kernels import TUNABLES\nimport torch\nmore = torch.cuda.is_initialized()",
        before="import torch, cuda.tile",
    )
    assert answer["written"] == []
    assert answer["more"] is False
