"""The command line: verbs, exit codes and everything printed. Thin: what it prints comes as data from elsewhere.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 fine, 1 it failed or found problems, 2 usage.
"""

from __future__ import annotations

import functools
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn, ParamSpec

import typer

from aot_tune import __version__, selection
from aot_tune.errors import AotTuneError, UsageError
from aot_tune.plain import json_text

P = ParamSpec("P")

app = typer.Typer(
    name="aot-tune",
    help="Tune cuTile kernels ahead of time: sweep, review, ship.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help and one-line usage errors, whatever the terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Kernels = Annotated[list[str] | None, typer.Argument(metavar="[KERNEL]...", help="Kernels; all by default.")]
Kernel = Annotated[str | None, typer.Argument(metavar="[KERNEL]", help="A kernel's declared name.")]
ArchName = Annotated[
    str | None, typer.Option("--arch", help="sm90, sm100 ...; this machine's GPU, else sm100.")
]
Modules = Annotated[
    list[str] | None, typer.Option("--module", help="A module that declares kernels; repeat for more.")
]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        "--problem", metavar="M=300,...", help="A problem in full, or part of declared ones; repeat for more."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show each choice, and an error's traceback.")]


def main() -> None:
    """Run the command line."""
    app()


class _Terminated(KeyboardInterrupt):
    """SIGTERM: stops as Ctrl-C does."""


_EXIT_INTERRUPTED, _EXIT_TERMINATED = 130, 143
"""128 + the signal's number, as shells report it."""


def _guarded(verb: Callable[P, None]) -> Callable[P, None]:
    """A verb whose errors become one message on stderr and an exit code; `-v` shows the traceback too."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except KeyboardInterrupt as stop:
            raise typer.Exit(
                _EXIT_TERMINATED if isinstance(stop, _Terminated) else _EXIT_INTERRUPTED
            ) from None
        except AotTuneError as error:
            if kwargs.get("verbose"):
                traceback.print_exc()
            _say(f"aot-tune: {error}")
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None

    return run


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit(0)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@_guarded
def tune(
    kernel: Kernels = None,
    arch: ArchName = None,
    module: Modules = None,
    named: Annotated[list[str] | None, typer.Option("--kernel", help="The same as an argument.")] = None,
    problem: Problems = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most buckets of each kernel, evenly spread.")
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option(help="Measure every candidate, not the model's best few.")
    ] = False,
    require: Annotated[
        str | None, typer.Option(metavar="measured", help="Fail where it could only predict.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of tables; the package's own by default.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compiling processes; one a core by default.")
    ] = None,
    gpu: Annotated[int | None, typer.Option(min=0, help="Index of the GPU to measure on.")] = None,
    journal: Annotated[Path | None, typer.Option(help="Where measurements are saved as they come.")] = None,
    fresh: Annotated[bool, typer.Option(help="Start over where a journal could be resumed.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Sweep kernels on this machine's GPU and write their tables; without one of that arch, predict."""
    from aot_tune.discovery import find_tunables
    from aot_tune.tuner import sweep
    from aot_tune.tuner.progress import prediction_notice, progress_on
    from aot_tune.tuner.report import SweepRequest

    if require not in (None, "", "measured"):
        raise UsageError(f"--require {require!r}: write measured, or leave it away to allow predictions")
    target = selection.chosen_arch(arch)
    kernels = selection.chosen_kernels(find_tunables(module or ()), [*(kernel or ()), *(named or ())])
    problems = selection.problems_by_kernel(kernels, problem or ())
    device = selection.chosen_gpu(target, gpu, required=require == "measured")
    request = SweepRequest(
        kernels=tuple(found for found in kernels if not problem or found.tunable.name in problems),
        arch=target,
        modules=tuple(module or ()),
        problems=problems,
        limit=limit,
        exhaustive=exhaustive,
        require_measured=require == "measured",
        out=out,
        jobs=jobs,
        gpu=device.index if device else None,
        journal=journal,
        fresh=fresh,
    )
    with closing(progress_on(sys.stderr)) as progress, _sigterm_stops():
        for line in prediction_notice(request) if request.predicts else ():
            progress.note(line)
        try:
            report = sweep.run(request, progress)
        except KeyboardInterrupt:
            progress.close()
            _say(f"stopped; what was reported as measured is saved. To go on: {request.command()}")
            raise
    if as_json:
        typer.echo(json_text(report))
    else:
        for row in report.rows:
            if row.path is not None:
                typer.echo(str(row.path))
    _leave(0 if report.published else 1)


@app.command()
@_guarded
def show(
    kernel: Kernel = None,
    arch: ArchName = None,
    module: Modules = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Print the tables there are, or one kernel's entries."""
    from aot_tune.arch import Arch
    from aot_tune.show import overview_lines, table_lines, tables_found

    tables = tables_found(kernel, Arch.parse(arch) if arch else None, module or ())
    if as_json:
        typer.echo(json_text([{"path": path, **_document(table)} for path, table in tables]))
    elif kernel is None:
        _print(overview_lines(tables))
    else:
        for path, table in tables:
            _print(table_lines(path, table))


@app.command()
@_guarded
def check(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A table or folder; all by default.")
    ] = None,
    module: Modules = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Check tables against their declarations, as a pull request does; exit code 1 when anything is found."""
    from aot_tune.check import check as find
    from aot_tune.discovery import find_tunables
    from aot_tune.text import counted

    findings = find(find_tunables(module or ()), path)
    if as_json:
        typer.echo(json_text(findings))
    else:
        _print([str(finding) for finding in findings])
        _say(f"{counted(len(findings), 'problem')} found" if findings else "no problems found")
    _leave(1 if findings else 0)


@app.command()
@_guarded
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A table, or a folder of tables.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same, later.")],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 where they differ.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Say what changed between two tables or folders of tables."""
    from aot_tune.diff import diff_data, diff_lines, diff_paths

    diffs = diff_paths(old, new)
    if as_json:
        typer.echo(json_text(diff_data(diffs)))
    else:
        _print(diff_lines(diffs))
    _leave(1 if exit_code and not all(one.empty for one in diffs) else 0)


@app.command()
@_guarded
def doctor(
    kernel: Kernel = None,
    problem: Problems = None,
    arch: ArchName = None,
    module: Modules = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Say what this process would use: GPU, driver, compiler, tables, cache; and why a problem gets its config."""
    from aot_tune.doctor import diagnose, diagnosis_lines
    from aot_tune.explain import explain, explanation_lines

    target = selection.chosen_arch(arch)
    if kernel is None:
        if problem:
            raise UsageError("--problem needs a kernel: aot-tune doctor KERNEL --problem M=300,...")
        diagnosis = diagnose(target, module or ())
        typer.echo(json_text(diagnosis)) if as_json else _print(diagnosis_lines(diagnosis))
        return
    from aot_tune.discovery import find_tunables

    kernels = selection.chosen_kernels(find_tunables(module or ()), [kernel])
    chosen = (
        selection.problems_by_kernel(kernels, problem or ()).get(kernel)
        or kernels[0].tunable.typical_problems
    )
    answers = [explain(kernels[0].tunable, target, one) for one in chosen]
    typer.echo(json_text(answers)) if as_json else _print(
        [line for one in answers for line in explanation_lines(one)]
    )


def _document(table: object) -> dict[str, object]:
    import json

    from aot_tune import document
    from aot_tune.table import Table

    assert isinstance(table, Table)
    return dict(json.loads(document.dump(table)))


def _print(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _leave(code: int) -> None:
    if code:
        raise typer.Exit(code)


@contextmanager
def _sigterm_stops() -> Iterator[None]:
    """SIGTERM stops the sweep as Ctrl-C does, by an exception that lets it save and end its children."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
