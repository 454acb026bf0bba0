"""TileGym's operations, declared in `tests.support.tilegym_declared`, go all the way to a launch.

Each is looked at by `doctor`, predicted, compiled into an archive and launched from it on the stand-in
driver. `make test` does one, `make test-slow` all.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aot_tune import environment
from aot_tune.cli.app import app
from aot_tune.nvidia.nvml import Gpu
from aot_tune.serve import loader
from aot_tune.tables import store
from aot_tune.tunable import Tunable
from tests.support.driver import stand_in
from tests.support.samples import SM90
from tests.support.tilegym_sites import FOLDER, MISSING

DECLARED = Path(__file__).parents[1] / "support" / "tilegym_declared"
NAMES = ("bmm", "gated_delta_rule", "group_gemm", "mla_decoding", "rms_norm", "silu_and_mul")
SMALL = "silu_and_mul"
"""The operation of `make test`: its configs differ in hints alone, so that one compilation predicts it."""

MOST_LINES = 40
"""Lines of a declaration in the median."""


def module_of(name: str) -> str:
    return f"tests.support.tilegym_declared.{name}"


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.process
@pytest.mark.skipif(not (FOLDER / "tilegym").is_dir(), reason=MISSING)
@pytest.mark.filterwarnings("ignore", "error::aot_tune.errors.CubinWarning")
@pytest.mark.parametrize(
    "name", [name if name == SMALL else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_an_operation_goes_from_its_declaration_to_a_launch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared: Tunable = getattr(importlib.import_module(module_of(name)), name)
    folder, options = tmp_path / "tables", ("--module", module_of(name), "--arch", "sm90")
    monkeypatch.setenv(environment.TABLES, str(folder))
    assert "[x] declared without a mistake" in run("doctor", declared.name, *options)
    kept = ("--cubins", str(tmp_path / "cubins"))
    run("tune", *options, "--out", str(folder), "--journal", str(tmp_path / "journal"), *kept)
    run("compile", *options, "--out", str(folder), *kept)

    table = store.read_table(store.table_path(folder, SM90, declared.name))
    assert {entry.bucket for entry in table.entries} == set(declared.buckets)
    monkeypatch.setattr("aot_tune.nvidia.cutile.may_have_compiler", lambda: False)
    gpu = Gpu(index=0, name="NVIDIA H200", arch=SM90, uuid="GPU-0")
    monkeypatch.setattr(loader, "gpus", lambda: (gpu,))
    served = dataclasses.replace(declared)  # reads the table
    with stand_in() as driver:
        for problem in served.typical_problems:
            args = served.make_args(problem, "meta", 0)
            entry = table.entry(served.bucket_of(problem))
            assert entry is not None
            assert served.config_for(*args) == entry.config
            for _ in range(2):
                served.launch(*args)
        assert len(driver.launches) == 2 * len(served.typical_problems)


def lines_of(text: str) -> int:
    """Lines that its author wrote: without blank ones, imports and the module's docstring."""
    tree = ast.parse(text)
    left_out = {
        line
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom) or node is tree.body[0]
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    return sum(
        bool(line.strip()) and number not in left_out for number, line in enumerate(text.splitlines(), 1)
    )


def test_a_declaration_takes_40_lines_in_the_median() -> None:
    written = {name: lines_of((DECLARED / f"{name}.py").read_text()) for name in NAMES}
    assert statistics.median(written.values()) <= MOST_LINES, written
    assert {path.stem for path in DECLARED.glob("[a-z]*.py")} == set(NAMES)
