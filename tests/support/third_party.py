"""Somebody else's installed package that declares kernels, in a module that may be broken."""

from __future__ import annotations

from pathlib import Path

from aot_tune.declare import discovery


def installed(folder: Path, text: str | None) -> None:
    """A distribution whose entry point names a module of `text`, or none, in a folder on the path."""
    if text is not None:
        (folder / "thirdlib").mkdir()
        (folder / "thirdlib" / "__init__.py").write_text("")
        (folder / "thirdlib" / "kernels.py").write_text(text)
    info = folder / "Third_Lib-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Third-Lib\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{discovery.GROUP}]\nthird = thirdlib.kernels\n")
