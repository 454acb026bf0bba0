"""Run the code on stdin on the stand-in driver, as a machine with a GPU of the arch that is named.

Prints one line of JSON: what was launched, the warnings, and the code's own ``more``.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aot_tune import inputs
from aot_tune.nvidia.nvml import Gpu
from aot_tune.serve import loader, runtime
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device
from tests.support import driver


class CudaIsPlayed(TorchFunctionMode):
    """ "cuda" is the meta device, which the stand-in takes for GPU 0."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def main(arch: Arch, code: str) -> None:
    name = Device.reference(arch).name
    driver.install()
    here = driver.FakeRuntime(arch=str(arch), name=name)
    here.grad_enabled = torch.is_grad_enabled  # type: ignore[method-assign]
    runtime.use(here)
    inputs._generator = lambda device, seed: None  # nothing is drawn on the meta device
    loader.gpus = lambda: (Gpu(index=0, name=name, arch=arch, uuid="GPU-0"),)
    space: dict[str, Any] = {}
    with CudaIsPlayed(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(code, "README.md", "exec"), space)
    launches = [{"grid": one.grid, "symbol": one.symbol} for one in driver.DRIVER.launches]
    shown = [str(one.message) for one in caught]
    print(json.dumps({"launches": launches, "warnings": shown, "more": space.get("more")}))


if __name__ == "__main__":
    main(Arch.parse(sys.argv[1]), sys.stdin.read())
