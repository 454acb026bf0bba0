"""What the first use of the shipped kernels takes of a process's CPU time, where NVML reports an sm90.

The collector is off: its time depends on what else the process holds. A bound is about twice the time that
was measured.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.kernels import rms_norm_tunable
from aot_tune.tables.store import package_folder, read_table, table_path
from aot_tune.tables.table import entry_order
from aot_tune.tables.writer import dump
from tests.support.samples import SM90

pytestmark = pytest.mark.process

LEFT_OUT = {environment.TABLES, "PYTHONDONTWRITEBYTECODE"}
"""Variables that processes do not inherit: Python caches the files that it compiles."""

TIMED = """
import gc, sys, time, types
gc.disable()
sys.modules["pynvml"] = types.SimpleNamespace(
    nvmlInit=lambda: None,
    nvmlShutdown=lambda: None,
    nvmlDeviceGetCount=lambda: 1,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUUID=lambda gpu: "GPU-0",
    nvmlDeviceGetName=lambda gpu: "NVIDIA H200",
    nvmlDeviceGetCudaComputeCapability=lambda gpu: (9, 0),
)
import torch, cuda.tile
{before}
started_s = time.process_time()
{timed}
print((time.process_time() - started_s) * 1e3)
{after}
"""


def cpu_ms(timed: str, *, before: str = "", after: str = "") -> float:
    """Return the CPU milliseconds of a statement: the least of three fresh processes, with cached files."""
    command = [sys.executable, "-c", TIMED.format(timed=timed, before=before, after=after)]
    variables = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    took = []
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        assert done.returncode == 0, done.stderr
        took.append(float(done.stdout))
    return min(took)


def test_one_kernel_with_its_table_takes_milliseconds() -> None:
    assert cpu_ms("from aot_tune.kernels import rms_norm") < 110  # some 55


def test_all_kernels_with_their_tables_take_milliseconds() -> None:
    after = "from aot_tune.kernels import rms_norm_tunable\nassert len(TUNABLES) == 16"
    assert cpu_ms("from aot_tune.kernels import TUNABLES", after=after) < 260  # some 130


DECLARED = """
import dataclasses, os
from aot_tune import Arch, Problem
from aot_tune.kernels import rms_norm_tunable
from aot_tune.serve.launch.dispatch import dispatcher_of
sm90, problem = Arch(9, 0), Problem({{"dtype": "bfloat16", "rows": 300, "cols": 4100}})
os.environ[{variable!r}] = {folder!r}
"""

LOOKED_UP = """
tunable = dataclasses.replace(rms_norm_tunable)
choice = dispatcher_of(tunable).choice(sm90, problem)
"""

READ = """
sizes = [len(table.entries) for table in dispatcher_of(tunable).load(sm90).tables.values()]
assert sizes[0] == 2000 and choice.source == "nearest", (sizes, choice)
"""


def test_a_table_of_2000_entries_takes_milliseconds_until_its_first_launch(tmp_path: Path) -> None:
    """It is read when the kernel is declared, and a size between its buckets is looked up."""
    shipped = read_table(table_path(package_folder(rms_norm_tunable), SM90, "rms_norm"))
    buckets = (
        (entry, entry.bucket.replaced(cols=entry.bucket.size("cols") + by))
        for by in range(0, 8000, 296)
        for entry in shipped.entries
    )
    entries = {bucket: dataclasses.replace(entry, bucket=bucket) for entry, bucket in buckets}
    chosen = sorted(islice(entries.values(), 2000), key=lambda entry: entry_order(shipped.axes, entry.bucket))
    path = table_path(tmp_path, SM90, "rms_norm")
    path.parent.mkdir()
    path.write_bytes(dump(dataclasses.replace(shipped, entries=tuple(chosen))))
    before = DECLARED.format(variable=environment.TABLES, folder=str(tmp_path))
    assert cpu_ms(LOOKED_UP, before=before, after=READ) < 80  # some 40
