"""Every environment variable that aot_tune reads. Read when asked, so that a test or a fork may set them."""

from __future__ import annotations

import os
from pathlib import Path

from aot_tune.errors import UsageError

TABLES = "AOT_TUNE_TABLES"
CACHE_DIR = "AOT_TUNE_CACHE_DIR"
CONFIG = "AOT_TUNE_CONFIG"
RANKED = "AOT_TUNE_RANKED"
SEARCH_SECONDS = "AOT_TUNE_SEARCH_SECONDS"
LOG = "AOT_TUNE_LOG"
DISABLE = "DISABLE_AUTOTUNE"

DESCRIPTIONS = {
    TABLES: "folders of tables, as in PATH, read before a package's own; predictions are read only there",
    CACHE_DIR: "where live searches are remembered; default: the user's cache folder",
    CONFIG: "'default' launches every kernel with its default config: the A/B switch",
    RANKED: "the world size where nothing else tells it; above 1 nothing is searched and no cache is read",
    SEARCH_SECONDS: "the longest live search that a miss may start, seconds; default 1",
    LOG: "'1' prints each choice and its reason to stderr, once per unseen problem",
    DISABLE: "'1' forbids live searches, as it does for Triton and others",
}
"""What each does, one line: the README's table and `aot-tune doctor` print this."""

DEFAULT_SEARCH_SECONDS = 1.0
"""A miss over prebuilt cubins costs 44 ms, eight compilations 5 s (measured, H200): the first fits."""


def table_folders() -> tuple[Path, ...]:
    """The folders named by AOT_TUNE_TABLES, in order."""
    return tuple(Path(part) for part in os.environ.get(TABLES, "").split(os.pathsep) if part)


def cache_folder() -> Path | None:
    """The folder named by AOT_TUNE_CACHE_DIR."""
    named = os.environ.get(CACHE_DIR)
    return Path(named) if named else None


def forces_default() -> bool:
    """Whether AOT_TUNE_CONFIG asks for defaults.

    Raises:
        UsageError: It holds anything but ``default`` or nothing.
    """
    value = os.environ.get(CONFIG, "")
    if value not in ("", "default"):
        raise UsageError(f"{CONFIG}={value!r}: write 'default' to launch defaults, or unset it")
    return value == "default"


def search_seconds() -> float:
    """The longest live search, seconds; 0 forbids it."""
    value = os.environ.get(SEARCH_SECONDS, "")
    if not value:
        return DEFAULT_SEARCH_SECONDS
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{SEARCH_SECONDS}={value!r}: write a number of seconds, 0 to forbid live searches")
    return seconds


def search_disabled() -> bool:
    """Whether DISABLE_AUTOTUNE forbids live searches."""
    return _on(DISABLE)


def logs_choices() -> bool:
    """Whether AOT_TUNE_LOG asks for each choice to be printed."""
    return _on(LOG)


def world_size() -> int:
    """The largest world size that AOT_TUNE_RANKED or WORLD_SIZE tells; 1 where neither does.

    Raises:
        UsageError: AOT_TUNE_RANKED is no number. WORLD_SIZE is not ours: what it says else is left alone.
    """
    told = [os.environ.get(name, "").strip() for name in (RANKED, "WORLD_SIZE")]
    if told[0] and not _is_number(told[0]):
        raise UsageError(f"{RANKED}={told[0]!r}: write the world size, a whole number, or unset it")
    return max([1, *(int(value) for value in told if _is_number(value))])


def check() -> None:
    """Refuse what holds no value of its kind, so that the first launch tells, not one much later.

    Raises:
        UsageError: As `forces_default`, `search_seconds` and `world_size` do.
    """
    for read in CHECKED:
        read()


CHECKED = (forces_default, search_seconds, world_size)
"""What raises for a value that means nothing."""


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdigit()


def _on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")
