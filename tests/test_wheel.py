"""The wheel as a user gets it: built from a fresh clone, installed by pip, without this checkout at hand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from aot_tune import environment

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.process, pytest.mark.slow]

NOT_CLONED = shutil.ignore_patterns(
    ".git", ".gpu", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info", "*.aot"
)
"""What git ignores, and the repository itself."""

HERE = re.compile(r"_?aot_tune[.-]|pip-|pip$|__pycache__$")
"""What an environment has of this checkout, and what is its own."""


def run(
    *command: str | Path, cwd: Path, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in environment.DESCRIPTIONS and name not in ("PYTHONPATH", "WORLD_SIZE", "MAKEFLAGS")
    }
    return subprocess.run(
        list(map(str, command)), cwd=cwd, input=stdin, capture_output=True, text=True, timeout=500,
        check=False, env=kept | {"CUDA_VISIBLE_DEVICES": ""} | variables,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` builds where nothing but the files of the repository is."""
    clone = shutil.copytree(ROOT, tmp_path_factory.mktemp("clone") / "aot_tune", ignore=NOT_CLONED)
    made = run("make", "wheel", "VENV=", f"PYTHON={sys.executable}", cwd=clone)
    assert made.returncode == 0, made.stderr
    assert re.search(r"Checking dist/.*PASSED", made.stdout), "twine's verdict"
    (built,) = (clone / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment, into which pip has installed the wheel with its extra `tune`.

    What the wheel needs is linked from this environment, so that pip finds each requirement satisfied.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    asked = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        own = Path(asked.stdout.strip(), path.name)
        if not HERE.match(path.name) and not own.exists():
            own.symlink_to(path)
    done = run(interpreter, "-m", "pip", "install", "-q", "--no-index", f"{wheel}[tune]", cwd=folder)
    assert done.returncode == 0, done.stderr
    return interpreter


def test_the_wheel_has_tables_and_no_bench_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"aot_tune", next(name for name in tops if name.endswith(".dist-info"))}
    assert [name for name in names if name.startswith(("aot_tune/bench/", "aot_tune/tests/"))] == []
    tables = {f"aot_tune/{path.relative_to(ROOT)}" for path in (ROOT / "tuned_configs").rglob("*.json")}
    assert tables <= set(names)


def test_the_first_launch_of_the_readme_runs_from_the_installed_wheel(python: Path, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # without the package beside them
    (code,) = re.findall(
        r"<!-- example: first launch -->\n```python\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.S | re.M,
    )
    code += "\nimport aot_tune\nfrom aot_tune.declare.discovery import find_tunables\n"
    code += "more = [aot_tune.__file__, *find_tunables()]"
    done = run(python, "-m", "tests.support.children.code_on_the_stand_in", "sm90", cwd=tmp_path, stdin=code)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    place, *declared = answer["more"]
    assert Path(place).is_relative_to(python.parents[1])
    assert declared == sorted(path.stem for path in (ROOT / "tuned_configs" / "sm90").glob("*.json"))
    assert [one["grid"] for one in answer["launches"]] == [[64, 1, 1]]
    assert answer["warnings"] == []


def test_the_installed_command_line_has_the_tables_and_leaves_the_bench_to_checkouts(
    python: Path, tmp_path: Path
) -> None:
    script = python.with_name("aot-tune")
    shown = run(script, "show", "rms_norm", "--arch", "sm90", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)
    bench = run(script, "bench", "--report", cwd=tmp_path)
    assert (bench.returncode, bench.stdout) == (2, "")
    assert "in a checkout" in bench.stderr
