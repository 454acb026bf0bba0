"""A sweep on two real GPUs of one model. Left out where there is one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tables import store
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest
from aot_tune.tuner.sweep.results import PASSES, accepts
from tests.support.samples import scale_in

pytestmark = [pytest.mark.gpu, pytest.mark.gpu2]


def _tune(folder: Path, cubins: Path, *gpus: int) -> SweepReport:
    arch = (visible_gpus() or ())[0].arch
    assert arch is not None
    request = SweepRequest(
        kernels=(scale_in(folder / "tables")["scale"],),
        arch=arch,
        gpus=gpus,
        journal=folder / "journal",
        cubins=cubins,
    )
    return sweep.run(request, PlainProgress(io.StringIO()))


def test_two_gpus_share_a_sweep_and_each_pass_of_a_problem_is_on_one(tmp_path: Path) -> None:
    one = _tune(tmp_path / "one", tmp_path / "cubins", 0)
    two = _tune(tmp_path / "two", tmp_path / "cubins", 0, 1)
    assert one.complete
    assert two.complete
    assert len({use.gpu for use in two.gpus if use.busy_s > 0}) == 2
    (path,) = (tmp_path / "two" / "journal").rglob("scale.done")
    passes: dict[tuple[str, str], set[str]] = {}
    for record in journals.read(path, accepts).records:
        if record["kind"] == "result" and record["step"] != "recheck":
            place = (PASSES[record["step"]], str(record["problem"]))
            passes.setdefault(place, set()).add(record["gpu"])
    assert all(len(gpus) == 1 for gpus in passes.values())
    assert len(set.union(*passes.values())) == 2
    tables = [
        store.read_table(store.table_path(tmp_path / name / "tables", two.arch, "scale"))
        for name in ("one", "two")
    ]
    assert [entry.bucket for entry in tables[0].entries] == [entry.bucket for entry in tables[1].entries]
