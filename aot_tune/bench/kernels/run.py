"""`aot-tune bench --kernels`: time the shipped kernels against other implementations and rooflines.

Each kernel runs in a process of its own, on declared shapes that are evenly spread, or on all of them. On
each shape the tuned config, its default, the rivals and a copy of as many bytes are timed in alternating
rounds (`aot_tune.bench.kernels.contest` describes how). The ceilings are measured in the same process. The
file keeps the figures of kernels that were timed earlier.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from aot_tune.bench import records, words
from aot_tune.bench.kernels.rivals import attention, memory, products
from aot_tune.bench.kernels.standard import Standard
from aot_tune.bench.kernels.standing import NEVER_SLOWER, Shape, Verdict, lines, verdict
from aot_tune.declare.discovery import OWN_KERNELS, FoundKernel, find_tunables
from aot_tune.declare.selection import chosen_kernels, problems_by_kernel
from aot_tune.errors import AotTuneError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tuner.plan.sizes import spread
from aot_tune.values.problem import Problem
from aot_tune.values.text import duration

SHAPES = 24
"""Declared shapes of each kernel that are timed by default: torch.compile takes seconds for each."""

OUT = Path("build/bench-kernels.json")
"""File of figures, unless --out names another."""

STANDARDS: Mapping[str, Standard] = {
    **memory.STANDARDS,
    **products.STANDARDS,
    **attention.STANDARDS,
}
"""Standards by kernel name. A kernel without a standard is timed against its default alone."""

SECTION = "kernels"
"""Name of the file of recorded results."""

_NO_RIVALS = Standard(rivals={}, demands=())

_GRACE_S = 120.0
"""Seconds that a kernel's process has beyond its share of the time, to finish its last shape."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run: what is timed, and where the figures are written."""

    problems: Sequence[str]
    """Problems of --problem; without them declared shapes are timed."""

    shapes: int | None
    """Declared shapes of each kernel; None for all."""

    rivals: bool
    """Whether rivals are timed."""

    limit_s: float
    """Seconds for all kernels together."""

    out: Path
    """File of the figures."""

    results: Path
    """Folder of recorded results."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Time or verify kernels and write the figures; return 1 where a kernel failed or missed a demand."""
    given = sys.argv[1:] if arguments is None else arguments
    return words.called(_benched, given, "aot-tune bench --kernels")


def _benched(
    context: typer.Context,
    kernel: Annotated[list[str] | None, typer.Option(help="A kernel; repeatable; all by default.")] = None,
    module: Annotated[
        list[str] | None, typer.Option(help="A module of kernels; by default the shipped ones.")
    ] = None,
    problem: Annotated[
        list[str] | None,
        typer.Option(metavar="M=300,...", help="A whole problem, or part of declared ones; repeatable."),
    ] = None,
    shapes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Declared shapes of each kernel; by default {SHAPES}, {records.MOST_SHAPES} with --record.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every declared shape.")] = False,
    no_rivals: Annotated[
        bool, typer.Option("--no-rivals", help="Without other implementations: quick.")
    ] = False,
    limit_s: Annotated[float, typer.Option(help="Seconds for all kernels together.")] = math.inf,
    out: words.Out = OUT,
    record: words.Record = False,
    results: words.Results = records.RESULTS,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the results of every portfolio instead.")
    ] = False,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> int:
    """Time kernels on declared shapes against their defaults, other implementations and a copy.

    Each kernel runs in a process of its own. The file keeps the figures of kernels that were timed earlier.
    """
    default = records.MOST_SHAPES if record else SHAPES
    options = Options(
        problems=problem or (), shapes=None if every else shapes or default, rivals=not no_rivals,
        limit_s=limit_s, out=out, results=results,
    )  # fmt: skip
    kernels = chosen_kernels(find_tunables(module or [OWN_KERNELS]), kernel or ())
    if problem:
        if verify:
            raise UsageError("--verify checks all declared shapes; leave --problem out")
        named = problems_by_kernel(kernels, problem)
        kernels = tuple(declared for declared in kernels if declared.tunable.name in named)
    if child:
        out.write_bytes(orjson.dumps(_timed(kernels[0], options)))
        return 0
    if record:
        _check_recordable(options, {"--problem": problem, "--module": module, "--verify": verify})
    if not visible_gpus():
        print("aot-tune bench: no GPU here; run it on a GPU host", file=sys.stderr)
        return 1
    if verify:
        from aot_tune.bench.kernels import verify as verification

        return verification.run(kernels, limit_s=limit_s)
    made_with = records.made_with(["--kernels", *context.obj]) if record else None
    records.check_out(out)
    if made_with is not None:
        records.check_addable(results, [SECTION], made_with.device)
    return _all_timed(kernels, options, made_with)


def _check_recordable(options: Options, excluded: Mapping[str, object]) -> None:
    """Refuse to record what the report would present as more than it is.

    Args:
        options: What is timed.
        excluded: Option that --record excludes to its value.

    Raises:
        UsageError: An option and --record exclude each other.
    """
    if options.shapes is None or options.shapes > records.MOST_SHAPES:
        raise UsageError(f"a record holds at most {records.MOST_SHAPES} shapes of a kernel; give --shapes")
    given = [option for option, value in excluded.items() if value]
    given += [] if options.rivals else ["--no-rivals"]
    if given:
        raise UsageError(f"--record needs whole results of shipped kernels; leave {' '.join(given)} out")


# The parent -------------------------------------------------------------------------------------


def _all_timed(kernels: Sequence[FoundKernel], options: Options, made_with: records.MadeWith | None) -> int:
    kept = _kept(options.out)
    ends, missed = time.monotonic() + options.limit_s, False
    for place, kernel in enumerate(kernels):
        name = kernel.tunable.name
        share = (ends - time.monotonic()) / (len(kernels) - place)
        record = _in_a_process(kernel, options, share) if share > 0 else {"failed": "no time was left"}
        if "failed" in record:
            print(f"\n{name}: failed: {record['failed']}", flush=True)
            missed = True
            continue
        verdicts, summary = standing_of(name, record)
        print("\n".join(["", *summary]), flush=True)
        missed = missed or any(verdict.held is False for verdict in verdicts)
        kept[name] = {**record, "standing": summary}
        options.out.write_bytes(orjson.dumps(kept, option=orjson.OPT_INDENT_2))
        if made_with is not None and record["shapes"]:
            states = {name: records.present(made_with.arch)[name]}
            entry = records.Record(made_with=made_with, kernels=states, figures=_figures(record))
            records.add(options.results, SECTION, name, entry)
    print(f"\nfigures: {options.out}")
    return 1 if missed else 0


def _kept(out: Path) -> dict[str, Any]:
    """Return the figures of kernels that were timed earlier.

    Raises:
        AotTuneError: The file holds something else; it is left as it is.
    """
    try:
        kept = orjson.loads(out.read_bytes()) if out.exists() else {}
    except orjson.JSONDecodeError as error:
        raise AotTuneError(f"{out} is not a file of figures: {error}; move it away") from error
    if not isinstance(kept, dict):
        raise AotTuneError(f"{out} is not a file of figures but a JSON {type(kept).__name__}; move it away")
    return kept


def _figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded part of a kernel's result; its provenance is recorded separately."""
    shapes = [{**shape, "failed": _reasons(shape["failed"])} for shape in record["shapes"]]
    kept = {name: record[name] for name in ("declared", "seconds", "ceilings", "rivals")}
    return {**kept, "shapes": shapes}


def _reasons(failed: Mapping[str, str]) -> dict[str, str]:
    """Shorten reasons, without the machine's paths that some errors name."""
    return {name: why[:100] if "/" not in why else why.partition(":")[0] for name, why in failed.items()}


def _in_a_process(kernel: FoundKernel, options: Options, share_s: float) -> dict[str, Any]:
    """Return one kernel's record. Its failure costs no other kernel its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "record.json")
        command = [
            *(sys.executable, "-m", "aot_tune.bench.kernels.run", "--child", "--module", kernel.module),
            *("--kernel", kernel.tunable.name, "--out", str(out), "--limit-s", str(share_s)),
            *(("--all",) if options.shapes is None else ("--shapes", str(options.shapes))),
            *(() if options.rivals else ("--no-rivals",)),
            *(word for text in options.problems if _means(text, kernel) for word in ("--problem", text)),
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


def _means(text: str, kernel: FoundKernel) -> bool:
    """Whether a --problem names problems of this kernel."""
    try:
        return bool(problems_by_kernel([kernel], [text]))
    except UsageError:
        return False


def standing_of(kernel: str, record: Mapping[str, Any]) -> tuple[list[Verdict], list[str]]:
    """Judge a kernel's record: the verdict on each demand, and printed lines."""
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
        *(f"   {verdict}" for verdict in verdicts),
    ]


# The child --------------------------------------------------------------------------------------


def _timed(kernel: FoundKernel, options: Options) -> dict[str, Any]:
    """Time one kernel on this process's GPU."""
    import torch

    from aot_tune.bench.gpu import this_gpu
    from aot_tune.bench.kernels.contest import ceilings
    from aot_tune.bench.kernels.shapes import KernelBench
    from aot_tune.tuner.measure.worker.clock import EventRound
    from aot_tune.tuner.plan.candidates import DeviceKernel

    started = time.monotonic()
    torch.set_float32_matmul_precision("high")  # tf32, for the rivals too
    tunable = kernel.tunable
    standard = STANDARDS.get(tunable.name, _NO_RIVALS)
    if not options.rivals:
        standard = replace(standard, rivals={})
    asked = problems_by_kernel([kernel], options.problems)
    problems = spread(asked.get(tunable.name, tunable.typical_problems), options.shapes)
    with this_gpu() as gpu:
        rounds, on_gpu = EventRound(), DeviceKernel(kernel, gpu.arch, gpu.device)
        rates = ceilings(
            rounds, {dtype for problem in problems if (dtype := standard.matrix_dtype_of(problem))}
        )
        bench = KernelBench(gpu=gpu, kernel=on_gpu, standard=standard, rounds=rounds, ceilings=rates)
        # Every second shape first: where the time ends early, those that were timed are evenly spread.
        order = [*problems[::2], *problems[1::2]]
        timed = {Problem(shape.problem): shape for shape in bench.shapes(order, started + options.limit_s)}
        shapes = [asdict(timed[problem]) for problem in problems if problem in timed]
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
