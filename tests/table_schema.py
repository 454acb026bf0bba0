"""Write `tuned_configs/schema.json`, the JSON Schema of tables: ``python -m tests.table_schema``."""

from __future__ import annotations

import json
from pathlib import Path

from aot_tune.replay import document as recorded
from aot_tune.tables import reader

PATH = Path(__file__).parents[1] / "tuned_configs" / "schema.json"


def generated() -> bytes:
    """The bytes of the file, made from the shapes that the readers follow."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A table of tuned configs of aot_tune",
        "description": "One kernel's tuned configs on one GPU architecture. aot-tune check holds more: "
        "sizes lie in their buckets, and times are as many as configs.",
        "if": {"properties": {"kind": {"const": recorded.KIND}}, "required": ["kind"]},
        "then": {"$ref": "#/$defs/recorded"},
        "else": {"$ref": "#/$defs/declared"},
        "$defs": {
            "declared": reader.TABLE.schema(),
            "recorded": recorded.TABLE.schema(),
            "argument": recorded.argument_schema(),
        },
    }
    return json.dumps(schema, indent=2).encode() + b"\n"


if __name__ == "__main__":
    PATH.write_bytes(generated())
