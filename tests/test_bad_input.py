"""What a person gets for each mistake, by the real front door: one clear error, and every file as it was."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.forked import Result

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]

KERNELS = """
import cuda.tile as ct
from aot_tune import Close, Config, Exact, Pow2, Tunable
from aot_tune.inputs import empty, randn

@ct.kernel
def scale_kernel(x, out, tile: ct.Constant[int]):
    row, column = ct.bid(0), ct.bid(1)
    ct.store(out, (row, column), ct.load(x, (row, column), (1, tile)) * 2)

def on_cpu(x, out):
    out.copy_(x * 2)

SPACE = [
    Config(constants={"tile": tile}, hints={"num_ctas": ctas, "occupancy": 1})
    for tile in (256, 1024) for ctas in (1, 2)
]
DEFAULT = SPACE[0]

scale = Tunable(
    name="scale", package=__package__, kernel=scale_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    problem=lambda x, out: {"dtype": x.dtype, "rows": x.shape[0], "cols": x.shape[1]},
    search_space=lambda arch, problem: SPACE,
    default=lambda arch, problem: DEFAULT,
    grid_fn=lambda config, device, problem: (problem.rows, -(-problem.cols // config["tile"])),
    args_fn=lambda config, x, out: (x, out, config["tile"]),
    make_args=lambda problem, device, seed: (
        randn((problem.rows, problem.cols), problem.dtype, device, seed),
        empty((problem.rows, problem.cols), problem.dtype, device),
    ),
    reference=lambda x, out: Close(value=x.double() * 2, rtol=1e-2, atol=1e-3),
    outputs=("out",),
    typical=[{"dtype": "bfloat16", "rows": 4, "cols": 4096}],
)
"""

PREDICT = ["tune", "--module", "mylib.kernels", "--arch", "sm100"]
MEASURE = ["tune", "--module", "mylib.kernels", "--arch", "sm90"]

AT_AN_H200 = (
    "from tests.support.cpu_backend import play_an_h200; play_an_h200(); "
    "from aot_tune.__main__ import main; main()"
)
"""The command line of a machine with a GPU."""

LAUNCH = """
import sys
from tests.support import driver as fake_driver
fake_driver.install()
from aot_tune.serve import loader
from aot_tune.serve import runtime
runtime.use(fake_driver.FakeRuntime(grad=True))
loader.gpus = lambda: ()
import torch
from mylib.kernels import scale
def tensor(**options):
    return torch.empty(4, 4096, dtype=torch.bfloat16, device="meta", **options)
try:
    exec(sys.argv[1])
finally:
    print(len(fake_driver.DRIVER.launches))
"""
"""A user's script on the stand-in driver; what it launched, counted, on stdout."""

WITHOUT_ROOTS_RIGHTS = """
import ctypes, os, sys
if os.geteuid() == 0:
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root may write anywhere
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Library:
    """Somebody's package in a folder of its own, with tables of archs that no test tunes for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = folder / "mylib/tuned_configs/sm90/scale.json"
        for name in ("mylib/tuned_configs/sm120/scale.json", "build/tuned_configs/sm120/scale.json"):
            self.put(name, b"a table of before")
        self.put("mylib/__init__.py", b"")
        self.declare()

    def put(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def declare(self, right: str = "", mistake: str = "") -> None:
        assert right in KERNELS, right
        self.put("mylib/kernels.py", KERNELS.replace(right, mistake).encode() if right else KERNELS.encode())

    def files(self) -> dict[str, tuple[int, bytes]]:
        """All files with mode and bytes, but for what a tune may keep: cubins and journals."""
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mode, path.read_bytes())
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and not {"cubins", "journal", "tmp"} & set(path.relative_to(self.folder).parts)
        }

    def python(self, *words: str) -> Result:
        (self.folder / "tmp").mkdir(exist_ok=True)  # locks of GPUs lie there
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AOT_TUNE", "CUDA_TILE"))
            and name not in ("WORLD_SIZE", "DISABLE_AUTOTUNE")
        }
        environment |= {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "AOT_TUNE_CACHE_DIR": str(self.folder / "cache"),
            "CUDA_VISIBLE_DEVICES": "",  # the machine of these tests has no GPU, wherever they run
        }
        return forked.python(words, self.folder, environment, timeout=120)

    def refused(self, *words: str, code: int = 1) -> str:
        """Run Python on something that must fail with this exit code and change no file; what it said."""
        before = self.files()
        result = self.python(*words)
        assert self.files() == before
        assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
        return result.stderr

    def error(self, *words: str, code: int = 1) -> str:
        """The one error of a command line that must fail."""
        return one_error(self.refused("-m", "aot_tune", *words, code=code))


def one_error(said: str) -> str:
    assert "Traceback" not in said, said
    lines = said.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("aot-tune: ")]
    assert len(errors) == 1, said
    return "\n".join(lines[errors[0] :])


def last_line(said: str) -> str:
    return said.splitlines()[-1]


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The library's table for sm90, measured and published by the command line."""
    library = Library(tmp_path_factory.mktemp("measured"))
    result = library.python("-c", AT_AN_H200, *MEASURE)
    assert result.returncode == 0, result.stderr
    table = library.table.read_bytes()
    assert b'"evidence": "measured"' in table
    return table


@pytest.fixture
def tuned(library: Library, measured: bytes) -> Library:
    """The library with that table."""
    library.put("mylib/tuned_configs/sm90/scale.json", measured)
    return library


# Declarations ---------------------------------------------------------------------------------------------


def test_an_empty_search_space(library: Library) -> None:
    library.declare("arch, problem: SPACE,", "arch, problem: [],")
    said = library.error(*PREDICT)
    assert "scale: search_space is empty for" in said
    assert "return at least the default" in said


def test_a_search_space_that_is_empty_on_the_arch_asked_for(library: Library) -> None:
    library.declare("arch, problem: SPACE,", "arch, problem: [] if arch.major == 10 else SPACE,")
    said = library.error(*PREDICT)
    assert "scale: search_space(sm100, dtype=bfloat16 rows=4 cols=4096) is empty" in said
    assert "return at least the default" in said


def test_a_duplicate_in_the_search_space(library: Library) -> None:
    library.declare("arch, problem: SPACE,", "arch, problem: [*SPACE, SPACE[1]],")
    said = library.error(*PREDICT)
    assert "scale: search_space(" in said
    assert "tile=256 num_ctas=2 occupancy=1 twice; list it once" in said


def test_a_default_outside_of_the_search_space(library: Library) -> None:
    library.declare("DEFAULT = SPACE[0]", "DEFAULT = SPACE.pop(0)")
    said = library.error(*PREDICT)
    assert "scale: default(" in said
    assert "which search_space lacks; add it there, or choose a member" in said


def test_an_axis_that_the_problems_do_not_have(library: Library) -> None:
    library.declare('axes={"rows": Pow2()', 'axes={"row": Pow2()')
    said = library.error(*PREDICT)
    assert "scale: the typical problem dtype=bfloat16 rows=4 cols=4096 lacks the axis row; add it" in said


def test_an_axis_that_problem_does_not_return(library: Library) -> None:
    library.declare('"rows": x.shape[0]', '"height": x.shape[0]')
    said = last_line(library.refused("-c", "import mylib.kernels"))
    told = "scale: problem() does not return the axis rows: it returns dtype, height, cols; add 'rows' there"
    assert told in said
    assert told in library.error(*PREDICT)


def test_an_axis_that_problem_does_not_return_for_some_tensors(library: Library) -> None:
    library.declare('"rows": x.shape[0]', '**({"rows": x.shape[0]} if x.ndim == 3 else {})')
    said = library.error(*PREDICT)
    made = "of the arguments made for dtype=bfloat16 rows=4 cols=4096 it returns dtype=bfloat16 cols=4096"
    assert f"scale: problem() does not return the axis rows: {made}; add 'rows' there" in said


def test_a_reference_of_another_shape(tuned: Library) -> None:
    tuned.declare("x.double() * 2,", "(x.double() * 2)[0],")
    for words in (["-m", "aot_tune", *PREDICT], ["-c", AT_AN_H200, *MEASURE]):
        said = one_error(tuned.refused(*words))
        assert "scale: reference gives out the shape (4096,), the argument has (4, 4096); return" in said


def test_an_undeclared_mutated_argument(tuned: Library) -> None:
    tuned.declare("out.copy_(x * 2)", "out.copy_(x * 2); x.add_(1)")
    said = one_error(tuned.refused("-c", AT_AN_H200, *MEASURE))
    assert "scale: the kernel changes its argument x, which the declaration does not name" in said
    assert "add 'x' to outputs, inplace or reset" in said


@pytest.mark.parametrize(
    "words",
    [["-m", "aot_tune", *PREDICT], pytest.param(["-c", AT_AN_H200, *MEASURE], marks=pytest.mark.slow)],
)
def test_a_kernel_that_does_not_compile_in_any_config(tuned: Library, words: list[str]) -> None:
    tuned.declare("(1, tile)) * 2)", "(1, tile)) * two)")
    said = tuned.refused(*words)
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "not published: " in line]
    line_number = 1 + next(i for i, text in enumerate(KERNELS.splitlines()) if "(1, tile)) * 2)" in text)
    what = "none of its 4 compilations succeeds: Undefined variable two used"
    assert line.startswith(f"scale: not published: {what} (")
    assert f"mylib/kernels.py, line {line_number}); repair the kernel" in line


# Command lines and files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "arch"),
    [("tune", "sm95"), ("tune", "hopper"), ("show", ""), ("doctor", "sm95"), ("compile", "sm95")],
)
def test_an_unknown_arch(library: Library, verb: str, arch: str) -> None:
    said = library.error(verb, "--arch", arch, code=2)
    assert repr(arch) in said
    assert "write one of sm80 " in said


def newer(table: bytes) -> bytes:
    assert b'"schema": 2,' in table
    return table.replace(b'"schema": 2,', b'"schema": 99,')


def truncated(table: bytes) -> bytes:
    return table[: len(table) // 2]


Damage = Callable[[bytes], bytes]

DAMAGES = [(newer, "99"), (truncated, "line ")]
NEWER_AND_SLOW = [DAMAGES[0], pytest.param(*DAMAGES[1], marks=pytest.mark.slow)]
"""Each damage where a table is looked at; one of them where `make test` tries to replace it, too."""


@pytest.mark.parametrize(("damage", "told"), NEWER_AND_SLOW)
def test_a_table_that_cannot_be_read_where_it_would_be_replaced(
    tuned: Library, damage: Damage, told: str
) -> None:
    tuned.table.write_bytes(damage(tuned.table.read_bytes()))
    said = one_error(tuned.refused("-c", AT_AN_H200, *MEASURE))
    assert str(tuned.table.relative_to(tuned.folder)) in said
    assert told in said
    assert "restore it, or remove it to start over" in said


@pytest.mark.parametrize(("damage", "told"), NEWER_AND_SLOW)
def test_a_table_that_cannot_be_read_where_a_prediction_would_replace_it(
    tuned: Library, damage: Damage, told: str
) -> None:
    there = tuned.put("elsewhere/sm100/scale.json", damage(tuned.table.read_bytes()))
    said = tuned.error(*PREDICT, "--out", "elsewhere")
    assert str(there.relative_to(tuned.folder)) in said
    assert told in said
    assert "restore it, remove it, or name another folder with --out" in said


@pytest.mark.parametrize(("damage", "told"), DAMAGES)
@pytest.mark.parametrize("verb", ["check", "diff", "show"])
def test_a_table_that_cannot_be_read_where_it_is_looked_at(
    tuned: Library, verb: str, damage: Damage, told: str
) -> None:
    kept = tuned.put("kept.json", tuned.table.read_bytes())
    tuned.table.write_bytes(damage(tuned.table.read_bytes()))
    words = {
        "check": ["check", str(tuned.table), "--module", "mylib.kernels"],
        "diff": ["diff", str(kept), str(tuned.table)],
        "show": ["show", "scale", "--arch", "sm90", "--module", "mylib.kernels"],
    }[verb]
    before = tuned.files()
    result = tuned.python("-m", "aot_tune", *words)
    assert tuned.files() == before
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    (line,) = [line for line in (result.stdout + result.stderr).splitlines() if str(tuned.table) in line]
    assert told in line


@pytest.mark.parametrize(
    "words",
    [["-m", "aot_tune", *PREDICT], pytest.param(["-c", AT_AN_H200, *MEASURE], marks=pytest.mark.slow)],
)
def test_a_read_only_output_folder(tuned: Library, words: list[str]) -> None:
    locked = tuned.folder / "locked"
    (locked / words[-1]).mkdir(parents=True)
    tuned.put(f"locked/{words[-1]}/scale.json", b"the old one")
    (locked / words[-1]).chmod(0o555)
    try:
        said = one_error(tuned.refused("-c", WITHOUT_ROOTS_RIGHTS, *words, "--out", "locked"))
    finally:
        (locked / words[-1]).chmod(0o755)
    assert f"cannot write in locked/{words[-1]}: Permission denied; allow it, free space, or choose" in said
    assert not (tuned.folder / "build/cubins").exists()  # told before anything is compiled


@pytest.mark.parametrize("verb", ["tune", pytest.param("compile", marks=pytest.mark.slow)])
def test_a_read_only_working_folder_needs_another_folder_for_cubins(library: Library, verb: str) -> None:
    for name in ("out", "tmp"):
        (library.folder / name).mkdir()
    shut = (library.folder, library.folder / "build")
    words = ["-c", WITHOUT_ROOTS_RIGHTS, "-m", "aot_tune", verb, "--module", "mylib.kernels"]
    words += ["--arch", "sm100", "--out", "out"]
    for folder in shut:
        folder.chmod(0o555)
    try:
        said = one_error(library.refused(*words))
        result = library.python(*words, "--cubins", "out/cubins")
    finally:
        for folder in shut:
            folder.chmod(0o755)
    assert "the folder for cubins cannot be created (Permission denied); name another with --cubins" in said
    assert result.returncode == 0, result.stderr
    assert list((library.folder / "out/cubins").glob("*.cubin"))


# Launches -------------------------------------------------------------------------------------------------


def launch_error(library: Library, script: str) -> str:
    """The error that ends a user's script, which must have launched nothing."""
    before = library.files()
    result = library.python("-c", LAUNCH, textwrap.dedent(script))
    assert library.files() == before
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert result.stdout.split() == ["0"]
    last = result.stderr.splitlines()[-1]
    assert last.startswith("aot_tune.errors.LaunchError: scale.launch: argument "), result.stderr
    return last


def test_the_user_s_script_launches_where_nothing_is_wrong(library: Library) -> None:
    result = library.python("-c", LAUNCH, "scale.launch(tensor(), tensor())")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1"]


def test_a_read_only_output_tensor(library: Library) -> None:
    last = launch_error(library, "scale.launch(tensor(), tensor()[:1].expand(4, 4096))")
    assert "argument out is written by the kernel and is an expanded view" in last
    assert "such as .contiguous()" in last


def test_a_tensor_subclass(library: Library) -> None:
    last = launch_error(
        library,
        """
        class Quantized(torch.Tensor):
            pass
        scale.launch(tensor().as_subclass(Quantized), tensor())
        """,
    )
    assert "argument x is a __main__.Quantized" in last
    assert "pass its plain data, such as .as_subclass(torch.Tensor)" in last


def test_an_input_that_requires_grad_while_grad_is_enabled(library: Library) -> None:
    last = launch_error(library, "scale.launch(tensor(requires_grad=True), tensor())")
    assert "argument x requires grad while grad is enabled" in last
    assert "launch under torch.no_grad(), pass .detach(), or" in last
