"""Read tables of an earlier form, by the keys that `aot-tune diff` compares. Does no I/O.

Such a table was written before a key of the present form was added, removed or renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aot_tune.errors import TableError
from aot_tune.tables.reader import check_schema
from aot_tune.tables.shape import Shape
from aot_tune.tables.strict_json import Json, loads
from aot_tune.tables.table import SCHEMA


@dataclass(frozen=True, kw_only=True)
class Form:
    """Present form of a kind of tables, and the keys that are compared with an earlier form."""

    shape: Shape[Any]
    """Shape of a table."""

    compared: str
    """Compared keys of an entry, in words."""

    none: Mapping[str, Json]
    """Other keys of an entry, each with the JSON value that means none."""

    values: Mapping[str, object]
    """Other fields of an entry, each with the value that means none."""

    optional: frozenset[str] = frozenset()
    """Keys that an entry may lack. None of them is compared."""

    whole: Mapping[str, Json] = field(default_factory=dict)
    """Keys of the table that are not compared, each with a JSON value in place of a missing one."""

    left_out: frozenset[str] = frozenset()
    """Keys of the table that are left out where their values have another form."""

    def parse_former(self, data: bytes | str) -> tuple[Any, str] | None:
        """Parse a table of an earlier form; None where it has the present form.

        Returns:
            The table, whose entries have the compared keys, and a line about the difference of its form.

        Raises:
            NewerSchemaError: A later release wrote the table.
            TableError: The table cannot be compared: a compared key is missing or has another form.
        """
        document = loads(data)
        schema = document.get("schema") if type(document) is dict else None
        if type(schema) is not int or schema >= SCHEMA:
            check_schema(schema)
        unknown: set[str] = set()
        try:
            table = self.shape.known(document, unknown) | {"schema": SCHEMA}
            lacking = {key for entry in table["entries"] for key in self.none.keys() - entry.keys()}
            lacking |= self.whole.keys() - table.keys()
            table = {**self.whole, **table}
            table["entries"] = [
                {key: item for key, item in entry.items() if key not in self.optional} | dict(self.none)
                for entry in table["entries"]
            ]
        except (AttributeError, KeyError, TypeError) as error:
            raise TableError(f"not a table of an earlier form: {error!r:.200}") from None
        try:
            parsed, other = self.shape.read(table), ""
        except TableError as error:
            other = error.path.partition(".")[0]
            if other not in self.left_out:
                raise
            parsed = self.shape.read({key: item for key, item in table.items() if key != other})
        if schema == SCHEMA and not unknown and not lacking and not other:
            return None
        parts = [] if schema == SCHEMA else [f"schema {schema}, read {SCHEMA}"]
        parts += [f"with {', '.join(sorted(unknown))}"] if unknown else []
        parts += [f"without {', '.join(sorted(lacking))}"] if lacking else []
        parts += [f"other {other}"] if other else []
        line = f"another form ({'; '.join(parts)}): entries are compared by {self.compared}"
        return parsed, line

    def only_compared(self, entry: Any) -> Any:
        """Return an entry of the present form with its compared fields alone."""
        return replace(entry, **self.values)
