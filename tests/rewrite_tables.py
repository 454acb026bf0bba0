"""Rewrite all shipped tables in the present form: ``python -m tests.rewrite_tables``.

Whoever changes a key of the tables adds to `renamed` how its value follows from the former keys, runs this
script, and commits the tables together with the change. Later changes replace what earlier ones added.
"""

from __future__ import annotations

from pathlib import Path

from aot_tune.choose.left_out import fitted_slopes
from aot_tune.declare.discovery import OWN_KERNELS, find_tunables
from aot_tune.declare.fingerprint.hashing import check_hash
from aot_tune.tables import files, writer
from aot_tune.tables.reader import TABLE
from aot_tune.tables.strict_json import Json, loads
from aot_tune.tables.table import SCHEMA

SHIPPED = Path(__file__).parents[1] / "tuned_configs"


def renamed(document: Json) -> Json:
    """The table with the present keys, made from the former ones.

    The declaration's check has not changed, and slopes are fitted to the points.
    """
    tunable = find_tunables([OWN_KERNELS])[document["kernel"]].tunable
    known = {"check_hash": check_hash(tunable)} | document
    table = TABLE.read(TABLE.known(known, set()) | {"schema": SCHEMA})
    slopes = table.slopes or fitted_slopes(tunable, table)
    return (
        known
        if slopes is None
        else known | {"slopes": {name: [*own] for name, own in slopes._asdict().items()}}
    )


def rewritten(data: bytes) -> bytes:
    """The bytes of a declared kernel's table in the present form; former keys are left out.

    Raises:
        TableError: The table lacks a key, or a value has another form.
    """
    document = TABLE.known(renamed(loads(data)), set())
    return writer.dump(TABLE.read(document | {"schema": SCHEMA}))


def main() -> None:
    """Rewrite the tables, and print the path of each one that changed."""
    for path in sorted(SHIPPED.glob("*/*.json")):
        before = path.read_bytes()
        after = rewritten(before)
        if after != before:
            files.write_atomic(path, after)
            print(path)


if __name__ == "__main__":
    main()
