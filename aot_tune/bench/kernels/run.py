"""`aot-tune bench --kernels`: the shipped kernels beside what a user would pick instead, and their rooflines.

Each kernel runs in a process of its own, on declared shapes evenly spread over all of them, or on all. On
each shape the tuned config meets its default, its rivals and what only moves as many bytes, in alternating
rounds (`aot_tune.bench.kernels.contest` says how they are timed). The ceilings are taken in the same process.
Kernels timed earlier stay in the file.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from aot_tune.bench.kernels.rivals import attention, memory, products
from aot_tune.bench.kernels.standard import Standard
from aot_tune.bench.kernels.standing import NEVER_SLOWER, Shape, Verdict, lines, verdict
from aot_tune.declare.discovery import OWN_KERNELS, Found, find_tunables
from aot_tune.declare.selection import chosen_kernels, problems_by_kernel
from aot_tune.errors import AotTuneError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tuner.plan.sizes import spread
from aot_tune.values.text import duration

SHAPES = 24
"""Declared shapes of each kernel timed unless all are asked for: torch.compile takes seconds for each."""

OUT = Path("build/bench-kernels.json")
"""Where the figures are kept."""

STANDARDS: Mapping[str, Standard] = {
    **memory.STANDARDS,
    **products.STANDARDS,
    **attention.STANDARDS,
}
"""By the kernel's name; a kernel that is not among them is measured beside its default alone."""

_NO_RIVALS = Standard(rivals={}, demands=())

_GRACE_S = 120.0
"""What a kernel's process has beyond its share of the time, for the shape it is at."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, time or verify, print, write; 1 where a kernel failed or a demand is missed."""
    options = _parser().parse_args(arguments)
    try:
        kernels = chosen_kernels(find_tunables(options.module or [OWN_KERNELS]), options.kernel or ())
        if options.problem:
            if options.verify:
                raise UsageError("--verify checks all declared shapes; leave --problem out")
            asked = problems_by_kernel(kernels, options.problem)
            kernels = tuple(found for found in kernels if found.tunable.name in asked)
        if options.child:
            options.out.write_bytes(orjson.dumps(_timed(kernels[0], options)))
            return 0
        if not visible_gpus():
            print("aot_tune.bench: no GPU here; run it on a GPU host", file=sys.stderr)
            return 1
        if options.verify:
            from aot_tune.bench.kernels import verify

            return verify.run(kernels, limit_s=options.limit_s)
        return _all_timed(kernels, options)
    except AotTuneError as error:
        print(f"aot_tune.bench: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aot-tune bench --kernels", description=__doc__)
    parser.add_argument("--kernel", action="append", help="may be repeated; all by default")
    parser.add_argument("--module", action="append", help="by default the shipped kernels")
    parser.add_argument(
        "--problem", action="append", default=[], metavar="M=300,...",
        help="a problem in full, or part of declared ones; may be repeated",
    )  # fmt: skip
    parser.add_argument("--shapes", type=int, default=SHAPES, help=f"declared shapes of each; {SHAPES}")
    parser.add_argument("--all", dest="shapes", action="store_const", const=None, help="every declared shape")
    parser.add_argument(
        "--no-rivals", dest="rivals", action="store_false", help="without other implementations: quick"
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds for all kernels together")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the JSON goes; {OUT}")
    parser.add_argument("--verify", action="store_true", help="check the results of every portfolio instead")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


# The parent -------------------------------------------------------------------------------------


def _all_timed(kernels: Sequence[Found], options: argparse.Namespace) -> int:
    records = orjson.loads(options.out.read_bytes()) if options.out.exists() else {}
    ends, missed = time.monotonic() + options.limit_s, False
    for place, found in enumerate(kernels):
        name = found.tunable.name
        share = (ends - time.monotonic()) / (len(kernels) - place)
        record = _in_a_process(found, options, share) if share > 0 else {"failed": "no time was left"}
        if "failed" in record:
            print(f"\n{name}: failed: {record['failed']}", flush=True)
            missed = True
            continue
        verdicts, told = standing_of(name, record)
        print("\n".join(["", *told]), flush=True)
        missed = missed or any(verdict.held is False for verdict in verdicts)
        records[name] = {**record, "standing": told}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(orjson.dumps(records, option=orjson.OPT_INDENT_2))
    print(f"\nfigures: {options.out}")
    return 1 if missed else 0


def _in_a_process(found: Found, options: argparse.Namespace, share_s: float) -> dict[str, Any]:
    """One kernel's record; what fails there costs no other kernel its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "record.json")
        command = [
            *(sys.executable, "-m", "aot_tune.bench.kernels.run", "--child", "--module", found.module),
            *("--kernel", found.tunable.name, "--out", str(out), "--limit-s", str(share_s)),
            *(("--all",) if options.shapes is None else ("--shapes", str(options.shapes))),
            *(() if options.rivals else ("--no-rivals",)),
            *(word for text in options.problem if _means(text, found) for word in ("--problem", text)),
        ]
        limit = None if math.isinf(share_s) else share_s + _GRACE_S
        try:
            code = subprocess.run(command, check=False, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer within {limit:.0f} s"}
        record: dict[str, Any] = (
            orjson.loads(out.read_bytes()) if out.exists() else {"failed": f"exit code {code}"}
        )
        return record


def _means(text: str, found: Found) -> bool:
    """Whether --problem means problems of this kernel."""
    try:
        return bool(problems_by_kernel([found], [text]))
    except UsageError:
        return False


def standing_of(kernel: str, record: Mapping[str, Any]) -> tuple[list[Verdict], list[str]]:
    """What a kernel's record amounts to: its demands, and lines for people."""
    standard = STANDARDS.get(kernel, _NO_RIVALS)
    shapes = [Shape(**shape) for shape in record["shapes"]]
    verdicts = [verdict(demand, shapes) for demand in (NEVER_SLOWER, *standard.demands)]
    rates = ", ".join(
        f"a copy {rate / 1e12:.2f} TB/s" if name == "copy" else f"a {name} product {rate / 1e12:.0f} TFLOP/s"
        for name, rate in record["ceilings"].items()
    )
    return verdicts, [
        f"{kernel}: {len(shapes)} of {record['declared']} declared shapes in {duration(record['seconds'])}; "
        f"{record['device']}; {rates}",
        *lines(shapes, record["rivals"]),
        *(f"   {one}" for one in verdicts),
    ]


# The child --------------------------------------------------------------------------------------


def _timed(found: Found, options: argparse.Namespace) -> dict[str, Any]:
    """Time one kernel on this process's GPU."""
    import torch

    from aot_tune.bench.gpu import this_gpu
    from aot_tune.bench.kernels.contest import ceilings
    from aot_tune.bench.kernels.shapes import KernelBench
    from aot_tune.tuner.measure.worker.clock import EventRound
    from aot_tune.tuner.plan.candidates import Kernel

    started = time.monotonic()
    torch.set_float32_matmul_precision("high")  # tf32, for the rivals too
    tunable = found.tunable
    standard = STANDARDS.get(tunable.name, _NO_RIVALS)
    if not options.rivals:
        standard = replace(standard, rivals={})
    asked = problems_by_kernel([found], options.problem)
    problems = spread(asked.get(tunable.name, tunable.typical_problems), options.shapes)
    with this_gpu() as gpu:
        rounds, kernel = EventRound(), Kernel(found, gpu.arch, gpu.device)
        rates = ceilings(rounds, {dtype for one in problems if (dtype := standard.matrix_dtype_of(one))})
        bench = KernelBench(gpu=gpu, kernel=kernel, standard=standard, rounds=rounds, ceilings=rates)
        shapes = [asdict(shape) for shape in bench.shapes(problems, started + options.limit_s)]
        return {
            "device": gpu.device.name,
            "cuda_tile": cutile.version(),
            "tileiras": cutile.compiler_version(),
            "ceilings": {name: round(rate) for name, rate in rates.items()},
            "rivals": list(standard.rivals),
            "declared": len(tunable.typical_problems),
            "seconds": round(time.monotonic() - started, 1),
            "shapes": shapes,
        }


if __name__ == "__main__":
    sys.exit(main())
