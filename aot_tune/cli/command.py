"""What the verbs of the command line share: options, exit codes for errors, output and signals."""

from __future__ import annotations

import functools
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, ClassVar, NoReturn, ParamSpec

import typer
from typer.core import TyperCommand

from aot_tune.errors import AotTuneError, EntryPointWarning, TableWarning, UsageError

P = ParamSpec("P")

EXIT_FAILED, EXIT_USAGE = 1, 2
"""Exit codes of a verb that failed or found a problem, and of one that was called in a wrong way."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop a verb: Ctrl-C, a job that is ended, a terminal that is closed."""

Kernels = Annotated[
    list[str] | None, typer.Argument(metavar="KERNEL", help="Names of kernels; all kernels by default.")
]
Kernel = Annotated[str | None, typer.Argument(metavar="KERNEL", help="The name of a kernel.")]
ArchName = Annotated[
    str | None,
    typer.Option(
        "--arch", metavar="sm90", help="The arch; by default that of this machine's GPU, else sm100."
    ),
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, for scripts.")]
AllowWorse = Annotated[
    bool,
    typer.Option("--allow-worse", help="Publish entries that gain less although nothing has changed."),
]
Program = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROGRAM", help="The program and its arguments; our own options come first. -- may part them."
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Print each choice with its reason, and the traceback of an error."),
]

BEFORE_PROGRAM = {"allow_interspersed_args": False}
"""Settings of a verb that runs a `Program`: its own options come first, and all from the first other word on
is the program's, options too."""


class Tune(TyperCommand):
    """The verb ``tune``: help in panels, and an address behind --ray that may be left out.

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
    """The process received SIGTERM or SIGHUP; it stops as it does after Ctrl-C.

    Attributes:
        number: The signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def guarded(verb: Callable[P, None]) -> Callable[P, None]:
    """Turn a verb's errors into one message on stderr and an exit code; `-v` prints the traceback too."""

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


def _shown(others: Callable[..., None]) -> Callable[..., None]:
    """Print our own warnings as errors are printed, without Python's file and line."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, EntryPointWarning):
            say(f"aot-tune: warning: {message}")
        else:
            others(message, category, *place, **more)

    return show


def put(lines: str | Iterable[str]) -> None:
    """Print data to stdout, one line for each text."""
    for line in [lines] if isinstance(lines, str) else lines:
        typer.echo(line)


def say(text: str) -> None:
    """Print progress, remarks and errors to stderr."""
    typer.echo(text, err=True)


def remark(lines: Iterable[str]) -> None:
    """Print what a person should know beside a verb's data, as doctor does."""
    for line in lines:
        say(f"remark: {line}")


def seconds(option: str, text: str) -> float:
    """Read a duration such as ``90s``, ``20m`` or ``1h30m``.

    Raises:
        UsageError: It has another form, or is 0.
    """
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    total = (
        sum(int(part or 0) * unit for part, unit in zip(found.groups(), (3600, 60, 1), strict=True))
        if found
        else 0
    )
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

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if before[number] is not signal.SIG_IGN:  # nohup wants a closed terminal to be ignored
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # set by other than Python
                signal.signal(number, handler)


def ignore_signals() -> None:
    """Let nothing interrupt the last lines of a verb that was stopped; `signals_stop` undoes it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
