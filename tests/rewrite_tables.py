"""Rewrite all shipped tables in the present form: ``python -m tests.rewrite_tables``.

Whoever changes a key of the tables adds to `renamed` how its value follows from the former keys, runs this
script, and commits the tables together with the change. Later changes replace what earlier ones added.
"""

from __future__ import annotations

import json
from pathlib import Path

from aot_tune.tables import files, reader, writer
from aot_tune.tables.former import known
from aot_tune.tables.strict_json import Json, loads

SHIPPED = Path(__file__).parents[1] / "tuned_configs"


def renamed(document: Json) -> Json:
    """The table with the present keys, made from the former ones. No key changes at present."""
    return document


def rewritten(data: bytes) -> bytes:
    """The bytes of a declared kernel's table in the present form.

    Raises:
        TableError: The table lacks a key, or a value has another form.
    """
    document, _ = known(renamed(loads(data)))
    return writer.dump(reader.parse(json.dumps(document)))


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
