"""How good the tuned kernels are: beside their defaults on all declared shapes, and beside others."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from aot_tune import store
from aot_tune.bench.gpu import Gpu, shipped, this_gpu
from aot_tune.config import Config
from aot_tune.discovery import Found
from aot_tune.problem import Problem
from aot_tune.tuner.plan import Kernel, ProblemPlan
from aot_tune.tuner.report import geometric_mean

NOISE = 0.03
"""Two times of one kernel, each of a few samples, differ by this fraction now and then: a tie is no loss."""


_MORE_ROUNDS = 10
"""Of a shape that looks slower than its default: a power cap moves single measurements by more than noise."""


def run() -> dict[str, Any]:
    """All of it, kernel by kernel."""
    found = shipped()
    with this_gpu() as gpu:
        return {
            **{f"{name}, tuned against default": against_default(gpu, one) for name, one in found.items()},
            "matmul against cuBLAS": matmul_against_cublas(gpu, found["matmul"]),
            "rms_norm against others": rms_norm_against_others(gpu, found["rms_norm"]),
            "rope against others": rope_against_others(gpu, found["rope"]),
        }


def against_default(gpu: Gpu, found: Found) -> dict[str, Any]:
    """Time the tuned config and the default of every declared shape together.

    Returns:
        The geometric mean of default / tuned, the worst shape, and shapes where tuned is slower beyond noise.
    """
    tunable = found.tunable
    table = store.read_table(store.table_path(store.package_folder(tunable), gpu.arch, tunable.name))
    kernel, plans = gpu.plans(found, tunable.buckets)
    ratios: dict[Problem, float] = {}
    for each in plans:
        entry = table.entry(each.problem)
        if entry is None or entry.config == each.default:
            ratios[each.problem] = 1.0
            continue
        us = gpu.times(kernel, each, [entry.config, each.default])
        again = gpu.times(kernel, each, [each.default, entry.config])
        ratios[each.problem] = min(us[each.default], again[each.default]) / min(
            us[entry.config], again[entry.config]
        )
    worst = min(ratios, key=lambda problem: ratios[problem])
    return {
        "problems": len(ratios),
        "speed-up over the default": round(geometric_mean(ratios.values()), 3),
        "best": round(max(ratios.values()), 2),
        "worst": round(ratios[worst], 3),
        "worst at": str(worst),
        "slower than the default beyond noise": [str(p) for p, ratio in ratios.items() if ratio < 1 - NOISE],
    }


def _gain(gpu: Gpu, kernel: Kernel, each: ProblemPlan, config: Config, *, rounds: int) -> float:
    """Median time of the default over that of a config, in rounds that begin with each in turn."""
    taken: dict[Config, list[float]] = {config: [], each.default: []}
    for number in range(rounds):
        order = [config, each.default] if number % 2 else [each.default, config]
        for one, us in gpu.times(kernel, each, order).items():
            taken[one].append(us)
    return statistics.median(taken[each.default]) / statistics.median(taken[config])


def matmul_against_cublas(gpu: Gpu, found: Found) -> list[dict[str, Any]]:
    """The tuned matmul beside `torch.matmul` (cuBLAS) on large and thin declared shapes, microseconds."""
    shapes = [(1, 4096, 14336), (16, 6144, 4096), (64, 28672, 4096), (256, 6144, 4096), (1024, 4096, 14336),
              (4096, 28672, 4096), (8192, 8192, 28672), (16384, 6144, 4096)]  # fmt: skip
    rows = []
    for m, n, k in shapes:
        problem = Problem({"dtype": "bfloat16", "M": m, "N": n, "K": k})
        args = found.tunable.make_args(problem, gpu.torch_device, 0)
        a, b, out, *_ = args
        ours, theirs = _both(gpu, partial(found.tunable.launch, *args), partial(torch.matmul, a, b, out=out))
        rows.append(
            {
                "shape": str(problem),
                "aot_tune_us": ours,
                "cublas_us": theirs,
                "ratio": round(theirs / ours, 3),
            }
        )
    return rows


def rms_norm_against_others(gpu: Gpu, found: Found) -> list[dict[str, Any]]:
    """The tuned rms_norm beside torch.compile, and its share of the bandwidth of a copy."""

    def eager(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    compiled = torch.compile(eager, dynamic=False)
    rows = []
    for rows_count, cols in ((64, 4096), (1024, 8192), (4096, 4096), (16384, 8192)):
        problem = Problem({"dtype": "bfloat16", "rows": rows_count, "cols": cols})
        args = found.tunable.make_args(problem, gpu.torch_device, 0)
        rows.append(_beside(gpu, found, problem, args, partial(compiled, *args), 2 * args[0].nbytes))
    return rows


def rope_against_others(gpu: Gpu, found: Found) -> list[dict[str, Any]]:
    """The tuned rope beside torch.compile, and its share of the bandwidth of a copy."""

    def eager(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        for x in (q, k):
            low, high = x.float().chunk(2, dim=-1)
            c, s = cos[:, None].float(), sin[:, None].float()
            x.copy_(torch.cat((low * c - high * s, high * c + low * s), dim=-1))

    compiled = torch.compile(eager, dynamic=False)
    rows = []
    for tokens, heads in ((64, 32), (1024, 64), (4096, 32), (16384, 64)):
        problem = Problem(
            {"dtype": "bfloat16", "tokens": tokens, "heads": heads, "kv_heads": 8, "head_dim": 128}
        )
        args = found.tunable.make_args(problem, gpu.torch_device, 0)
        moved = 2 * (args[0].nbytes + args[1].nbytes) + args[2].nbytes + args[3].nbytes
        rows.append(_beside(gpu, found, problem, args, partial(compiled, *args), moved))
    return rows


def _beside(
    gpu: Gpu, found: Found, problem: Problem, args: tuple[Any, ...], other: Callable[[], object], moved: int
) -> dict[str, Any]:
    ours, theirs = _both(gpu, lambda: found.tunable.launch(*args), other)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=gpu.torch_device)
    target = torch.empty_like(source)
    copy = gpu.flushed_us(lambda: target.copy_(source))
    return {
        "shape": str(problem),
        "aot_tune_us": ours,
        "torch_compile_us": theirs,
        "ratio": round(theirs / ours, 3),
        "copy of as many bytes_us": round(copy, 2),
        "share of the copy's bandwidth": round(copy / ours, 3),
    }


def _both(gpu: Gpu, ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Best of two interleaved medians each, so that a change of clocks meets both."""
    pairs = [(gpu.flushed_us(ours), gpu.flushed_us(theirs)) for _ in range(2)]
    return round(min(pair[0] for pair in pairs), 2), round(min(pair[1] for pair in pairs), 2)
