"""Search unchecked configs in a separate process that can be killed: the parent's code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from aot_tune import environment
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import module_of
from aot_tune.errors import TableError
from aot_tune.serve.search.trial import Winner
from aot_tune.tables import strict_json
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

MOST_CANDIDATES = 8
"""Most candidates of a search without a table."""

_START_S = 6.0
"""Seconds to start a process that imports torch and cuda.tile and makes a CUDA context."""

_CANDIDATE_S = 1.0
"""Seconds to compile, check and time one candidate."""

_START = (
    "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; "
    "from aot_tune.serve.search.child_main import main; main()"
)
"""Program of the child. Python puts the current folder first on ``sys.path`` for ``-m`` and ``-c``, so the
first statement replaces the path with this process's: a file in that folder must not pass for a module."""


def few(limit_s: float) -> int:
    """Return the number of candidates that fit the time limit; 0 where the process's start takes longer."""
    return max(0, min(MOST_CANDIDATES, int((limit_s - _START_S) / _CANDIDATE_S)))


def fastest(
    tunable: Declaration,
    problem: Problem,
    configs: Sequence[Config],
    *,
    device_index: int,
    limit_s: float,
) -> Winner | None:
    """Check and time configs on generated arguments; None where the child fails or exceeds the limit."""
    module = module_of(tunable)
    if module in (None, "__main__"):  # another process cannot import it
        return None
    request = {
        "module": module,
        "kernel": tunable.name,
        "device": device_index,
        "problem": dict(problem),
        "configs": [config.document for config in configs],
    }
    answer = run(command(), json.dumps(request).encode(), limit_s)
    if answer is None:
        return None
    try:
        document = strict_json.loads(answer)
        strict_json.check_keys(document, "", ("best", "mean_us"))
        mean_us = strict_json.as_number(document["mean_us"], "mean_us", zero=False)
        return configs[int(document["best"])], mean_us
    except (TableError, ValueError, TypeError, IndexError):
        return None


def command() -> list[str]:
    """Return the command that starts the child; it ignores the environment where this process does."""
    ignored = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    options = (option for option, is_set in ignored.items() if is_set)
    return [sys.executable, *options, "-c", _START, *_import_path()]


def _import_path() -> list[str]:
    """Return the folders of ``sys.path``: an empty text is the current folder; Python skips other types."""
    path = [folder for folder in sys.path if isinstance(folder, str)]
    try:
        return [folder or os.getcwd() for folder in path]
    except OSError:  # the current folder was removed
        return [folder for folder in path if folder]


def run(command: Sequence[str], request: bytes, limit_s: float) -> bytes | None:
    """Return a command's output; None where it fails, or is killed with its children at the limit."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, environment.DISABLE: "1", environment.CONFIG: "default"},
            start_new_session=True,
        )
    except OSError:
        return None
    started = time.monotonic()
    try:
        answer, _ = process.communicate(request, timeout=limit_s)
        return answer if process.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A process inside the driver may take long to die, so the wait is bounded.
            process.communicate(timeout=max(1.0, limit_s - (time.monotonic() - started)))
