"""The shipped kernels' declarations, and what serves them without a compiler: their tables and an archive."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from aot_tune.cubins.archive import FILE_NAME
from aot_tune.cubins.origin import declared_code
from aot_tune.cubins.origin_walk import origin_of
from aot_tune.cubins.pack import KernelCubins, pack
from aot_tune.declare.discovery import OWN_KERNELS, find_tunables
from aot_tune.errors import TableError
from aot_tune.nvidia import cutile
from aot_tune.tables import store
from aot_tune.tunable import Tunable
from aot_tune.tuner.archives.build import table_of
from aot_tune.tuner.archives.signatures import compilations
from aot_tune.tuner.plan.candidates import DeviceKernel
from tests.support.samples import SM90

FOUND = find_tunables([OWN_KERNELS])
SHIPPED = tuple(found.tunable for found in FOUND.values())


def with_cubins(tunable: Tunable, folder: Path) -> Tunable:
    """A declaration with its tables and an archive of all that `aot-tune compile` makes of it, of no code."""
    (folder / str(SM90)).mkdir(parents=True)
    own = store.package_folder(tunable)
    try:
        table = table_of(own, SM90, tunable)
    except TableError:  # of a kernel that was changed and not swept yet: served without it
        table = None
    if table is not None:
        shutil.copy(store.table_path(own, SM90, tunable.name), folder / str(SM90))
    kernel = DeviceKernel(FOUND[tunable.name], SM90)
    symbol = cutile.symbol_of(tunable.kernel)
    wanted = compilations(kernel, [table] if table else [])
    cubins = {(one.hints, one.signature): b"code" for one in wanted}
    packed = KernelCubins(
        kernel=tunable.name, symbol=symbol, origin=origin_of(declared_code(tunable), ""), cubins=cubins
    )
    (folder / str(SM90) / FILE_NAME).write_bytes(pack(SM90, [packed]))
    return dataclasses.replace(tunable, tables=folder)
