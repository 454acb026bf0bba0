"""Cut rows of cross_entropy into chunks and parts: search space, default, legality. Imports no kernel."""

from __future__ import annotations

from functools import cache

from aot_tune.kernels.rows import row_groups
from aot_tune.kernels.rows.rows import refusal, registers, threads
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@cache
def _config(chunk: int, num_worker_warps: int, occupancy: int, num_ctas: int = 1, members: int = 1) -> Config:
    return Config(
        constants={"chunk": chunk, "members": members},
        hints={"num_ctas": num_ctas, "occupancy": occupancy, "num_worker_warps": num_worker_warps},
    )


# Configs that read a row chunk by chunk ---------------------------------------------------------

_CHUNKED = (
    # Liger-Kernel reads 32768 columns at a time with 32 warps: 32 columns a thread, as most configs here.
    *(_config(chunk, 4, occupancy) for chunk in (2048, 4096) for occupancy in (4, 8)),
    *(_config(chunk, 8, occupancy) for chunk in (4096, 8192, 16384) for occupancy in (2, 4)),
)

_CLUSTERS = tuple(_config(8192 * ctas, 8, occupancy, ctas) for ctas in (2, 4) for occupancy in (1, 2))
"""For the loss of few rows: clusters of blocks, so that several multiprocessors read each row."""

_FEW = 64
"""Rows, at most, that count as few: they leave half of a GPU idle if one multiprocessor reads each."""

_READ_TWICE = (_config(4096, 4, 4), _config(8192, 8, 2), _config(16384, 8, 2))
"""For the gradient of rows too narrow to be shared, or too wide."""

# Configs whose blocks share a row ---------------------------------------------------------------

_FEWEST_COLUMNS = 16384
"""Columns of a row that blocks share, at least. Narrower rows would be done before the blocks had met."""

_MOST_PARTS = 32
"""Parts of a member, at most: the code and the time to compile it grow with them."""

_FEWEST_ELEMENTS = 32
"""Elements of a shared row that a thread holds, at least: with fewer, a block waits for many others."""

_IN_FLIGHT = 16384
"""Elements that the blocks of a multiprocessor load at once, at least."""

_REGISTERS = {"float32": (1.0, 34), "bfloat16": (0.5, 24), "float16": (0.5, 24)}
"""Registers of a thread by dtype: for each element that it holds, and further ones, where 16 divides the
columns: row-registers (README)."""

_UNALIGNED = (1.0, 40)
"""Registers where 16 does not divide the columns: elements of 16 bits are loaded one by one."""

_SHARED = (
    # The fewest members whose registers hold a row have the most loads in flight. The numbers grow by about a
    # quarter, so that every vocabulary finds one not far above its fewest.
    *(_config(1024, 4, 4, members=members) for members in (2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 32)),
    *(_config(1024, 4, 5, members=members) for members in (2, 3, 7, 14)),
    *(_config(1024, 4, 3, members=members) for members in (8, 16)),
    _config(2048, 8, 3, members=2),
)
"""For gradients, the same configs for every vocabulary: what was tuned for one vocabulary serves others."""

_READERS = tuple(_config(1024, 4, 4, members=members) for members in (16, 32))
"""For the loss of few rows; where rows are more, one block for each reads enough at once."""


def parts(config: Config, cols: int) -> tuple[int, int]:
    """Count the parts of each member, and those, from the first, that lie inside for all members.

    The second number is the first or one less.
    """
    width, members = int(config["chunk"]), int(config["members"])
    return -(-cols // (width * members)), cols // width // members


def slots(gradient: bool, rows: int, cols: int) -> int:
    """Return the size of `slots`, in int32 elements, for members of any config; 1 without shared rows."""
    if not _may_share(gradient, rows, cols):
        return 1
    return row_groups.ints(rows, _lanes(cols)) if gradient else _FEW * _lanes(cols)


def _may_share(gradient: bool, rows: int, cols: int) -> bool:
    few = gradient or rows <= _FEW
    return few and cols >= _FEWEST_COLUMNS and row_groups.fit(rows, _lanes(cols))


def _lanes(cols: int) -> int:
    """Return the most threads that share a row."""
    return min(edge(cols) // _FEWEST_ELEMENTS, row_groups.MOST_LANES)


def _held(config: Config, problem: Problem) -> int:
    """Count the elements of a shared row that a thread holds."""
    return parts(config, problem.size("vocabulary"))[0] * int(config["chunk"]) // threads(config)


def _resident(config: Config) -> int:
    """Count the threads that a multiprocessor runs at once."""
    return threads(config) * config.hints.get("occupancy", 1)


def _needs(problem: Problem) -> tuple[float, int]:
    """Return a thread's registers for each element that it holds, and its further registers."""
    dtype = str(problem["dtype"])
    one_by_one = dtype != "float32" and problem.size("vocabulary") % 16
    return _UNALIGNED if one_by_one else _REGISTERS[dtype]


def _unshared(config: Config, arch: Arch, problem: Problem) -> str | None:
    """Return why blocks of a config should not share a row, or None."""
    rows, cols, members = problem.size("rows"), problem.size("vocabulary"), int(config["members"])
    if not _may_share(bool(problem["gradient"]), rows, cols):
        return (
            f"{rows} rows of {cols} columns are not shared; blocks share rows of {_FEWEST_COLUMNS} columns "
            f"or more, and for the loss alone only up to {_FEW} rows"
        )
    if refused := row_groups.refusal(config, arch, _lanes(cols)):
        return refused
    width, (each, _) = int(config["chunk"]), parts(config, cols)
    if (members - 1) * width >= cols:
        return f"{cols} columns leave nothing to the last of {members} blocks"
    if each > _MOST_PARTS:
        return f"{cols} columns are more than {_MOST_PARTS} parts of {width} for each of {members} members"
    held, resident = _held(config, problem), _resident(config)
    if held < _FEWEST_ELEMENTS or held * resident < _IN_FLIGHT:
        return f"{held} elements a thread, {held * resident} a multiprocessor, are too few to share a row"
    occupancy, (element, beside) = config.hints.get("occupancy", 1), _needs(problem)
    if element * held + beside > registers(arch, resident):
        return f"{held} elements a thread spill at an occupancy of {occupancy}"
    return Device.reference(arch).refusal(occupancy)


# What the declaration names ---------------------------------------------------------------------


def space(arch: Arch, problem: Problem) -> tuple[Config, ...]:
    """Return all candidates; `legal` drops those that do not suit the vocabulary."""
    if problem["gradient"]:
        return tuple(dict.fromkeys((*_READ_TWICE, *_SHARED, default(arch, problem))))
    return (*_CHUNKED, *_CLUSTERS, *_READERS) if problem.size("rows") <= _FEW else _CHUNKED


def default(arch: Arch, problem: Problem) -> Config:
    """Choose a config that spills on no arch; for a gradient the fewest members that easily hold a row."""
    if not problem["gradient"]:
        return _config(8192, 8, 2) if problem.size("rows") <= _FEW else _config(4096, 4, 4)
    for occupancy, most in ((4, 76), (2, 176)):
        for members in (2, 3, 4, 6, 8, 12, 16, 24, 32):
            config = _config(1024, 4, occupancy, members=members)
            element, beside = _needs(problem)
            easily = element * _held(config, problem) + beside <= most
            if easily and _unshared(config, arch, problem) is None:
                return config
    return _config(8192, 8, 2)


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether a config may run, or why not."""
    if int(config["members"]) > 1:
        return _unshared(config, arch, problem) or True
    chunk, width = int(config["chunk"]), edge(problem.size("vocabulary"))
    if chunk > max(width, 8192):  # 8192 is the default's chunk, which is always legal
        return f"a chunk of {chunk} is more than half empty for {width} columns"
    return refusal(config, arch, chunk) or True


def blocks(config: Config, problem: Problem) -> int:
    """Count the blocks of a launch."""
    return problem.size("rows") * int(config["members"])
