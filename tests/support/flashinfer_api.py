"""FlashInfer's public functions over its cuTile code, whose folders alone are fetched: for its own tests.

A pytest plugin. Each function hands its arguments on as FlashInfer's own modules do. At the end the plugin
tells how many launches cuTile's search timed, and how many kernels were compiled.
"""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from importlib import import_module
from typing import Any

COUNTED = "timed {} launches, compiled {} kernels"

_counts = {"timed": 0, "compiled": 0}


def _count(module: str, name: str, what: str) -> None:
    """From now on: count the calls of a function."""
    place: Any = import_module(module)
    function = getattr(place, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        _counts[what] += 1
        return function(*args, **kwargs)

    setattr(place, name, counted)


def _of(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"flashinfer.{module}"), name)


def pytest_configure() -> None:
    """Put the functions in place, before the tests import them."""
    _count("cuda.tile.tune._tune", "_benchmark", "timed")
    _count("cuda.tile._compile", "compile_cubin", "compiled")
    flashinfer: Any = import_module("flashinfer")
    utils: Any = import_module("flashinfer.utils")
    gemm: Any = import_module("flashinfer.gemm")
    quantization: Any = import_module("flashinfer.quantization")
    mm = _of("gemm.kernels.cutile.mm_bf16_cutile:mm_bf16_cutile")
    bmm = _of("gemm.kernels.cutile.bmm_bf16_cutile:bmm_bf16_cutile")
    rope = _of("quantization.kernels.cutile.rope_quantize_fp8_cutile:rope_quantize_fp8_cutile")
    quantize = _of(
        "quantization.kernels.cutile.per_token_group_quant_8bit_cutile:per_token_group_quant_8bit_cutile"
    )

    def mm_bf16(
        a: Any, b: Any, bias: Any = None, pdl: bool = False, out: Any = None, *_: Any, **__: Any
    ) -> Any:
        for name, given in (("bias", bias is not None), ("pdl", pdl)):
            if given:
                raise ValueError(f"cuTile ignores `{name}`")
        return mm(a, b, out)

    def bmm_bf16(a: Any, b: Any, out: Any = None, *_: Any, **__: Any) -> Any:
        return bmm(a, b, out)

    for function in (mm_bf16, bmm_bf16):
        checked: Any = function
        checked.is_compute_capability_supported = lambda capability: True
        checked.is_backend_supported = lambda backend, capability=None: backend == "cutile"
    flashinfer.autotune = lambda *args, **kwargs: nullcontext()
    flashinfer.mm_bf16, flashinfer.bmm_bf16 = mm_bf16, bmm_bf16
    gemm.is_cuda_tile_available = _of("cutile.cutile_common:is_cuda_tile_available")
    base: Any = types.ModuleType("flashinfer.gemm.gemm_base")
    base.CUDNN_AVAILABLE = False
    gemm.gemm_base = sys.modules[base.__name__] = base
    utils.is_sm100a_supported = lambda device: False

    def rope_quantize_fp8(*args: Any, enable_pdl: bool = False, backend: str = "", **kwargs: Any) -> Any:
        return rope(*args, **kwargs)

    flashinfer.rope = types.SimpleNamespace(rope_quantize_fp8=rope_quantize_fp8)
    quantization.per_token_group_quant_8bit = lambda x, backend="", **kwargs: quantize(x, **kwargs)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell the counts."""
    terminalreporter.write_line(COUNTED.format(_counts["timed"], _counts["compiled"]))
