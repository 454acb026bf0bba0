"""Search unchecked configs in a separate process that can be killed: the parent's code.

The process stays for the next search, so that only the first waits for its start.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from aot_tune import environment
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import TableError
from aot_tune.serve.fork import ForkSafe
from aot_tune.serve.search.trial import Winner
from aot_tune.tables import strict_json
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

MOST_CANDIDATES = 8
"""Most candidates of a search without a table."""

TOTAL_S = 120.0
"""Seconds that the searches of all kernels of a process may take together, unless one may take longer."""

FREE_BYTES = 2 << 30
"""Least bytes of a GPU's memory that are free for a search: a CUDA context takes 0.5 GiB, and there are the
arguments."""

_START_S = 6.0
"""Seconds to start a process that imports torch and cuda.tile and makes a CUDA context."""

_CANDIDATE_S = 1.0
"""Seconds to compile, check and time one candidate."""

_ALONE = {environment.DISABLE: "1", environment.DISABLE_OURS: "1", environment.CONFIG: "default"}
"""Environment of the child: kernels that `make_args` or `reference` launch are not searched either."""

_MOST_ANSWER = 4096
"""Most bytes that are read of an answer at a time."""

_START = (
    "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; "
    "from aot_tune.serve.search.child_main import main; main()"
)
"""Program of the child. Python puts the current folder first on ``sys.path`` for ``-m`` and ``-c``, so the
first statement replaces the path with this process's: a file in that folder must not pass for a module."""


def seconds_left(limit_s: float) -> float:
    """Return the time limit of a search that begins now: `limit_s`, or less of this process's total."""
    return max(0.0, min(limit_s, max(limit_s, TOTAL_S) - _spent_s[0]))


def few(limit_s: float) -> int:
    """Return the number of candidates that fit the time limit; 0 where the process's start takes longer."""
    start_s = 0.0 if _running() is not None else _START_S
    return max(0, min(MOST_CANDIDATES, int((limit_s - start_s) / _CANDIDATE_S)))


def fastest(
    tunable: Declaration,
    problem: Problem,
    configs: Sequence[Config],
    *,
    device_index: int,
    limit_s: float,
) -> Winner | None:
    """Check and time configs on generated arguments; None where the child fails or exceeds the limit."""
    from aot_tune.declare.discovery import module_of  # 2 ms, which only a search without a table takes

    module = module_of(tunable)
    if module in (None, "__main__"):  # another process cannot import it
        return None
    request = {
        "module": module,
        "kernel": tunable.name,
        "device": device_index,
        "problem": dict(problem),
        "configs": [config.document for config in configs],
        "limit_s": limit_s,
    }
    answer = _asked(json.dumps(request).encode(), limit_s)
    if answer is None:
        return None
    try:
        document = strict_json.loads(answer)
        strict_json.check_keys(document, "", ("best", "mean_us"))
        mean_us = strict_json.as_number(document["mean_us"], "mean_us", zero=False)
        return configs[int(document["best"])], mean_us
    except (TableError, ValueError, TypeError, IndexError):
        return None


_turn = ForkSafe()
_kept: list[Child] = []
"""Child that waits for the next search of this process, whatever its kernel."""
_spent_s = [0.0]
"""Seconds that this process's searches took so far."""


def _running() -> Child | None:
    """Return the child of this process; None where it has ended, or would import from other folders."""
    child = _kept[0] if _kept else None
    return child if child is not None and child.is_usable(command()) else None


def _asked(request: bytes, limit_s: float) -> bytes | None:
    """Ask the child, which is started if need be; a child that fails or is late is killed.

    The time limit holds the wait for other threads' searches, and is cut to what the process has left.
    """
    began, turn = time.monotonic(), _turn.lock
    if not turn.acquire(timeout=limit_s):
        return None
    try:
        started = time.monotonic()
        left_s = seconds_left(environment.search_seconds(environment.UNTABLED_SEARCH_SECONDS))
        limit_s = min(limit_s - (started - began), left_s)
        return _answer(request, limit_s) if limit_s > 0 else None
    finally:
        _spent_s[0] += time.monotonic() - started
        turn.release()


def _answer(request: bytes, limit_s: float) -> bytes | None:
    child = _running()
    try:
        if child is None:
            _close()
            child = Child(command())
            _kept[:] = [child]
        answer = child.ask(request, limit_s)
    except OSError:
        answer = None
    if answer is None:
        _close()
    return answer


def _close() -> None:
    for child in _kept:
        child.close()
    _kept.clear()


atexit.register(_close)


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


class Child:
    """Process that answers requests, a line each, on its standard streams.

    Args:
        command: The command that starts it.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command, self._parent = command, os.getpid()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ALONE},
            start_new_session=True,
            bufsize=0,
        )

    def is_usable(self, command: Sequence[str]) -> bool:
        """Whether it runs, and was started by this command and this process, not by one that forked it."""
        known = self._command == command and self._parent == os.getpid()
        return known and self._process.poll() is None

    def ask(self, request: bytes, limit_s: float) -> bytes | None:
        """Return the answer to a request; None where the child ends or the time does.

        Raises:
            OSError: It ended before it read the request.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        end, answer = time.monotonic() + limit_s, b""
        self._process.stdin.write(request + b"\n")
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                ready = selector.select(max(0.0, end - time.monotonic()))
                part = self._process.stdout.read(_MOST_ANSWER) if ready else b""
                if not part:
                    return None
                answer += part
        return answer

    def close(self) -> None:
        """Kill it with all it started; leave the child of a parent that this process was forked from."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        if self._parent != os.getpid():
            return
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)  # a process inside the driver may take long to die
