"""Describe tables that serve another GPU model than the one they were measured on. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from aot_tune.tables.table import Table

_KNOWN = {
    ("NVIDIA H200", "NVIDIA H100 80GB HBM3"): (
        "at 620 sizes that nobody declared, shipped kernels were 2.2 % slower with their edition of 27 "
        "November 2026 than with the best of the portfolio, in the geometric mean, and matmul 2.5 %"
    ),
}
"""Measured slowdown, by the names of the tables' GPU model and of this machine's."""


def measured_on(tables: Iterable[Table]) -> tuple[str, ...]:
    """Return the names of the GPU models that tables were measured on, in order; predictions name none."""
    measured = (table for table in tables if any(entry.evidence == "measured" for entry in table.entries))
    return tuple(dict.fromkeys(table.built_with.device_name for table in measured))


def other_gpu_model(made: str, here: str) -> str | None:
    """Return a sentence on tables that serve another GPU model; None where both are the same.

    Args:
        made: The name of the GPU model that the tables were measured on, as the driver gives it.
        here: The name of this machine's GPU model.
    """
    if made == here:
        return None
    known = _KNOWN.get((made, here), "how much slower its choices are on this one was not measured")
    return (
        f"tables were measured on another GPU model of the arch: {made}, and this is {here}. They are used; "
        f"{known}. In a checkout aot-tune bench regret measures it here, and aot-tune tune KERNEL makes "
        "tables for this model. Choices between configs that are expected to be as fast depend on the model: "
        "ranks of one job should run on GPUs of one model"
    )
