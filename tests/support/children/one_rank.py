"""A child process that is one rank of two, with gloo, on the stand-in driver: it prints what it chooses."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tests.support import driver


def main(number: int, rendezvous: str, tables: str) -> None:
    """Launch random problems and gather what both ranks chose."""
    driver.install()
    warnings.simplefilter("ignore")
    from aot_tune.serve import runtime
    from aot_tune.serve.launch.dispatch import dispatcher_of
    from aot_tune.serve.search import cache
    from tests.support.samples import scale

    runtime.use(driver.FakeRuntime())
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2
    )
    read: list[str] = []
    real = cache.UserCache.read

    def noting(self: Any, key: Any) -> Any:
        read.append(key.place)
        return real(self, key)

    cache.UserCache.read = noting  # type: ignore[method-assign]
    tunable = dataclasses.replace(scale, tables=Path(tables))
    pick = random.Random(3)
    chosen = []
    for _ in range(40):
        rows, cols = pick.choice([1, 64, 200, 256, 512, 4096]), 1024
        args = [torch.empty(rows, cols, dtype=torch.bfloat16, device="meta") for _ in range(2)]
        tunable.launch(*args)
        plans = dispatcher_of(tunable)._plans
        chosen.append(next(str(p.choice) for key, p in plans.items() if key[1]["M"] == rows))
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, chosen)
    torch.distributed.destroy_process_group()
    print(json.dumps({"equal": gathered[0] == gathered[1], "different": len(set(chosen)), "read": read}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
