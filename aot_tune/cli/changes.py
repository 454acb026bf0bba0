"""The words and marks for entries that changed between two tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kind = Literal["added", "removed", "config", "figures"]
"""How an entry changed: it was added, it was removed, another config won, or only its figures differ."""

SIGNS: Mapping[Kind, str] = {"added": "+", "removed": "-", "config": "!", "figures": "~"}
"""The mark that an entry's line begins with."""

WORDS: Mapping[Kind, str] = {
    "added": "added",
    "removed": "removed",
    "config": "with another config",
    "figures": "with other figures only",
}
"""The words that the summary counts the changes with."""
