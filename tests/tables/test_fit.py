"""What is wrong with a table is listed, whatever the configs are that its file holds."""

from __future__ import annotations

import dataclasses

from aot_tune.tables.fit import entry_complaints
from aot_tune.values.config import Config
from tests.support.samples import scale, scale_table, with_entry


def test_the_author_s_legal_is_not_asked_of_what_no_search_space_holds() -> None:
    strict = dataclasses.replace(scale)
    object.__setattr__(strict, "legal", lambda config, arch, problem: int(config["tile_m"]) > 0)
    word = Config(constants={"tile_m": "x", "tile_n": 64}, hints={"occupancy": 1, "num_ctas": 1})
    table = with_entry(scale_table(), 1, config=word)
    said = [what for what, _ in entry_complaints(table, strict, table.entries[1], own=True)]
    assert f"{word} is outside the search space" in said
