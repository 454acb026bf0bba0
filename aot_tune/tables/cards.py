"""What is known of tables on another card of their arch than the one that they were measured on. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from aot_tune.tables.table import Table

_KNOWN = {
    ("NVIDIA H200", "NVIDIA H100 80GB HBM3"): (
        "at 620 sizes that nobody declared, shipped kernels were 2.2 % slower with them than with the best "
        "of the portfolio, in the geometric mean, and matmul 2.5 %"
    ),
}
"""What was measured, by the names of the tables' card and of the one here."""


def measured_on(tables: Iterable[Table]) -> tuple[str, ...]:
    """The names of the cards that tables were measured on, in order; predictions name none."""
    measured = (one for one in tables if any(entry.evidence == "measured" for entry in one.entries))
    return tuple(dict.fromkeys(one.built_with.device_name for one in measured))


def other_card(made: str, here: str) -> str | None:
    """The sentence about tables of one card that serve another one; None where both are the same.

    Args:
        made: The name of the card that the tables were measured on, as the driver gives it.
        here: The name of the card here.
    """
    if made == here:
        return None
    known = _KNOWN.get((made, here), "how much slower its choices are here was not measured")
    return (
        f"tables were measured on another card of the arch: {made}, and this is {here}. They are used; "
        f"{known}. In a checkout aot-tune bench regret measures it here, and aot-tune tune KERNEL makes "
        "tables of this card. Choices between configs that are expected to be as fast follow the card: ranks "
        "of one job should be on cards of one model"
    )
