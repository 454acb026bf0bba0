"""Time the first launch of an autotuned Triton kernel in a fresh process, for `serving`: prints JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import triton
import triton.language as tl

_ROWS, _COLS = 64, 4096
_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block in (1024, 4096)
    for warps in (2, 4, 8)
    for stages in (1, 2)
]


@triton.autotune(configs=_CONFIGS, key=["rows", "cols"])  # type: ignore[untyped-decorator,unused-ignore]
@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rms_norm(  # type: ignore[no-untyped-def,unused-ignore]
    x, weight, out, rows, cols, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * cols + at, mask=at < cols, other=0.0).to(tl.float32)
        total += part * part
    scale = tl.rsqrt(tl.sum(total) / cols + eps)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * cols + at, mask=at < cols, other=0.0).to(tl.float32)
        by = tl.load(weight + at, mask=at < cols, other=0.0).to(tl.float32)
        tl.store(out + row * cols + at, (part * scale * by).to(out.dtype.element_ty), mask=at < cols)


def main() -> None:
    """Launch twice and print the milliseconds of each launch, waited for."""
    x = torch.randn(_ROWS, _COLS, device="cuda", dtype=torch.bfloat16)
    weight, out = torch.ones(_COLS, device="cuda", dtype=torch.bfloat16), torch.empty_like(x)
    torch.cuda.synchronize()
    figures: dict[str, Any] = {}
    for name in ("rms_norm_ms", "again_ms"):
        started = time.perf_counter()
        _rms_norm[(_ROWS,)](x, weight, out, _ROWS, _COLS, 1e-6)
        torch.cuda.synchronize()
        figures[name] = round((time.perf_counter() - started) * 1e3, 3)
    wanted = torch.nn.functional.rms_norm(x.float(), (_COLS,), weight.float(), 1e-6)
    figures["right"] = bool(((out.float() - wanted).abs() < 0.05).all())
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
