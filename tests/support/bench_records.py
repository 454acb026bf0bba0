"""Provenance of made-up bench results."""

from __future__ import annotations

from aot_tune.bench.records import MadeWith

MADE = MadeWith(
    device="NVIDIA H200", arch="sm90", driver="580.1", cuda_tile="1.7.0", tileiras="13.4.92",
    torch="2.11.0", python="3.12.3", cores=16, date="2026-01-31", command="aot-tune bench launch --record",
)  # fmt: skip
