"""Read how the model's choices did at the sizes of measured tables, kernel by kernel. Measures nothing.

``python -m tests.judge_model`` chooses at every size of a measured table as a prediction does, looks up the
measured times, and writes a line for each kernel into `FILE`. A prediction quotes its kernel's line. A line
is stale as soon as the table, the kernel or the model has changed: then the kernel counts as not judged.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from aot_tune.declare.declaration import Declaration
from aot_tune.declare.fingerprint.hashing import HEX_DIGITS, facts_hash, source_hash
from aot_tune.declare.fingerprint.syntax import is_text, normal_form
from aot_tune.declare.kernel_source import block_counts
from aot_tune.errors import AotTuneError
from aot_tune.nvidia import sass
from aot_tune.tables import store
from aot_tune.tables.files import read_bytes
from aot_tune.tuner.plan import model
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.arch import Arch

FILE = Path(__file__).with_name("judged.jsonl")
"""The judgements of the shipped kernels, one a line."""

NOT_JUDGED = "not judged on a measured table"
"""The worth of predictions without a judgement."""

_MODEL = (model, block_counts, sass, DeviceKernel.launched, DeviceKernel.derived, DeviceKernel.counted)
"""The code that a predicted time is computed with."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The model's choices for one kernel at the sizes of a measured table."""

    kernel: str
    """The kernel's name."""

    arch: str
    """The table's arch."""

    device: str
    """The GPU that the table was measured on."""

    gate: float | None
    """Least predicted gain with which a prediction leaves the default; None where it always keeps it."""

    sizes: int
    """Number of the table's sizes."""

    leaves: int
    """Number of sizes at which the model's choice is not the default."""

    time: float
    """Geometric mean over the sizes of the choice's time / the default's."""

    behind: float
    """Fraction of the sizes at which the choice is slower than the default by more than the tie band."""

    worst: float
    """Largest ratio of the choice's time to the default's."""

    apart_time: float
    """`time` where each half of the shapes takes the gate of the other half."""

    apart_far: float
    """Fraction of the sizes that are slower than the default by more than 10 % then."""

    hash: str
    """Hash of the table, the kernel and the model."""

    def __str__(self) -> str:
        where = f"{self.arch}, {self.device}"
        if not self.leaves:
            return f"leaves the default at none of {self.sizes} sizes ({where}): the default stays"
        return (
            f"{self.time:.3f} of the default's time, slower at {self.behind:.0%} of {self.sizes} sizes, at "
            f"worst {self.worst - 1:.0%} ({where})" + (": not used" if self.gate is None else "")
        )


def judgement(tunable: Declaration) -> Judgement | None:
    """Return how the model did on a kernel's measured table; None without a line that still holds."""
    for line in FILE.read_text().splitlines():
        judged = Judgement(**json.loads(line))
        if judged.kernel == tunable.name:
            return judged if judged.hash == judged_hash(tunable, Arch.parse(judged.arch)) else None
    return None


def judged_hash(tunable: Declaration, arch: Arch) -> str | None:
    """Hash a kernel's table, its code and the model; None where one of them cannot be read."""
    try:
        table = read_bytes(store.table_path(store.package_folder(tunable), arch, tunable.name))
        parts = [table, source_hash(tunable).encode(), facts_hash(tunable).encode(), _model_code()]
    except (AotTuneError, OSError):  # no such table, or a package without its source
        return None
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:HEX_DIGITS]


@functools.cache
def _model_code() -> bytes:
    """Return the model's code without comments and docstrings, equal in all releases of Python."""
    trees = [ast.parse(textwrap.dedent(inspect.getsource(part))) for part in _MODEL]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not is_text(each)]  # type: ignore[attr-defined]
    return "".join(text for tree in trees for text in normal_form(tree)).encode()
