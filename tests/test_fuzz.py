"""Every reader takes any bytes as it documents: those that fuzzing once found, and Hypothesis's."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import mutate
from tests.fuzz.targets import CORPUS, TARGETS, corpus

ACCEPTED = {
    "table": "a table",
    "recorded": "a recorded table",
    "missed_problems": "2 problems, 1 notes",
    "cache_entry": "a config",
    "archive": "an archive of 2",
    "archive_index": "an archive of 2",
    "archive_section": "an archive of 1",
    "journal": "9 records, 5 results, intact",
    "journal_records": "9 records, 5 results, intact",
    "message": "a message: list",
}
"""What comes of each target's seeds: what begins with refused bytes sees little of a reader."""


@pytest.mark.parametrize("name", TARGETS)
def test_the_bytes_to_begin_with_are_accepted(name: str) -> None:
    target = TARGETS[name]
    assert {target.run(seed).startswith(ACCEPTED[name]) for seed in target.seeds()} == {True}


@pytest.mark.parametrize(("name", "found"), [(name, found) for name in TARGETS for found in corpus(name)])
def test_what_was_once_found_is_taken_as_documented(name: str, found: str) -> None:
    TARGETS[name].run(corpus(name)[found])


def test_every_folder_of_the_corpus_belongs_to_a_target() -> None:
    assert {path.name for path in Path(CORPUS).iterdir()} <= set(TARGETS)


EXAMPLES = {"journal": 80, "journal_records": 80}
"""How many inputs Hypothesis makes, where 250 take long: an opened journal waits for the disk."""


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_the_bytes_a_reader_does_as_it_documents(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()

    @settings(max_examples=EXAMPLES.get(name, 250), suppress_health_check=list(HealthCheck))
    @given(data=st.sampled_from(seeds), random=st.randoms(use_true_random=False))
    def holds(data: bytes, random: Random) -> None:
        target.run(mutate(data, random, seeds))

    holds()
