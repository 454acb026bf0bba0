"""What a kernel may be called, since its name becomes a file's. Pure: knows no file and no kernel."""

from __future__ import annotations

import re

from aot_tune.errors import DeclarationError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def is_name(name: object) -> bool:
    """Whether this is a plain lower-case name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: object) -> None:
    """Refuse names that are no plain file name: ``../x``, absolute, NUL, 300 characters.

    Raises:
        DeclarationError: It is no such name.
    """
    if not is_name(name):
        raise DeclarationError(
            f"a kernel is called {name!r:.80}; write a lower-case name of letters, digits and underscores, "
            "at most 64 characters, such as 'rms_norm'"
        )
