"""Refuse a run of GPU tests where there is no GPU. Knows nothing of the package under test."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Workers share the cores: with as many threads each as there are cores, which wait for each other, small
# tensors take four times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Loaded machines run these tests too: how long an example takes says nothing of the code.
settings.register_profile("aot_tune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("aot_tune")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs two GPUs where there is one; the tuner's first, whose process has no context."""
    items.sort(key=lambda item: "tuner" not in item.path.parts)
    pairs = [item for item in items if item.get_closest_marker("gpu2")]
    if pairs and not config.option.collectonly and _gpus() < 2:
        config.hook.pytest_deselected(items=pairs)
        items[:] = [item for item in items if item not in pairs]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop a run that selected `gpu` tests without a GPU: skipped, they would look like tests that passed."""
    chosen = [item for item in session.items if item.get_closest_marker("gpu")]
    if chosen and not session.config.option.collectonly and _gpus() == 0:
        raise pytest.UsageError(
            f"{len(chosen)} of the selected tests need an NVIDIA GPU and NVML finds none: "
            f'run them on a GPU host (make test-gpu), or leave them out (-m "not gpu", the default)'
        )


def _gpus() -> int:
    # NVML and not CUDA: a test that forks needs a parent without a CUDA context.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
