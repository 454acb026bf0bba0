"""The child's half of a `Worker`: build the target, answer requests, fork the guard."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from importlib import import_module
from typing import Any, BinaryIO

HEADER = 8
"""Size of a message's length field, which precedes its pickle, bytes."""


def send(pipe: BinaryIO, message: object) -> None:
    """Write one whole message."""
    data = pickle.dumps(message)
    pipe.write(len(data).to_bytes(HEADER, "little") + data)
    pipe.flush()


def _next(pipe: BinaryIO) -> Any:
    header = pipe.read(HEADER)
    if len(header) < HEADER:
        raise EOFError
    return pickle.loads(pipe.read(int.from_bytes(header, "little")))


def main(requests_from: int, replies_to: int, lifeline: int) -> None:
    """Build the target, then answer requests until the parent closes the pipe. Takes descriptors."""
    _guard(lifeline, (requests_from, replies_to))
    os.close(lifeline)
    for descriptor in (requests_from, replies_to):
        # A compiler that inherited them and outlived this process would keep the pipes open.
        os.set_inheritable(descriptor, False)
    requests, replies = os.fdopen(requests_from, "rb"), os.fdopen(replies_to, "wb")
    try:
        name, init = _next(requests)
        module, _, attribute = name.partition(":")
        target = getattr(import_module(module), attribute)
        served = target(lambda message: send(replies, ("progress", message)), **init)
        send(replies, ("ready", None))
        _serve(served, requests, replies)
    except (EOFError, BrokenPipeError):
        pass  # the parent has ended or closed the pipes
    except Exception as error:
        traceback.print_exc()
        send(replies, ("error", _described(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not sys.exit: the clean-up of a library may hang or abort on a dead GPU context


def _serve(target: object, requests: BinaryIO, replies: BinaryIO) -> None:
    while True:
        method, payload = _next(requests)
        try:
            send(replies, ("reply", getattr(target, method)(**payload)))
        except BrokenPipeError:
            raise
        except Exception as error:
            send(replies, ("error", _described(error)))


def _described(error: Exception) -> tuple[str, str, str]:
    return type(error).__name__, str(error), traceback.format_exc()


def _guard(lifeline: int, others: tuple[int, ...]) -> None:
    """Fork the guard, which waits until the parent's end of `lifeline` closes and then kills this group."""
    group = os.getpid()
    if os.fork():
        return
    try:
        os.setpgid(0, 0)  # out of the group that it will kill
        for descriptor in (0, 1, 2, *others):
            os.close(descriptor)
        os.read(lifeline, 1)
        os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)
