"""Launch a library's configs first, in a child process with its own CUDA context. The child may die."""

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
"""Exit code of a child whose CUDA context a config has broken."""


class Launcher:
    """Answers the requests of `aot_tune.replay.record.ahead.Ahead`.

    Args:
        report: Sends a progress message. It is not used.
        device: The GPU's number.
    """

    def __init__(self, report: Callable[[object], None], device: int) -> None:
        self._device = torch.device("cuda", device)
        torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)  # makes the context
        self._kernels: list[Any] = []
        """Launched kernels, kept because cuTile must not lose one."""

    def hash_of(self, module: str, name: str) -> str:
        """Import a kernel and return its source hash; empty where it cannot be hashed.

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
        """Launch a config from its cubin on arguments like the library's, and wait for its end.

        Ends the process with `BROKEN` where nothing can be launched after it.
        """
        code = cubin.read_bytes()
        loaded = cutile.Cubin(code, symbol) if has_symbol(code, symbol) else None
        kernel = cutile.with_hints(kernel_of(module, name), hints, cubins=lambda signature, arch: loaded)
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
