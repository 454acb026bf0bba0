"""`python -m aot_tune` and the script `aot-tune`. Knows only whether what it needs is installed."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich")
"""What the command line imports beyond what serving needs: the extra `tune` brings them."""


def main() -> None:
    """Run the command line; without its needs, say what to install."""
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
