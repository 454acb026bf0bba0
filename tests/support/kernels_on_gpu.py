"""A shipped kernel on a real GPU, held against its reference; and tensors and dtypes for such tests."""

from __future__ import annotations

import torch

from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from tests.support.agree import assert_agrees, expected, poison

DTYPES = ("bfloat16", "float16")


def here() -> Arch:
    return Arch(*torch.cuda.get_device_capability())


def check(tunable: Tunable, one: Problem, *, every: int = 0) -> None:
    """Compare the default, and each `every`-th candidate, with the reference."""
    args = tunable.make_args(one, torch.device("cuda"), 1)
    wanted = expected(tunable, args)
    candidates = tunable.candidates(here(), one)
    chosen = [tunable.default_config(here(), one), *(candidates[::every] if every else ())]
    before = {
        name: arg.clone()
        for name, arg in zip(tunable.parameters, args, strict=True)
        if name in tunable.inplace
    }
    for config in dict.fromkeys(chosen):
        poison(tunable, args)
        for name, arg in zip(tunable.parameters, args, strict=True):
            if name in before:
                arg.copy_(before[name])
        tunable.launch(*args, config=config)
        torch.cuda.synchronize()
        assert_agrees(tunable, args, wanted, f"{one} with {config}")


def check_shared_sums(tunable: Tunable, one: Problem) -> None:
    """Compare every candidate whose blocks share sums with the reference, many times, on one scratch."""
    args = tunable.make_args(one, torch.device("cuda"), 1)
    wanted = expected(tunable, args)
    out, scratch = (args[tunable.parameters.index(name)] for name in ("out", "scratch"))
    sharing = [config for config in tunable.candidates(here(), one) if int(config["splits"]) > 1]
    assert sharing
    for config in sharing:
        for _ in range(20):
            out.fill_(torch.nan)
            tunable.launch(*args, config=config)
            assert_agrees(tunable, args, wanted, f"{one} with {config}")
            assert not bool(scratch.any()), "what blocks left is not zero again"


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=dtype)
