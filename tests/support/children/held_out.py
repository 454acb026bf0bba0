"""Call the sites of FlashInfer and TileGym at some models' shapes, on the stand-in driver.

``python -m tests.support.children.held_out MODEL...`` prints, by site, how many first calls the shipped
tables answer, of how many. Nothing is launched: whether a search is answered shows before.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

import aot_tune
from aot_tune.bench.children.library import forget
from aot_tune.bench.children.operations import OPERATIONS
from aot_tune.bench.libraries.sites import SITES, shapes_of
from aot_tune.errors import MissError
from tests.support.played_cuda import on_the_stand_in


def main(models: Sequence[str]) -> None:
    """Call each site at each model's shapes; a miss raises."""
    import cuda.tile as ct

    aot_tune.install()
    answered: dict[str, tuple[int, int]] = {}
    with on_the_stand_in():
        cuda, tile = vars(torch.cuda), vars(ct)
        for site in SITES:
            operation = OPERATIONS[site]
            library: Any = importlib.import_module(operation.module)
            tile["launch"] = lambda *args, **kwargs: None
            cuda["synchronize"] = lambda *device: None
            shapes = [shape for model in models for shape in shapes_of(site, model)]
            count = 0
            for shape in shapes:
                forget(library)
                try:
                    operation.make(library, *shape)()
                    count += 1
                except MissError:
                    pass
            answered[site] = (count, len(shapes))
    print(json.dumps(answered))


if __name__ == "__main__":
    main(sys.argv[1:])
