"""`python -m aot_tune.bench`: run the benches, print them, write them as JSON.

All but `lookups` need a GPU with tuned tables. Each section runs in a process of its own: a sweep takes
another process's context on its GPU for a disturbance, and waits.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from aot_tune.nvidia.nvml import visible_gpus

SECTIONS = ("imports", "lookups", "launch", "compile", "sweep", "regret", "again", "serving")
"""Each a module of this package with ``run() -> JSON values``."""

_WITHOUT_A_GPU = {"lookups"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print; with --kernels that is another's to do."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--kernels" in words:
        from aot_tune.bench.kernels import run as kernels

        words.remove("--kernels")
        return kernels.main(words)
    parser = argparse.ArgumentParser(prog="python -m aot_tune.bench", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"which to run, of {' '.join(SECTIONS)}; default: all")
    parser.add_argument(
        "--kernels", action="store_true", help="the kernels beside others; more: --kernels -h"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), help="where the JSON goes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child:
        return _child(options.child, options.out)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section is called {' '.join(unknown)}; there is {' '.join(SECTIONS)}")
    wanted = options.sections or list(SECTIONS)
    if not visible_gpus() and not _WITHOUT_A_GPU.issuperset(wanted):
        print("aot_tune.bench: no GPU here; run it on a GPU host", file=sys.stderr)
        return 1
    results = {name: _section(name) for name in SECTIONS if name in wanted}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    print(f"\nwritten to {options.out}")
    return 1 if any("failed" in result for result in results.values()) else 0


def _section(name: str) -> Any:
    started = time.perf_counter()
    print(f"\n== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, "-m", "aot_tune.bench", "--child", name, "--out", str(out)]
        code = subprocess.run(command, check=False).returncode
        # One bench that fails must not lose the others' figures.
        result = orjson.loads(out.read_bytes()) if out.exists() else {"failed": f"exit code {code}"}
    _show(result, "")
    print(f"   ({time.perf_counter() - started:.0f} s)", flush=True)
    return result


def _child(name: str, out: Path) -> int:
    result = importlib.import_module(f"aot_tune.bench.sections.{name}").run()
    out.write_bytes(orjson.dumps(result))
    return 0


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
