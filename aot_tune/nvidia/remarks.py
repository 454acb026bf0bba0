"""Read the compiler's remarks on a kernel: which instructions it chose, and what it could not do. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_RECORD = re.compile(r"^--- !(\w+)\n(.*?)^\.\.\.$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  - (\w+): +(.*)$", re.MULTILINE)
_NAME = re.compile(r"^Name: +(.*)$", re.MULTILINE)

_UNTOLD = ("RemarkId", "Remark")
"""Fields that are no detail."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A remark of the compiler."""

    kind: str
    """Whether it concerns an optimisation that was made (``Passed``), or failed (``Failure``, ``Missed``)."""

    name: str
    """Name of its kind, ``RemarkTensorCoreMMA``."""

    text: str
    """The remark in words, with its details."""

    times: int
    """Number of places with the same remark."""

    @property
    def failed(self) -> bool:
        """Return whether the compiler could not do something."""
        return self.kind in ("Failure", "Missed")


def remarks_of(text: str) -> tuple[Remark, ...]:
    """Read the remarks of a file as the compiler writes it (``--remark-format=yaml``), failures first."""
    found: Counter[tuple[str, str, str]] = Counter()
    for kind, body in _RECORD.findall(text):
        name = match[1].strip() if (match := _NAME.search(body)) else ""
        fields = {key: value.strip().strip("'\"") for key, value in _FIELD.findall(body)}
        details = ", ".join(value for key, value in fields.items() if key not in _UNTOLD)
        title = fields.get("Remark", name)
        found[kind, name, f"{title}: {details}" if details else title] += 1
    remarks = [
        Remark(kind=kind, name=name, text=text, times=times) for (kind, name, text), times in found.items()
    ]
    return tuple(sorted(remarks, key=lambda remark: not remark.failed))
