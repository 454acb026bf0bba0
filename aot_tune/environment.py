"""Read the environment variables of aot_tune. Each is read anew, so that a test or a fork may set it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, cast, get_args

from aot_tune.errors import UsageError

TABLES = "AOT_TUNE_TABLES"
CACHE_DIR = "AOT_TUNE_CACHE_DIR"
CONFIG = "AOT_TUNE_CONFIG"
RANKED = "AOT_TUNE_RANKED"
SEARCH_SECONDS = "AOT_TUNE_SEARCH_SECONDS"
LOG = "AOT_TUNE_LOG"
ON_MISS = "AOT_TUNE_ON_MISS"
RECORD = "AOT_TUNE_RECORD"
BATCH_INVARIANT = "AOT_TUNE_BATCH_INVARIANT"
DISABLE = "DISABLE_AUTOTUNE"
DISABLE_OURS = "AOT_TUNE_DISABLE_AUTOTUNE"

START_OPTIONS = "AOT_TUNE_START_OPTIONS"
"""Variable by which `aot-tune run` and `aot-tune record` configure the program that they start. Internal."""

OnMiss = Literal["search", "nearest", "default", "error"]
"""Answers to a miss: search live, take the nearest tuned or recorded config at any distance, take the default
(for a recorded search the first config), or raise."""

DESCRIPTIONS = {
    TABLES: "folders of tables, as in PATH, read before a package's own; predictions are read only there",
    CACHE_DIR: "where live searches are remembered, an absolute path; default: the user's cache folder",
    CONFIG: "'default' launches every kernel with its default config: the A/B switch",
    RANKED: "a world size; above 1 nothing is searched. Where set, it decides in place of the launcher's",
    SEARCH_SECONDS: "the longest live search of a miss, seconds; default 1, 15 where the arch has no table",
    LOG: "'1' prints each choice and its reason to stderr, once per unseen problem",
    ON_MISS: "what a miss does: 'search' (the default), 'nearest', 'default', or 'error' for servers",
    RECORD: "a file to which problems that missed are appended, each once; a process writes to FILE.<pid>",
    BATCH_INVARIANT: "'1' takes one config for every size of a batch: a row's bits do not depend on it",
    DISABLE: "'1' forbids live searches, as it does for Triton and others",
    DISABLE_OURS: "the same for aot_tune alone; where it is set, DISABLE_AUTOTUNE does not count",
}
"""Effect of each variable in one line, for the README's table and `aot-tune doctor`."""

DEFAULT_SEARCH_SECONDS = 1.0
"""Default limit of a live search, seconds. A search over prebuilt cubins takes 44 ms and fits; eight
compilations take 5 s and do not (measured on an H200)."""

UNTABLED_SEARCH_SECONDS = 15.0
"""Default limit of a live search on an arch without a table, seconds. A child process starts in 6 s, and
eight candidates take about 1 s each. Nothing is known of the default there: it may be much slower."""

MOST_SEARCH_SECONDS = 1e6
"""Longest limit of a live search, seconds: 12 days. A wait for a lock takes at most 9.2e9 seconds."""


def table_folders() -> tuple[Path, ...]:
    """Return the folders named by AOT_TUNE_TABLES, in order."""
    return tuple(Path(part) for part in os.environ.get(TABLES, "").split(os.pathsep) if part)


def cache_folder() -> Path | None:
    """Return the folder named by AOT_TUNE_CACHE_DIR; None where it is unset."""
    named = os.environ.get(CACHE_DIR)
    return Path(named) if named else None


def forces_default() -> bool:
    """Whether AOT_TUNE_CONFIG asks for default configs.

    Raises:
        UsageError: It is neither empty nor ``default``.
    """
    value = os.environ.get(CONFIG, "")
    if value not in ("", "default"):
        raise UsageError(f"{CONFIG}={value!r:.80}: write 'default' to launch defaults, or unset it")
    return value == "default"


def search_seconds(default: float = DEFAULT_SEARCH_SECONDS) -> float:
    """Return the limit of a live search, seconds; 0 forbids live searches.

    Args:
        default: The limit where AOT_TUNE_SEARCH_SECONDS is not set.

    Raises:
        UsageError: AOT_TUNE_SEARCH_SECONDS is not a number of seconds.
    """
    value = os.environ.get(SEARCH_SECONDS, "")
    if not value:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_SEARCH_SECONDS:
        raise UsageError(
            f"{SEARCH_SECONDS}={value!r:.80}: write a number of seconds, {MOST_SEARCH_SECONDS:.0f} at most; "
            "0 forbids live searches"
        )
    return seconds


def search_disabled() -> bool:
    """Whether AOT_TUNE_DISABLE_AUTOTUNE, or where unset DISABLE_AUTOTUNE, forbids live searches."""
    return _on(DISABLE_OURS) if os.environ.get(DISABLE_OURS, "").strip() else _on(DISABLE)


def on_miss() -> OnMiss:
    """Return the answer to a miss, a problem that no table answers.

    Raises:
        UsageError: AOT_TUNE_ON_MISS is none of the modes.
    """
    value = os.environ.get(ON_MISS, "").strip() or "search"
    for mode in get_args(OnMiss):
        if value == mode:
            return cast(OnMiss, mode)
    raise UsageError(f"{ON_MISS}={value!r:.80}: write one of {', '.join(get_args(OnMiss))}, or unset it")


def missed_file() -> Path | None:
    """Return the file that AOT_TUNE_RECORD names for problems that missed; None where it is unset."""
    named = os.environ.get(RECORD, "").strip()
    return Path(named) if named else None


def logs_choices() -> bool:
    """Whether AOT_TUNE_LOG asks for each choice to be printed."""
    return _on(LOG)


def batch_invariant() -> bool:
    """Whether AOT_TUNE_BATCH_INVARIANT asks for one config for every batch."""
    return _on(BATCH_INVARIANT)


LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which torchrun, Open MPI, PMI (MPICH, Intel MPI) and srun give a job's number of processes."""


def world_size() -> tuple[str, int]:
    """Return the variable that gives the world size, and the size; 1 where none does.

    AOT_TUNE_RANKED decides alone where it is set; else the first variable of a launcher that is above 1.

    Raises:
        UsageError: AOT_TUNE_RANKED is not a number. The others belong to other programs: where one is not a
            number it is ignored.
    """
    own = os.environ.get(RANKED, "").strip()
    if own:
        if not _is_number(own):
            raise UsageError(f"{RANKED}={own!r:.80}: write the world size, a whole number, or unset it")
        return RANKED, int(own)
    for name in LAUNCHERS:
        size = os.environ.get(name, "").strip()
        if _is_number(size) and int(size) > 1:
            return name, int(size)
    return "", 1


def check() -> None:
    """Refuse variables with a wrong value, so that the first launch reports them.

    Raises:
        UsageError: As `forces_default`, `search_seconds` and `world_size` do.
    """
    for read in CHECKED:
        read()


CHECKED = (forces_default, search_seconds, world_size, on_miss)
"""Functions that raise where their variable has a wrong value."""


_MOST_DIGITS = 18
"""Most digits of a world size. Python refuses to read a number of more than 4300."""


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS


def _on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")
