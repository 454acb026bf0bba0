"""A child process that launches the sample kernel from an archive, under the cuda-tile first on its path.

It prints one line of JSON, of what cuTile did. Importing cuTile's compiling half ends it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.abc
import json
import struct
import sys
import warnings
from ctypes import CFUNCTYPE, POINTER, c_int, c_uint, c_uint32, c_uint64, c_void_p, cast
from typing import Any

from tests.support import driver

_ARRAY = (8, 4, 4, 4, 4)  # bytes: address, two sizes, two strides
_loaded: list[str] = []
_passed: list[list[int]] = []


class _NoCompiler(importlib.abc.MetaPathFinder):
    """cuTile's compiling half cannot be imported here."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "cuda.tile._compile":
            raise SystemExit("the compiler was imported")


@CFUNCTYPE(c_int, POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint)
def _load(library: Any, code: int, *rest: Any) -> int:
    headers, size, count = struct.unpack_from("<40xQ10xHH", ctypes.string_at(code, 64))
    _loaded.append(hashlib.sha256(ctypes.string_at(code, headers + size * count)).hexdigest())
    library[0] = 0x1000
    return 0


@CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_void_p)
def _launch(config: int, kernel: int, parameters: int, extra: int) -> int:
    values = []
    for place, size in enumerate((*_ARRAY, *_ARRAY)):
        address = cast(parameters, POINTER(c_void_p))[place] or 0
        values.append(int(cast(address, POINTER(c_uint64 if size == 8 else c_uint32))[0]))
    _passed.append(values)
    return 0


class Array:
    """An array's outside at a made-up address."""

    def __init__(self, address: int, shape: list[int], strides: list[int]) -> None:
        self.__cuda_array_interface__ = {
            "typestr": "<f2",
            "shape": tuple(shape),
            "strides": tuple(stride * 2 for stride in strides),
            "data": (address, False),
            "version": 3,
        }


def main(folder: str, cases: list[dict[str, Any]]) -> None:
    """Launch each case once and twice; print what was asked for, loaded and passed."""
    driver._functions["cuLibraryLoadData"] = _load
    driver._functions["cuLaunchKernelEx"] = _launch
    driver.install()
    sys.meta_path.insert(0, _NoCompiler())
    warnings.simplefilter("ignore")

    import dataclasses
    from pathlib import Path

    import cuda.tile as ct

    from aot_tune.nvidia import cutile
    from aot_tune.serve.kernels import declared_cubins
    from aot_tune.values.config import Config
    from tests.support.samples import DEFAULT, SM90, scale

    cutile.may_have_compiler = lambda: False  # type: ignore[assignment]
    cubins = declared_cubins(dataclasses.replace(scale, tables=Path(folder)))
    answers = []
    for case in cases:
        config = Config(constants=case["constants"], hints=case["hints"]) if "hints" in case else DEFAULT
        asked: list[tuple[str, str]] = []

        def source(signature: str, arch: Any, config: Config = config, asked: Any = asked) -> Any:
            asked.append((signature, str(arch)))
            return cubins.find(tuple(config.hints.items()), signature, arch)

        kernel = cutile.with_hints(scale.kernel, config.hints, source)
        arguments = (Array(**case["source"]), Array(**case["target"]), config["tile_m"], config["tile_n"])
        _loaded.clear()
        _passed.clear()
        driver.DRIVER.compiled.clear()
        for launched in (kernel, kernel, kernel.replace_hints()):
            ct.launch(0, (3, 2), launched, arguments)
        exact = all(cubins.has(tuple(config.hints.items()), signature, SM90) for signature, _ in asked)
        answers.append(
            {
                "asked": asked,
                "exact": exact,
                "symbols": list(driver.DRIVER.compiled),
                "loaded": list(_loaded),
                "passed": list(_passed),
            }
        )
    print(json.dumps({"version": cutile.version(), "answers": answers}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
