"""Call a site of FlashInfer or TileGym at a model's shapes, one after another, under `aot-tune record`.

``python -m aot_tune.bench.children.library SITE MODEL FILE`` appends the label of each shape to FILE once its
call has ended, after ``failed`` and a tab where it failed. A shape that is in FILE already is not called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aot_tune.bench.children.operations import OPERATIONS
from aot_tune.bench.libraries.sites import label, shapes_of


def forget(library: Any) -> None:
    """Empty the library's caches of winners: their keys may not hold all of a shape."""
    for name, cache in vars(library).items():
        if name.lower().endswith("tune_cache") and isinstance(
            cache, dict
        ):  # some functions are called so too
            cache.clear()


def main(words: Sequence[str]) -> None:
    """Call a site at the shapes of a model that are not in the file of ended calls."""
    site, model, file = words
    path, operation = Path(file), OPERATIONS[site]
    ended = {line.split("\t")[-1] for line in path.read_text().splitlines()} if path.exists() else set()
    library = importlib.import_module(operation.module)
    torch.manual_seed(0)
    for shape in shapes_of(site, model):
        name = label(shape)
        if name in ended:
            continue
        failed = ""
        forget(library)
        try:
            operation.make(library, *shape)()
            torch.cuda.synchronize()
        except Exception as error:  # such as no memory: the other shapes are recorded
            print(
                f"{site} {model} {name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True
            )
            failed = "failed\t"
        with path.open("a") as lines:
            lines.write(f"{failed}{name}\n")
        if failed:
            torch.cuda.synchronize()  # raises where the CUDA context is broken: the next process goes on


if __name__ == "__main__":
    main(sys.argv[1:])
