"""`python -m aot_tune` and the script `aot-tune`: run the command line, or name the missing package."""

from __future__ import annotations

import signal
import sys

_EXTRA = ("typer", "rich")
"""Packages that the command line imports beyond those of serving. The extra `tune` installs them."""


def main() -> None:
    """Run the command line; where a package is missing, print what to install."""
    # A parent that ignores it would hide how this process's children end, and theirs.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        from aot_tune.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        print(f"aot-tune needs {error.name}: pip install 'aot-tune[tune]'", file=sys.stderr)
        raise SystemExit(1) from None
    app()


if __name__ == "__main__":
    main()
