"""aot_tune.cli.start.new: declarations that are begun from kernels it was not written with."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.cli.start.new import begin
from aot_tune.cli.start.text import name_of
from aot_tune.declare.blanks import blank_mistakes, blanks_of
from aot_tune.declare.checks import declaration_problems
from aot_tune.nvidia import cutile
from aot_tune.replay.fit import hash_now
from aot_tune.replay.problem import Array, Fixed, read_problem
from aot_tune.replay.table import Library, RecordedEntry, RecordedTable
from aot_tune.tunable import Tunable
from aot_tune.tuner.measure.worker.verify import Case
from aot_tune.values.config import Config
from tests.support import begun, emulator, recorded_tables
from tests.support.samples import SM90
from tests.support.tilegym_sites import FOLDER, MISSING

ROOT = Path(__file__).parents[3]
OWN = "aot_tune.kernels"
EXAMPLES = "tests.support.example_kernels"

BLANKS = ["reference", "typical"]
"""What is blank wherever the source tells all else."""

SHIPPED = {
    f"{OWN}.norms.rms_norm:rms_norm_kernel": (["reduction"], {"outputs": ["out"]}, []),
    f"{OWN}.norms.fused_add_rms_norm:fused_add_rms_norm_kernel": (
        ["reduction", "in place"], {"inplace": ["x", "residual"]}, [],
    ),
    f"{OWN}.products.matmul:matmul_kernel": (
        ["matmul", "persistent"], {"outputs": ["c", "scratch"]}, ["search_space"],
    ),
    f"{OWN}.products.fp8.matmul_fp8:matmul_fp8_kernel": (
        ["matmul", "fp8", "persistent"], {"outputs": ["c"]}, ["search_space"],
    ),
    f"{OWN}.products.gate_up_swiglu:gate_up_swiglu_kernel": (
        ["dual matmul", "persistent"], {"outputs": ["out"]}, [],
    ),
    f"{OWN}.products.grouped_matmul:grouped_matmul_kernel": (
        ["matmul", "grouped", "persistent"], {"outputs": ["out"]}, ["grid_fn", "make_args"],
    ),
    f"{OWN}.prefill.attention_varlen:attention_varlen_kernel": (
        ["attention", "variable length"], {"outputs": ["out", "lse"]}, ["grid_fn", "make_args"],
    ),
}  # fmt: skip
"""Kernels with their kinds, what they write, and what is blank beside `BLANKS`."""

OF_TILEGYM = {
    "tilegym.ops.cutile.silu_and_mul:_silu_and_mul_kernel_row_wise": (
        ["elementwise"], {"outputs": ["output"]}, ["make_args"],
    ),
    "tilegym.ops.cutile.matmul:_static_persistent_matmul_kernel": (
        ["matmul", "persistent"], {"outputs": ["C"]}, ["search_space"],
    ),
    "tilegym.ops.cutile.attention:_fmha_kernel": (["attention"], {"outputs": ["Out"]}, ["make_args"]),
}  # fmt: skip
"""The same of somebody else's kernels."""

PRODUCTS = ("attention", "dual matmul", "matmul")


def hold(found: begun.Outcome, kinds: list[str], written: dict[str, list[str]], more: list[str]) -> None:
    assert found.kinds == kinds
    assert found.written == written
    assert sorted(found.blanks) == sorted([*BLANKS, *more])
    assert found.clusters == ([[1], [1, 2]] if kinds[0] in PRODUCTS else [[], []])
    assert 2 <= found.most <= 30
    assert found.mistakes == []


@pytest.mark.parametrize("place", SHIPPED)
def test_a_shipped_kernels_declaration_lacks_its_blanks_alone(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    hold(begun.outcome(place, tmp_path), *SHIPPED[place])


@pytest.mark.process
@pytest.mark.skipif(not (FOLDER / "tilegym").is_dir(), reason=MISSING)
def test_declarations_of_tilegyms_kernels_lack_their_blanks_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.begun", str(tmp_path), *OF_TILEGYM],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER}"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes.keys() == OF_TILEGYM.keys()
    for place, found in outcomes.items():
        hold(begun.Outcome(*found), *OF_TILEGYM[place])


# What its author writes -------------------------------------------------------------------------------------

NORMED = "{} * ({}.square().mean(1, keepdim=True) + eps).rsqrt() * weight.double()"

FILLED = {
    f"{EXAMPLES}:scale_rows_kernel": {
        "reference": "lambda x, out, factor: x.double() * factor",
        "typical": '[{"dtype": "bfloat16", "rows": Pow2.edges(1, 4096), "cols": 4096}]',
    },
    f"{EXAMPLES}:row_mean_kernel": {
        "reference": "lambda x, out, eps: x.double().mean(1) + eps",
        "typical": '[{"dtype": "bfloat16", "rows": Pow2.edges(1, 4096), "cols": 512}]',
    },
    f"{OWN}.norms.rms_norm:rms_norm_kernel": {
        "reference": f"""lambda x, weight, out, eps, inside: (
        {NORMED.format("x.double()", "x.double()")}
    )""",
        "typical": """[
        {"dtype": "bfloat16", "rows": Pow2.edges(1, 4096), "cols": 4096, "inside": 1}
    ]""",
    },
    f"{OWN}.norms.fused_add_rms_norm:fused_add_rms_norm_kernel": {
        "reference": f"""lambda x, residual, weight, eps, inside: {{
        "residual": x.double() + residual.double(),
        "x": {NORMED.format("(x.double() + residual.double())", "(x.double() + residual.double())")},
    }}""",
        "typical": """[
        {"dtype": "bfloat16", "rows": Pow2.edges(1, 4096), "cols": 4096, "inside": 1}
    ]""",
    },
}
"""All that an author writes of an elementwise or a reduction kernel."""


@pytest.mark.emulated
@pytest.mark.parametrize("place", FILLED)
def test_an_elementwise_or_reduction_kernel_takes_ten_own_lines(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert sum(len(code.splitlines()) for code in FILLED[place].values()) <= 10
    tunable = begun.imported(place, tmp_path, FILLED[place])
    assert [declaration_problems(tunable, arch) for arch in begun.ARCHS] == [[], []]
    problem = tunable.typical_problems[0].replaced(rows=5)
    case = Case.make(tunable, problem, torch.device("cpu"), 1)
    case.prepare()
    emulator.run(tunable, case.args, tunable.default_config(SM90, problem), monkeypatch)
    assert case.check() is None


def test_the_number_of_blocks_that_run_at_a_time_is_that_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    place = f"{EXAMPLES}:stepping_kernel"
    resident = 'device.sm_count * config.hints["occupancy"]'
    text = begin(place).text
    assert "args_fn=lambda config, x, out, *, device: (" in text
    assert f"        {resident},\n" in text
    assert f"grid_fn=lambda config, device, problem: ({resident},)," in text
    assert begun.outcome(place, tmp_path).mistakes == []


def test_strides_and_sizes_of_groups_are_blanks_since_they_are_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    blanks = dict(blanks_of(begun.imported(f"{EXAMPLES}:strided_kernel", tmp_path, {})))
    assert blanks["search_space"].startswith("the configs to try; 8 for GROUP_SIZE is a guess by the name")
    assert blanks["make_args"].endswith("the value of stride_x, where 1 is a guess")
    assert blanks["typical"].endswith("; 1 for STEP is a guess")


def test_a_bool_that_guards_bounds_is_not_tried_as_false() -> None:
    text = begin(f"{EXAMPLES}:guarded_kernel").text
    assert '"CHECK_BOUNDS": True,' in text
    assert '"TURNED": False,' in text


# The verb ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mylib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of one kernel in the current folder."""
    folder = tmp_path / "mylib_to_begin"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "kernels.py").write_text(
        "import cuda.tile as ct\n\n\n@ct.kernel\ndef scale_kernel(x, out, tile: ct.Constant[int]):\n"
        "    at = (ct.bid(0),)\n    ct.store(out, at, ct.load(x, at, (tile,)) * 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delenv("AOT_TUNE_TABLES", raising=False)
    yield folder
    for name in [name for name in sys.modules if name.startswith("mylib_to_begin")]:
        del sys.modules[name]


def told(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_new_prints_the_module_and_says_what_comes_next(mylib: Path) -> None:
    done = told("new", "mylib_to_begin.kernels:scale_kernel")
    assert done.exit_code == 0
    assert done.stdout == begin("mylib_to_begin.kernels:scale_kernel").text
    assert "such as mylib_to_begin.scale, fill in reference, typical, then run aot-tune doctor" in done.stderr


def test_new_writes_a_file_that_doctor_reads_and_tune_refuses(mylib: Path) -> None:
    done = told("new", "mylib_to_begin.kernels:scale_kernel", "--out", "mylib_to_begin/scale.py")
    assert (done.exit_code, done.stdout) == (0, "")
    command = done.stderr.partition("then run aot-tune ")[2].split()
    assert command == ["doctor", "scale", "--module", "mylib_to_begin.scale"]
    found = told(*command, "--arch", "sm90")
    assert found.exit_code == 1
    blank = [line for line in found.stdout.splitlines() if "blank" in line]
    assert [line.partition(" is blank")[0] for line in blank] == ["[ ] reference", "[ ] typical"]
    assert "the declaration is wrong" not in found.stdout
    for verb in ("tune", "compile"):
        refused = told(verb, "--module", "mylib_to_begin.scale", "--arch", "sm90")
        assert refused.exit_code == 1
        assert "scale: reference is blank: what out must hold after a launch" in refused.stderr
    assert "reference is blank" in told("check", "--module", "mylib_to_begin.scale").stdout
    assert not (mylib / "tuned_configs").exists()


def test_new_overwrites_no_file(mylib: Path) -> None:
    path = mylib / "kernels.py"
    before = path.read_text()
    done = told("new", "mylib_to_begin.kernels:scale_kernel", "--out", str(path))
    assert done.exit_code == 2
    assert "exists already; name another file" in done.stderr
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "mylib_to_begin.kernels:scale",
            "has no kernel 'scale'; write one of mylib_to_begin.kernels:scale_kernel",
        ),
        ("mylib_to_begin.kernels", "names no kernel; write one of mylib_to_begin.kernels:scale_kernel"),
        ("mylib_to_begin:x", "has no kernel 'x': it has none: mylib_to_begin has no @ct.kernel"),
        ("no_such_library:x", "there is no module 'no_such_library'"),
    ],
)
def test_new_says_which_kernels_there_are(place: str, said: str, mylib: Path) -> None:
    done = told("new", place)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_kernel_without_source_is_refused(mylib: Path) -> None:
    (mylib / "made.py").write_text(
        "import cuda.tile as ct\nspace = {'ct': ct}\n"
        "exec('@ct.kernel\\ndef made(x):\\n    ct.store(x, (0,), ct.load(x, (0,), (16,)))', space)\n"
        "made = space['made']\n"
    )
    done = told("new", "mylib_to_begin.made:made")
    assert done.exit_code == 2
    assert "the source of mylib_to_begin.made:made cannot be read" in done.stderr


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("scale_kernel", "scale"), ("_Rows_Kernel", "rows"), ("kernel", "kernel"), ("_2d", "k_2d")],
)
def test_a_declaration_is_named_after_its_kernel(kernel: str, name: str) -> None:
    assert name_of(kernel) == name


# What was recorded ------------------------------------------------------------------------------------------

RECORDED = "mylib_to_begin.recorded:rows_kernel"
SOURCE = """import cuda.tile as ct


@ct.kernel
def rows_kernel(x, out, TILE: ct.Constant[int], FAST: ct.Constant[bool], DEEP: ct.Constant[int]):
    at = (ct.bid(0), ct.bid(1))
    tile = ct.load(x, at, (1, TILE))
    ct.store(out, at, tile * DEEP if FAST else tile + tile)
"""


def recorded_entry(rows: int, tile: int, dtype: torch.dtype, *, deep: int = 2, **hints: int) -> RecordedEntry:
    kernel = importlib.import_module("mylib_to_begin.recorded").rows_kernel
    x = torch.empty((rows, 512), dtype=dtype, device="meta")
    args = (x, x, tile, True, deep)
    constants = cutile.constant_parameters(kernel)
    parameters = [(name, name in constants) for name, _ in cutile.parameters(kernel)]
    return recorded_tables.entry(
        problem=read_problem(parameters, args, (2, 3), 132),
        config={"dict": {"FAST": True, "t": tile}},
        hints=hints,
        signature=cutile.signature_of(kernel, args),
    )


def recorded_table(*entries: RecordedEntry, **changes: Any) -> RecordedTable:
    kernel = importlib.import_module("mylib_to_begin.recorded").rows_kernel
    return dataclasses.replace(
        recorded_tables.TABLE,
        **{
            "module": "mylib_to_begin.recorded",
            "kernel": "rows_kernel",
            "source_hash": hash_now(kernel),
            "library": Library(name="", version=""),
            "entries": entries,
            **changes,
        },
    )


@pytest.fixture
def searched(mylib: Path) -> Path:
    """The package with a kernel of which three searches were recorded, of two problems."""
    (mylib / "recorded.py").write_text(SOURCE)
    importlib.invalidate_caches()
    entries = (
        recorded_entry(16, 64, torch.float16, occupancy=2),
        recorded_entry(512, 256, torch.bfloat16, occupancy=4),
        recorded_entry(700, 256, torch.bfloat16, occupancy=4),
    )
    recorded_tables.write(mylib / "tuned_configs", recorded_table(*entries))
    return mylib


def test_recorded_winners_and_problems_are_the_declarations(searched: Path) -> None:
    done = told("new", RECORDED, "--out", "mylib_to_begin/rows.py")
    assert done.exit_code == 0, done.output
    place = "tuned_configs/sm90/mylib_to_begin.recorded.rows_kernel.json (NVIDIA H200)"
    assert f"search_space and typical are of 3 recorded searches: {place}\n" in done.stderr
    assert "fill in reference in" in done.stderr
    module = importlib.import_module("mylib_to_begin.rows")
    assert place in " ".join(str(module.__doc__).split())
    (tunable,) = (value for value in vars(module).values() if isinstance(value, Tunable))
    same = {"cols": 512, "DEEP": 2}
    assert [dict(one) for one in tunable.typical_problems] == [
        {"dtype": "bfloat16", "rows": 512, **same},
        {"dtype": "bfloat16", "rows": 700, **same},
        {"dtype": "float16", "rows": 16, **same},
    ]
    assert tunable.candidates(SM90, tunable.typical_problems[0]) == (
        Config(constants={"TILE": 256, "FAST": True}, hints={"occupancy": 4}),
        Config(constants={"TILE": 64, "FAST": True}, hints={"occupancy": 2}),
    )
    assert declaration_problems(tunable, SM90) == [
        f"{tunable.name}: {one.text}" for one in blank_mistakes(tunable)
    ]


def test_new_reads_tables_of_the_folder_that_is_named(searched: Path, tmp_path: Path) -> None:
    (searched / "tuned_configs").rename(tmp_path / "elsewhere")
    assert "recorded search" not in told("new", RECORDED).stdout
    done = told("new", RECORDED, "--tables", str(tmp_path / "elsewhere"))
    assert "elsewhere/sm90/mylib_to_begin.recorded.rows_kernel.json" in done.stderr
    assert 'constants={"TILE": 256, "FAST": True}, hints={"occupancy": 4}' in done.stdout
    other = told("new", "mylib_to_begin.kernels:scale_kernel", "--tables", str(tmp_path / "elsewhere"))
    assert "is of mylib_to_begin.kernels.scale_kernel as it is here" in other.stderr
    missing = told("new", RECORDED, "--tables", str(tmp_path / "nowhere"))
    assert missing.exit_code == 2
    assert "nowhere: there is no such folder; aot-tune record --out writes one" in missing.stderr


def test_new_says_which_recorded_table_is_left_out(searched: Path) -> None:
    table = recorded_table(recorded_entry(16, 64, torch.float16), source_hash="feedfacefeedface")
    recorded_tables.write(searched / "tuned_configs", table)
    done = told("new", RECORDED)
    assert "is left out: the code of rows_kernel is not as it was recorded (feedfacefeedface" in done.stderr
    assert done.stdout == begin(RECORDED).text
    assert "typical=blank(" in done.stdout


def test_a_constant_that_followed_the_problem_leaves_a_blank(searched: Path) -> None:
    entries = [recorded_entry(16, tile, torch.float16) for tile in (64, 256)]
    entries = [
        dataclasses.replace(
            one,
            problem=one.problem._replace(
                arguments=(
                    array._replace(shape=(16, size)),
                    array,
                    Fixed(str(size)),
                    *one.problem.arguments[3:],
                )
            ),
        )
        for one, size in zip(entries, (64, 256), strict=True)
        for array in [one.problem.arguments[0]]
        if isinstance(array, Array)
    ]
    recorded_tables.write(searched / "tuned_configs", recorded_table(*entries))
    text = begin(RECORDED).text
    assert '"the configs to try; TILE followed the problem in the recorded searches"' in text
