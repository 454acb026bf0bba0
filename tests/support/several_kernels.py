"""Three kernels of one module, the sample kernel with other numbers of buckets: several in flight at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from aot_tune.declare.discovery import FoundKernel
from tests.support.samples import scale

MODULE = "tests.support.several_kernels"

_SIZES = {"short": [64], "long": [1, 16, 64, 128], "middle": [1, 256]}

TUNABLES = tuple(
    dataclasses.replace(scale, name=name, typical=[{"dtype": "bfloat16", "M": sizes, "N": 1024}])
    for name, sizes in _SIZES.items()
)


def several_in(folder: Path) -> tuple[FoundKernel, ...]:
    """The declarations with their tables in `folder`; the longest is neither the first nor the last."""
    return tuple(
        FoundKernel(module=MODULE, tunable=dataclasses.replace(one, tables=folder)) for one in TUNABLES
    )
