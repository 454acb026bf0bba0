"""Places of others' libraries that compile on their first call, called unchanged on the stand-in driver."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aot_tune import environment
from aot_tune.nvidia import cutile
from aot_tune.tables import store
from tests.support.played_cuda import counted, noted, on_the_stand_in, without_compiler

ROOT = Path(__file__).parents[2]
THIRD_PARTY = ROOT / "build" / "third-party"
"""Where `make` puts libraries."""

BF16, F32, INT, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


class Site(NamedTuple):
    """A place of a library that compiles on its first call."""

    module: str
    """The module that holds the space and the kernel, below the library."""

    call: Callable[[Any, int], object]
    """(the module, a size) -> whatever the library gives."""

    size: int
    """The size that is recorded."""

    near: int | None = None
    """A size in the same bucket, or in the next: it is answered with what was recorded. None where a size is
    compiled in, so that nothing is near."""

    searches: int = 1
    """How often a first call searches."""

    as_found: tuple[str, ...] = ("grid", "symbol", "hints")
    """What the library's launch has of what its search measured."""

    arch: str = "sm90"
    """The arch of the GPU."""


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def only(module: Any, choose: slice) -> None:
    """From now on the library searches a part of each space."""
    search = module.exhaustive_search
    module.exhaustive_search = lambda space, *args, **kwargs: search(space[choose], *args, **kwargs)


def call(library: str, sites: Mapping[str, Site], name: str, size: str, *options: str) -> None:
    """Be the program: call one site, and print what reached the driver."""
    sys.path.append(str(THIRD_PARTY / library))  # behind a copy that a test changed
    vars(store)["libraries_folder"] = lambda: Path("none")  # what a test recorded answers alone
    site = sites[name]
    if "--without-compiler" in options:
        without_compiler()
    with on_the_stand_in(site.arch, name="one GPU"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"{library}.{site.module}")
        warnings.simplefilter("always")
        launches = noted(library)
        searched = counted() if cutile.stands_in(sys.modules["cuda.tile.tune"].exhaustive_search) else []
        if "--shorter" in options:
            only(module, slice(-1))
        if "--four" in options and site.searches:
            only(module, slice(4))
        site.call(module, int(size))
    said = [str(one.message) for one in caught]
    print(json.dumps({"launches": launches, "searched": searched, "warnings": said}))


class Ran(NamedTuple):
    """What a program did."""

    launches: list[dict[str, object]]
    """What the library launched: grid, symbol, hints."""

    searched: list[int]
    """The lengths of the spaces that cuTile's own search was asked to search."""

    warnings: list[str]
    """Its warnings."""

    told: str
    """The lines of the command line."""


_WITHOUT_SHIPPED = """
from pathlib import Path
from aot_tune.__main__ import main
from aot_tune.tables import store
store.libraries_folder = lambda: Path("none")
main()
"""
"""The command line, as if no tables of libraries were shipped: `compile` makes cubins for all of them."""


def aot_tune(folder: Path, *words: str, ahead: Path | None = None, **variables: str) -> tuple[str, str]:
    """Run the command line in a folder; return its output and its lines.

    Args:
        folder: The current folder.
        words: The verb and what follows it.
        ahead: A folder that is imported from first.
        variables: More variables.
    """
    kept = {key: value for key, value in os.environ.items() if key not in environment.DESCRIPTIONS}
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    path = os.pathsep.join([*([str(ahead)] if ahead else []), str(ROOT), *before])
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_SHIPPED, *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def ran(
    verb: str, folder: Path, sites: str, name: str, size: int, *options: str, ahead: Path | None = None
) -> Ran:
    """Call a site in a process of its own under ``aot-tune record`` or ``run``.

    Args:
        verb: Which of them.
        folder: The folder of tables is below it, and the journal.
        sites: The module of sites, a program that calls `call`.
        name: The site.
        size: The size that it is called with.
        options: Those of `call`.
        ahead: A folder that the program imports from first.
    """
    tables = {"record": "--out", "run": "--tables"}[verb]
    program = [sys.executable, "-m", sites, name, str(size), *options]
    out, told = aot_tune(folder, verb, tables, "tables", "--", *program, ahead=ahead)
    return Ran(**json.loads(out.splitlines()[-1]), told=told)
