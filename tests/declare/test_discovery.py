"""Finding declarations: entry points, module names, paths; what is said when there is none."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from aot_tune.declare import discovery
from aot_tune.declare.discovery import find_tunables, load, module_of
from aot_tune.errors import EntryPointWarning, UsageError
from tests.support import samples
from tests.support.third_party import installed

SHIPPED = {path.stem for path in (Path(__file__).parents[2] / "tuned_configs" / "sm90").glob("*.json")}
"""What has a measured table is shipped, and nothing else."""

KERNELS = """
import dataclasses
from tests.support import samples

{name} = dataclasses.replace(samples.scale, name="{name}")
again = {name}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and no trace of what a test imports from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith(("mylib", "lone", "thirdlib")):
            del sys.modules[name]


def package(folder: Path, text: str, name: str = "mylib") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "kernels.py").write_text(text)


BROKEN = {
    None: "there is no module 'thirdlib.kernels' here",
    "import not_there": "module thirdlib.kernels needs 'not_there', which is not installed",
    "1 / 0": "module thirdlib.kernels cannot be imported: ZeroDivisionError: division by zero (",
    "raise SystemExit(0)": "module thirdlib.kernels cannot be imported: SystemExit: 0 (",
    "x = 1": "module thirdlib.kernels declares no kernel",
    "def __getattr__(name): 1 / 0": "module thirdlib.kernels cannot be imported: ZeroDivisionError: division",
}
"""What an entry point's module holds, and what is said of it."""


@pytest.mark.parametrize("text", list(BROKEN))
def test_a_broken_entry_point_is_one_warning_that_names_it_and_leaves_the_other_kernels(
    here: Path, text: str | None
) -> None:
    installed(here, text)
    with pytest.warns(EntryPointWarning) as told:
        assert set(find_tunables()) == SHIPPED
    (warning,) = map(str, (one.message for one in told))
    assert warning.startswith(
        f"entry point third = thirdlib.kernels of Third-Lib 1.0 is left out: {BROKEN[text]}"
    )
    assert warning.endswith("; repair Third-Lib or uninstall it (pip uninstall Third-Lib)")


def test_a_broken_entry_point_is_no_matter_where_modules_are_named(here: Path) -> None:
    installed(here, "1 / 0")
    package(here, KERNELS.format(name="double"))
    assert list(find_tunables(["mylib.kernels"])) == ["double"]
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        find_tunables(["thirdlib.kernels"])


def test_the_shipped_kernels_are_found_with_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    found = find_tunables()
    assert set(found) == SHIPPED
    assert {one.module for one in found.values()} == {"aot_tune.kernels"}


def test_installed_entry_points_are_found_beside_the_shipped_kernels(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(here, KERNELS.format(name="double"))
    points = [
        metadata.EntryPoint(name="aot_tune", value="aot_tune.kernels", group=discovery.GROUP),
        metadata.EntryPoint(name="mylib", value="mylib.kernels", group=discovery.GROUP),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == discovery.GROUP else [])
    found = find_tunables()
    assert set(found) == SHIPPED | {"double"}
    assert found["double"].module == "mylib.kernels"


def test_a_kernel_of_a_taken_name_keeps_nobody_from_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "\nimport dataclasses\ndouble = dataclasses.replace(softmax, name='double')\n"
    package(here, KERNELS.format(name="softmax") + more)
    points = [
        metadata.EntryPoint(name="aot_tune", value="aot_tune.kernels", group=discovery.GROUP),
        metadata.EntryPoint(name="mylib", value="mylib.kernels", group=discovery.GROUP),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == discovery.GROUP else [])
    told = (
        r"^kernel 'softmax' of mylib.kernels is left out: aot_tune.kernels declares .*--module mylib.kernels"
    )
    with pytest.warns(EntryPointWarning, match=told):
        found = find_tunables()
    assert set(found) == SHIPPED | {"double"}
    assert found["softmax"].module == "aot_tune.kernels"
    assert found["double"].module == "mylib.kernels"
    assert list(find_tunables(["mylib.kernels"])) == ["softmax", "double"]


def test_a_named_module_is_found_in_the_current_folder_and_alone(here: Path) -> None:
    package(here, KERNELS.format(name="double"))
    found = find_tunables(["mylib.kernels"])
    assert list(found) == ["double"]
    assert found["double"].tunable.name == "double"
    assert load("mylib.kernels", "double") is found["double"].tunable


def test_a_file_in_the_current_folder_does_not_replace_an_installed_module(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (here / "thirdlib.py").write_text("raise SystemExit('the file in the current folder ran')")
    (here / "lone.py").write_text(KERNELS.format(name="alone"))
    elsewhere = tmp_path_factory.mktemp("site-packages")
    (elsewhere / "thirdlib.py").write_text(KERNELS.format(name="double"))
    monkeypatch.setattr(sys, "path", [*(folder for folder in sys.path if folder), str(elsewhere)])
    assert list(find_tunables(["thirdlib"])) == ["double"]
    assert list(find_tunables(["lone"])) == ["alone"], "what is nowhere else is found there"


@pytest.mark.parametrize(
    "text", ["mylib/kernels.py", "./mylib/kernels.py", "mylib/kernels", "{here}/mylib/kernels.py"]
)
def test_a_path_names_its_module(here: Path, text: str) -> None:
    package(here, KERNELS.format(name="double"))
    assert find_tunables([text.format(here=here)])["double"].module == "mylib.kernels"


def test_a_lone_file_is_a_module_too(here: Path) -> None:
    (here / "lone.py").write_text(KERNELS.format(name="double"))
    assert find_tunables(["lone.py"])["double"].module == "lone"


def test_a_declaration_imported_by_two_modules_is_one(here: Path) -> None:
    package(here, KERNELS.format(name="double"))
    (here / "mylib" / "more.py").write_text("from mylib.kernels import double\n")
    assert list(find_tunables(["mylib.kernels", "mylib.more"])) == ["double"]


def test_declarations_in_lists_and_mappings_are_found(here: Path) -> None:
    variants = "\nlisted, named = [make('one')], {'two': make('two'), 'again': double}\n"
    make = "\nimport dataclasses\n\ndef make(name):\n    return dataclasses.replace(double, name=name)\n"
    package(here, KERNELS.format(name="double") + make + variants)
    assert list(find_tunables(["mylib.kernels"])) == ["double", "one", "two"]
    assert discovery.load("mylib.kernels", "two").name == "two"


def test_two_kernels_of_one_name_in_one_module_need_another_name(here: Path) -> None:
    package(
        here, KERNELS.format(name="double") + "\nimport dataclasses\nagain = dataclasses.replace(double)\n"
    )
    with pytest.raises(
        UsageError, match=r"^two kernels of mylib.kernels are called 'double'; give one of them"
    ):
        find_tunables(["mylib.kernels"])


def test_two_kernels_of_one_name_are_refused_naming_both_modules(here: Path) -> None:
    package(here, KERNELS.format(name="double"))
    package(here, KERNELS.format(name="double"), name="mylib2")
    with pytest.raises(
        UsageError, match=r"two kernels are called 'double', in mylib\.kernels and in mylib2\.kernels"
    ):
        find_tunables(["mylib.kernels", "mylib2.kernels"])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("nowhere", r"there is no module 'nowhere' here \(.*\) or on the Python path"),
        ("mylib.nowhere", r"there is no module 'mylib.nowhere'"),
        ("mylib.needs", r"module mylib.needs needs 'not_there', which is not installed"),
        ("mylib.broken", r"module mylib.broken cannot be imported: ZeroDivisionError"),
        ("mylib.ends", r"module mylib.ends cannot be imported: SystemExit: 0 \(.*ends.py, line 1\)"),
        ("mylib.syntax", r"module mylib.syntax cannot be imported: SyntaxError"),
        ("mylib", r"module mylib declares no kernel"),
        ("../other.py", r"\.\./other\.py is outside the current folder"),
        ("not a name", r"there is no module 'not a name'"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused_with_the_reason(
    here: Path, module: str, message: str
) -> None:
    package(here, KERNELS.format(name="double"))
    (here / "mylib" / "needs.py").write_text("import not_there\n")
    (here / "mylib" / "broken.py").write_text("1 / 0\n")
    (here / "mylib" / "ends.py").write_text("raise SystemExit(0)\n")
    (here / "mylib" / "syntax.py").write_text("def\n")
    with pytest.raises(UsageError, match=message):
        find_tunables([module])


def test_a_kernel_that_a_module_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(UsageError, match=r"declares no kernel 'matrix'; it has attention .* rope softmax"):
        load("aot_tune.kernels", "matrix")
    assert load(samples.MODULE, "scale") is samples.scale


def test_another_process_imports_a_shipped_kernel_alone() -> None:
    for tunable in (found.tunable for found in find_tunables().values()):
        module = module_of(tunable)
        assert module is not None
        assert module.endswith(f".{tunable.name}")
        assert load(module, tunable.name) is tunable


@pytest.mark.process
def test_importing_discovery_imports_neither_torch_nor_cutile() -> None:
    script = (
        "import sys, aot_tune.declare.discovery; sys.exit(bool({'torch', 'cuda.tile'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("hold", [list, tuple, lambda members: dict(enumerate(members)), lambda one: one[0]])
@pytest.mark.parametrize("module", ["tests.support.samples", "tests.support.wide_samples"])
def test_a_declaration_is_found_in_the_module_whose_global_holds_it(
    module: str, hold: Callable[[list[Any]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = dataclasses.replace(samples.scale)
    assert module_of(member) is None
    monkeypatch.setattr(f"{module}.MEMBERS", hold([member]), raising=False)
    assert module_of(member) == module
