"""TileGym's batched matrix product: sizes that are compiled in, a grid by the device's multiprocessors.

The authors always search. The space holds their list for sm90, of which the default is the middle.
"""

from itertools import product

import cuda.tile as ct
from tilegym.ops.cutile.bmm import _static_persistent_bmm_kernel

from aot_tune import Config, Exact, Pow2, Tunable, Work
from aot_tune.inputs import empty, randn


def _tiles(config, problem):
    return problem.Q * ct.cdiv(problem.M, config["TILE_M"]) * ct.cdiv(problem.N, config["TILE_N"])


def _made(problem, device, seed):
    a = (problem.K, problem.M) if problem.ta else (problem.M, problem.K)
    b = (problem.N, problem.K) if problem.tb else (problem.K, problem.N)
    arrays = [randn((problem.Q, *shape), problem.dtype, device, seed + i) for i, shape in enumerate((a, b))]
    return *arrays, empty((problem.Q, problem.M, problem.N), problem.dtype, device), problem.ta, problem.tb


def _work(config, problem):
    m, n, k = config.constants.values()
    return Work(
        steps=ct.cdiv(problem.K, k), flops=2 * m * n * k, load_bytes=2 * (m + n) * k, store_bytes=2 * m * n
    )


bmm = Tunable(
    name="tilegym_bmm",
    package=__package__,
    kernel=_static_persistent_bmm_kernel,
    axes={"Q": Pow2(), "M": Exact(), "N": Exact(), "K": Exact()},
    problem=lambda a, b, c, ta, tb: {
        **{"dtype": a.dtype, "ta": ta, "tb": tb},
        **dict(zip("QMNK", (*c.shape, a.shape[1 if ta else 2]), strict=True)),
    },
    search_space=[
        Config(constants={"TILE_M": m, "TILE_N": n, "TILE_K": 64}, hints={"num_ctas": c, "occupancy": o})
        for m, n in product((128, 64, 256), repeat=2)
        for c, o in ((2, 1), (2, 2), (1, 1))
    ],
    grid_fn=lambda config, device, problem: (
        min(device.sm_count // config.hints["num_ctas"], _tiles(config, problem)) * config.hints["occupancy"],
    ),
    args_fn=lambda config, a, b, c, ta, tb: (
        *(a, b, c, *c.shape, a.shape[1 if ta else 2]),
        *(*config.constants.values(), 8, 3, ta, tb),
    ),
    make_args=_made,
    reference=lambda a, b, c, ta, tb: (a.mT if ta else a).float() @ (b.mT if tb else b).float(),
    outputs=("c",),
    typical=[{"dtype": "bfloat16", "Q": 8, "M": 2048, "N": 2048, "K": 512, "ta": False, "tb": [False, True]}],
    tiles=_tiles,
    work=_work,
)
