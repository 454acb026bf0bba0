"""Start child processes as forks of a process that has imported torch, in milliseconds instead of seconds.

The *fork server* is a fresh interpreter that imports torch, 2 to 3 s of CPU time in each process, and then
forks a child for each request. It is no fork of the process that asks, which may have threads or CUDA; it
imports nothing else, never touches a GPU, and ends when the process that asks has ended. Each child gets its
own environment, ``sys.path``, current folder and output.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module, invalidate_caches
from typing import Any, NoReturn

_START = (
    "import sys; number = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from aot_tune.tuner.process.fork_server import serve; serve(number)"
)
"""The server's program. It is not started with ``-m``, which puts a folder first on ``sys.path`` that could
hide a module."""

_WORD = 8
"""Bytes of a number on a pipe: a length, a process id or a wait status."""

_AT_IMPORT = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "LD_")
"""How variables begin that a process reads when it starts or imports torch: where one has changed, another
server is started."""


class Child:
    """A forked child, with the methods of `subprocess.Popen` that a `Worker` uses.

    Args:
        news: A pipe from the server: the child's process id, then its wait status. Closed when the child's
            end is known.
    """

    def __init__(self, news: int) -> None:
        self._news, self._pid = news, 0
        self.returncode: int | None = None
        """Exit code, or minus the number of the signal that killed it; None while it runs."""

    @property
    def pid(self) -> int:
        """Process id; waits until the child has been forked. 0 where the server ended before."""
        if not self._pid and self.returncode is None:
            self._pid = self._read() or 0
        return self._pid

    def poll(self) -> int | None:
        """Return the exit code, None while the child runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: The child runs after `timeout` seconds.
        """
        limit = time.monotonic() + timeout
        while self.returncode is None:
            if not select.select([self._news], [], [], max(0.0, limit - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired("a forked child", timeout)
            if not self._pid:
                self._pid = self._read() or 0
            elif (status := self._read()) is not None:
                self._ends(os.waitstatus_to_exitcode(status))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to a child that was forked and runs."""
        if self._pid and self.poll() is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        """Kill a child that was forked and runs."""
        self.send_signal(signal.SIGKILL)

    def _read(self) -> int | None:
        """Return the next number; None, and the child counts as killed, where the server has ended."""
        word = os.read(self._news, _WORD)  # written whole, being shorter than a pipe's page
        if word:
            return int.from_bytes(word, "little")
        self._ends(-signal.SIGKILL)
        return None

    def _ends(self, code: int) -> None:
        self.returncode = code
        os.close(self._news)


class _Server:
    """The fork server of this process.

    Args:
        environment: Its variables.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._owner, self._at_import = os.getpid(), _at_import(environment)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), *map(os.path.abspath, sys.path)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),), env=environment, start_new_session=True,
            )  # fmt: skip

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether this process may have children with such variables from it."""
        return self._owner == os.getpid() and self._at_import == _at_import(environment)

    def send(self, request: bytes, descriptors: Sequence[int]) -> None:
        """Ask for a child.

        Raises:
            OSError: The server has ended.
        """
        socket.send_fds(self._socket, [len(request).to_bytes(_WORD, "little")], descriptors)
        self._socket.sendall(request)

    def close(self) -> None:
        """Let the server end when its children have ended."""
        self._socket.close()
        self.process.returncode = 0  # nobody waits for it


def _at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_IMPORT)}


_lock = threading.Lock()
_server: _Server | None = None


@atexit.register
def _close() -> None:
    if _server is not None:
        _server.close()


def start(function: str, descriptors: Sequence[int], output: int, environment: Mapping[str, str]) -> Child:
    """Start a child, which may be forked later.

    Args:
        function: The ``package.module:function`` that the child calls with its descriptors and never leaves.
        descriptors: What the child inherits, under other numbers.
        output: The descriptor of its stdout and stderr.
        environment: Its variables.

    Raises:
        OSError: No server can be started.
    """
    folder = "/"
    with suppress(OSError):  # the current folder was removed
        folder = os.getcwd()
    path = list(map(os.path.abspath, sys.path))
    request = json.dumps([function, dict(environment), path, folder]).encode()
    news, theirs = os.pipe()
    try:
        _ask(environment, request, [theirs, output, *descriptors])
    except BaseException:
        os.close(news)
        raise
    finally:
        os.close(theirs)
    return Child(news)


def _ask(environment: Mapping[str, str], request: bytes, descriptors: Sequence[int]) -> None:
    """Send the server a request; start one where there is none, or none any more."""
    global _server
    with _lock:
        if _server is not None and _server.serves(environment):
            with suppress(OSError):
                return _server.send(request, descriptors)
        if _server is not None:
            _server.close()
        _server = _Server(environment)
        try:
            _server.send(request, descriptors)
        except BaseException:  # half a request
            _server.close()
            _server = None
            raise


# The server -------------------------------------------------------------------------------------------------


def serve(number: int) -> None:
    """Fork a child for each request of a socket, until it is closed and all children have ended."""
    requests = socket.socket(fileno=number)
    with suppress(Exception):  # a child that needs torch says what is wrong with it
        import_module("torch")
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    """Process ids, and the pipes to whom their ends are reported."""
    listening = True
    while listening or children:
        watched: list[Any] = [requests, woken] if listening else [woken]
        readable, _, _ = select.select(watched, [], [])
        if woken in readable:
            os.read(woken, 4096)
            _reap(children)
        if requests in readable:
            listening = _fork(requests, (woken, wake), children)


def _reap(children: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            news = children.pop(ended[0])
            with suppress(OSError):  # nobody wants to know
                os.write(news, ended[1].to_bytes(_WORD, "little"))
            os.close(news)


def _fork(requests: socket.socket, own: Sequence[int], children: dict[int, int]) -> bool:
    """Fork a child for the next request; return False where the socket was closed."""
    word, received, _, _ = socket.recv_fds(requests, _WORD, 16)
    if not word:
        return False
    request = bytearray()
    while missing := int.from_bytes(word, "little") - len(request):
        if not (part := requests.recv(missing)):
            return False
        request += part
    news, *descriptors = received
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's threads are idle, and forks of them are safe
            child = os.fork()
        if not child:
            _become(json.loads(request), descriptors, [requests.detach(), *own, news, *children.values()])
        os.write(news, child.to_bytes(_WORD, "little"))
        children[child] = news
    except OSError:  # no process can be started, or nobody waits for it any more
        os.close(news)
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def _become(request: Any, descriptors: Sequence[int], not_its: Sequence[int]) -> NoReturn:
    """Be the child of a request."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in not_its:
            os.close(descriptor)
        os.setsid()
        output, *its = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        function, environment, path, folder = request
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        with suppress(OSError):
            os.chdir(folder)
        invalidate_caches()
        module, _, name = function.partition(":")
        getattr(import_module(module), name)(*its)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
