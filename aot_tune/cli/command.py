"""What the verbs of the command line share: their options, errors as exit codes, output, signals."""

from __future__ import annotations

import functools
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from aot_tune.errors import AotTuneError, EntryPointWarning, TableWarning, UsageError

P = ParamSpec("P")

EXIT_FAILED, EXIT_USAGE = 1, 2
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
"""128 + the signal's number, as shells report it."""

Kernels = Annotated[list[str] | None, typer.Argument(metavar="KERNEL", help="Kernels; all by default.")]
Kernel = Annotated[str | None, typer.Argument(metavar="KERNEL", help="A kernel's declared name.")]
ArchName = Annotated[
    str | None, typer.Option("--arch", metavar="sm90", help="By default this machine's GPU's, else sm100.")
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="lib.kernels", help="A module that declares kernels; may be repeated."),
]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        "--problem", metavar="M=300,...", help="A problem in full, or part of declared ones; may be repeated."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Tell each choice and its reason; show an error's traceback.")
]


class Terminated(KeyboardInterrupt):
    """SIGTERM: stops as Ctrl-C does."""


def guarded(verb: Callable[P, None]) -> Callable[P, None]:
    """A verb whose errors become one message on stderr and an exit code; `-v` shows the traceback too."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with warnings.catch_warnings():
                # Said once more at import of the kernels; the verbs tell of tables themselves.
                warnings.simplefilter("ignore", TableWarning)
                warnings.simplefilter("always", EntryPointWarning)
                warnings.showwarning = _shown(warnings.showwarning)
                verb(*args, **kwargs)
        except KeyboardInterrupt as stop:
            raise typer.Exit(EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED) from None
        except AotTuneError as error:
            if kwargs.get("verbose"):
                traceback.print_exc()
            say(f"aot-tune: {error}")
            raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED) from None

    return run


def _shown(others: Callable[..., None]) -> Callable[..., None]:
    """Show our own warnings as errors are shown, without Python's file and line."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, EntryPointWarning):
            say(f"aot-tune: warning: {message}")
        else:
            others(message, category, *place, **more)

    return show


def put(lines: str | Iterable[str]) -> None:
    """Data, to stdout."""
    for line in [lines] if isinstance(lines, str) else lines:
        typer.echo(line)


def say(text: str) -> None:
    """What is no data, to stderr."""
    typer.echo(text, err=True)


def leave(*, failed: bool) -> None:
    """End the verb with exit code 1 where it failed."""
    if failed:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """SIGTERM stops as Ctrl-C does, by an exception that lets the verb save and end its children."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
