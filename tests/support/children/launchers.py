"""What launches configs ahead of a library's process, as scripted, by the last argument, the tile."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from aot_tune.replay.fit import hash_now, kernel_of


class Launcher:
    """Lives through each tile but 64."""

    BAD = 64

    def __init__(self, report: Callable[[object], None], device: int) -> None:
        self.launched: list[int] = []

    def hash_of(self, module: str, name: str) -> str:
        return hash_now(kernel_of(module, name))

    def launch(self, **request: Any) -> None:
        assert request["cubin"].read_bytes()[:4] == b"\x7fELF"
        assert request["contents"].exists()
        if request["args"][-1]["value"] == self.BAD:
            self.bad()

    def bad(self) -> None:
        sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
        os._exit(86)


class Hangs(Launcher):
    """Hangs at the tile of 64."""

    def bad(self) -> None:
        time.sleep(600)


class Interrupted(Launcher):
    """Is ended by somebody at the tile of 64."""

    def bad(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


class Refuses(Launcher):
    """Has no memory for the tile of 64."""

    def bad(self) -> None:
        raise MemoryError("no room")


class OtherCode(Launcher):
    """Imports other code."""

    def hash_of(self, module: str, name: str) -> str:
        return "0" * 16


class NoGpu(Launcher):
    """Does not start."""

    def __init__(self, report: Callable[[object], None], device: int) -> None:
        raise RuntimeError("no CUDA-capable device is detected")
