"""aot_tune.cli.start.init: what a pyproject.toml gets, that it is got once, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomlkit
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.cli.start.init import initialise
from aot_tune.errors import UsageError

HATCHLING = """\
# A library of kernels.
[build-system]
requires = ["hatchling"]  # nothing else
build-backend = "hatchling.build"

[project]
name = "mylib"   # as it is imported
version = "1.0"

[tool.ruff]
line-length = 100
"""

SETUPTOOLS = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "mylib"
version = "1.0"

[tool.setuptools.package-data]
mylib = ["*.txt"]  # the words
"""

BACKENDS = {"hatchling": HATCHLING, "setuptools": SETUPTOOLS}
CHECK = "aot-tune check --module mylib.kernels"


def project(folder: Path, text: str, *, source: str = "") -> Path:
    """A project whose package is in `source`, with tables and an archive that git ignores."""
    tables = folder / source / "mylib" / "tuned_configs" / "sm90"
    tables.mkdir(parents=True)
    (tables.parents[1] / "__init__.py").touch()
    (tables.parents[1] / "kernels.py").touch()
    (tables / "scale.json").write_text("{}")
    (tables / "cubins.aot").write_text("archive")
    (folder / ".gitignore").write_text("*.aot\n")
    path = folder / "pyproject.toml"
    path.write_text(text)
    return path


def told(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, ["init", *words])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_gets_what_is_missing_and_keeps_what_was_there(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(tmp_path, BACKENDS[backend])
    done = told(tmp_path, monkeypatch, "mylib.kernels")
    assert done.exit_code == 0, done.stderr
    after = path.read_text()
    kept = [line for line in BACKENDS[backend].splitlines() if line and not line.startswith("mylib =")]
    assert [line for line in after.splitlines() if line in kept] == kept
    document = tomlkit.parse(after).unwrap()
    assert document["project"]["entry-points"] == {"aot_tune.tunables": {"mylib": "mylib.kernels"}}
    if backend == "hatchling":
        assert document["tool"]["hatch"] == {
            "build": {"targets": {"wheel": {"artifacts": ["mylib/tuned_configs/*/*"]}}},
            "envs": {"default": {"scripts": {"check-tuned-configs": CHECK}}},
        }
    else:
        assert document["tool"]["setuptools"]["package-data"] == {"mylib": ["*.txt", "tuned_configs/*/*"]}
        assert "# the words" in after
        assert f"# In CI, before a merge: {CHECK}" in after
    *changes, last = done.stdout.splitlines()
    assert len(changes) == 3
    assert last == f"in CI, before a merge: {CHECK}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_time_nothing_is_changed(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(tmp_path, BACKENDS[backend])
    told(tmp_path, monkeypatch, "mylib.kernels")
    before = path.read_bytes(), path.stat().st_mtime_ns
    for words in (["mylib.kernels"], []):  # the module is known from then on
        done = told(tmp_path, monkeypatch, *words)
        assert done.stdout.splitlines()[0] == "pyproject.toml: nothing to change"
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.process
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["", "src"])
def test_the_wheel_holds_the_tables_the_archive_and_the_entry_point(
    backend: str, source: str, tmp_path: Path
) -> None:
    path = project(tmp_path, BACKENDS[backend], source=source)
    initialise(path, "mylib.kernels")
    module = "hatchling.build" if backend == "hatchling" else "setuptools.build_meta"
    subprocess.run(
        [sys.executable, "-c", f"import {module} as it; it.build_wheel('dist')"],
        cwd=tmp_path, capture_output=True, check=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if "tuned_configs" in name and not name.endswith("/")}
        points = packed.read("mylib-1.0.dist-info/entry_points.txt").decode()
    assert names == {"mylib/tuned_configs/sm90/scale.json", "mylib/tuned_configs/sm90/cubins.aot"}
    assert points.split() == ["[aot_tune.tunables]", "mylib", "=", "mylib.kernels"]


def test_tables_beside_the_package_are_put_inside_it_in_the_wheel(tmp_path: Path) -> None:
    path = project(tmp_path, HATCHLING)
    (tmp_path / "mylib" / "tuned_configs").rename(tmp_path / "tuned_configs")
    changes = initialise(path, "mylib.kernels").changes
    assert 'files of the wheel: "tuned_configs" as "mylib/tuned_configs"' in changes
    wheel = tomlkit.parse(path.read_text()).unwrap()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"force-include": {"tuned_configs": "mylib/tuned_configs"}}


def test_a_list_of_tasks_that_is_there_gets_the_check(tmp_path: Path) -> None:
    path = project(tmp_path, SETUPTOOLS + "\n[tool.pdm.scripts]\ntest = 'pytest'\n")
    initialise(path, "mylib.kernels")
    scripts = tomlkit.parse(path.read_text()).unwrap()["tool"]["pdm"]["scripts"]
    assert scripts == {"test": "pytest", "check-tuned-configs": CHECK}


def test_another_entry_point_of_that_name_stays(tmp_path: Path) -> None:
    other = '\n[project.entry-points."aot_tune.tunables"]\nmylib = "mylib.others"\n'
    path = project(tmp_path, HATCHLING + other)
    initialise(path, "mylib.kernels")
    points = tomlkit.parse(path.read_text()).unwrap()["project"]["entry-points"]["aot_tune.tunables"]
    assert points == {"mylib": "mylib.others", "mylib_kernels": "mylib.kernels"}


REFUSED = {
    "no TOML": ("[project\n", "is not valid TOML"),
    "no project": ("[tool.poetry]\nname = 'mylib'\n", "has no table [project]"),
    "another backend": (
        HATCHLING.replace("hatchling.build", "poetry.core.masonry.api"), "knows hatchling and setuptools",
    ),
    "dynamic": (
        HATCHLING.replace('version = "1.0"', 'version = "1.0"\ndynamic = ["entry-points"]'),
        "project.dynamic lists entry-points",
    ),
    "no table": (
        HATCHLING.replace("[tool.ruff]", "[tool]\nhatch = 3\n[tool.ruff]"), "tool.hatch is no table",
    ),
    "no list": (
        SETUPTOOLS.replace('["*.txt"]  # the words', '"*.txt"'), "mylib is '*.txt'; write a list of patterns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_completed_is_refused_and_left_as_it_was(name: str, tmp_path: Path) -> None:
    text, said = REFUSED[name]
    path = project(tmp_path, text)
    with pytest.raises(UsageError) as refusal:
        initialise(path, "mylib.kernels")
    assert said in str(refusal.value)
    assert path.read_text() == text


def test_a_file_or_module_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = told(tmp_path, monkeypatch, "mylib.kernels")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pyproject.toml does not exist; run this in the folder" in done.stderr
    project(tmp_path, HATCHLING)
    assert "there is no module 'mylib.other' in" in told(tmp_path, monkeypatch, "mylib.other").stderr
    assert "name the module that declares kernels" in told(tmp_path, monkeypatch).stderr
    (tmp_path / "pyproject.toml").write_bytes(b"\xff")
    assert "is not UTF-8" in told(tmp_path, monkeypatch, "mylib.kernels").stderr


def test_setuptools_cannot_take_tables_beside_the_package(tmp_path: Path) -> None:
    path = project(tmp_path, SETUPTOOLS)
    (tmp_path / "mylib" / "tuned_configs").rename(tmp_path / "tuned_configs")
    with pytest.raises(UsageError, match="lies beside the package mylib"):
        initialise(path, "mylib.kernels")
