"""One file a shipped kernel: what the tests of every kernel ask for, a `KernelCase` called ``CASE``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from tests.support.kernel_case import KernelCase

CASES: Mapping[str, KernelCase] = {
    path.stem: import_module(f"{__name__}.{path.stem}").CASE
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))
}
"""By the kernel's name."""
