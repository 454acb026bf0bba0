"""TileGym's products of a list of pairs: lists of tensors, and a constant from the device.

The authors always search. The space holds their list for sm90, of which the default is the first.
"""

from tilegym.ops.cutile.group_gemm import _group_gemm_kernel

from aot_tune import Config, Exact, Pow2, Tunable
from aot_tune.inputs import empty, randn


def _blocks(config, device):
    return device.sm_count // config.hints["num_ctas"] * config.hints["occupancy"]


group_gemm = Tunable(
    name="tilegym_group_gemm",
    package=__package__,
    kernel=_group_gemm_kernel,
    axes={"groups": Exact(), "M": Pow2(), "N": Exact(), "K": Exact()},
    problem=lambda a, b, c: {
        "dtype": a[0].dtype,
        "groups": len(a),
        "M": max(map(len, a)),
        "N": b[0].shape[1],
        "K": len(b[0]),
    },
    search_space=[
        Config(constants={"TILE_M": m, "TILE_N": n, "TILE_K": k}, hints={"num_ctas": ctas, "occupancy": 1})
        for m, n, k in ((128, 128, 128), (256, 256, 64), (128, 128, 64), (128, 256, 64), (64, 128, 64))
        for ctas in (1, 2)
    ],
    grid_fn=lambda config, device, problem: (_blocks(config, device),),
    args_fn=lambda config, a, b, c, *, device: (
        *(a, b, c, *config.constants.values(), _blocks(config, device), False),
    ),
    make_args=lambda problem, device, seed: (
        [randn((problem.M, problem.K), problem.dtype, device, seed + g) for g in range(problem.groups)],
        [randn((problem.K, problem.N), problem.dtype, device, seed - g) for g in range(problem.groups)],
        [empty((problem.M, problem.N), problem.dtype, device) for _ in range(problem.groups)],
    ),
    reference=lambda a, b, c: [one.float() @ other.float() for one, other in zip(a, b, strict=True)],
    outputs=("c",),
    typical=[{"dtype": "bfloat16", "groups": 4, "M": [512, 2048], "N": 1024, "K": 512}],
)
