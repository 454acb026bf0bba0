"""Parse, order and print GPU architectures. Pure: it never looks at this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from aot_tune.errors import ArchError

_NAME = re.compile(r"(?:sm_?|compute_?)?([1-9][0-9]{1,2})[af]?", re.IGNORECASE)
_DOTTED = re.compile(r"([1-9][0-9]?)\.([0-9])")


@dataclass(frozen=True, order=True)
class Arch:
    """A GPU architecture such as ``sm90``. Ordered by compute capability."""

    major: int
    """Compute capability, major."""

    minor: int
    """Compute capability, minor."""

    @classmethod
    def parse(cls, name: str | Sequence[int] | Arch) -> Arch:
        """Read ``sm90``, ``sm_90``, ``90``, ``90a``, ``9.0`` or ``(9, 0)``.

        Raises:
            ArchError: `name` is not an architecture that cuTile compiles for.
        """
        if isinstance(name, Arch):
            return name
        arch: Arch | None = None
        if isinstance(name, str):
            if dotted := _DOTTED.fullmatch(name.strip()):
                arch = cls(int(dotted[1]), int(dotted[2]))
            elif plain := _NAME.fullmatch(name.strip()):
                arch = cls(int(plain[1][:-1]), int(plain[1][-1]))
        elif (
            isinstance(name, tuple | list) and len(name) == 2 and all(type(number) is int for number in name)
        ):
            arch = cls(*name)
        if arch is None:
            raise ArchError(f"{name!r:.80} is not a GPU architecture; write one of {_known_names()}")
        if arch not in KNOWN_ARCHS:
            raise ArchError(f"cuTile does not compile for {name!r:.80}; write one of {_known_names()}")
        return arch

    def __str__(self) -> str:
        return f"sm{self.major}{self.minor}"

    @property
    def cutile_name(self) -> str:
        """Name in cuTile and its compiler, such as ``sm_90``."""
        return f"sm_{self.major}{self.minor}"


KNOWN_ARCHS: tuple[Arch, ...] = tuple(
    Arch(*capability)
    for capability in (
        (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1),
    )
)  # fmt: skip
"""Architectures that tileiras 13.4 compiles for, oldest first."""


def _known_names() -> str:
    return " ".join(str(arch) for arch in KNOWN_ARCHS)
