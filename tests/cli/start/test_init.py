"""aot_tune.cli.start.init: which lines a pyproject.toml needs, which it has, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from aot_tune.cli.app import app
from aot_tune.cli.start.init import init_lines, tomllib
from aot_tune.errors import UsageError

HATCHLING = """\
# A library of kernels.
[build-system]
requires = ["hatchling"]  # nothing else
build-backend = "hatchling.build"

[project]
name = "mylib"   # as it is imported
version = "1.0"
"""

SETUPTOOLS = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "mylib"
version = "1.0"
"""

BACKENDS = {"hatchling": HATCHLING, "setuptools": SETUPTOOLS}
POINT = {"aot_tune.tunables": {"mylib": "mylib.kernels"}}
DATA = {
    "hatchling": {"hatch": {"build": {"targets": {"wheel": {"artifacts": ["mylib/tuned_configs/*/*"]}}}}},
    "setuptools": {"setuptools": {"package-data": {"mylib": ["tuned_configs/*/*"]}}},
}
CHECK = "# in CI, before a merge: aot-tune check --module mylib.kernels"


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


def pasted(path: Path, module: str = "mylib.kernels") -> dict[str, Any]:
    """Append the printed lines to the file, and read it."""
    lines = init_lines(path, module)
    path.write_text(path.read_text() + "\n" + "\n".join(lines) + "\n")
    return tomllib.loads(path.read_text())


def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, ["init", *words])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_printed_lines_complete_a_file_that_is_not_written(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(tmp_path, BACKENDS[backend])
    done = invoke(tmp_path, monkeypatch, "mylib.kernels")
    assert (done.exit_code, path.read_text()) == (0, BACKENDS[backend])
    assert done.stdout.splitlines()[-1] == CHECK
    document = tomllib.loads(path.read_text() + done.stdout)
    assert document["project"] == {"name": "mylib", "version": "1.0", "entry-points": POINT}
    assert document["tool"] == DATA[backend]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_there_already_is_a_comment(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pasted(project(tmp_path, BACKENDS[backend]))
    for words in (["mylib.kernels"], []):  # the module is the entry point's from then on
        point, data, check = invoke(tmp_path, monkeypatch, *words).stdout.splitlines()
        assert (
            point == '# pyproject.toml has [project.entry-points."aot_tune.tunables"] mylib = "mylib.kernels"'
        )
        assert data.startswith("# pyproject.toml has [tool.")
        assert check == CHECK


@pytest.mark.process
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["", "src", "acme"])
def test_the_wheel_holds_the_tables_the_archive_and_the_entry_point(
    backend: str, source: str, tmp_path: Path
) -> None:
    """Of a package in a checkout's root, in ``src``, and in the namespace package ``acme``."""
    namespace = "acme" if source == "acme" else ""
    place, package = f"{namespace}/mylib".lstrip("/"), f"{namespace}.mylib".lstrip(".")
    pasted(project(tmp_path, BACKENDS[backend], source=source), f"{package}.kernels")
    module = "hatchling.build" if backend == "hatchling" else "setuptools.build_meta"
    subprocess.run(
        [sys.executable, "-c", f"import {module} as it; it.build_wheel('dist')"],
        cwd=tmp_path, capture_output=True, check=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if "tuned_configs" in name and not name.endswith("/")}
        points = packed.read("mylib-1.0.dist-info/entry_points.txt").decode()
    assert names == {f"{place}/tuned_configs/sm90/{name}" for name in ("scale.json", "cubins.aot")}
    assert points.split() == ["[aot_tune.tunables]", namespace or "mylib", "=", f"{package}.kernels"]


def test_tables_beside_the_package_are_put_inside_it_in_the_wheel(tmp_path: Path) -> None:
    path = project(tmp_path, HATCHLING)
    (tmp_path / "mylib" / "tuned_configs").rename(tmp_path / "tuned_configs")
    wheel = pasted(path)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"force-include": {"tuned_configs": "mylib/tuned_configs"}}


# A table that cannot be opened again, by what it is in the file and which line belongs into it.
WRITTEN_BY_HAND = {
    "another entry point": (
        HATCHLING + '[project.entry-points."aot_tune.tunables"]\nmylib = "mylib.others"\n',
        '[project.entry-points."aot_tune.tunables"] of pyproject.toml, in place of any line mylib_kernels: '
        'mylib_kernels = "mylib.kernels"',
    ),
    "inline entry points": (
        HATCHLING + 'entry-points = {"other" = {a = "b"}}\n',
        '[project.entry-points."aot_tune.tunables"] of pyproject.toml, in place of any line mylib: '
        'mylib = "mylib.kernels"',
    ),
    "a list of patterns": (
        SETUPTOOLS + '[tool.setuptools.package-data]\nmylib = ["*.txt"]  # the words\n',
        '[tool.setuptools.package-data] of pyproject.toml, in place of any line mylib: '
        'mylib = ["*.txt", "tuned_configs/*/*"]',
    ),
    "inline setuptools": (
        SETUPTOOLS + "[tool]\nsetuptools = {zip-safe = false}\n",
        '[tool.setuptools.package-data] of pyproject.toml, in place of any line mylib: '
        'mylib = ["tuned_configs/*/*"]',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_BY_HAND)
def test_a_table_that_is_there_is_to_be_written_by_hand(name: str, tmp_path: Path) -> None:
    text, line = WRITTEN_BY_HAND[name]
    path = project(tmp_path, text)
    assert f"# write into {line}" in init_lines(path, "mylib.kernels")
    assert pasted(path)["project"]["name"] == "mylib"


def test_dotted_keys_keep_all_that_they_say(tmp_path: Path) -> None:
    build = HATCHLING.partition("[project]")[0].replace("[build-system]\n", "").replace("\n", "\n")
    head = 'project.name = "mylib"\nproject.version = "1.0"\nproject.entry-points."x.y".a = "b"\n'
    path = project(tmp_path, head + "[build-system]\n" + build.partition("\n")[2])
    document = pasted(path)
    assert document["project"] == {
        "name": "mylib", "version": "1.0", "entry-points": {"x.y": {"a": "b"}, **POINT},
    }  # fmt: skip


def test_an_unknown_backend_gets_the_entry_point_and_a_word_about_the_wheel(tmp_path: Path) -> None:
    path = project(tmp_path, HATCHLING.replace("hatchling.build", "poetry.core.masonry.api"))
    assert "let the wheel hold all files of mylib/tuned_configs" in "\n".join(
        init_lines(path, "mylib.kernels")
    )
    assert pasted(path)["project"]["entry-points"] == POINT


REFUSED = {
    "no TOML": ("[project\n", "is not valid TOML"),
    "nested too deep": ("a = " + "[" * 100_000, "is not valid TOML"),
    "a byte order mark": ("\ufeff" + HATCHLING, "begins with a byte order mark"),
    "no project": ("[tool.poetry]\nname = 'mylib'\n", "has no table [project]"),
    "dynamic": (
        HATCHLING.replace('version = "1.0"', 'version = "1.0"\ndynamic = ["entry-points"]'),
        "lists entry-points",
    ),
    "no list": (
        SETUPTOOLS + "[tool.setuptools.package-data]\nmylib = '*.txt'\n",
        "mylib in [tool.setuptools.package-data] is '*.txt'; write a list of patterns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_completed_is_refused(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    path = project(tmp_path, text)
    with pytest.raises(UsageError) as refusal:
        init_lines(path, "mylib.kernels")
    assert reason in str(refusal.value)


def test_a_file_or_module_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = invoke(tmp_path, monkeypatch, "mylib.kernels")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pyproject.toml does not exist; run this in the folder" in done.stderr
    path = project(tmp_path, HATCHLING)
    for module in ("mylib.other", "..mylib", "my-lib.kernels", "mylib.kernels."):
        done = invoke(tmp_path, monkeypatch, "--", module)
        assert (done.exit_code, f"there is no module {module!r} in" in done.stderr) == (2, True)
    assert "name the module that declares kernels" in invoke(tmp_path, monkeypatch).stderr
    path.write_bytes(b"\xff")
    assert "is not UTF-8" in invoke(tmp_path, monkeypatch, "mylib.kernels").stderr
    path.unlink()
    os.mkfifo(path)
    assert "is no file" in invoke(tmp_path, monkeypatch, "mylib.kernels").stderr


def test_setuptools_cannot_take_tables_beside_the_package(tmp_path: Path) -> None:
    path = project(tmp_path, SETUPTOOLS)
    (tmp_path / "mylib" / "tuned_configs").rename(tmp_path / "tuned_configs")
    with pytest.raises(UsageError, match="lies beside the package mylib"):
        init_lines(path, "mylib.kernels")
