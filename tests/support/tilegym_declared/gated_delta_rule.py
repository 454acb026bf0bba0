"""TileGym's recurrent gated delta rule: three kernels for one operation, and a state that may be absent.

The first config is the one that the authors take where they do not search.
"""

import cuda.tile as ct
import torch
from tilegym.ops.cutile.recurrent_gated_delta_rule import (
    _recurrent_gated_delta_rule_fwd_kernel,
    _recurrent_gated_delta_rule_fwd_kernel_decode_vstream,
    _recurrent_gated_delta_rule_fwd_kernel_persistent,
)

from aot_tune import Config, Exact, Pow2, Tunable
from aot_tune.inputs import empty, randn, uniform

HEADS = {"H": 8, "HV": 16, "D": 128}


def _space(arch, problem):
    names, blocks = ("standard", "persistent"), (64, 32, 16, 8)
    if problem.T == 1:
        names, blocks = ("stream", *names), (32, 64, 128)
    last = {"standard": {}, "persistent": {}, "stream": {"STREAM_V_TILE": 16}}
    return [
        Config(kernel=name, constants={"BLOCK_V": block, **last[name]}, hints={"occupancy": occupancy})
        for name in names
        for block in blocks
        for occupancy in (2, 4)
    ]


def _grid(config, device, problem, parts):
    blocks = problem.B * problem.HV
    return (min(device.sm_count, blocks * parts),) if config.kernel == "persistent" else (blocks, parts)


def _args(config, q, k, v, g, beta, out, initial, final):
    flags = initial is not None, final is not None, False
    states = (q if one is None else one for one in (initial, final))  # an absent one is not touched
    last = config["STREAM_V_TILE"] if config.kernel == "stream" else q.shape[1]
    sizes = q.shape[3], config["BLOCK_V"], True, True, last
    return q, k, v, g, beta, out, *states, q.shape[3] ** -0.5, *flags, *sizes


def _reference(q, k, v, g, beta, out, initial, final):
    q, k = (x.double().repeat_interleave(v.shape[2] // x.shape[2], 2).unsqueeze(-1) for x in (q, k))
    state = 0 if initial is None else initial.double()
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].double().exp()
        delta = (v[:, t].double() - (state * k[:, t]).sum(-2)) * beta[:, t, :, None].double()
        state = state + k[:, t] * delta.unsqueeze(-2)
        outs.append((state * q[:, t]).sum(-2) * q.shape[3] ** -0.5)
    return {"out": torch.stack(outs, 1), "final": None if final is None else state}


def _made(problem, device, seed):
    b, t, h, hv, d = (problem[name] for name in ("B", "T", "H", "HV", "D"))
    q, k, v = (
        randn((b, t, heads, d), problem.dtype, device, seed + i, scale=d**-0.5)
        for i, heads in enumerate((h, h, hv))
    )
    g = uniform((b, t, hv), -1.0, 0.0, "float32", device, seed)
    beta = uniform((b, t, hv), 0.0, 1.0, problem.dtype, device, seed)
    initial = randn((b, hv, d, d), "float32", device, seed) if problem.initial else None
    final = empty((b, hv, d, d), "float32", device) if problem.final else None
    return q, k, v, g, beta, empty((b, t, hv, d), problem.dtype, device), initial, final


gated_delta_rule = Tunable(
    name="tilegym_gated_delta_rule",
    package=__package__,
    kernel={
        "standard": _recurrent_gated_delta_rule_fwd_kernel,
        "persistent": _recurrent_gated_delta_rule_fwd_kernel_persistent,
        "stream": _recurrent_gated_delta_rule_fwd_kernel_decode_vstream,
    },
    axes={"B": Pow2(), "T": Exact(), "H": Exact(), "HV": Exact(), "D": Exact()},
    problem=lambda q, k, v, g, beta, out, initial, final: {
        "dtype": q.dtype,
        **{"B": q.shape[0], "T": q.shape[1], "H": q.shape[2], "HV": v.shape[2], "D": q.shape[3]},
        **{"initial": initial is not None, "final": final is not None},
    },
    search_space=_space,
    legal=lambda config, arch, problem: config.kernel != "stream" or problem.T == 1,
    grid_fn=lambda config, device, problem: _grid(
        config, device, problem, ct.cdiv(problem.D, config["BLOCK_V"])
    ),
    args_fn=_args,
    make_args=_made,
    reference=_reference,
    outputs=("out", "final"),
    typical=[
        {"dtype": "bfloat16", "B": [1, 16], "T": 1, **HEADS, "initial": True, "final": True},
        {"dtype": "bfloat16", "B": [1, 8], "T": 32, **HEADS, "initial": False, "final": False},
    ],
)
