"""A child process that replays and launches `tests.support.tuned_once` from a folder, without a compiler.

It prints one line of JSON, of what was loaded. Importing cuTile's compiling half ends it.
"""

from __future__ import annotations

import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any

from tests.support import driver


class _NoCompiler(importlib.abc.MetaPathFinder):
    """cuTile's compiling half cannot be imported here."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "cuda.tile._compile":
            raise SystemExit("the compiler was imported")


def main(folder: str, sizes: list[int]) -> None:
    """Launch each size twice; print the errors, and what the driver saw."""
    driver.install()
    sys.meta_path.insert(0, _NoCompiler())

    import torch

    import aot_tune
    from aot_tune.nvidia import cutile
    from aot_tune.serve import runtime

    runtime.use(driver.FakeRuntime())
    cutile.may_have_compiler = lambda: False
    aot_tune.install(tables=Path(folder))
    from tests.support import tuned_once

    errors = []
    for size in sizes:
        for _ in range(2):
            x, out = (driver.FakeTensor((size,), torch.float16) for _ in range(2))
            try:
                tuned_once.launch(x, out)
            except cutile.CompilerMissingError as error:
                errors.append(str(error))
    print(json.dumps({
        "errors": errors,
        "loaded": driver.DRIVER.compiled,
        "launched": [[*one.grid, one.symbol] for one in driver.DRIVER.launches],
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
