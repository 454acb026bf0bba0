"""The child process that launches a library's configs first, in a CUDA context of its own. It may die."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import has_symbol
from aot_tune.replay.fit import hash_now, kernel_of
from aot_tune.replay.record.arguments import rebuilt

BROKEN = 86
"""The exit code of a child whose CUDA context a config has left broken."""


class Launcher:
    """Answers the requests of `aot_tune.replay.record.ahead.Ahead`.

    Args:
        report: Sends a progress message; none is sent.
        device: The GPU's number.
    """

    def __init__(self, report: Callable[[object], None], device: int) -> None:
        self._device = torch.device("cuda", device)
        torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)  # makes the context
        self._kernels: list[Any] = []
        """Kernels that were launched: cuTile must not lose one."""

    def hash_of(self, module: str, name: str) -> str:
        """Import a kernel, and return its source hash; empty where it cannot be hashed.

        Raises:
            UsageError: The module cannot be imported, or has no such kernel.
        """
        return hash_now(kernel_of(module, name))

    def launch(
        self,
        module: str,
        name: str,
        hints: Mapping[str, int],
        cubin: Path,
        symbol: str,
        grid: Sequence[int],
        args: Sequence[Any],
        contents: Path,
    ) -> None:
        """Launch one config from its cubin on arguments like the library's, and wait for it.

        Ends the process with `BROKEN` where nothing can be launched after it.
        """
        code = cubin.read_bytes()
        made = cutile.Cubin(code, symbol) if has_symbol(code, symbol) else None
        kernel = cutile.with_hints(kernel_of(module, name), hints, cubins=lambda signature, arch: made)
        self._kernels.append(kernel)
        built = rebuilt(args, torch.load(contents, weights_only=True), self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        try:
            cutile.launch(stream, tuple(grid), kernel, built)
            torch.cuda.synchronize(self._device)
        except Exception as error:
            if self._is_broken():
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                os._exit(BROKEN)
            raise

    def _is_broken(self) -> bool:
        try:
            torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)
        except Exception:  # torch and the driver raise several types; each means a dead context
            return True
        return False
