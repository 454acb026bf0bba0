"""Serving where nothing can be written: FAULTS B4. A process of its own, on the stand-in driver."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aot_tune.kernels import TUNABLES, rms_norm_tunable, softmax_tunable
from aot_tune.nvidia import cutile
from tests.support.shipped import with_cubins

ROOT = Path(__file__).parent.parent.parent

SERVE = """
import dataclasses, json, os, sys, tempfile, warnings
from pathlib import Path
import torch
from tests.support import driver as fake_driver
fake_driver.install()
from aot_tune.nvidia import cutile
from aot_tune import kernels
from aot_tune.serve import runtime
from aot_tune.serve.launch.dispatch import dispatcher_of

warnings.simplefilter("ignore")
folder, stranger = Path(sys.argv[1]), sys.argv[2] == "stranger"
driver = fake_driver.DRIVER
here = fake_driver.FakeRuntime()
runtime.use(here)
cutile.may_have_compiler = lambda: False
first, second = (
    dataclasses.replace(getattr(kernels, f"{name}_tunable"), tables=folder / name)
    for name in ("rms_norm", "softmax")
)
first.launch(*first.make_args(first.typical_problems[0], "meta", 0))  # imports what a launch imports

attempts = []

def read_only(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.truncate"):
        attempts.append(f"{event} {args[0]}")
        raise OSError(30, "Read-only file system")

os.chdir("/")
for name in ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME"):
    os.environ.pop(name, None)
os.environ["TMPDIR"] = "/not/there"
tempfile.tempdir = None
if stranger:
    if sys.argv[3] == "is one":
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
    else:  # only told so: nothing else tells a process without a user
        os.getuid = os.geteuid = lambda: 54321
sys.addaudithook(read_only)
declared = second.typical_problems
problems = [
    declared[0],
    declared[0].replaced(cols=declared[0].size("cols") + 1),  # near one
    declared[0].replaced(cols=7, rows=1000),  # near none
]
for number, problem in enumerate([*declared, *problems]):
    args = second.make_args(problem, "meta", 0)
    try:
        second.launch(*args)
    except cutile.CompilerMissingError:  # a default whose columns are no declared ones: chosen, not loaded
        driver.launches.append(None)
chosen = [dispatcher_of(second)._plans[key].choice.source for key in dispatcher_of(second)._plans]
from aot_tune.serve.search.cache import folder_here
print(json.dumps({
    "launches": len(driver.launches) - 1,
    "declared": len(declared),
    "sources": sorted(set(chosen)),
    "attempts": attempts,
    "folder": None if folder_here() is None else str(folder_here()),
    "uid": os.getuid(),
}))
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Tables and archives where a stranger may read them, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory() as name:
        for tunable in (rms_norm_tunable, softmax_tunable):
            with_cubins(tunable, Path(name) / tunable.name)
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield Path(name)


def serve(folder: Path, who: str) -> dict[str, object]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AOT_TUNE_")}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder), who, "is one" if may_become_another() else "seems one"],
        cwd=ROOT,
        env=environ | {"DISABLE_AUTOTUNE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def may_become_another() -> bool:
    """Root may, where others can read the checkout."""
    return os.getuid() == 0 and all(p.stat().st_mode & stat.S_IXOTH for p in (ROOT, *ROOT.parents))


@pytest.mark.process
@pytest.mark.parametrize("who", ["user", "stranger"])
def test_b4_serving_writes_nothing_and_makes_no_folder(folder: Path, who: str) -> None:
    """B4: read-only, no HOME, no /tmp; as a stranger with a uid that no file knows."""
    answer = serve(folder, who)
    assert answer["attempts"] == []
    assert answer["launches"] == int(str(answer["declared"])) + 3
    assert {"own", "nearest"} <= set(answer["sources"])  # type: ignore[call-overload]
    if who == "stranger":
        assert (answer["uid"], answer["folder"]) == (54321, None)


IMPORT = """
import errno, os, sys, tempfile
sys.dont_write_bytecode = True
attempts = []

def read_only(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.truncate"):
        attempts.append(f"{event} {args[0]}")
        raise OSError(errno.EROFS, "Read-only file system")

import torch
sys.addaudithook(read_only)
from aot_tune import kernels
from aot_tune.nvidia import cutile
print(len(kernels.TUNABLES), cutile.may_have_compiler(), os.environ.get(cutile.TEMP_DIR))
"""


@pytest.mark.process
def test_b4_the_kernels_are_imported_where_no_folder_can_be_written_to() -> None:
    """B4: cuTile's import asks for a temporary folder, which only compiling needs; nothing compiles then."""
    environ = {name: value for name, value in os.environ.items() if name != cutile.TEMP_DIR}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    number, compiles, folder = done.stdout.split()
    assert (int(number), compiles) == (len(TUNABLES), "False")
    assert Path(folder) == ROOT / "aot_tune" / "nvidia"


@pytest.mark.process
@pytest.mark.parametrize("named", [True, False], ids=["a named folder", "its own"])
def test_importing_the_kernels_makes_no_folder_where_one_is_named(named: bool, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != cutile.TEMP_DIR}
    code = "import os, sys; from aot_tune.kernels import TUNABLES; print(os.listdir(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env=environ | {"TMPDIR": str(tmp_path)} | ({cutile.TEMP_DIR: str(tmp_path)} if named else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip() == "[]") is named
    assert list(tmp_path.iterdir()) == []
