"""The cases in which each shipped kernel runs as its weakest cubin: sizes, dtypes and layouts.

Sizes are such that few sets of constants are compiled for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aot_tune.declare.discovery import OWN_KERNELS, FoundKernel, find_tunables
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.kernels.norms.rms_norm_space import LEAST_COLUMNS_IN_PLACE
from aot_tune.nvidia import cutile
from aot_tune.tunable import Tunable
from aot_tune.tuner.archives import build as build_cubins
from aot_tune.tuner.archives.report import CUBINS
from aot_tune.tuner.archives.signatures import Compilation
from aot_tune.tuner.compile.job import Compiled, CompileResult
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem

FOUND: Mapping[str, FoundKernel] = find_tunables([OWN_KERNELS])
SEED = 7
"""Odd, so that `linear` has a bias."""

HALVES = ("bfloat16", "float16")
THREE = (*HALVES, "float32")
DTYPES: Mapping[str, Sequence[str]] = {
    "attention": HALVES,
    "attention_decode": HALVES,
    "attention_varlen": HALVES,
    "cross_entropy": THREE,
    "fused_add_rms_norm": THREE,
    "gate_up_swiglu": HALVES,
    "gated_activation": THREE,
    "grouped_matmul": HALVES,
    "layer_norm": THREE,
    "linear": THREE,
    "matmul": HALVES,
    "matmul_fp8": HALVES,
    "matmul_fp8_block": HALVES,
    "rms_norm": THREE,
    "rope": THREE,
    "softmax": THREE,
}
"""What the host function takes; of fp8 what it writes, since all its factors are float8_e4m3fn."""


def _rows(**sizes: tuple[int, int]) -> dict[str, dict[str, object]]:
    return {case.replace("_", " "): {"rows": rows, "cols": cols} for case, (rows, cols) in sizes.items()}


def _product(names: str, **sizes: Sequence[object]) -> dict[str, dict[str, object]]:
    return {
        case.replace("_", " "): dict(zip(names.split(), each, strict=True)) for case, each in sizes.items()
    }


_MNK = {
    "aligned": (128, 256, 128),
    "ragged": (50, 248, 72),
    "of_odd_sizes": (133, 77, 51),
    "of_size_1": (1, 1, 1),
}
_PREFILL = {
    "aligned": ("causal", 2, 256, 8, 2, 128),
    "ragged": ("causal_127", 3, 200, 4, 4, 64),
    "of_odd_sizes": ("full", 3, 77, 3, 1, 64),
    "of_size_1": ("causal", 1, 1, 1, 1, 64),
}
_ROWS = {"aligned": (64, 2048), "ragged": (50, 2040), "of_odd_sizes": (33, 1501), "of_size_1": (1, 1)}

SIZES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "attention": _product("mask batch tokens heads kv_heads head_dim", **_PREFILL),
    "attention_decode": _product(
        "windowed batch context heads kv_heads head_dim page_size",
        aligned=(False, 16, 512, 8, 2, 128, 16),
        ragged=(False, 3, 1000, 8, 1, 128, 16),
        of_odd_sizes=(True, 5, 100, 24, 3, 64, 32),
        of_size_1=(False, 1, 1, 1, 1, 64, 16),
    ),
    "attention_varlen": _product(
        "mask batch tokens heads kv_heads head_dim",
        **{**_PREFILL, "of_odd_sizes": ("full", 5, 77, 3, 1, 64)},
    ),
    "cross_entropy": _product(
        "gradient rows vocabulary",
        aligned=(False, 64, 4096),
        ragged=(True, 50, 4088),
        of_odd_sizes=(True, 33, 1501),
        of_shared_rows=(True, 5, 50257),
        of_size_1=(True, 1, 1),
    ),
    # Fewer than 5 columns are a sum and an rms_norm.
    "fused_add_rms_norm": _rows(**{**_ROWS, "of_size_1": (1, LEAST_COLUMNS_IN_PLACE)}),
    "gate_up_swiglu": _product("tokens N K", **_MNK),
    "gated_activation": _product(
        "activation rows cols",
        aligned=("silu", 64, 2048),
        ragged=("gelu", 50, 2040),
        of_odd_sizes=("gelu_tanh", 33, 1501),
        of_size_1=("silu", 1, 1),
    ),
    "grouped_matmul": _product(
        "tokens experts N K",
        aligned=(128, 8, 256, 128),
        ragged=(50, 5, 248, 72),
        of_odd_sizes=(33, 3, 77, 51),
        of_size_1=(1, 1, 1, 1),
    ),
    "layer_norm": _product(
        "bias rows cols",
        aligned=(True, 64, 2048),
        ragged=(False, 50, 2040),
        of_odd_sizes=(True, 33, 1501),
        of_size_1=(True, 1, 1),
    ),
    "linear": _product(
        "activation M N K",
        aligned=("none", 128, 256, 128),
        ragged=("silu", 50, 248, 72),
        of_odd_sizes=("gelu", 33, 77, 51),
        of_a_long_sum=("none", 33, 77, 8201),
        of_size_1=("relu", 1, 1, 1),
    ),
    "matmul": _product("M N K", **_MNK, of_a_long_sum=(33, 77, 8201)),
    "matmul_fp8": _product("M N K", **_MNK),
    "matmul_fp8_block": _product("M N K", **{**_MNK, "of_some_blocks": (33, 200, 300)}),
    "rms_norm": _rows(**_ROWS),
    "rope": _product(
        "interleaved tokens heads kv_heads head_dim rotary_dim",
        aligned=(False, 64, 16, 16, 128, 128),
        ragged=(True, 50, 5, 3, 64, 32),
        of_odd_sizes=(False, 33, 3, 1, 65, 32),
        of_size_1=(False, 1, 1, 1, 2, 2),
    ),
    "softmax": _rows(**_ROWS, of_shared_rows=(3, 50257)),
}


# Layouts ----------------------------------------------------------------------------------------------------


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """An element behind an aligned address."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].view(tensor.shape).copy_(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The first dimension has stride 1."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Every third element of rows of an odd length."""
    *outer, last = tensor.shape
    wide = torch.empty((*outer, 3 * last + 1 + last % 2), dtype=tensor.dtype, device=tensor.device)
    return wide[..., 1::3][..., :last].copy_(tensor)


LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "unaligned": unaligned,
    "transposed": transposed,
    "strided": strided,
}

_MADE = "the host function makes it, contiguous and aligned"
_OURS = "memory of the stream, which the host function takes from `workspace`"
_FP8 = "the host function refuses or copies it: `fp8.laid_out`"
KEPT: Mapping[str, Mapping[str, str]] = {
    "attention": {"lse": _MADE},
    "attention_decode": {"lse": _MADE, "scratch": _OURS},
    "attention_varlen": {"lse": _MADE},
    "cross_entropy": {"loss": _MADE, "slots": _OURS},
    "linear": {"scratch": _OURS},
    "matmul": {"scratch": _OURS},
    "matmul_fp8": {"a": _FP8, "b": _FP8},
    "matmul_fp8_block": {"a": _FP8, "b": _FP8},
    "softmax": {"slots": _OURS},
}
"""The arguments that keep the layout `make_args` gives them, and why; all others are laid out in each."""


# Cases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch."""

    kernel: str
    problem: Problem
    name: str
    layout: str

    @property
    def tunable(self) -> Tunable:
        """The declaration."""
        return FOUND[self.kernel].tunable

    def args(self, device: str) -> tuple[Any, ...]:
        """Launch arguments in this layout."""
        made = self.tunable.make_args(self.problem, torch.device(device), SEED)
        kept, lay = KEPT.get(self.kernel, {}), LAYOUTS[self.layout]
        return tuple(
            lay(arg) if isinstance(arg, torch.Tensor) and name not in kept else arg
            for name, arg in zip(self.tunable.parameters, made, strict=True)
        )


def compilation_of(tunable: Tunable, problem: Problem, args: Sequence[Any], arch: Arch) -> Compilation:
    """The weakest that a problem's default needs."""
    config = tunable.default_config(arch, problem)
    strong = cutile.signature_of(tunable.kernel, tuple(tunable.args_fn(config, *args)))
    return Compilation(tuple(config.hints.items()), cutile.weakest_signature(tunable.kernel, strong))


def cases(kernel: str) -> Iterator[Case]:
    """Every size in every dtype and layout."""
    for dtype in DTYPES[kernel]:
        for name, sizes in SIZES[kernel].items():
            problem = Problem({"dtype": dtype, **sizes})
            for layout in LAYOUTS:
                yield Case(kernel=kernel, problem=problem, name=f"{dtype}, {name}, {layout}", layout=layout)


def weakest(kernel: str, arch: Arch) -> frozenset[Compilation]:
    """All that a kernel's cases need compiled: the layouts of a problem share one."""
    return frozenset(
        compilation_of(case.tunable, case.problem, case.args("meta"), arch)
        for case in cases(kernel)
        if case.layout == "contiguous"
    )


def compiled(wanted: Mapping[str, Iterable[Compilation]], arch: Arch) -> dict[tuple[str, Compilation], bytes]:
    """Their cubins, on all usable cores; those that an `aot-tune compile` left here are not compiled again.

    Raises:
        AssertionError: One cannot be compiled.
    """
    jobs = {
        (kernel, one): build_cubins._job(
            DeviceKernel(FOUND[kernel], arch), one, source_hash(FOUND[kernel].tunable)
        )
        for kernel, each in wanted.items()
        for one in each
    }
    results: dict[str, CompileResult] = {}
    with CompilePool(usable_cores(), build_cubins.COMPILE_SECONDS, CUBINS.absolute()) as pool:
        for job in jobs.values():
            pool.submit(job)
        while pool.unfinished:
            results |= {result.key: result for result in pool.poll(1.0)}
    cubins = {}
    for place, job in jobs.items():
        result = results[job.key]
        assert isinstance(result, Compiled), (place, result)
        cubins[place] = result.path.read_bytes()
    return cubins
