"""Every wrong value of an environment variable is a UsageError that says what to write."""

from __future__ import annotations

import threading

import pytest

from aot_tune import environment
from aot_tune.errors import UsageError


@pytest.mark.parametrize("value", ["9.3e9", "1e308", "inf", "nan", "-1", "x", "9" * 5000])
def test_a_limit_that_no_wait_can_have_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.SEARCH_SECONDS, value)
    with pytest.raises(UsageError, match="write a number of seconds, 1000000 at most") as caught:
        environment.search_seconds()
    assert len(str(caught.value)) < 300
    assert environment.MOST_SEARCH_SECONDS < threading.TIMEOUT_MAX


@pytest.mark.parametrize("value", ["9" * 5000, "0" * 4400, "x", "-1", "1.0"])
def test_a_world_size_that_is_no_number_is_refused_or_ignored(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.LAUNCHERS:
        monkeypatch.setenv(name, value)
    assert environment.world_size() == ("", 1)
    monkeypatch.setenv(environment.RANKED, value)
    with pytest.raises(UsageError, match="write the world size") as caught:
        environment.world_size()
    assert len(str(caught.value)) < 300
