"""Archives of the sample kernel made up for it, with no compiler. Not a test itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from aot_tune import cutile
from aot_tune.discovery import Found
from aot_tune.tuner.origin import origin_of
from aot_tune.tuner.pack import KernelCubins, pack
from aot_tune.tuner.plan import Kernel
from aot_tune.tuner.signature_classes import compilations
from tests.samples import MODULE, SM90, scale, scale_table


def packed(name: str = "scale", **origin: object) -> KernelCubins:
    """Cubins of no code for all that the sample's table asks for."""
    wanted = compilations(Kernel(Found(module=MODULE, tunable=scale), SM90), [scale_table()])
    return KernelCubins(
        kernel=name,
        symbol=cutile.symbol_of(scale.kernel),
        origin=dataclasses.replace(origin_of(scale, ""), **origin),  # type: ignore[arg-type]
        cubins={(one.hints, one.signature): b"code" for one in wanted},
    )


def put(folder: Path, *kernels: KernelCubins) -> Path:
    path = folder / "sm90" / "cubins.aot"
    path.write_bytes(pack(SM90, kernels))
    return path
