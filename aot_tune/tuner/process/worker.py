"""A child process that answers requests, and that can be killed and replaced.

The child is forked by the fork server (`aot_tune.tuner.process.fork_server`), never by the parent, because a
fork of a process with threads or CUDA may deadlock. It has the parent's ``sys.path``. Its own parent is a
*guard* (`aot_tune.tuner.process.guard`), a second small process that holds one end of a pipe, the lifeline.
Only the process that asked has the other end: when it closes that end, or dies for whatever reason, the guard
kills the child and its processes.

A child's messages are not trusted, because a kernel may have damaged its memory: messages are JSON of a few
known types (`aot_tune.tuner.process.codec`). A child that sends anything else is killed: a `WorkerDied`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, Literal, get_args

from aot_tune.environment import DISABLE_OURS, RANKED, START_OPTIONS
from aot_tune.errors import TuneError
from aot_tune.tuner.process import fork_server
from aot_tune.tuner.process.codec import MOST_BYTES, MessageError, decode
from aot_tune.tuner.process.worker_main import HEADER, send

START_SECONDS = 120.0
"""Longest start of a child, seconds. Importing torch and creating a CUDA context took 3 to 8 s on a busy
host."""

_REAP_SECONDS = 10.0
"""Longest wait for a killed child to disappear, seconds; the driver first tears down its context."""

_CLOSED_SECONDS = 1.0
"""Longest wait for the end of a child whose pipe has closed, seconds. It may live on."""

_TAIL_BYTES = 4000
"""Bytes of the end of a child's stderr that an error repeats."""

Kind = Literal["ready", "progress", "reply", "error"]
Report = Callable[[object], None]
"""The function that a target calls to send a progress message."""

_ENVIRONMENT = {START_OPTIONS: "", RANKED: "1", DISABLE_OURS: "1"}
"""Variables of every child: it is no part of a program of `aot-tune record` or `run`, no rank whatever
launched its parent, and searches no kernel that a declaration's functions launch."""


class WorkerDied(TuneError):
    """A child ended on its own.

    Attributes:
        code: Its exit code, or minus the number of the signal that killed it; None when it is unknown.
        output: The end of its output to stderr.
        how: The manner of its end, in words.
    """

    def __init__(self, code: int | None, output: str, how: str = "") -> None:
        self.code, self.output, self.how = code, output, how or ending(code)
        super().__init__(f"the worker process {self.how}" + (f": {_last_lines(output)}" if output else ""))


class WorkerTimeout(TuneError):
    """A child was silent for too long. It still runs and must be killed.

    Attributes:
        seconds: The length of the silence, seconds.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"no answer to {what} within {seconds:g} s")


class WorkerSlowStart(WorkerTimeout):
    """A child did not become ready in time. Its first request is not to blame."""


class RemoteError(TuneError):
    """The target raised an exception.

    Attributes:
        kind: The exception's type name.
        message: Its text.
        where: Its traceback in the child.
    """

    def __init__(self, kind: str, message: str, where: str) -> None:
        self.kind, self.message, self.where = kind, message, where
        super().__init__(f"{kind}: {message}")


def ending(code: int | None) -> str:
    """Describe an exit code: ``was killed by SIGKILL``, ``ended with exit code 1``."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Worker:
    """One child process and the object that lives in it.

    Args:
        target: ``package.module:Class``. The child builds ``Class(report, **init)`` and requests call its
            methods. ``report(message)`` sends a progress message. Messages, arguments and answers are values
            of `aot_tune.tuner.process.codec`.
        init: Keyword arguments of the class.
        environment: Variables to set in the child in addition to the parent's.

    Raises:
        TuneError: No temporary file can be made for the child's output.
    """

    def __init__(
        self,
        target: str,
        init: Mapping[str, object] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.ready = False
        """Whether the child has built its target."""
        self._stderr = temporary_file()
        self._cutting = threading.Lock()
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        guard_in, self._lifeline = os.pipe()
        theirs = (child_in, child_out, guard_in)
        try:
            self._process = fork_server.start(
                "aot_tune.tuner.process.worker_main:main",
                theirs,
                self._stderr.fileno(),
                {**os.environ, **_ENVIRONMENT, **(environment or {})},
            )
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._to_child, self._from_child = os.fdopen(to_child, "wb"), from_child
        self._received = bytearray()
        self._last_output = ""
        self._write(target)
        self._write(dict(init or {}))

    @property
    def pid(self) -> int:
        """Process id of the child's guard, with which the child dies."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor on which ``select`` waits for the next message."""
        return self._from_child

    def running(self) -> bool:
        """Return whether the child runs."""
        return self._process.poll() is None

    def output_tail(self) -> str:
        """Return the end of the child's output to stdout and stderr."""
        if self._stderr.closed:
            return self._last_output
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return tail.decode(errors="replace").strip()

    # Messages -----------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float = START_SECONDS) -> None:
        """Wait until the child has built its target.

        Raises:
            WorkerSlowStart: The child was not ready in time.
            WorkerDied: The child ended.
            RemoteError: The target's constructor raised.
        """
        limit = time.monotonic() + timeout_s
        while not self.ready:
            message = self.receive(max(0.0, limit - time.monotonic()))
            if message is None:
                raise WorkerSlowStart("the start of a worker process", timeout_s)
            if message[0] == "error":
                raise RemoteError(*message[1])

    def request(
        self,
        method: str,
        payload: Mapping[str, object],
        timeout_s: float | Callable[[], float],
        on_progress: Callable[[Any], None] | None = None,
    ) -> Any:
        """Call ``target.method(**payload)`` in the child and wait for the returned value.

        Args:
            method: A method of the target.
            payload: Its keyword arguments.
            timeout_s: The longest silence, seconds, or a function that returns the limit of the next silence.
                Each progress message ends a silence. A start does not count.
            on_progress: Called with each progress message.

        Raises:
            WorkerTimeout: The child was silent for longer; it still runs.
            WorkerDied: The child ended before it answered.
            RemoteError: The method raised.
        """
        self.wait_ready()
        self.send(method, payload)
        while True:
            limit_s = timeout_s() if callable(timeout_s) else timeout_s
            message = self.receive(limit_s)
            if message is None:
                raise WorkerTimeout(method, limit_s)
            kind, value = message
            if kind == "reply":
                return value
            if kind == "error":
                raise RemoteError(*value)
            if on_progress is not None:
                on_progress(value)

    def send(self, method: str, payload: Mapping[str, object]) -> None:
        """Send a request without waiting; `receive` returns the answer."""
        self._write((method, dict(payload)))

    def receive(self, timeout_s: float) -> tuple[Kind, Any] | None:
        """Return the next message, or None when none came in time.

        Raises:
            WorkerDied: The child ended, and all of its messages were received; or it sent bytes that are not
                a message, and was killed.
        """
        limit = time.monotonic() + timeout_s
        while True:
            message = self._unpack()
            if message is not None:
                self.ready |= message[0] == "ready"
                return message
            readable, _, _ = select.select([self._from_child], [], [], max(0.0, limit - time.monotonic()))
            if not readable:
                return None
            data = os.read(self._from_child, 1 << 16)
            if not data:
                raise self._died()
            self._received += data

    def _unpack(self) -> tuple[Kind, Any] | None:
        if len(self._received) < HEADER:
            return None
        size = int.from_bytes(self._received[:HEADER], "little")
        if size > MOST_BYTES:
            raise self._garbled(f"a length of {size} bytes")
        end = HEADER + size
        if len(self._received) < end:
            return None
        try:
            message = _checked(decode(bytes(self._received[HEADER:end])))
        except MessageError as error:
            raise self._garbled(str(error)) from error
        del self._received[:end]
        return message

    def _garbled(self, what: str) -> WorkerDied:
        """Kill a child after an unreadable message: the start of the next message is unknown."""
        self.kill()
        return WorkerDied(None, self._last_output, f"sent an invalid message and was killed ({what})")

    def _write(self, message: object) -> None:
        try:
            send(self._to_child, message)
        except BrokenPipeError:
            raise self._died() from None

    def _died(self) -> WorkerDied:
        """Describe the end of a child whose pipe has closed; kill a child that lives on."""
        how = ""
        try:
            self._process.wait(_CLOSED_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            how = f"closed its pipe and {ending(self._process.returncode)}"
        return WorkerDied(self._process.returncode, self.output_tail(), how)

    # Ending -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the child and all processes that it started. May be called repeatedly, also after its end."""
        self.interrupt()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # a child stuck in the driver cannot be waited for
            self._process.kill()
        self._last_output = self.output_tail()
        for close in (self._to_child.close, self._stderr.close):
            with suppress(OSError, ValueError):
                close()
        if self._from_child >= 0:
            os.close(self._from_child)
            self._from_child = -1

    def interrupt(self) -> None:
        """End the child. A thread that waits for its answer gets a `WorkerDied`."""
        with self._cutting:
            lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)  # the guard kills all below it
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def temporary_file(folder: str | None = None) -> IO[bytes]:
    """Open an unnamed file, in the system's temporary folder unless another is given.

    Raises:
        TuneError: It cannot be created; the message names the variable to set.
    """
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        where = folder or tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise TuneError(
            f"temporary folder {where} cannot be written ({error.strerror}); set TMPDIR to one that can be"
        ) from error


def _checked(message: Any) -> tuple[Kind, Any]:
    if not (isinstance(message, list) and len(message) == 2 and message[0] in get_args(Kind)):
        raise MessageError("not a pair of a kind and a value")
    kind, value = message
    if kind == "error" and not (isinstance(value, list) and [type(part) for part in value] == [str] * 3):
        raise MessageError("an error without its three texts")
    return kind, value


def _last_lines(text: str, most: int = 5) -> str:
    return "\n".join(text.splitlines()[-most:])
