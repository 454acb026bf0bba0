"""Run the bench: print what is measured, write it as JSON, record it, or print the recorded results.

Sections: all but `lookups` need a GPU with tuned tables. Each runs in a process of its own,
because a sweep waits while another process has a context on its GPU.

With --kernels: time the kernels beside other implementations. With --report: print the recorded results.
With --left-out: print what the rule between measured sizes leaves on the present tables.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from aot_tune.bench import records
from aot_tune.bench.sections.part import Part, Request
from aot_tune.errors import AotTuneError
from aot_tune.nvidia.nvml import visible_gpus

SECTIONS = ("lookups", "launch", "scaling", "inside", "regret", "serving", "replay", "declared")
"""Modules of `aot_tune.bench.sections`. Each has ``run(request) -> Iterator[Part]``."""

_BY_NAME = {"declared", "scaling"}
"""The sections that run only where they are named: one needs to be told what to measure, the other takes
several times as long as all others."""

_WITHOUT_A_GPU = {"lookups"}
"""The sections that run on a machine without a GPU."""

_CHOOSING = {"kernel": ("scaling", "inside", "regret", "replay", "declared"), "module": ("declared",)}
"""Option that chooses what is measured to the sections that take it."""

_GRACE_S = 10.0
"""Seconds that a child has to end once it is told to."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the words ask for; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "--kernels" in words:
            from aot_tune.bench.kernels import run as kernels

            words.remove("--kernels")
            return kernels.main(words)
        if "--report" in words:
            from aot_tune.bench import report

            words.remove("--report")
            return report.main(words)
        if "--left-out" in words:
            from aot_tune.bench import left_out

            words.remove("--left-out")
            return left_out.main(words)
        return _sections(words)
    except AotTuneError as error:
        print(f"aot-tune bench: {error}", file=sys.stderr)
        return 1


def _sections(words: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(words)
    if options.child:
        return _child(options)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section is called {' '.join(unknown)}; there is {' '.join(SECTIONS)}")
    wanted = options.sections or [name for name in SECTIONS if name not in _BY_NAME]
    if "declared" in wanted and not options.module:
        parser.error("declared sweeps the kernels of modules: name each, --module mylib.kernels")
    for option, takers in _CHOOSING.items():
        if getattr(options, option) and not set(wanted) & set(takers):
            parser.error(f"no --{option} for {' '.join(wanted)}: it is for {' '.join(takers)}; leave it out")
    if not visible_gpus() and not _WITHOUT_A_GPU.issuperset(wanted):
        print("aot-tune bench: no GPU here; run it on a GPU host", file=sys.stderr)
        return 1
    made_with = records.made_with(words) if options.record else None
    records.check_out(options.out)
    if made_with is not None:
        records.check_addable(options.results, wanted, made_with.device)
        records.present(made_with.arch)  # imports the kernels now, and not while a section measures
    passed = [word for word in words if word not in options.sections]
    results: dict[str, Any] = {}
    written = False
    for name in (name for name in SECTIONS if name in wanted):
        results[name] = _section(name, passed, made_with, options.results)
        written = _written(options.out, results)
    if written:
        print(f"\nwritten to {options.out}")
    return 1 if not written or any(_failed(result) for result in results.values()) else 0


def _parser() -> argparse.ArgumentParser:
    least = Request()
    parser = argparse.ArgumentParser(
        prog="aot-tune bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", help=f"some of {' '.join(SECTIONS)}; by default all but declared and scaling"
    )
    parser.add_argument("--kernels", action="store_true", help="time the kernels; options: --kernels -h")
    parser.add_argument("--report", action="store_true", help="print the tables; options: --report -h")
    parser.add_argument("--left-out", action="store_true", help="judge the rule; options: --left-out -h")
    parser.add_argument("--record", action="store_true", help="record the results, by the device's name")
    parser.add_argument(
        "--results", type=Path, default=records.RESULTS, help="folder of recorded results; the package's own"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), help="file of this run's JSON")
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        help="scaling, inside, regret, declared: a kernel, replay: an operation; may be repeated",
    )
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        help="declared: a module whose kernels are swept, mylib.kernels; may be repeated",
    )
    parser.add_argument("--sizes", type=_count, default=least.sizes, help="inside: sizes of each kernel")
    parser.add_argument(
        "--problems", type=_count, default=least.problems, help="scaling, regret: most of each kernel"
    )
    parser.add_argument(
        "--journal", type=Path, default=Path(least.journal), help="regret: the file of all samples"
    )
    parser.add_argument("--look-ups", type=_count, default=least.look_ups, help="lookups: of each kernel")
    parser.add_argument(
        "--repeats", type=_count, default=least.repeats, help="serving: processes of each quick scenario"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=least.limit_s,
        help="inside, regret, replay, declared: seconds after which nothing more begins",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _count(text: str) -> int:
    """A number of things to measure, from the command line."""
    with contextlib.suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not an int of 1 or more")


# The parent -------------------------------------------------------------------------------------


def _section(
    name: str, words: Sequence[str], made_with: records.MadeWith | None, results: Path
) -> dict[str, Any]:
    """Run a section in a process of its own; record each part as soon as it is there."""
    started = time.perf_counter()
    print(f"\n== {name}", flush=True)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "aot_tune.bench", *words, "--child", name, "--out", folder]
        process = subprocess.Popen(command)
        try:
            for part in _parts(Path(folder), process):
                figures[part.name] = part.figures
                _show({part.name: part.figures}, "")
                if made_with is not None and "failed" not in part.figures:
                    try:
                        _record(results, name, part, made_with)
                    except AotTuneError as error:  # what is measured costs more than its record
                        figures["failed"] = f"{part.name} is not recorded: {error}"
                        print(f"failed: {figures['failed']}")
        except BaseException as error:
            # After Ctrl-C the terminal has told the child too, which ends in its own time.
            _end(process, told=isinstance(error, KeyboardInterrupt))
            raise
        # One section that fails must not lose the others' figures.
        if process.returncode:
            figures["failed"] = f"exit code {process.returncode}"
            print(f"failed: {figures['failed']}")
    print(f"   ({time.perf_counter() - started:.0f} s)", flush=True)
    return figures


def _parts(folder: Path, process: subprocess.Popen[bytes]) -> Iterator[Part]:
    """The parts that a child writes, each once it is complete, until the child has ended."""
    number, running = 0, True
    while running:
        running = process.poll() is None
        while (path := folder / f"{number}.json").exists():
            yield Part(**orjson.loads(path.read_bytes()))
            number += 1
        if running:
            time.sleep(0.2)


def _record(results: Path, section: str, part: Part, made_with: records.MadeWith) -> None:
    """Record a part with the present state of its kernels."""
    now = records.present(made_with.arch)
    states = {kernel: now[kernel] for kernel in part.kernels}
    record = records.Record(made_with=made_with, kernels=states, figures=part.figures)
    records.add(results, section, part.name, record)


def _end(process: subprocess.Popen[bytes], *, told: bool) -> None:
    """End a child that would measure for nobody and keep its GPU; `told` where it is ending already."""
    if not told:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _written(out: Path, results: dict[str, Any]) -> bool:
    """Write all results so far; say where that fails, which loses no later section."""
    try:
        out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    except OSError as error:
        print(f"aot-tune bench: cannot write {out}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _failed(figures: dict[str, Any]) -> bool:
    return "failed" in figures or any("failed" in each for each in figures.values())


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


# The child --------------------------------------------------------------------------------------


def _child(options: argparse.Namespace) -> int:
    """Run one section; write each part into a file of its own, complete once it has its name."""
    request = Request(
        kernels=tuple(options.kernel),
        modules=tuple(options.module),
        sizes=options.sizes,
        problems=options.problems,
        journal=str(options.journal),
        look_ups=options.look_ups,
        repeats=options.repeats,
        limit_s=options.limit_s,
    )
    section = importlib.import_module(f"aot_tune.bench.sections.{options.child}")
    for number, part in enumerate(section.run(request)):
        path = options.out / f"{number}.json"
        partial = path.with_suffix(".part")
        partial.write_bytes(
            orjson.dumps({"name": part.name, "figures": part.figures, "kernels": part.kernels})
        )
        partial.replace(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
