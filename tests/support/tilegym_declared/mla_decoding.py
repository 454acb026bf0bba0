"""TileGym's decoding of multi-head latent attention: one array arrives at two parameters of the kernel.

The default is the config that the authors take on the arch.
"""

import math

import cuda.tile as ct
from tilegym.ops.cutile.mla_decoding import _naive_absorb_mla_transpose_kernel

from aot_tune import Config, Exact, Pow2, Tunable, Work
from aot_tune.inputs import empty, randn


def _args(config, q, qpe, kv, kpe, out, lse, scale):
    length, tile_n = kv.shape[1], config["TILE_N"]
    sizes = q.shape[2], config["TILE_H"], tile_n, kpe.shape[2], length, length % tile_n == 0
    return q, qpe, kv, kv, kpe, out, lse, scale, *sizes


def _reference(q, qpe, kv, kpe, out, lse, scale):
    scores = (q.float() @ kv.float().mT + qpe.float() @ kpe.float().mT) * scale
    return {"out": scores.softmax(-1) @ kv.float(), "lse": scores.logsumexp(-1) / math.log(2)}


def _work(config, problem):
    h, n = config["TILE_H"], config["TILE_N"]
    load = 2 * n * (2 * 512 + 64)
    return Work(
        steps=ct.cdiv(problem.length, n), flops=h * load, load_bytes=load, store_bytes=h * (2 * 512 + 4)
    )


mla_decoding = Tunable(
    name="tilegym_mla_decoding",
    package=__package__,
    kernel=_naive_absorb_mla_transpose_kernel,
    axes={"batch": Pow2(), "heads": Exact(), "length": Exact()},
    problem=lambda q, qpe, kv, kpe, out, lse, scale: {
        "dtype": q.dtype,
        "batch": q.shape[0],
        "heads": q.shape[1],
        "length": kv.shape[1],
    },
    search_space=[Config(constants={"TILE_H": h, "TILE_N": n}) for n in (64, 128, 32) for h in (16, 32)],
    default=lambda arch, problem: Config(constants={"TILE_H": 16, "TILE_N": 128 if arch.major == 10 else 64}),
    grid_fn=lambda config, device, problem: (ct.cdiv(problem.heads, config["TILE_H"]), problem.batch),
    args_fn=_args,
    make_args=lambda problem, device, seed: (
        *(randn((problem.batch, problem.heads, d), problem.dtype, device, seed + d) for d in (512, 64)),
        *(randn((problem.batch, problem.length, d), problem.dtype, device, seed - d) for d in (512, 64)),
        empty((problem.batch, problem.heads, 512), problem.dtype, device),
        empty((problem.batch, problem.heads), "float32", device),
        576**-0.5,
    ),
    reference=_reference,
    outputs=("out", "lse"),
    typical=[{"dtype": "bfloat16", "batch": [2, 64], "heads": [16, 128], "length": [1024, 4096]}],
    work=_work,
)
