"""A sweep in a real tuner with real workers, killed with SIGKILL again and again, and resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aot_tune.tuner.choose.portfolio import MOST_WHEN_WORSE
from aot_tune.tuner.measure.worker.runner import STATE_SAMPLES

_SWEEP = """
import sys
from pathlib import Path
from aot_tune.tuner.measure import session
from aot_tune.tuner.sweep import resources, run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepRequest
from tests.support.samples import SM90, scale_in
from tests.support.several_kernels import several_in

folder = Path(sys.argv[1])


class NoLock:
    def __init__(self, *_):
        pass

    def release(self):
        pass

    def set_purpose(self, purpose):
        pass


def measure(found, gpu, **more):
    return session.MeasureSession(
        found, gpu, backend="tests.support.hashed_backend:HashedBackend",
        arguments={"folder": str(folder)}, **more,
    )


session.GpuLock, resources.MeasureSession = NoLock, measure
tables = folder / "tables"
kernels = several_in(tables) if sys.argv[4] == "several" else (scale_in(tables)["scale"],)
request = SweepRequest(
    kernels=kernels, arch=SM90, gpus=tuple(map(int, sys.argv[3])), jobs=2, journal=folder / "journal",
    cubins=Path(sys.argv[2]),
)
print(sweep.run(request, PlainProgress()).resumed)
"""


def _start(folder: Path, cubins: Path, gpus: str, kernels: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-c", _SWEEP, str(folder), str(cubins), gpus, kernels]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _lines(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


def _tables(folder: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (folder / "tables" / "sm90").glob("*.json")}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "kernels"), [("0", "one"), ("01", "one"), ("01", "several")])
def test_a_sweep_killed_at_any_instant_ends_with_the_same_bytes(
    tmp_path: Path, gpus: str, kernels: str
) -> None:
    whole, killed, cubins = tmp_path / "whole", tmp_path / "killed", tmp_path / "cubins"
    child = _start(whole, cubins, "0", kernels)
    _, said = child.communicate(timeout=300)
    assert child.returncode == 0, said
    kills = 0
    for more in random.Random(3).sample(range(2, len(_lines(whole)) // 6), 6):
        child = _start(killed, cubins, gpus, kernels)
        limit = len(_lines(killed)) + more
        while child.poll() is None and len(_lines(killed)) < limit:
            time.sleep(0.002)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.communicate()
    child = _start(killed, cubins, gpus, kernels)
    _, said = child.communicate(timeout=300)
    assert child.returncode == 0, said
    assert kills >= 2
    assert _tables(killed) == _tables(whole)
    assert len(_tables(whole)) == (3 if kernels == "several" else 1)
    # A kill may lose what is in flight on each GPU, verified or timed but not told yet; of what is timed in
    # turn in one state, all samples.
    lost = 4 + (MOST_WHEN_WORSE + 1) * (1 + STATE_SAMPLES)
    assert len(_lines(whole)) <= len(_lines(killed)) <= len(_lines(whole)) + lost * kills * len(gpus)
