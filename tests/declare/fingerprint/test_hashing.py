"""aot_tune.declare.fingerprint: what changes a kernel's hash and what does not."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

from aot_tune.declare.fingerprint import hashing
from aot_tune.declare.fingerprint.hashing import source_hash, unhashable

HELPERS = '''
"""Helpers of the kernel."""
import enum

WIDTH = 4

class Order(enum.Enum):
    ROWS = 0
    COLUMNS = 1

class Layout:
    """How it lies."""
    ROW_MAJOR = True

    def lanes(self):
        return WIDTH * 8

def inner(i):
    return i * WIDTH

def swizzle(i, group=8):
    """Where block i goes."""
    return inner(i) % group

def unused(i):
    return i
'''

KERNEL = '''
import functools
import math
from dataclasses import dataclass

import cuda.tile as ct
from {helpers} import Layout, Order, swizzle
import {helpers} as h

ConstInt = ct.Constant[int]
SCALE = 2.0
TABLE = {"a": (1, 2), "b": [3, {4}]}
NAMES = {"x", "y", "zz", "w"}
LAYOUT = Layout()
UNUSED = 1

@dataclass(frozen=True)
class Padding:
    mode: str = "zero"

PADDING = Padding()
Sizes = tuple[int, ...]

@ct.function
def helper(x):
    return x * SCALE

@ct.kernel(occupancy=2)
def kernel(a, b, tile_m: ConstInt, tile_n: "ct.Constant[int]"):
    """Scale a matrix."""
    i = swizzle(ct.bid(0))
    j = h.inner(ct.bid(1)) + h.WIDTH
    tile = ct.load(a, (i, j), (tile_m, tile_n))  # one tile
    if Order.ROWS and TABLE and NAMES and PADDING:
        tile = helper(tile)
    ct.store(b, (i, j), tile)

def make_grid(extra):
    def grid_fn(config, device, problem: Sizes) -> Sizes:
        import math as m
        sizes: Sizes = ()
        total = [i for i in range(extra)]
        return (m.ceil(problem["M"] / config["tile_m"]) + len(total), LAYOUT.lanes())
    return grid_fn

grid_fn = make_grid(1)
tiles, args_fn, other = lambda config: 1, lambda config, a, b: (a, b, config["tile_m"], 16), lambda config: 2
'''

_numbers = itertools.count()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write the two modules under fresh names, import them, and return what a declaration would hold."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(kernel: str = KERNEL, helpers: str = HELPERS) -> types.SimpleNamespace:
        number = next(_numbers)
        for name, text in ((f"fp_helpers_{number}", helpers), (f"fp_kernel_{number}", kernel)):
            (tmp_path / f"{name}.py").write_text(text.replace("{helpers}", f"fp_helpers_{number}"))
        importlib.invalidate_caches()
        module = importlib.import_module(f"fp_kernel_{number}")
        return types.SimpleNamespace(kernel=module.kernel, grid_fn=module.grid_fn, args_fn=module.args_fn)

    return load


def _edited(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    return text


def test_the_hash_is_16_hex_digits_and_says_nothing_is_in_the_way(load):
    declared = load()
    assert unhashable(declared) == ()
    assert len(source_hash(declared)) == 16
    assert int(source_hash(declared), 16) >= 0
    assert source_hash(declared) == source_hash(declared)


SAME = {
    "renamed files": (),
    "a comment": (("i = swizzle", "# where it goes\n    i = swizzle"),),
    "a changed comment": (("# one tile", "# one  tile, padded"),),
    "another docstring": (('"""Scale a matrix."""', '"""Scale one matrix by a number."""'),),
    "no docstring": (('    """Scale a matrix."""\n', ""),),
    "another position": (("import functools\n", "import functools\n\n\nNOTHING = None\n\n\n"),),
    "broken lines": (("ct.load(a, (i, j), (", "ct.load(\n        a,\n        (i,\n         j), ("),),
    "other spaces and brackets": (("x * SCALE", "(x*SCALE)"),),
    "other quotes": (('config["tile_m"]) +', "config['tile_m']) +"),),
    "a global that nothing reads": (("UNUSED = 1", "UNUSED = 2"),),
    "another lambda on the line": (("lambda config: 1", "lambda config: 11"),),
    "a lambda on its own line": (("1, lambda config, a", "1, (\n  lambda config, a"), ("16), ", "16)), ")),
    "another local of a closure's maker": (("def make_grid(extra):", "def make_grid(extra, unread=3):"),),
    "another order of a set": (('{"x", "y", "zz", "w"}', '{"w", "zz", "y", "x"}'),),
    "an equal constant made elsewhere": (("SCALE = 2.0", "SCALE = float('2')"),),
}  # fmt: skip

SAME_HELPERS = {
    "a docstring": (("Where block i goes.", "Which tile block i takes."),),
    "a class's docstring": (("How it lies.", "How it is laid out."),),
    "a function that nothing calls": (("    return i\n", "    return i + 1\n"),),
    "another order of definitions": (("WIDTH = 4\n", ""), ("def unused(i):", "WIDTH = 4\n\ndef unused(i):")),
}

CHANGED = {
    "the kernel's code": (("(i, j), tile)", "(j, i), tile)"),),
    "a decorator's hint": (("occupancy=2", "occupancy=4"),),
    "a global": (("SCALE = 2.0", "SCALE = 3.0"),),
    "a global's type": (("SCALE = 2.0", "SCALE = 2"),),
    "a value deep in a global": (("{4}", "{5}"),),
    "a member of a set": (('"zz", "w"', '"zz", "v"'),),
    "a field of an object": (("PADDING = Padding()", 'PADDING = Padding("undefined")'),),
    "a field's default": (('mode: str = "zero"', 'mode: str = "one"'),),
    "a helper": (("return x * SCALE", "return x + SCALE"),),
    "an annotation": (("tile_m: ConstInt", "tile_m: ct.Constant[float]"),),
    "an annotation in quotes": (('"ct.Constant[int]"', '"ct.Constant[float]"'),),
    "what an annotation's name means": (("ConstInt = ct.Constant[int]", "ConstInt = ct.Constant[float]"),),
    "no annotation": (("tile_m: ConstInt", "tile_m"),),
    "a closure's value": (("make_grid(1)", "make_grid(2)"),),
    "grid_fn": (("m.ceil", "m.floor"),),
    "args_fn": (("16), lambda", "32), lambda"),),
    "a parameter's name": (("def helper(x):\n    return x * SCALE", "def helper(y):\n    return y * SCALE"),),
    "which enum member": (("Order.ROWS", "Order.COLUMNS"),),
}  # fmt: skip

CHANGED_HELPERS = {
    "a helper of a helper": (("return i * WIDTH", "return i + WIDTH"),),
    "a helper's global": (("WIDTH = 4", "WIDTH = 5"),),
    "a default argument": (("group=8", "group=16"),),
    "an enum's values": (("ROWS = 0", "ROWS = 2"),),
    "a method": (("WIDTH * 8", "WIDTH * 16"),),
    "a class attribute": (("ROW_MAJOR = True", "ROW_MAJOR = False"),),
}


@pytest.mark.parametrize("name", SAME)
def test_the_hash_stays_with_a_change_of(load, name):
    assert source_hash(load(_edited(KERNEL, *SAME[name]))) == source_hash(load())


@pytest.mark.parametrize("name", SAME_HELPERS)
def test_the_hash_stays_with_a_change_in_a_helpers_module_of(load, name):
    assert source_hash(load(helpers=_edited(HELPERS, *SAME_HELPERS[name]))) == source_hash(load())


@pytest.mark.parametrize("name", CHANGED)
def test_the_hash_changes_with(load, name):
    declared = load(_edited(KERNEL, *CHANGED[name]))
    assert unhashable(declared) == ()
    assert source_hash(declared) != source_hash(load())


@pytest.mark.parametrize("parameter", ["more=extra", "*, more=extra"])
def test_a_default_that_a_maker_gives_counts_by_its_value(load, parameter):
    """The name of the maker's argument has no value any more; the default has."""
    made = _edited(
        KERNEL, ("problem: Sizes)", f"problem: Sizes, {parameter})"), ("range(extra)", "range(more)")
    )
    assert source_hash(load(made)) == source_hash(load(made))
    assert source_hash(load(made)) != source_hash(load(_edited(made, ("make_grid(1)", "make_grid(2)"))))


@pytest.mark.parametrize("name", CHANGED_HELPERS)
def test_the_hash_changes_in_a_helpers_module_with(load, name):
    declared = load(helpers=_edited(HELPERS, *CHANGED_HELPERS[name]))
    assert unhashable(declared) == ()
    assert source_hash(declared) != source_hash(load())


def test_every_change_gives_a_hash_of_its_own(load):
    hashes = [source_hash(load(_edited(KERNEL, *edits))) for edits in CHANGED.values()]
    assert len(set(hashes)) == len(hashes)


# What cannot be hashed --------------------------------------------------------------------------------------

OBSTACLES = {
    "an array": ("SCALE = 2.0", "import numpy\nSCALE = numpy.zeros(3000)"),
    "an object without a value": ("SCALE = 2.0", "SCALE = object()"),
    "a function without source": ("SCALE = 2.0", "exec('def SCALE(): return 1')"),
    "an import that fails": ("import math as m", "import math as m, no_such_module_at_all"),
    "a module passed on": ("PADDING:", "getattr(h, 'WIDTH'):"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_hashed_counts_as_changed_and_is_named(load, name):
    declared = load(_edited(KERNEL, OBSTACLES[name]))
    assert unhashable(declared)
    assert source_hash(declared) != source_hash(declared)


def test_a_file_that_changed_since_its_import_counts_as_changed(load, tmp_path):
    declared = load()
    path = Path(declared.grid_fn.__code__.co_filename)
    path.write_text("# another first line\n" + path.read_text())
    os.utime(path, (1, 1))
    assert any("does not define" in obstacle for obstacle in unhashable(declared))


def test_recursive_functions_and_cyclic_values_have_a_hash(load):
    text = _edited(
        KERNEL, ("return x * SCALE", "return helper(x) * SCALE"), ("UNUSED = 1", 'TABLE["self"] = TABLE')
    )
    declared = load(text)
    assert unhashable(declared) == ()
    assert source_hash(declared) == source_hash(load(text)) != source_hash(load())


def test_a_kernel_that_reads_a_frameworks_insides_is_refused_in_bounded_time(load):
    many = "\n".join(f"def f{i}(x): return f{i + 1}(x)" for i in range(2500)) + "\ndef f2500(x): return x"
    declared = load(_edited(KERNEL, ("SCALE = 2.0", f"{many}\nSCALE = f0")))
    assert any("more than" in obstacle or "too deep" in obstacle for obstacle in unhashable(declared))


def test_partials_methods_and_wrapped_functions_are_seen_through(load):
    def declared(group: int, body: str) -> types.SimpleNamespace:
        return load(
            _edited(
                KERNEL,
                ("args_fn, other", "_, other"),
                ("UNUSED = 1", f"def build(config, a, b, group): return {body}"),
                ("def make_grid", f"args_fn = functools.partial(build, group={group})\ndef make_grid"),
            )
        )

    base = source_hash(declared(4, "(a, b)"))
    assert base == source_hash(declared(4, "(a, b)"))
    assert base != source_hash(declared(8, "(a, b)"))
    assert base != source_hash(declared(4, "(b, a)"))


def test_a_helper_imported_inside_grid_fn_counts(load):
    inside = ("import math as m", "import math as m\n        from {helpers} import unused")
    one = load(_edited(KERNEL, inside))
    other = load(_edited(KERNEL, inside), _edited(HELPERS, ("    return i\n", "    return i + 1\n")))
    assert unhashable(one) == ()
    assert source_hash(one) != source_hash(other)


def test_a_factorys_type_in_an_annotation_counts(load):
    def declared(kind: str) -> types.SimpleNamespace:
        maker = f"""
def make(T):
    def grid_fn(config: T, device, problem):
        return (1,)
    return grid_fn
grid_fn = make({kind})
"""
        return load(KERNEL + maker)

    assert source_hash(declared("int")) == source_hash(declared("int"))
    assert source_hash(declared("int")) != source_hash(declared("float"))


# Other processes --------------------------------------------------------------------------------------------

STAND_IN = '''
"""As much of cuda.tile as the hash needs, for interpreters without it."""
from typing import Annotated, Generic, TypeVar

T = TypeVar("T")

class ConstantAnnotation:
    def __repr__(self):
        return "ConstantAnnotation()"

Constant = Annotated[T, ConstantAnnotation()]

class Annotated_:
    pass

def kernel(**hints):
    def decorate(function):
        made = Annotated_()
        made._annotated_function = type("Made", (), {"pyfunc": staticmethod(function)})
        made._compiler_options = type("Options", (), hints)
        return made
    return decorate

def function(wrapped):
    return wrapped

def bid(axis): ...
def load(*args): ...
def store(*args): ...
'''

CHILD = """
import sys
from types import SimpleNamespace
from aot_tune.declare.fingerprint import hashing as fingerprint
from aot_tune.declare.fingerprint.hashing import source_hash, unhashable
import many_kernel as module
declared = SimpleNamespace(kernel=module.kernel, grid_fn=module.grid_fn, args_fn=module.args_fn)
print(source_hash(declared), unhashable(declared))
"""

EVERY_SYNTAX = '''
def grid_fn(config, device, problem: "dict[str, int] | None" = None,
            *rest, flag: bool | None = None, **more) -> Sizes:
    """Uses what releases have treated differently."""
    from typing import Any, Optional, Union
    text = f"{problem!r:>{len(rest)}} {{}} {flag=}" "joined" f"{text_of(1.5)}"
    with open("x") as one, open("y") as two:
        pass
    match problem:
        case {"M": int(m), **others} if m > 1:
            return (m,)
        case [1, *tail] | (2 as tail):
            return (2,)
        case str() | None | -1.5:
            return (3,)
    found = [y for x in rest if (y := x) for z in range(y)]
    squares = {k: v ** 2 for k, v in more.items()}
    first, *others = sorted(rest, key=lambda a, /, b=1, *, c=-1: (a, b, c))
    try:
        assert first, "nothing"
    except (ValueError, TypeError) as error:
        raise RuntimeError from error
    else:
        del first
    finally:
        global WRITTEN
        WRITTEN = others[1:2, ..., None] if others else b"bytes" or 1j or 10**30 or "\\u20ac"
    return (1 if flag else 2,) if not squares else tuple(found)

def text_of(x: float, sizes: Sizes = ()) -> "str | Any": return f"{x:.2f}"
'''


def _interpreters() -> list[str]:
    """Pythons from 3.10 on: on the PATH, and those that pyenv keeps."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python3.{minor}") for minor in range(10, 16)]
    found += [str(path) for path in sorted(pyenv.glob("3.1*/bin/python"))]
    by_version = {}
    for python in [sys.executable, *filter(None, found)]:
        asked = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode == 0 and tuple(map(int, asked.stdout.split())) >= (3, 10):
            by_version.setdefault(asked.stdout.strip(), python)
    return list(by_version.values())


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with the modules and a stand-in for cuda.tile; returns a runner of the child in any Python."""
    (tmp_path / "cuda" / "tile").mkdir(parents=True)
    (tmp_path / "cuda" / "tile" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "many_helpers.py").write_text(HELPERS)
    kernel = KERNEL.replace("{helpers}", "many_helpers").replace("grid_fn = make_grid(1)", EVERY_SYNTAX)
    (tmp_path / "many_kernel.py").write_text(kernel)
    root = Path(__file__).parents[3]

    def run(python: str, **variables: str) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [python, "-c", CHILD], capture_output=True, text=True, check=False, timeout=60,
            cwd=tmp_path, env={**environment, **variables},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.process
def test_the_hash_is_the_same_in_every_process(elsewhere):
    seen = {elsewhere(sys.executable, PYTHONHASHSEED=seed) for seed in ("0", "1", "77", "random")}
    assert len(seen) == 1
    assert seen.pop().endswith(" ()\n")


@pytest.mark.process
def test_the_hash_is_the_same_with_and_without_optimisation(elsewhere):
    assert elsewhere(sys.executable) == elsewhere(sys.executable, PYTHONOPTIMIZE="2")


@pytest.mark.process
def test_the_hash_is_the_same_in_every_python(elsewhere):
    interpreters = _interpreters()
    if len(interpreters) < 2:
        pytest.skip("only one Python from 3.10 on is installed")
    hashes = {python: elsewhere(python) for python in interpreters}
    assert len(set(hashes.values())) == 1, hashes
    assert next(iter(hashes.values())).endswith(" ()\n")


class _SpecialForm:
    """What typing.Any is on Python 3.10: no class, but an object of the module typing with a name."""

    _name = "Any"
    __module__ = "typing"


def test_any_counts_alike_whether_it_is_a_class_as_since_python_3_11_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digest() -> str:
        hasher = hashing._Hasher()
        # Twice, and before another class: what is described once is counted.
        hasher.add("x", (typing.Any, Path, typing.Any, Path))
        assert hasher.obstacles == []
        return hasher.digest()

    now = digest()
    monkeypatch.setattr(typing, "Any", _SpecialForm() if isinstance(typing.Any, type) else _AnyClass)
    assert digest() == now


class _AnyClass:
    """What it is since."""


_AnyClass.__module__, _AnyClass.__qualname__ = "typing", "Any"
