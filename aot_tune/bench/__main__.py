"""Run the bench: print figures, write them as JSON, record them, or print the recorded results.

Each section runs in a process of its own, because a sweep waits while another process has a context on its
GPU.
"""

from __future__ import annotations

import importlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from aot_tune.bench import records, words
from aot_tune.bench.sections.part import Part, Request
from aot_tune.errors import AotTuneError, UsageError
from aot_tune.nvidia.nvml import visible_gpus

MODES = {"--kernels": "kernels.run", "--report": "report", "--left-out": "left_out"}
"""Modules by the option that runs their ``main(words)`` instead of sections."""

SECTIONS = ("lookups", "launch", "scaling", "inside", "regret", "serving", "replay", "declared")
"""Modules of `aot_tune.bench.sections`. Each has ``run(request) -> Iterator[Part]``."""

_BY_NAME = {"declared", "scaling"}
"""Sections that run only where they are named: one needs to know what to measure, the other takes several
times as long as all others."""

_WITHOUT_A_GPU = {"lookups"}
"""Sections that run on a machine without a GPU."""

_CHOOSING = {"kernel": ("scaling", "inside", "regret", "replay", "declared"), "module": ("declared",)}
"""Sections that take an option, by the option that chooses what is measured."""

_GRACE_S = 10.0
"""Seconds that a child has to end after the signal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments request; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--child"]:
        return _child(*given[1:])
    for mode, module in MODES.items():
        if mode in given:
            given.remove(mode)
            return int(importlib.import_module(f"aot_tune.bench.{module}").main(given))
    return words.called(measure, given, "aot-tune bench")


_LEAST = Request()


def measure(
    context: typer.Context,
    sections: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION", help=f"Some of {' '.join(SECTIONS)}; by default all but declared and scaling."
        ),
    ] = None,
    record: words.Record = False,
    results: words.Results = records.RESULTS,
    out: words.Out = Path("build/bench.json"),
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="scaling, inside, regret, declared: a kernel, replay: an operation; repeatable."),
    ] = None,
    module: Annotated[
        list[str] | None, typer.Option(help="declared: a module whose kernels are swept; repeatable.")
    ] = None,
    sizes: Annotated[int, typer.Option(min=1, help="inside: sizes of each kernel.")] = _LEAST.sizes,
    problems: Annotated[
        int, typer.Option(min=1, help="scaling, regret: most of each kernel.")
    ] = _LEAST.problems,
    journal: Annotated[str, typer.Option(help="regret: the file of all samples.")] = _LEAST.journal,
    look_ups: Annotated[int, typer.Option(min=1, help="lookups: of each kernel.")] = _LEAST.look_ups,
    repeats: Annotated[
        int, typer.Option(min=1, help="serving: processes of each quick scenario.")
    ] = _LEAST.repeats,
    limit_s: Annotated[
        float,
        typer.Option(help="inside, regret, replay, declared: seconds after which nothing more begins."),
    ] = math.inf,
) -> int:
    """Measure sections on this machine's GPU; lookups needs none.

    Further uses, each with a -h of its own: --kernels times the kernels against other implementations,
    --report prints the recorded results, --left-out the regret of the rule between measured sizes.
    """
    wanted = _wanted(sections or (), kernel=kernel, module=module)
    if not visible_gpus() and not _WITHOUT_A_GPU.issuperset(wanted):
        print("aot-tune bench: no GPU here; run it on a GPU host", file=sys.stderr)
        return 1
    made_with = records.made_with(context.obj) if record else None
    records.check_out(out)
    if made_with is not None:
        records.check_addable(results, wanted, made_with.device)
        records.present(made_with.arch)  # imports the kernels now, and not while a section measures
    request = Request(
        kernels=tuple(kernel or ()), modules=tuple(module or ()), sizes=sizes, problems=problems,
        journal=journal, look_ups=look_ups, repeats=repeats, limit_s=limit_s,
    )  # fmt: skip
    figures: dict[str, Any] = {}
    written = False
    for name in wanted:
        figures[name] = _section(name, request, made_with, results)
        written = _written(out, figures)
    if written:
        print(f"\nwritten to {out}")
    return 1 if not written or any(map(_failed, figures.values())) else 0


def _wanted(names: Sequence[str], **chosen: Sequence[str] | None) -> list[str]:
    """Return the sections to run, in order.

    Args:
        names: Named sections; empty for all that run by default.
        **chosen: Values by option of `_CHOOSING`.

    Raises:
        UsageError: A name or an option is wrong.
    """
    words.check_known(names, SECTIONS, "no section is called")
    wanted = [name for name in SECTIONS if name in names or not (names or name in _BY_NAME)]
    if "declared" in wanted and not chosen["module"]:
        raise UsageError("declared sweeps the kernels of modules: name each, --module mylib.kernels")
    for option, takers in _CHOOSING.items():
        if chosen[option] and not set(wanted) & set(takers):
            raise UsageError(
                f"no --{option} for {' '.join(wanted)}: it is for {' '.join(takers)}; leave it out"
            )
    return wanted


# The parent -------------------------------------------------------------------------------------


def _section(
    name: str, request: Request, made_with: records.MadeWith | None, results: Path
) -> dict[str, Any]:
    """Run a section in a process of its own; record each part as soon as it is complete."""
    started = time.perf_counter()
    print(f"\n== {name}", flush=True)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        fields = json.dumps(asdict(request))
        process = subprocess.Popen([sys.executable, "-m", "aot_tune.bench", "--child", name, folder, fields])
        try:
            for part in _parts(Path(folder), process):
                figures[part.name] = part.figures
                _show({part.name: part.figures}, "")
                if made_with is not None and "failed" not in part.figures:
                    try:
                        _record(results, name, part, made_with)
                    except AotTuneError as error:  # measuring costs more than recording: go on
                        figures["failed"] = f"{part.name} is not recorded: {error}"
                        print(f"failed: {figures['failed']}")
        except BaseException as error:
            # After Ctrl-C the terminal has signalled the child too, which ends in its own time.
            _end(process, signalled=isinstance(error, KeyboardInterrupt))
            raise
        # One section that fails must not lose the others' figures.
        if process.returncode:
            figures["failed"] = f"exit code {process.returncode}"
            print(f"failed: {figures['failed']}")
    print(f"   ({time.perf_counter() - started:.0f} s)", flush=True)
    return figures


def _parts(folder: Path, process: subprocess.Popen[bytes]) -> Iterator[Part]:
    """Yield the parts that a child writes, each once it is complete, until the child has ended."""
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


def _end(process: subprocess.Popen[bytes], *, signalled: bool) -> None:
    """End a child, which would keep its GPU; `signalled` where it is ending already."""
    if not signalled:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _written(out: Path, results: dict[str, Any]) -> bool:
    """Write all results so far; print a failure, which loses no later section."""
    try:
        out.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    except OSError as error:
        print(f"aot-tune bench: cannot write {out}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _failed(figures: dict[str, Any]) -> bool:
    return "failed" in figures or any("failed" in part for part in figures.values())


def _show(value: Any, indent: str) -> None:
    if isinstance(value, list):
        for item in value:
            print(f"{indent}- {item}")
        return
    for key, item in value.items():
        if isinstance(item, dict | list) and item:
            print(f"{indent}{key}:")
            _show(item, indent + "   ")
        else:
            print(f"{indent}{key:45s} {item}")


# The child --------------------------------------------------------------------------------------


def _child(name: str, folder: str, text: str) -> int:
    """Run a section; write each part into a file of its own, which is complete once it has its name."""
    fields: dict[str, Any] = json.loads(text)
    request = Request(**{**fields, **{name: tuple(fields[name]) for name in ("kernels", "modules")}})
    section = importlib.import_module(f"aot_tune.bench.sections.{name}")
    for number, part in enumerate(section.run(request)):
        path = Path(folder, f"{number}.json")
        partial = path.with_suffix(".part")
        partial.write_bytes(
            orjson.dumps({"name": part.name, "figures": part.figures, "kernels": part.kernels})
        )
        partial.replace(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
