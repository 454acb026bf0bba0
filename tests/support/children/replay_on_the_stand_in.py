"""The child of the bench's section `replay` in a process without a GPU, at sizes that compile fast.

``python -m tests.support.children.replay_on_the_stand_in OPERATION [--no-compiler]``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from aot_tune.bench.children import replay as replay_child
from aot_tune.bench.libraries import fetched
from aot_tune.bench.sections import replay
from tests.support.children import library_on_the_stand_in
from tests.support.played_cuda import on_the_stand_in
from tests.support.tilegym_sites import FOLDER

SMALL = {
    "matmul": ((512, 256, 128),),
    "static_persistent_matmul": ((512, 256, 128),),
    "attention": ((1, 8, 2, 500, 64),),
    "softmax": ((500, 512),),
    "rms_norm": ((500, 512), (100, 512)),
    "silu_and_mul": ((500, 256), (500, 512)),
    "bmm": ((8, 64, 256, 128),),
    "rope": ((1, 8, 2, 512, 64),),
    "layer_norm": ((500, 512),),
    "persistent_layer_norm": ((500, 512),),
    **{name: shapes[:1] for name, shapes in library_on_the_stand_in.SMALL.items()},
}
"""The shapes in the place of those of LLM servers."""


class Event:
    """A CUDA event: 1 ms after the one before."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1.0


def main() -> None:
    sys.path += [str(FOLDER), str(fetched.FOLDER.absolute())]
    shapes: Any = replay.SHAPES
    shapes.update(SMALL)
    with on_the_stand_in():
        cuda: Any = torch.cuda
        cuda.synchronize = lambda: None
        cuda.Event = Event
        replay_child.main(sys.argv[1:])


if __name__ == "__main__":
    main()
