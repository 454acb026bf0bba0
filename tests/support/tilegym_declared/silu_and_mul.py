"""TileGym's SiLU times a gate: only hints are searched. The authors' own config, unsearched, has none."""

import torch
from tilegym.ops.cutile.silu_and_mul import _silu_and_mul_kernel_row_wise
from tilegym.ops.cutile.utils import next_power_of_2

from aot_tune import Config, Exact, Pow2, Tunable
from aot_tune.inputs import empty, randn

silu_and_mul = Tunable(
    name="tilegym_silu_and_mul",
    package=__package__,
    kernel=_silu_and_mul_kernel_row_wise,
    axes={"rows": Pow2(), "hidden": Exact()},
    problem=lambda x, out: {"dtype": x.dtype, "rows": x.shape[0], "hidden": out.shape[1]},
    search_space=[
        Config(),
        *(
            Config(hints={"occupancy": occupancy, "num_worker_warps": warps})
            for occupancy in (4, 1, 2, 8, 16)
            for warps in (4, 8)
        ),
    ],
    grid_fn=lambda config, device, problem: (problem.rows,),
    args_fn=lambda config, x, out: (x, out, next_power_of_2(out.shape[1]), out.shape[1]),
    make_args=lambda problem, device, seed: (
        randn((problem.rows, 2 * problem.hidden), problem.dtype, device, seed),
        empty((problem.rows, problem.hidden), problem.dtype, device),
    ),
    reference=lambda x, out: torch.nn.functional.silu(x.float()).chunk(2, 1)[0] * x.float().chunk(2, 1)[1],
    outputs=("out",),
    typical=[{"dtype": "bfloat16", "rows": [64, 4096], "hidden": [2048, 8192]}],
)
