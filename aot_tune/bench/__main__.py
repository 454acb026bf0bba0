"""`python -m aot_tune.bench`: run the benches, print them, write them as JSON. Needs a tuned GPU."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from aot_tune.bench import imports

_SECTIONS = ("imports", "launch", "compile", "sweep", "quality", "regret", "again")


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m aot_tune.bench", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"which to run, of {' '.join(_SECTIONS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), help="where the JSON goes")
    parser.add_argument(
        "--again", type=int, default=30, help="problems of each kernel to sweep a second time"
    )
    options = parser.parse_args()
    unknown = set(options.sections) - set(_SECTIONS)
    if unknown:
        parser.error(f"no section is called {' '.join(unknown)}; there is {' '.join(_SECTIONS)}")
    wanted = options.sections or list(_SECTIONS)
    results: dict[str, Any] = {}
    if "imports" in wanted:
        _section(results, "imports", imports.run)
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: only the imports were measured", file=sys.stderr)
        return 1 if set(wanted) - {"imports"} else 0
    _on_gpu(results, wanted, options.again)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    print(f"\nwritten to {options.out}")
    return 0


def _on_gpu(results: dict[str, Any], wanted: list[str], again: int) -> None:
    import torch

    from aot_tune import cutile
    from aot_tune.bench import launch, quality, regret, tuning
    from aot_tune.bench.gpu import Gpu
    from aot_tune.discovery import find_tunables

    found = find_tunables(["aot_tune.kernels"])
    with tuning.feed() as feed, tempfile.TemporaryDirectory() as temporary:
        gpu, folder = Gpu(feed), Path(temporary)
        results["device"] = {
            "name": gpu.device.name, "sm_count": gpu.device.sm_count, "cuda_tile": cutile.version(),
            "tileiras": cutile.compiler_version(), "torch": torch.__version__,
        }  # fmt: skip
        print(results["device"])
        run = {
            "launch": lambda: launch.run(gpu),
            "compile": lambda: tuning.compile_speed(gpu, found["matmul"]),
            "sweep": lambda: tuning.against_serial_search(gpu, found["matmul"], folder / "sweep"),
            "quality": lambda: {
                **{
                    f"{name}, tuned against default": quality.against_default(gpu, one)
                    for name, one in found.items()
                },
                "matmul against cuBLAS": quality.matmul_against_cublas(gpu, found["matmul"]),
                "rms_norm against others": quality.rms_norm_against_others(gpu, found["rms_norm"]),
                "rope against others": quality.rope_against_others(gpu, found["rope"]),
            },
            "regret": lambda: _regret(gpu, found, regret),
            "again": lambda: {
                name: tuning.tune_again(gpu, one, folder / "again", again) for name, one in found.items()
            },
        }
        for name in _SECTIONS:
            if name in wanted and name in run:
                _section(results, name, run[name])


def _regret(gpu: Any, found: Any, regret: Any) -> dict[str, Any]:
    result = {}
    for name, one in found.items():
        result[name], timed = regret.of_resolver(gpu, one)
        if name == "matmul":
            defaults = [one.tunable.default_config(gpu.arch, each.problem) for each in timed]
            result["model on matmul"] = regret.of_model(timed, defaults)
    return result


def _section(results: dict[str, Any], name: str, run: Callable[[], Any]) -> None:
    started = time.perf_counter()
    print(f"\n== {name}", flush=True)
    try:
        results[name] = run()
    except Exception as error:  # one bench that fails must not lose the others' figures
        results[name] = {"failed": f"{type(error).__name__}: {error}"}
    _show(results[name], "")
    print(f"   ({time.perf_counter() - started:.0f} s)", flush=True)


def _show(value: Any, indent: str) -> None:
    if isinstance(value, list):
        for each in value:
            print(f"{indent}- {each}")
        return
    for key, each in value.items():
        if isinstance(each, dict | list) and each:
            print(f"{indent}{key}:")
            _show(each, indent + "   ")
        else:
            print(f"{indent}{key:45s} {each}")


if __name__ == "__main__":
    sys.exit(main())
