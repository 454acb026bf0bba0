"""The cases in which each shipped kernel runs as its weakest cubin: sizes, dtypes and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aot_tune.cubins.origin import declared_code
from aot_tune.declare.discovery import OWN_KERNELS, FoundKernel, find_tunables
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.nvidia import cutile
from aot_tune.tunable import Tunable
from aot_tune.tuner.archives import build as build_cubins
from aot_tune.tuner.archives.report import CUBINS
from aot_tune.tuner.archives.signatures import Compilation
from aot_tune.tuner.compile.job import Compiled, CompileResult
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from tests.kernels.cases import CASES

FOUND: Mapping[str, FoundKernel] = find_tunables([OWN_KERNELS])
SEED = 7
"""Odd, so that `linear` has a bias."""


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
        kept, lay = CASES[self.kernel].kept, LAYOUTS[self.layout]
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
    for dtype in CASES[kernel].dtypes:
        for name, sizes in CASES[kernel].sizes.items():
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
            declared_code(FOUND[kernel].tunable, FOUND[kernel].module),
            source_hash(FOUND[kernel].tunable),
            arch,
            one,
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
