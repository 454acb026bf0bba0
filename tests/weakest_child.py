"""Runs one shipped kernel, compiled under the weakest assumptions, on a GPU and compares. Not a test itself.

A process of its own, since tests of the tuner need theirs to have no CUDA context. Prints one JSON object:
case -> "right", or what is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import cutile, kernels
from aot_tune.arch import Arch
from aot_tune.device import Device
from aot_tune.problem import Problem
from aot_tune.tunable import Close, Tunable

SIZES = {
    "matmul": {
        "aligned": (128, 256, 128),
        "ragged": (50, 248, 72),
        "of odd sizes": (33, 77, 51),
        "of size 1": (1, 1, 1),
    },
    "rms_norm": {
        "aligned": (64, 2048),
        "ragged": (50, 2040),
        "of odd sizes": (33, 1501),
        "of size 1": (1, 1),
    },
    "rope": {"aligned": (64, 16, 16, 128, 128), "ragged": (50, 5, 3, 64, 32), "of size 1": (1, 1, 1, 2, 2)},
}
NAMES = {
    "matmul": ("M", "N", "K"),
    "rms_norm": ("rows", "cols"),
    "rope": ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
}
CLASSES: Mapping[str, Mapping[str, object]] = {"rope": {"interleaved": False}}


def _unaligned(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].view(tensor.shape).copy_(tensor)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    *outer, last = tensor.shape
    wide = torch.empty((*outer, 3 * last + 1), dtype=tensor.dtype, device=tensor.device)
    return wide[..., 1::3][..., :last].copy_(tensor)


LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "unaligned": _unaligned,
    "transposed": _transposed,
    "strided": _strided,
}


def main(name: str) -> None:
    """Run every size in every layout and print the verdicts."""
    tunable: Tunable = getattr(kernels, f"{name}_tunable")
    arch = Arch(*torch.cuda.get_device_capability(0))
    properties = torch.cuda.get_device_properties(0)
    device = Device.reference(arch).with_sm_count(properties.name, properties.multi_processor_count)
    compiled: dict[str, bytes] = {}
    verdicts = {}
    for case, sizes in SIZES[name].items():
        named = dict(zip(NAMES[name], sizes, strict=True))
        problem = Problem({"dtype": "bfloat16", **CLASSES.get(name, {}), **named})
        for layout, lay in LAYOUTS.items():
            verdicts[f"{case}, {layout}"] = _verdict(tunable, problem, lay, device, compiled)
    print(json.dumps({"weakest": len(compiled), "verdicts": verdicts}))


def _verdict(
    tunable: Tunable,
    problem: Problem,
    lay: Callable[[torch.Tensor], torch.Tensor],
    device: Device,
    compiled: dict[str, bytes],
) -> str:
    made = tunable.make_args(problem, torch.device("cuda", 0), 7)
    args = tuple(lay(arg) if isinstance(arg, torch.Tensor) else arg for arg in made)
    expected = tunable.reference(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))
    config = tunable.default_config(device.arch, problem)

    def source(signature: str, arch: Arch) -> cutile.Cubin:
        weak, symbol = cutile.weakest_signature(tunable.kernel, signature), cutile.symbol_of(tunable.kernel)
        if weak not in compiled:
            compiled[weak] = cutile.compile_cubin(tunable.kernel, config.hints, weak, arch, symbol=symbol)
        return cutile.Cubin(compiled[weak], symbol)

    outputs = {place: tunable.parameters.index(place) for place in tunable.outputs}
    for index in outputs.values():
        args[index].fill_(float("nan"))
    kernel = _KEPT.setdefault(str(config.hints), cutile.with_hints(tunable.kernel, config.hints, source))
    grid = tuple(tunable.grid_fn(config, device, problem))
    ct.launch(torch.cuda.current_stream().cuda_stream, grid, kernel, tunable.args_fn(config, *args))
    torch.cuda.synchronize()
    for name, close in _by_name(tunable, expected).items():
        got = args[tunable.parameters.index(name)].double()
        error = (got - close.value).abs() - (close.atol + close.rtol * close.value.abs())
        if not bool((error <= 0).all()):
            return f"{name} is off by up to {float((got - close.value).abs().max())}"
    return "right"


def _by_name(tunable: Tunable, expected: Mapping[str, Close] | Close) -> Mapping[str, Close]:
    return {tunable.mutated[0]: expected} if isinstance(expected, Close) else expected


_KEPT: dict[str, Any] = {}

if __name__ == "__main__":
    main(sys.argv[1])
