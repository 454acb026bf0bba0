"""Archives of cubins for the sample kernel of `samples`, made up without a compiler."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from aot_tune.cubins.origin import declared_code
from aot_tune.cubins.origin_walk import origin_of
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.declare.discovery import FoundKernel
from aot_tune.nvidia import cutile
from aot_tune.tuner.archives.signatures import compilations
from aot_tune.tuner.plan.candidates import DeviceKernel
from tests.support.samples import MODULE, SM90, scale, scale_table


def packed(name: str = "scale", **origin: object) -> KernelCubins:
    """Cubins of no code for all that the sample's table asks for."""
    wanted = compilations(DeviceKernel(FoundKernel(module=MODULE, tunable=scale), SM90), [scale_table()])
    return KernelCubins(
        kernel=name,
        symbol=cutile.symbol_of(scale.kernel),
        origin=dataclasses.replace(origin_of(declared_code(scale), ""), **origin),  # type: ignore[arg-type]
        cubins={(one.hints, one.signature): b"code" for one in wanted},
    )


def put(folder: Path, *kernels: KernelCubins) -> Path:
    path = folder / "sm90" / "cubins.aot"
    path.write_bytes(pack(SM90, kernels))
    return path
