"""Fail once for all violations of a rule that a loop has found."""

from __future__ import annotations

from collections.abc import Iterable


def assert_none(violations: Iterable[str]) -> None:
    """Fail where there are violations, and show each on a line of its own."""
    lines = list(violations)
    assert not lines, "\n" + "\n".join(lines)
