"""Call the sites of FlashInfer and TileGym at shapes that were recorded, on the stand-in driver.

``python -m tests.support.children.recorded_models`` prints the sites of which the shipped tables answer no
call. Nothing is launched: whether a search is answered shows before.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch

import aot_tune
from aot_tune.bench.children.library import forget
from aot_tune.bench.children.operations import OPERATIONS
from aot_tune.bench.libraries.sites import HELD_OUT, MODELS, SITES, shapes_of
from aot_tune.errors import MissError
from tests.support.played_cuda import on_the_stand_in


def answers(site: str, *shape: int) -> bool:
    """Whether a site's call at a shape is answered; a miss raises."""
    operation = OPERATIONS[site]
    library: Any = importlib.import_module(operation.module)
    forget(library)
    try:
        operation.make(library, *shape)()
    except MissError:
        return False
    return True


def main() -> None:
    """Call each site until a call is answered."""
    import cuda.tile as ct

    aot_tune.install()
    with on_the_stand_in():
        vars(torch.cuda)["synchronize"] = lambda *device: None
        vars(ct)["launch"] = lambda *args, **kwargs: None
        models = [model for model in MODELS if model not in HELD_OUT]
        missed = [
            site
            for site in SITES
            if not any(answers(site, *shape) for model in models for shape in shapes_of(site, model))
        ]
    print(json.dumps(missed))


if __name__ == "__main__":
    main()
