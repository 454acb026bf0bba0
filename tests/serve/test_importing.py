"""What importing does and does not do, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

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
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(told.stdout.splitlines()[-1])
    return answer


def test_import_aot_tune_loads_neither_torch_nor_cuda_tile() -> None:
    modules = report("import aot_tune")["modules"]
    assert not {"torch", "cuda.tile", "orjson", "pynvml", "filelock"} & set(modules)  # type: ignore[call-overload]


def test_nothing_that_a_serving_process_imports_imports_the_tuner() -> None:
    names = [".".join(path.with_suffix("").parts) for path in Path("aot_tune/serve").rglob("[!_]*.py")]
    assert "aot_tune.serve.launch.dispatch" in names
    modules = report("import aot_tune.kernels\n" + "\n".join(f"import {name}" for name in names))["modules"]
    tools = [name for name in modules if name.startswith("aot_tune.tuner") or name in ("typer", "rich")]  # type: ignore[attr-defined]
    assert tools == []


def test_b4_importing_the_shipped_kernels_writes_no_file_and_makes_no_context() -> None:
    """B4: no file is opened for writing, no folder made; torch has not touched a GPU."""
    answer = report(
        "import aot_tune.kernels\nimport torch\nmore = torch.cuda.is_initialized()",
        before="import torch, cuda.tile",
    )
    assert answer["written"] == []
    assert answer["more"] is False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forking is POSIX")
def test_a_forked_child_loads_while_another_thread_of_its_parent_holds_the_lock() -> None:
    code = """
import os, threading
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.serve.guard import Guard
from tests.support.samples import SM90, scale
held, go = threading.Event(), threading.Event()
def hold():
    with Guard.lock:
        held.set(); go.wait()
thread = threading.Thread(target=hold); thread.start(); held.wait()
child = os.fork()
if child == 0:
    index = dispatcher_of(scale).load(SM90)
    os._exit(0 if index.tables == () else 1)
more = os.waitpid(child, 0)[1]
go.set(); thread.join()
"""
    program = "import warnings; warnings.simplefilter('ignore')\n" + code + "print(more)"
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.strip() == "0"
