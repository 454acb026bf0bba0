"""The rooms of the package and the direction of their imports, lazy and typing-only ones counted.

`aot_tune/README.md` draws the rooms. Each may import those to its right:

    bench -> cli -> kernels -> replay -> tunable -> {serve | tuner} -> choose -> cubins -> tables -> declare
        -> nvidia -> values

The bench stands apart: no wheel holds it, and its verb imports it when it is called.
Below all of them are `environment`, `inputs` and `warn`, and below these `errors`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import aot_tune
from tests.support.violations import assert_none

PACKAGE = Path(__file__).parents[1] / "aot_tune"
TESTS = Path(__file__).parent

ROOMS = (
    ("errors",),
    ("environment", "inputs", "warn"),
    ("values",),
    ("nvidia",),
    ("declare",),
    ("tables",),
    ("cubins",),
    ("choose",),
    ("serve", "tuner"),
    ("tunable",),
    ("replay",),
    ("kernels",),
    ("cli",),
    ("bench",),
)
"""The rooms of each floor, from the ground up. Those of one floor do not import each other."""

VERB = ("aot_tune.cli.app", "aot_tune.bench.__main__")
"""The verb that runs the bench, and the only module of it that is imported from outside."""

FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}

WITHIN = {
    "serve": ("rank", "runtime", "missed", "loader", "kernels", "search", "launch", "prime"),
    "tuner": (
        "outcome",
        "process",
        "compile",
        "plan",
        "choose",
        "measure",
        "archives",
        "ray",
        "sweep",
        "profile",
    ),
    "replay": (
        *("spelling", "problem", "table", "document", "files", "nearest", "fit", "words"),
        *("answer", "archives", "record"),
    ),
    "kernels": ("host", "rows", "products", "prefill", "decode"),
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
    "typer": ("cli", "bench"),
    "rich": ("cli", "tuner.sweep"),
    "triton": ("bench",),
    "ray": ("tuner.ray",),
    "filelock": ("serve.search", "tuner", "replay.record"),
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
    return {name for name in imported(module) if is_ours(name)} - {module}


def needs(modules: Iterable[str]) -> set[str]:
    """These modules and those of aot_tune that they import, or that an imported one does."""
    needed, left = set[str](), list(modules)
    while left:
        module = left.pop()
        needed.add(module)
        left += ours(module) - needed
    return needed


def place(module: str) -> str:
    """A module's name within the package."""
    return module.removeprefix("aot_tune").removeprefix(".")


def room(module: str) -> str:
    return place(module).partition(".")[0]


INSIDE = [module for module in MODULES if room(module) not in ("", "__main__")]


def test_every_module_is_in_a_room_that_is_drawn() -> None:
    assert {room(module) for module in INSIDE} == set(FLOOR)


def wrong_imports(modules: Iterable[str], wrong: Callable[[str, str], bool]) -> list[str]:
    """The imports of these modules that are wrong, a line each."""
    return [
        f"{module} imports {name}"
        for module in modules
        for name in sorted(imported(module))
        if wrong(module, name)
    ]


def is_ours(name: str) -> bool:
    """Whether a module is of aot_tune, but for the package itself, which defines nothing."""
    return name in MODULES and name != "aot_tune"


def test_a_module_imports_its_own_room_and_rooms_below() -> None:
    def is_upwards(module: str, name: str) -> bool:
        here, other = room(module), room(name)
        if (module, name) == VERB:
            return False
        return is_ours(name) and other != here and FLOOR[other] >= FLOOR[here]

    assert_none(wrong_imports(INSIDE, is_upwards))


def test_the_bench_is_imported_by_its_verb_alone_as_it_is_called() -> None:
    assert wrong_imports(INSIDE, lambda module, name: room(module) != "bench" == room(name)) == [
        "{} imports {}".format(*VERB)
    ]
    at_the_top = ast.parse(MODULES[VERB[0]].read_text()).body
    assert VERB[1] not in {node.module for node in at_the_top if isinstance(node, ast.ImportFrom)}


def test_a_part_of_a_large_room_imports_none_above_it() -> None:
    # Modules that are in no listed part have no floor: a room's own files, and parts without a fixed one.
    floors = {(name, part): floor for name, parts in WITHIN.items() for floor, part in enumerate(parts)}

    def floor(module: str) -> int | None:
        return floors.get((room(module), *place(module).split(".")[1:2]))  # type: ignore[arg-type]

    def is_upwards(module: str, name: str) -> bool:
        here, other = floor(module), floor(name)
        return room(name) == room(module) and here is not None and other is not None and other > here

    assert_none(wrong_imports(INSIDE, is_upwards))


def test_answering_a_librarys_search_needs_no_tuner() -> None:
    """Imports in functions count: a serving process answers searches, and records none."""
    needed = needs(name for name in INSIDE if place(name).startswith("replay.answer"))
    assert "aot_tune.replay.document" in needed
    assert {name for name in needed if place(name).startswith(("tuner", "replay.record"))} == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    waiting = {module: ours(module) for module in MODULES if module != "aot_tune"}
    while free := [module for module, needs in waiting.items() if not needs & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert waiting == {}


def test_other_distributions_are_imported_only_where_drawn() -> None:
    def is_elsewhere(module: str, name: str) -> bool:
        allowed = FOREIGN.get(name.partition(".")[0])
        return allowed is not None and not place(module).startswith(allowed)

    assert_none(wrong_imports(INSIDE, is_elsewhere))


def test_cutiles_private_names_are_in_one_module() -> None:
    others = sorted(MODULES.keys() - {"aot_tune.nvidia.cutile"})
    assert_none(wrong_imports(others, lambda _, name: name.startswith("cuda.tile") and "._" in name))


def test_a_shipped_kernel_imports_what_anybodys_kernel_could() -> None:
    public = {f"aot_tune.{home}" for home in aot_tune._HOMES.values()} | {"aot_tune.inputs"}

    def is_private(_: str, name: str) -> bool:
        return is_ours(name) and name not in public and room(name) not in ("kernels", "values", "errors")

    # Not the package itself, which prepares the import of cuda.tile where no folder can be written to.
    shipped = [name for name in MODULES if name.startswith("aot_tune.kernels.")]
    assert_none(wrong_imports(shipped, is_private))


def test_a_shipped_kernel_imports_no_other() -> None:
    declaring = {
        name for name in INSIDE if room(name) == "kernels" and "= Tunable(" in MODULES[name].read_text()
    }
    others = {
        place(name): {place(other) for other in needs([name]) & declaring - {name}} for name in declaring
    }
    assert {name: found for name, found in others.items() if found} == {  # their host functions launch both
        "kernels.norms.fused_add_rms_norm": {"kernels.norms.rms_norm"},  # imported at its first launch
        "kernels.products.fp8.matmul_fp8": {"kernels.products.fp8.matmul_fp8_block"},
    }


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


def test_no_test_module_is_imported_by_another() -> None:
    assert_none(
        f"{path.relative_to(TESTS)} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in sorted(test_modules_of(path))
    )


def test_tests_lie_where_what_they_test_lies() -> None:
    """Each folder of tests is a room of the package; a file at its top or in `faults` is about the whole."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path("faults")}
    assert {folder for folder in folders if not (PACKAGE / folder).is_dir()} == set()
