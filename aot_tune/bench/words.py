"""Run a typer command on given arguments, for every command line of the bench."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from aot_tune.errors import AotTuneError, UsageError

Record = Annotated[bool, typer.Option("--record", help="Record the results, by the device's name.")]
Results = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of recorded results.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="File of this run's figures, JSON.")]


def check_known(names: Iterable[str], known: Collection[str], wrong: str) -> None:
    """Refuse names that are not known.

    Args:
        names: The given names.
        known: The known names.
        wrong: Text before the unknown names in the message, such as "no kernel is called".

    Raises:
        UsageError: A name is unknown; the message lists the known names.
    """
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{wrong} {' '.join(unknown)}; there is {' '.join(known)}")


def called(command: Callable[..., int], words: Sequence[str], prog: str) -> int:
    """Run a command; return its exit status: 1 where it failed, 2 where the words are wrong.

    Args:
        command: The command. Its parameters are options and arguments, as typer reads them; a context's
            ``obj`` has the words.
        words: The arguments.
        prog: Name of the command in help and errors.
    """

    @functools.wraps(command)
    def run(*args: object, **options: object) -> None:
        raise typer.Exit(command(*args, **options))

    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(run)
    try:
        app(list(words), prog_name=prog, obj=tuple(words))
    except SystemExit as end:
        return int(end.code or 0)
    except AotTuneError as error:
        print(f"aot-tune bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0
