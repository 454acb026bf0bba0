"""Choose the tests of a run: refuse GPU tests where there is no GPU, and hold `--fast` to its marks."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from itertools import compress

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from tests.support import fast
from tests.support.marks import MARK

# Workers share the cores: with as many threads each as there are cores, which wait for each other, small
# tensors take four times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ[MARK] = f"{os.getpid()}"  # before anything is started

# Loaded machines run these tests too: how long an example takes says nothing of the code.
settings.register_profile("aot_tune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("aot_tune fast", settings.get_profile("aot_tune"), max_examples=30)
settings.load_profile("aot_tune")

# A run of the command line in this process would read the signatures of all commands again, for 15 ms.
typer.testing._get_command = functools.cache(typer.testing._get_command)

_TRIED = pytest.StashKey[list[str]]()
"""What a fast test tried to start."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fast`."""
    words = f"leave out tests marked {', '.join(fast.LEFT_OUT)}, and prove the marks"
    parser.addoption("--fast", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Watch what the tests start, where they are to be fast."""
    if config.option.fast:
        settings.load_profile("aot_tune fast")  # before the tests are imported, which take it then
        fast.install()
    if config.option.markexpr == "gpu":
        from tests.support import driver

        driver.wanted = False  # modules of other tests are imported too, and one takes the driver's place


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch one test with all its fixtures, those of its module too."""
    if not item.config.option.fast:
        return (yield)
    with fast.watched() as tried:
        item.stash[_TRIED] = tried
        return (yield)


@pytest.fixture(autouse=True)
def _starts_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a fast test that started something and hid it."""
    yield
    tried = request.node.stash.get(_TRIED, [])
    if tried:
        pytest.fail(tried[0])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not fast, and what needs two GPUs where there is one.

    The tuner's tests come first, whose process has no context.
    """
    items.sort(key=lambda item: "tuner" not in item.path.parts)
    if config.option.fast:
        marked = [any(map(item.get_closest_marker, fast.LEFT_OUT)) for item in items]
        config.hook.pytest_deselected(items=list(compress(items, marked)))
        items[:] = [item for item, left_out in zip(items, marked, strict=True) if not left_out]
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
