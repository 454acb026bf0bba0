"""What importing aot_tune costs, and which module may import which: a test holds the direction of imports."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aot_tune"

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def _imported(module: str) -> frozenset[str]:
    """Every module that a module imports, anywhere in it, but for those imported for type checkers alone."""
    tree = ast.parse(MODULES[module].read_text())
    for_types = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inside in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
    return frozenset(found)


@cache
def _reached(module: str) -> frozenset[str]:
    """All modules that a module's imports lead to, lazy ones included."""
    reached, waiting = {module}, [module]
    while waiting:
        for name in _imported(waiting.pop()):
            if name not in reached:
                reached.add(name)
                if name in MODULES:
                    waiting.append(name)
    return frozenset(reached)


def _tops(module: str) -> set[str]:
    return {name.partition(".")[0] for name in _imported(module)}


# What it costs ----------------------------------------------------------------------------------------------

TIMED = """
import json, sys, time
before = set(sys.modules)
started = time.perf_counter()
import aot_tune
seconds = time.perf_counter() - started
print(json.dumps({"ms": seconds * 1e3, "modules": sorted(set(sys.modules) - before)}))
"""

TOUCHED = """
import json, sys
import aot_tune
for name in aot_tune.__all__:
    getattr(aot_tune, name)
print(json.dumps(sorted(sys.modules)))
"""


def _child(script: str):
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=PACKAGE.parent,
    )
    return json.loads(done.stdout)


@pytest.mark.process
def test_importing_aot_tune_takes_under_15_ms_over_the_bare_interpreter():
    assert min(_child(TIMED)["ms"] for _ in range(7)) < 15


@pytest.mark.process
def test_importing_aot_tune_imports_nothing_heavy():
    modules = {name.partition(".")[0] for name in _child(TIMED)["modules"]}
    assert (
        modules & {"torch", "cuda", "numpy", "orjson", "pynvml", "filelock", "platformdirs", "rich"} == set()
    )


@pytest.mark.process
def test_every_public_name_is_there_without_torch_and_cuda_tile():
    modules = set(_child(TOUCHED))
    assert "aot_tune.tunable" in modules
    assert modules & {"torch", "cuda.tile", "numpy"} == set()


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known():
    import aot_tune

    with pytest.raises(AttributeError, match=r"no attribute 'tunable_'; it has .*Tunable"):
        _ = aot_tune.tunable_
    assert dir(aot_tune) == aot_tune.__all__


# Which way they depend --------------------------------------------------------------------------------------

SERVING = ["aot_tune", "aot_tune.tunable"]
SERVING += [name for name in MODULES if name.startswith(("aot_tune.serve", "aot_tune.kernels"))]
TOOLS = {"rich", "typer", "click", "hypothesis", "pytest", "aot_tune.cli.app", "aot_tune.__main__"}


@pytest.mark.parametrize("module", SERVING)
def test_nothing_that_a_serving_process_imports_leads_to_the_tuner_or_the_command_line(module):
    reached = _reached(module)
    assert {name for name in reached if name.startswith(("aot_tune.tuner", "aot_tune.bench"))} == set()
    assert {name for name in reached if name in TOOLS or name.partition(".")[0] in TOOLS} == set()


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("aot_tune.tuner")])
def test_the_tuner_does_not_import_the_serve_side_or_the_command_line(module):
    named = _imported(module)
    assert {
        name for name in named if name.startswith(("aot_tune.serve", "aot_tune.cli.app", "aot_tune.bench"))
    } == set()


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"aot_tune.nvidia.cutile"}))
def test_cutiles_private_names_are_in_one_module(module):
    private = {
        name
        for name in _imported(module)
        if name.startswith("cuda.tile") and any(part.startswith("_") for part in name.split("."))
    }
    assert private == set()


def test_the_walk_follows_imports_that_stand_in_functions():
    assert "aot_tune.declare.mistakes" in _reached("aot_tune.tunable")
    assert "aot_tune.tuner.sweep.run" in _reached("aot_tune.cli.app")
