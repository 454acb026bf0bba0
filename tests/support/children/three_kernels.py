"""A child process that calls the three functions of the package `tests/support/three_kernels` once each.

With ``--compile-nothing`` cuTile's compiler raises.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

from tests.support.played_cuda import counted, noted, on_the_stand_in


def refuse(*_: object) -> None:
    raise RuntimeError("something was compiled")


def main() -> None:
    if "--compile-nothing" in sys.argv:
        from cuda.tile import _compile

        _compile.compile_tile = refuse
    with on_the_stand_in(), warnings.catch_warnings(record=True) as caught:
        from mylib import kernels  # type: ignore[import-not-found]

        launches, searched = noted("mylib"), counted()
        x = torch.empty(1000, dtype=torch.float16, device="cuda")
        kernels.scale(x, 2.0)
        kernels.add_(x, torch.empty_like(x))
        kernels.row_sum(torch.empty(300, 64, dtype=torch.float16, device="cuda"))
    said = [str(one.message) for one in caught]
    print(json.dumps({"launches": launches, "searched": searched, "warnings": said}))


if __name__ == "__main__":
    main()
