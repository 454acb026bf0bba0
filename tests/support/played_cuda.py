"""A library of cuTile kernels, called in a process without a GPU: torch.cuda on the stand-in driver.

Tensors are meta tensors that say that they lie on a GPU. Of two kernels the one that was loaded later is the
faster, so that the last config of a search space wins.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aot_tune.nvidia import cutile
from aot_tune.serve import runtime
from tests.support import driver as fake_driver
from tests.support.driver import DRIVER

_ANSWERS: dict[Any, Any] = {
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.__bool__: True,
    torch.Tensor.item: 1,
}
"""What is read of a tensor without contents."""


class _LooksLikeCuda(TorchFunctionMode):
    """Meta tensors that say that they lie on a GPU, and "cuda" as another name of their device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _ANSWERS and args[0].is_meta:
            return _ANSWERS[function]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


class _Stream(int):
    """The default stream: its handle, which cuTile takes, with the attribute of torch's streams."""

    cuda_stream = 0


@contextlib.contextmanager
def on_the_stand_in(arch: str = "sm90", name: str = "NVIDIA H200") -> Iterator[None]:
    """One GPU that torch.cuda tells of."""
    fake_driver.install()
    runtime.use(fake_driver.FakeRuntime(arch=arch, name=name))
    DRIVER.elapsed_ms = lambda symbol: 0.5 * 0.95**DRIVER.last_kernel
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda.current_stream = cuda.default_stream = cuda.Stream = lambda *args, **kwargs: stream
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: DRIVER.capability
    major, minor = DRIVER.capability
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=132, major=major, minor=minor, name=name, shared_memory_per_block_optin=232_448
    )
    import cuda.tile as ct

    limit: Any = ct.compiler_timeout
    ct.compiler_timeout = lambda seconds: limit(100 * seconds)  # the library's limit is for an idle machine
    with _LooksLikeCuda():
        yield


def noted(library: str) -> list[dict[str, Any]]:
    """From now on: what a package launches itself. It is imported first, since it may wrap the launch."""
    import cuda.tile as ct

    launches: list[dict[str, Any]] = []
    launch = ct.launch

    def noted(stream: Any, grid: Any, kernel: Any, args: Any) -> None:
        launch(stream, grid, kernel, args)
        caller: Any = sys._getframe(1)
        if caller.f_globals.get("__name__") == "aot_tune.replay.record.launches":
            caller = caller.f_back  # recording looks at launches
        if str(caller.f_globals.get("__name__")).startswith(f"{library}."):
            last = DRIVER.launches[-1]
            hints = cutile.hints_of(kernel, runtime.runtime().device(0).arch)
            launches.append({"grid": list(last.grid), "symbol": last.symbol, "hints": hints})

    ct.launch = noted
    return launches


def counted() -> list[int]:
    """From now on: the lengths of the spaces that cuTile's own search is asked to search."""
    import cuda.tile.tune as tune

    own, calls = cutile.own_search(), []

    def search(search_space: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(search_space))
        return own(search_space, *args, **kwargs)

    cutile.standing_in(tune.exhaustive_search, search)
    return calls


def without_compiler() -> None:
    """From now on cuTile finds no compiler."""
    from cuda.tile import _compile

    def find() -> None:
        raise FileNotFoundError("'tileiras' compiler not found")

    replaced: Any = _compile
    replaced._find_compiler_bin = find
    cutile.may_have_compiler = lambda: False  # type: ignore[assignment]
