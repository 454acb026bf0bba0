"""TileGym's RMSNorm: of its three kernels the fastest is a matter of the sizes.

The first config is the one that the authors take for the rows and columns, by their rule of two waves.
"""

import cuda.tile as ct
import torch
from tilegym.ops.cutile.rms_norm import (
    _rms_norm_kernel_gather,
    _rms_norm_kernel_multi_wave_cached,
    _rms_norm_kernel_static_persistent,
)

from aot_tune import Config, Device, Exact, Pow2, Tunable
from aot_tune.inputs import empty, named_dtype, randn


def _args(config, x, w, y, r, eps):
    if config.kernel == "persistent":
        return x, y, w, r, config["TILE_SIZE_M"], config["TILE_SIZE_N"], eps, 0.0
    return x, w, y, r, x.shape[1], eps, 0.0, config["TILE_SIZE"]


def _space(arch, problem):
    whole = 1 << (problem.cols - 1).bit_length()
    own = 16 if whole <= 1024 else 2 if whole >= 16384 else 4
    most = min(4096 // named_dtype(problem.dtype).itemsize, whole)
    tiles = [{"TILE_SIZE_M": m, "TILE_SIZE_N": whole} for m in dict.fromkeys((own, 4, 2))]
    rows = [Config(kernel="persistent", constants=tile) for tile in tiles]
    parts = [Config(kernel="gather", constants={"TILE_SIZE": size}) for size in (most, most // 2)]
    last = Config(kernel="cached", constants={"TILE_SIZE": whole})
    waves = problem.rows / Device.reference(arch).sm_count
    return [*rows, *parts, last] if waves > 2 else [*parts, *rows, last]


rms_norm = Tunable(
    name="tilegym_rms_norm",
    package=__package__,
    kernel={
        "cached": _rms_norm_kernel_multi_wave_cached,
        "gather": _rms_norm_kernel_gather,
        "persistent": _rms_norm_kernel_static_persistent,
    },
    axes={"rows": Pow2(), "cols": Exact()},
    problem=lambda x, w, y, r, eps: {"dtype": x.dtype, "rows": len(x), "cols": x.shape[1], "eps": f"{eps}"},
    search_space=_space,
    legal=lambda c, arch, p: c.kernel == "gather" or max(c.constants.values()) >= p.cols,
    grid_fn=lambda config, device, problem: (
        min(device.sm_count, ct.cdiv(problem.rows, config["TILE_SIZE_M"]))
        if config.kernel == "persistent"
        else problem.rows,
    ),
    args_fn=_args,
    make_args=lambda problem, device, seed: (
        randn((problem.rows, problem.cols), problem.dtype, device, seed),
        randn((problem.cols,), problem.dtype, device, seed + 1),
        empty((problem.rows, problem.cols), problem.dtype, device),
        empty((problem.rows,), "float32", device),
        float(problem.eps),
    ),
    reference=lambda x, w, y, r, eps: {
        "y": torch.nn.functional.rms_norm(x.float(), x.shape[1:], w.float(), eps),
        "r": (x.double().square().mean(1) + eps).rsqrt(),
    },
    outputs=("y", "r"),
    typical=[{"dtype": "bfloat16", "rows": [64, 4096], "cols": [4096, 8192], "eps": "1e-06"}],
)
