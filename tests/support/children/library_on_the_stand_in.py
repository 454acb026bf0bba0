"""The child of `python -m aot_tune.bench.libraries` in a process without a GPU, at sizes that compile fast.

``python -m tests.support.children.library_on_the_stand_in SITE MODEL FILE``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from aot_tune.bench.children import library
from tests.support.played_cuda import on_the_stand_in

SMALL: dict[str, tuple[tuple[int, ...], ...]] = {
    "mm_bf16": ((16, 128, 128),),
    "bmm_bf16": ((2, 128, 128, 64), (2, 120, 128, 64)),
    "fp8_groupwise": ((16, 128, 128),),
    "decode_paged": ((4, 8, 2, 64, 8, 64), (3, 8, 2, 64, 8, 64)),
    "decode_mla": ((2, 16, 2, 16), (1, 16, 2, 16)),
    "prefill_ragged": ((1, 128, 8, 2, 64),),
    "prefill_paged": ((1, 128, 8, 2, 64),),
    "rope_quantize_fp8": ((4, 4),),
}
"""The shapes in the place of those of models. A second one is near the first."""


def main() -> None:
    called: Any = library
    called.shapes_of = lambda site, model: SMALL[site]
    with on_the_stand_in():
        cuda: Any = torch.cuda
        cuda.synchronize = lambda *device: None
        library.main(sys.argv[1:])


if __name__ == "__main__":
    main()
