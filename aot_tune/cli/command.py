"""Options, exit codes, output and signals that the verbs of the command line share."""

from __future__ import annotations

import functools
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ClassVar, NoReturn, ParamSpec

import typer
from typer.core import TyperCommand

from aot_tune.errors import AotTuneError, EntryPointWarning, TableWarning, UsageError

P = ParamSpec("P")

EXIT_FAILED, EXIT_USAGE, EXIT_UNKNOWN = 1, 2, 3
"""Exit codes: the verb failed or found a problem; it was called in a wrong way; nothing can be said, for want
of an idle GPU."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a verb: Ctrl-C, the end of a job, a closed terminal."""

Kernels = Annotated[
    list[str] | None, typer.Argument(metavar="KERNEL", help="Names of kernels; all kernels by default.")
]
Kernel = Annotated[str | None, typer.Argument(metavar="KERNEL", help="The name of a kernel.")]
ArchName = Annotated[
    str | None,
    typer.Option("--arch", metavar="sm90", help="The arch; by default this machine's GPU's, else sm100."),
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="lib.kernels", help="A module that declares kernels; may be repeated."),
]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        "--problem",
        metavar="M=300,...",
        help="A whole problem, or part of declared problems; may be repeated.",
    ),
]
ProblemFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--problems",
        metavar="FILE",
        help="Problems that servers missed: a file of AOT_TUNE_RECORD; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, for scripts.")]
AllowWorse = Annotated[
    bool,
    typer.Option("--allow-worse", help="Publish entries that gain less although nothing changed."),
]
Program = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROGRAM", help="The program and its arguments, after our own options; -- may separate them."
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Print each choice with its reason, and the traceback of an error."),
]

BEFORE_PROGRAM = {"allow_interspersed_args": False}
"""Settings of a verb that runs a `Program`: its own options end at the first other word."""


class Tune(TyperCommand):
    """Verb ``tune``: help in panels, and an optional address behind --ray.

    The address is a host with a port, ``auto`` or ``local``.
    """

    panels: ClassVar = {"kernel": "What", "gpus": "Where", "exhaustive": "How"}
    """Title of each panel, by its first parameter."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        title = ""
        for param in self.get_params(ctx):
            title = self.panels.get(str(param.name), title)
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with an empty address where none is given."""
        words = list(args)
        for place, word in enumerate(words):
            following = words[place + 1] if place + 1 < len(words) else ""
            if word == "--ray" and not (":" in following or following in ("auto", "local")):
                words[place] = "--ray="
        return super().parse_args(ctx, words)


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received. The process stops as after Ctrl-C.

    Attributes:
        number: The signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def guarded(verb: Callable[P, None]) -> Callable[P, None]:
    """Turn a verb's errors into a message on stderr and an exit code; `-v` prints the traceback too."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with warnings.catch_warnings():
                # Importing the kernels would repeat these warnings; the verbs report tables themselves.
                warnings.simplefilter("ignore", TableWarning)
                warnings.simplefilter("always", EntryPointWarning)
                warnings.showwarning = _shown(warnings.showwarning)
                verb(*args, **kwargs)
        except KeyboardInterrupt as stop:
            number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
            raise typer.Exit(128 + number) from None  # as shells report it
        except AotTuneError as error:
            if kwargs.get("verbose"):
                traceback.print_exc()
            say(f"aot-tune: {error}")
            raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED) from None

    return run


def _shown(original: Callable[..., None]) -> Callable[..., None]:
    """Print our own warnings in the form of errors, without Python's file and line."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, EntryPointWarning):
            say(f"aot-tune: warning: {message}")
        else:
            original(message, category, *place, **more)

    return show


def put(lines: str | Iterable[str]) -> None:
    """Print data to stdout, a line for each text."""
    for line in [lines] if isinstance(lines, str) else lines:
        typer.echo(line)


def say(text: str) -> None:
    """Print progress, remarks and errors to stderr."""
    typer.echo(text, err=True)


def remark(lines: Iterable[str]) -> None:
    """Print remarks to stderr, in the form of doctor's."""
    for line in lines:
        say(f"remark: {line}")


def seconds(option: str, text: str) -> float:
    """Read a duration such as ``90s``, ``20m`` or ``1h30m``.

    Raises:
        UsageError: The text has another form, or is 0.
    """
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    parts = match.groups() if match else ()
    total = sum(int(part or 0) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not total:
        raise UsageError(f"{option} {text!r}: write hours, minutes and seconds, as 20m, 90s or 1h30m")
    return float(total)


def leave(*, failed: bool) -> None:
    """End the verb with exit code 1 if it failed."""
    if failed:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def signals_stop() -> Iterator[None]:
    """Raise `Stopped` on SIGTERM and SIGHUP, so that the verb saves its work and ends its children."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(number)

    former = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if former[number] is not signal.SIG_IGN:  # nohup wants a closed terminal to be ignored
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in former.items():
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore signals while a stopped verb prints its last lines; `signals_stop` undoes that."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
