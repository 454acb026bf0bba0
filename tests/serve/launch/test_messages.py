"""Messages of choices and misses: one that cannot be written stops no launch."""

from __future__ import annotations

import warnings

import pytest

from aot_tune.errors import MissWarning
from aot_tune.serve.launch import messages


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("I/O operation on closed file")])
def test_a_warning_that_cannot_be_written_is_no_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []

    def write(message: object, *rest: object) -> None:
        tried.append(message)
        raise error

    monkeypatch.setattr(warnings, "showwarning", write)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        messages._warn("a miss", MissWarning)
    assert list(map(str, tried)) == ["a miss"]


def test_a_warning_that_a_filter_makes_an_error_is_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MissWarning, match="a miss"):
            messages._warn("a miss", MissWarning)
