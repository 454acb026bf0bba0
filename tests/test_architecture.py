"""The rooms of the package and the direction of their imports, lazy and typing-only ones counted.

`aot_tune/README.md` draws the rooms. Each may import those to its right:

    cli -> bench -> kernels -> record -> tunable -> {serve | tuner} -> cubins -> recorded -> tables -> declare
        -> nvidia -> values

Below all of them are `environment` and `inputs`, and below these `errors`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import aot_tune

PACKAGE = Path(__file__).parents[1] / "aot_tune"
TESTS = Path(__file__).parent

ROOMS = (
    ("errors",),
    ("environment", "inputs"),
    ("values",),
    ("nvidia",),
    ("declare",),
    ("tables",),
    ("recorded",),
    ("cubins",),
    ("serve", "tuner"),
    ("tunable",),
    ("record",),
    ("kernels",),
    ("bench",),
    ("cli",),
)
"""The rooms of each floor, from the ground up. Those of one floor do not import each other."""

FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}

WITHIN = {
    "serve": ("rank", "runtime", "missed", "choose", "kernels", "search", "launch", "prime", "replay"),
    "tuner": ("outcome", "process", "compile", "plan", "choose", "measure", "archives", "ray", "sweep"),
    "kernels": ("host", "rows", "products", "prefill", "decode", "ops"),
}
"""Parts of the largest rooms, from the ground up: a part imports none that stands to its right."""

FOREIGN = {
    "pynvml": ("nvidia",),
    "nvidia": ("nvidia",),
    "cuda": (
        "nvidia",
        "kernels",
        "bench",
        "serve.launch",
        "serve.search",
        "serve.prime",
        "tuner.measure.worker",
    ),
    "tomli": ("cli",),
    "typer": ("cli",),
    "rich": ("cli", "tuner.sweep"),
    "triton": ("bench",),
    "ray": ("tuner.ray",),
    "filelock": ("serve.search", "tuner", "record"),
    "platformdirs": ("serve.search",),
    "orjson": ("tables", "cubins", "bench", "cli"),
}
"""The rooms that may import another distribution. `cuda` is cuTile."""

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

HOMES = {f"aot_tune.{name}": f"aot_tune.{home}" for name, home in aot_tune._HOMES.items()}
"""Public name to the module that defines it: `aot_tune` imports it when the name is first used."""


@cache
def imported(module: str) -> frozenset[str]:
    """Every module that a module imports, in functions and for type checkers too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else HOMES.get(full, str(node.module)))
    return frozenset(found)


def ours(module: str) -> set[str]:
    """The modules of aot_tune that a module imports, but for the package itself, which defines nothing."""
    return {name for name in imported(module) if name in MODULES and name != "aot_tune"} - {module}


def place(module: str) -> str:
    """A module's name within the package."""
    return module.removeprefix("aot_tune").removeprefix(".")


def room(module: str) -> str:
    return place(module).partition(".")[0]


INSIDE = [module for module in MODULES if room(module) not in ("", "__main__")]


def test_every_module_is_in_a_room_that_is_drawn() -> None:
    assert {room(module) for module in INSIDE} == set(FLOOR)


@pytest.mark.parametrize("module", INSIDE)
def test_a_module_imports_its_own_room_and_rooms_below(module: str) -> None:
    here = room(module)
    upwards = {name for name in ours(module) if room(name) != here and FLOOR[room(name)] >= FLOOR[here]}
    assert upwards == set()


@pytest.mark.parametrize("module", [name for name in INSIDE if room(name) in WITHIN])
def test_a_part_of_a_large_room_imports_none_above_it(module: str) -> None:
    order = {part: floor for floor, part in enumerate(WITHIN[room(module)])}
    here = place(module).split(".")[1:2]
    if not here or here[0] not in order:
        return  # __init__, README's own files and parts without a fixed floor
    inside = [name for name in ours(module) if room(name) == room(module)]
    parts = {name: place(name).split(".")[1] for name in inside if "." in place(name)}
    above = {name for name, part in parts.items() if order.get(part, -1) > order[here[0]]}
    assert above == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    waiting = {module: ours(module) for module in MODULES if module != "aot_tune"}
    while free := [module for module, needs in waiting.items() if not needs & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert waiting == {}


@pytest.mark.parametrize("module", INSIDE)
def test_other_distributions_are_imported_only_where_drawn(module: str) -> None:
    for name in imported(module):
        allowed = FOREIGN.get(name.partition(".")[0])
        assert allowed is None or place(module).startswith(allowed), f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"aot_tune.nvidia.cutile"}))
def test_cutiles_private_names_are_in_one_module(module: str) -> None:
    assert {n for n in imported(module) if n.startswith("cuda.tile") and "._" in n} == set()


# Not the package itself, which prepares the import of cuda.tile where no folder can be written to.
@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("aot_tune.kernels.")])
def test_a_shipped_kernel_imports_what_anybodys_kernel_could(module: str) -> None:
    public = {f"aot_tune.{home}" for home in aot_tune._HOMES.values()} | {"aot_tune.inputs"}
    outside = {name for name in ours(module) if room(name) != "kernels"}
    assert {
        name for name in outside if name not in public and room(name) not in ("values", "errors")
    } == set()


def test_a_folder_of_modules_fits_a_glance() -> None:
    folders = {path.parent for path in MODULES.values()}
    counts = {
        str(folder.relative_to(PACKAGE.parent)): len([p for p in folder.glob("*.py") if p.stem != "__init__"])
        for folder in folders
    }
    assert {folder: count for folder, count in counts.items() if count > 14} == {}


def test_no_module_is_called_utils() -> None:
    assert {m for m in MODULES if m.rpartition(".")[2].strip("_") in ("util", "utils", "common")} == set()


# The tests themselves ---------------------------------------------------------------------------------------


def test_modules_of(path: Path) -> set[str]:
    """The modules of tests that a file imports, those in the scripts that it hands to children included."""
    found: set[str] = set()
    for line in path.read_text().splitlines():
        words = line.strip().strip("'\"").split()
        if words[:1] == ["from"] and len(words) > 3 and words[1].startswith("tests"):
            found |= {f"{words[1]}.{name.strip(',')}" for name in words[3:]} | {words[1]}
    return {name for name in found if any(part.startswith("test_") for part in name.split(".")[:-1])}


test_modules_of.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_module_is_imported_by_another(path: Path) -> None:
    assert test_modules_of(path) == set()


def test_tests_lie_where_what_they_test_lies() -> None:
    """Each folder of tests is a room of the package; a file at its top or in `faults` is about the whole."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path("faults")}
    assert {folder for folder in folders if not (PACKAGE / folder).is_dir()} == set()
