"""aot_tune.cli.start.new: declarations that are begun from kernels it was not written with."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.cli.start.kinds import KINDS
from aot_tune.cli.start.new import begin
from aot_tune.cli.start.text import name_of
from aot_tune.declare.blanks import blanks_of
from aot_tune.declare.checks import declaration_problems
from aot_tune.errors import DeclarationError
from aot_tune.nvidia import cutile
from aot_tune.replay.fit import hash_now
from aot_tune.replay.problem import Array, Fixed, read_problem
from aot_tune.replay.table import Library, RecordedEntry, RecordedTable
from aot_tune.tuner.measure.worker.verify import Case
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests.support import emulator, example_kernels, recorded_tables
from tests.support.begun import blanks_in, filled, imported
from tests.support.samples import SM90

EXAMPLES = "tests.support.example_kernels"
ARCHS = tuple(map(Arch.parse, ("sm90", "sm100")))

# Templates --------------------------------------------------------------------------------------------------

_OF_ROWS = "randn((problem.rows, problem.cols), problem.dtype, device, seed)"
_TYPICAL = '[{"dtype": "bfloat16", "M": [16, 64], "N": 128, "K": 64}]'
_SPACE = """[
        Config(constants={"TM": 16, "TN": tn, "TK": 32}, hints={"occupancy": 1}) for tn in (32, 64)
    ]"""
_OF_PRODUCT = """(
        randn((problem.M, problem.K), problem.dtype, device, seed),
        randn((problem.K, problem.N), problem.dtype, device, seed + 1),
        empty((problem.M, problem.N), problem.dtype, device), {}
    )"""
_WEIGHTS = "torch.softmax({} @ {}.mT * scale, -1)"

FILLED = {
    "elementwise": ("scale_rows", {"rows": 5, "cols": 640}, {
        "make_args": f"lambda problem, device, seed: ({_OF_ROWS}, empty((problem.rows, problem.cols), "
        "problem.dtype, device), 0.5)",
        "reference": "lambda x, out, factor: x.double() * factor",
    }),
    "in-place": ("add_rows", {"rows": 5, "cols": 640}, {
        "make_args": f"lambda problem, device, seed: ({_OF_ROWS}, {_OF_ROWS.replace('seed', 'seed + 1')})",
        "reference": "lambda x, y: x.double() + y.double()",
    }),
    "row-reduction": ("row_mean", {"rows": 5, "cols": 128}, {
        "args_fn": """lambda config, x, out, eps: (
            x, out, eps, 1 << (x.shape[1] - 1).bit_length(), config["ROWS"]
        )""",
        "make_args": f"""lambda problem, device, seed: (
            {_OF_ROWS}, empty((problem.rows,), "float32", device), 0.5
        )""",
        "reference": "lambda x, out, eps: x.double().mean(1) + eps",
    }),
    "product": ("product", {"M": 5}, {
        "search_space": _SPACE,
        "args_fn": """lambda config, a, b, c: (
            a, b, c, config["TM"], config["TN"], config["TK"], False
        )""",
        "make_args": f"lambda problem, device, seed: {_OF_PRODUCT.format('')}",
        "typical": _TYPICAL,
    }),
    "persistent-product": ("persistent", {"M": 5}, {
        "search_space": _SPACE,
        "args_fn": """lambda config, a, b, c, M, N, K: (
            a, b, c, M, N, K, config["TM"], config["TN"], config["TK"], 8
        )""",
        "make_args": f"lambda problem, device, seed: {_OF_PRODUCT.format('problem.M, problem.N, problem.K')}",
        "typical": _TYPICAL,
    }),
    "attention": ("attention", {"queries": 20, "kv_length": 32}, {
        "search_space": '[Config(constants={"TM": 16, "TN": tn}, hints={}) for tn in (16, 32)]',
        "args_fn": """lambda config, q, k, v, out, lse, scale: (
            q, k, v, out, lse, scale, q.shape[3], q.shape[1], config["TM"], config["TN"], 1
        )""",
        "make_args": """lambda problem, device, seed: (
            randn((1, 2, problem.queries, 16), problem.dtype, device, seed),
            randn((1, 2, problem.kv_length, 16), problem.dtype, device, seed + 1),
            randn((1, 2, problem.kv_length, 16), problem.dtype, device, seed + 2),
            empty((1, 2, problem.queries, 16), problem.dtype, device),
            empty((1, 2, problem.queries), "float32", device),
            0.25,
        )""",
        "reference": f"""lambda q, k, v, out, lse, scale: {{
            "out": {_WEIGHTS.format("q.double()", "k.double()")} @ v.double(),
            "lse": torch.logsumexp(q.double() @ k.double().mT * scale, -1),
        }}""",
        "typical": """[
            {
                "dtype": "bfloat16", "batch": 1, "heads": 2, "queries": [32, 64], "kv_length": 32,
                "head_dim": 16,
            }
        ]""",
    }),
    "varlen-attention": ("varlen", {"tokens": 44, "longest": 40}, {
        "problem": """lambda q, k, v, starts, out, longest, scale: {
            "dtype": q.dtype, "tokens": q.shape[0], "heads": q.shape[1], "longest": longest,
            "head_dim": q.shape[2],
        }""",
        "search_space": '[Config(constants={"TM": 16, "TN": tn}, hints={}) for tn in (16, 32)]',
        "grid_fn": """lambda config, device, problem: (
            ct.cdiv(problem.longest, config["TM"]), problem.heads, 2
        )""",
        "args_fn": """lambda config, q, k, v, starts, out, longest, scale: (
            q, k, v, starts, out, longest, scale, q.shape[2], config["TM"], config["TN"]
        )""",
        "make_args": """lambda problem, device, seed: (
            *(
                randn((problem.tokens, problem.heads, problem.head_dim), problem.dtype, device, seed + place)
                for place in range(3)
            ),
            torch.tensor([0, problem.longest, problem.tokens], dtype=torch.int32, device=device),
            empty((problem.tokens, problem.heads, problem.head_dim), problem.dtype, device),
            problem.longest,
            0.25,
        )""",
        "reference": f"""lambda q, k, v, starts, out, longest, scale: torch.cat([
            ({_WEIGHTS.format("a.double().transpose(0, 1)", "b.double().transpose(0, 1)")}
             @ c.double().transpose(0, 1)).transpose(0, 1)
            for a, b, c in zip(*(one.split([longest, len(one) - longest]) for one in (q, k, v)))
        ])""",
        "typical": """[
            {"dtype": "bfloat16", "tokens": [64, 128], "heads": 2, "longest": 48, "head_dim": 16}
        ]""",
    }),
    "grouped-product": ("grouped", {"rows": 44}, {
        "search_space": _SPACE,
        "make_args": """lambda problem, device, seed: (
            randn((problem.rows, problem.K), problem.dtype, device, seed),
            randn((problem.groups, problem.K, problem.N), problem.dtype, device, seed + 1),
            torch.tensor([0, 7, 7, problem.rows], dtype=torch.int32, device=device),
            empty((problem.rows, problem.N), problem.dtype, device),
        )""",
        "reference": """lambda x, w, starts, out: torch.cat([
            x[start:stop].double() @ w[group].double()
            for group, (start, stop) in enumerate(zip(starts.tolist(), starts.tolist()[1:]))
        ])""",
        "typical": '[{"dtype": "bfloat16", "rows": [16, 64], "N": 128, "K": 64, "groups": 3}]',
    }),
    "dual-product": ("dual", {"M": 5}, {
        "search_space": _SPACE,
        "make_args": """lambda problem, device, seed: (
            randn((problem.M, problem.K), problem.dtype, device, seed),
            randn((problem.K, problem.N), problem.dtype, device, seed + 1),
            randn((problem.K, problem.N), problem.dtype, device, seed + 2),
            empty((problem.M, problem.N), problem.dtype, device),
        )""",
        "typical": _TYPICAL,
    }),
}  # fmt: skip
"""Of each kind a kernel, the sizes that it is run with, and what its author writes; other examples stay."""


@pytest.mark.emulated
@pytest.mark.parametrize("kind", KINDS)
def test_a_template_whose_blanks_are_filled_declares_a_kernel_that_computes_the_right_result(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    kernel, sizes, codes = FILLED[kind]
    begun = begin(f"{EXAMPLES}:{kernel}_kernel")
    assert begun.kind == kind  # the source proves it
    text = filled(begun.text, codes)
    makers = "from aot_tune.inputs import empty, randn\nimport cuda.tile as ct\nimport torch\n"
    tunable = imported(text.replace("from aot_tune import", f"{makers}from aot_tune import", 1), tmp_path)
    assert [declaration_problems(tunable, arch) for arch in ARCHS] == [[], []]
    problem = tunable.typical_problems[0].replaced(**sizes)
    case = Case.make(tunable, problem, torch.device("cpu"), 1)
    case.prepare()
    emulator.run(tunable, case.args, tunable.default_config(SM90, problem), monkeypatch)
    assert case.check() is None


PROVEN = {"name", "package", "kernel", "args_fn", "outputs", "inplace", "reset"}
"""The fields that are no blanks."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_template_imports_and_nothing_is_done_by_its_examples(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for kernel in ("scale_rows", "attention", "handed_away"):
        begun = begin(f"{EXAMPLES}:{kernel}_kernel", kind)
        tunable = imported(begun.text, tmp_path)
        blanks = [field for field, _ in blanks_of(tunable)]
        written = {field for field in tunable.__dataclass_fields__ if f"\n    {field}=" in begun.text}
        assert written - set(blanks) <= PROVEN
        assert sorted(begun.blanks) == sorted(blanks)
        found = declaration_problems(tunable, SM90)
        assert sorted(text.split()[1] for text in found) == sorted(blanks)
        with pytest.raises(DeclarationError, match=r"grid_fn is blank: .*\n(.*\n)*.*typical is blank"):
            tunable.launch(None)


def test_every_example_kernel_can_be_begun_as_any_kind() -> None:
    for name in [name for name in vars(example_kernels) if name.endswith("_kernel")]:
        for kind in KINDS:
            compile(begin(f"{EXAMPLES}:{name}", kind).text, name, "exec")


def test_arguments_that_the_source_proves_are_handed_on_and_others_are_blank() -> None:
    assert '\n    args_fn=lambda config, x, out, factor: (x, out, factor, config["TILE"]),\n' in (
        begin(f"{EXAMPLES}:scale_rows_kernel").text
    )
    blanks = {field: whole for field, whole, _ in blanks_in(begin(f"{EXAMPLES}:row_mean_kernel").text)}
    assert "the kernel's arguments; COLS: config[...] of one that is tuned" in blanks["args_fn"]
    assert '(x, out, eps, ..., config["ROWS"])' in blanks["args_fn"]


def test_examples_name_the_input_whose_contents_are_places() -> None:
    text = begin(f"{EXAMPLES}:largest_kernel", "row-reduction").text
    assert 'lambda x, counts: {"dtype": x.dtype, "rows": x.shape[0], "cols": x.shape[1]}' in text
    (made,) = (example for field, _, example in blanks_in(text) if field == "make_args")
    assert "randn" not in made  # places are no random numbers


def test_an_example_of_rows_and_columns_has_tiles_that_are_wide() -> None:
    text = begin(f"{EXAMPLES}:quantise_kernel", "row-reduction").text
    assert "for (rows_, cols_) in ((1, 1024), (2, 1024), (4, 1024))" in text


def test_an_outputs_shape_and_dtype_are_never_those_of_an_input_by_guess() -> None:
    text = begin(f"{EXAMPLES}:quantise_kernel").text
    assert '\n    outputs=("out", "scales"),\n' in text
    (made,) = (example for field, _, example in blanks_in(text) if field == "make_args")
    assert made.count("empty(..., ..., device)") == 2


def test_what_a_function_without_source_is_given_leaves_the_outputs_blank() -> None:
    text = begin(f"{EXAMPLES}:handed_away_kernel", "elementwise").text
    (whole,) = (whole for field, whole, _ in blanks_in(text) if field == "outputs")
    assert "x and out: given to a function whose source cannot be read" in " ".join(
        whole.replace('"\n        "', "").split()
    )


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


BLANKS = ["axes", "problem", "search_space", "grid_fn", "make_args", "reference", "typical"]
"""What the source of an elementwise kernel cannot say, in the order of the text."""


def test_new_prints_the_module_and_says_what_comes_next(mylib: Path) -> None:
    done = told("new", "mylib_to_begin.kernels:scale_kernel")
    assert done.exit_code == 0
    assert done.stdout == begin("mylib_to_begin.kernels:scale_kernel").text
    fields = ", ".join(BLANKS)
    assert f"such as mylib_to_begin.scale, fill in {fields}, then run aot-tune doctor" in done.stderr


def test_a_kind_is_named_where_the_source_proves_none() -> None:
    for kernel in ("column_sum", "count", "segments", "stepping", "handed_away"):
        refused = told("new", f"{EXAMPLES}:{kernel}_kernel")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"on which only blanks depend: --kind with one of {', '.join(KINDS)}" in refused.stderr
        assert told("new", f"{EXAMPLES}:{kernel}_kernel", "--kind", "row-reduction").exit_code == 0
    unknown = told("new", f"{EXAMPLES}:count_kernel", "--kind", "histogram")
    assert unknown.exit_code == 2
    assert f"there is no such kind; write one of {', '.join(KINDS)}" in unknown.stderr


def test_new_writes_a_file_that_doctor_reads_and_tune_refuses(mylib: Path) -> None:
    done = told("new", "mylib_to_begin.kernels:scale_kernel", "--out", "mylib_to_begin/scale.py")
    assert (done.exit_code, done.stdout) == (0, "")
    command = done.stderr.partition("then run aot-tune ")[2].split()
    assert command == ["doctor", "scale", "--module", "mylib_to_begin.scale"]
    found = told(*command, "--arch", "sm90")
    assert found.exit_code == 1
    blank = [line for line in found.stdout.splitlines() if "blank" in line]
    assert sorted(line.partition(" is blank")[0] for line in blank) == sorted(f"[ ] {one}" for one in BLANKS)
    assert found.stdout.splitlines() == blank
    for words in (["--json"], ["--problem", "rows=16"]):
        assert told(*command, "--arch", "sm90", *words).exit_code == 1
    for verb in ("tune", "compile"):
        refused = told(verb, "--module", "mylib_to_begin.scale", "--arch", "sm90")
        assert refused.exit_code == 1
        assert "scale: reference is blank: what out must hold after a launch" in refused.output
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


def test_an_async_kernel_is_refused_as_such(mylib: Path) -> None:
    (mylib / "later.py").write_text(
        "import cuda.tile as ct\n@ct.kernel\nasync def later(x):\n    ct.store(x, (0,), 1)\n"
    )
    done = told("new", "mylib_to_begin.later:later")
    assert done.exit_code == 2
    assert (
        "mylib_to_begin.later:later is an async function, which cuTile cannot compile; write def"
        in done.stderr
    )


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


def test_recorded_winners_and_problems_are_the_declarations(searched: Path, tmp_path: Path) -> None:
    done = told("new", RECORDED)
    assert done.exit_code == 0, done.output
    place = "tuned_configs/sm90/mylib_to_begin.recorded.rows_kernel.json (NVIDIA H200)"
    assert f"search_space and typical are of 3 recorded searches: {place}\n" in done.stderr
    assert place in " ".join(done.stdout.partition("\n\n")[2].partition('"""')[0].split())
    codes = {field: example for field, _, example in blanks_in(done.stdout)}
    assert "search_space" not in codes
    codes["args_fn"] = codes["args_fn"].replace("...", "2")  # FAST varied with the configs, DEEP did not
    tunable = imported(filled(done.stdout, codes), tmp_path)
    assert [dict(one) for one in tunable.typical_problems] == [
        {"dtype": "bfloat16", "rows": 512, "cols": 512},
        {"dtype": "bfloat16", "rows": 700, "cols": 512},
        {"dtype": "float16", "rows": 16, "cols": 512},
    ]
    assert tunable.candidates(SM90, tunable.typical_problems[0]) == (
        Config(constants={"TILE": 256, "FAST": True}, hints={"occupancy": 4}),
        Config(constants={"TILE": 64, "FAST": True}, hints={"occupancy": 2}),
    )
    assert tunable.args_fn(tunable.candidates(SM90, tunable.typical_problems[0])[0], 1, 2) == (
        1,
        2,
        256,
        True,
        2,
    )


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
    assert "is left out: the code of rows_kernel changed since it was recorded (feedface" in done.stderr
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
    (whole,) = (whole for field, whole, _ in blanks_in(begin(RECORDED).text) if field == "search_space")
    assert "TILE followed the problem in the recorded searches" in whole.replace('"\n        "', "")
