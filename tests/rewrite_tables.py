"""Rewrite all shipped tables in the present form: ``python -m tests.rewrite_tables``.

Whoever changes a key of the tables adds to `renamed` how its value follows from the former keys, runs this
script, and commits the tables together with the change. Later changes replace what earlier ones added.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from aot_tune.choose.left_out import fitted_slopes
from aot_tune.choose.points import Estimator
from aot_tune.declare.discovery import OWN_KERNELS, find_tunables
from aot_tune.tables import files, writer
from aot_tune.tables.reader import TABLE
from aot_tune.tables.strict_json import Json, loads
from aot_tune.tables.table import SCHEMA, Table

SHIPPED = Path(__file__).parents[1] / "tuned_configs"


def renamed(document: Json) -> Json:
    """The table with the present keys, made from the former ones: without its former slopes."""
    return {key: value for key, value in document.items() if key != "slopes"}


def judged(table: Table) -> Table:
    """The table with slopes that are fitted to its points, and with what the rule then leaves at each bucket.

    A bucket's regret stays where the rounded times of the file make the difference.
    """
    tunable = find_tunables([OWN_KERNELS])[table.kernel].tunable
    table = replace(table, slopes=fitted_slopes(tunable, table))
    estimator, entries = Estimator(table, tunable.tiles, partial(tunable.default_config, table.arch)), []
    for entry in table.entries:
        regret = max(estimator.left_out(entry).values(), default=0.0)
        entries.append(entry if abs(regret - entry.regret) < 0.001 else replace(entry, regret=regret))
    return replace(table, entries=tuple(entries))


def rewritten(data: bytes) -> bytes:
    """The bytes of a declared kernel's table in the present form; former keys are left out.

    Raises:
        TableError: The table lacks a key, or a value has another form.
    """
    document = TABLE.known(renamed(loads(data)), set())
    return writer.dump(judged(TABLE.read(document | {"schema": SCHEMA})))


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
