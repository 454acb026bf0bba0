"""Read tables of an earlier form by the keys that `aot-tune diff` compares. Does no I/O.

Such a table was written before a key of the present form was added, removed or renamed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain

from aot_tune.errors import TableError
from aot_tune.tables import reader
from aot_tune.tables.strict_json import Json, loads
from aot_tune.tables.table import SCHEMA, Entry, Table

_NOT_COMPARED: dict[str, Json] = {"error_margin_us": 0.0, "regret": 0.0, "points": []}
"""The keys of an entry that are not compared, each with the value that means none."""


def known(document: Json) -> tuple[Json, tuple[str, ...]]:
    """Leave out the keys that the present form has not.

    Args:
        document: A declared kernel's table as JSON; its configs, entries and points are objects.

    Returns:
        The table with the present schema, and the names of the keys that were left out, sorted.
    """
    unknown: set[str] = set()

    def only(value: Json, *groups: tuple[str, ...]) -> Json:
        keys = frozenset(chain(*groups))
        unknown.update(value.keys() - keys)
        return {key: item for key, item in value.items() if key in keys}

    def config(value: Json) -> Json:
        return only(value, reader.CONFIG_KEYS, reader.OPTIONAL_CONFIG_KEYS)

    def entry(value: Json) -> Json:
        kept = only(value, reader.ENTRY_KEYS, reader.OPTIONAL_ENTRY_KEYS)
        kept["config"] = config(kept["config"])
        if "points" in kept:
            groups = (reader.POINT_KEYS, reader.OPTIONAL_POINT_KEYS)
            kept["points"] = [only(point, *groups) for point in kept["points"]]
        return kept

    table = only(document, reader.TOP_KEYS, reader.OPTIONAL_TOP_KEYS)
    table |= {
        "schema": SCHEMA,
        "built_with": only(table["built_with"], reader.BUILT_WITH_KEYS),
        "portfolio": list(map(config, table["portfolio"])),
        "entries": list(map(entry, table["entries"])),
    }
    return table, tuple(sorted(unknown))


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
        reader.check_schema(schema)
    try:
        table, unknown = known(document)
        lacking = {key for entry in table["entries"] for key in _NOT_COMPARED.keys() - entry.keys()}
        table["entries"] = [_only_compared(entry) for entry in table["entries"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise TableError(f"not a table of an earlier form: {error!r:.200}") from None
    if schema == SCHEMA and not unknown and not lacking:
        return None
    parts = [] if schema == SCHEMA else [f"schema {schema}, read {SCHEMA}"]
    parts += [f"with {', '.join(unknown)}"] if unknown else []
    parts += [f"without {', '.join(sorted(lacking))}"] if lacking else []
    line = f"another form ({'; '.join(parts)}): entries are compared by config, mean_us, default_us, evidence"
    return reader.parse(json.dumps(table)), line


def _only_compared(entry: Json) -> Json:
    kept = {key: item for key, item in entry.items() if key not in reader.OPTIONAL_ENTRY_KEYS}
    return kept | _NOT_COMPARED


def compared(table: Table) -> Table:
    """The table with the values that are compared with a table of an earlier form, and no others."""

    def only(entry: Entry) -> Entry:
        return replace(entry, error_margin_us=0.0, regret=0.0, points=(), disturbed=None, states={})

    return replace(table, entries=tuple(map(only, table.entries)))
