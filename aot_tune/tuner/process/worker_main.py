"""The child's half of a `Worker`: builds the target and answers requests, below a guard."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import Any, BinaryIO

from aot_tune.tuner.process.codec import MOST_BYTES, MessageError, decode, encode
from aot_tune.tuner.process.guard import guarded

HEADER = 8
"""Size of a message's length field, which precedes the message, bytes."""

_MOST_TEXT = 100_000
"""Most characters to send of an error's message and of its traceback."""


def send(pipe: BinaryIO, message: object) -> None:
    """Write one whole message.

    Raises:
        MessageError: The message has a part that cannot be sent; nothing was written.
    """
    data = encode(message)
    pipe.write(len(data).to_bytes(HEADER, "little") + data)
    pipe.flush()


def _next(pipe: BinaryIO) -> Any:
    header = pipe.read(HEADER)
    if len(header) < HEADER:
        raise EOFError
    size = int.from_bytes(header, "little")
    if size > MOST_BYTES:
        raise MessageError(f"a request has {size} bytes")
    return decode(pipe.read(size))


def main(requests_from: int, replies_to: int, lifeline: int) -> None:
    """Build the target, then answer requests until the parent closes the pipe. Takes descriptors."""
    guarded(lifeline, (requests_from, replies_to))  # returns in a process of its own
    for descriptor in (requests_from, replies_to):
        # A compiler that inherited them and outlived this process would keep the pipes open.
        os.set_inheritable(descriptor, False)
    requests, replies = os.fdopen(requests_from, "rb"), os.fdopen(replies_to, "wb")
    try:
        module, _, attribute = str(_next(requests)).partition(":")
        target = getattr(import_module(module), attribute)
        # The target's module, imported above, registers the types of the arguments.
        served = target(lambda message: send(replies, ("progress", message)), **_next(requests))
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
    # A private type is sent as its public base: the other side identifies errors by name.
    kind = next(base.__name__ for base in type(error).__mro__ if not base.__name__.startswith("_"))
    return kind, str(error)[:_MOST_TEXT], traceback.format_exc()[-_MOST_TEXT:]
