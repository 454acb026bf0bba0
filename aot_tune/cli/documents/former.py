"""Read tables of an earlier form by the keys that `aot-tune diff` compares. Does no I/O.

Such a table was written before a key of the present form was added, removed or renamed.
"""

from __future__ import annotations

from dataclasses import replace

from aot_tune.errors import TableError
from aot_tune.tables.reader import OPTIONAL_ENTRY_FIELDS, TABLE, check_schema
from aot_tune.tables.strict_json import Json, loads
from aot_tune.tables.table import SCHEMA, Entry, Table

_NOT_COMPARED: dict[str, Json] = {"error_margin_us": 0.0, "regret": 0.0, "points": []}
"""The keys of an entry that are not compared, each with the value that means none."""


def parse_former(data: bytes | str) -> tuple[Table, str] | None:
    """Parse the table of a declared kernel in an earlier form; None where it has the present form.

    Returns:
        The table with what `compared` keeps, and a line that says how its form differs.

    Raises:
        NewerSchemaError: A later release wrote it.
        TableError: It cannot be compared: a compared key is missing or has another form.
    """
    document = loads(data)
    schema = document.get("schema") if type(document) is dict else None
    if type(schema) is not int or schema >= SCHEMA:
        check_schema(schema)
    unknown: set[str] = set()
    try:
        table = TABLE.known(document, unknown) | {"schema": SCHEMA}
        lacking = {key for entry in table["entries"] for key in _NOT_COMPARED.keys() - entry.keys()}
        table["entries"] = [_only_compared(entry) for entry in table["entries"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise TableError(f"not a table of an earlier form: {error!r:.200}") from None
    if schema == SCHEMA and not unknown and not lacking:
        return None
    parts = [] if schema == SCHEMA else [f"schema {schema}, read {SCHEMA}"]
    parts += [f"with {', '.join(sorted(unknown))}"] if unknown else []
    parts += [f"without {', '.join(sorted(lacking))}"] if lacking else []
    line = f"another form ({'; '.join(parts)}): entries are compared by config, mean_us, default_us, evidence"
    return TABLE.read(table), line


def _only_compared(entry: Json) -> Json:
    kept = {key: item for key, item in entry.items() if key not in OPTIONAL_ENTRY_FIELDS}
    return kept | _NOT_COMPARED


def compared(table: Table) -> Table:
    """The table with the values that are compared with a table of an earlier form, and no others."""

    def only(entry: Entry) -> Entry:
        return replace(entry, error_margin_us=0.0, regret=0.0, points=(), disturbed=None, states={})

    return replace(table, entries=tuple(map(only, table.entries)))
