"""A child process that calls `tests.support.split_sums` with float16, and with each dtype that is named.

With ``--without-compiler`` cuTile finds no compiler. It prints launches, searches, errors and warnings.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

from tests.support.played_cuda import counted, noted, on_the_stand_in, without_compiler


def main(*dtypes: str) -> None:
    if "--without-compiler" in sys.argv:
        without_compiler()
    errors = []
    with on_the_stand_in(), warnings.catch_warnings(record=True) as caught:
        from tests.support import split_sums

        launches, searched = noted("tests.support"), counted()
        split_sums.total(torch.empty(1000, dtype=torch.float16, device="cuda"))
        for dtype in dtypes:
            try:
                split_sums.reduce(torch.empty(64, dtype=getattr(torch, dtype), device="cuda"))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
    print(json.dumps({
        "launches": launches, "searched": searched, "errors": errors,
        "warnings": [str(one.message) for one in caught],
    }))  # fmt: skip


if __name__ == "__main__":
    main(*(word for word in sys.argv[1:] if not word.startswith("--")))
