"""A lazy attribute is computed once, and no lock of it survives in a forked child."""

from __future__ import annotations

import ast
import os
import signal
import threading
from pathlib import Path

import pytest

from aot_tune.values.lazy import lazy

PACKAGE = Path(__file__).parents[2] / "aot_tune"


class Sample:
    computed = 0
    inside, go = threading.Event(), threading.Event()

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow

    @lazy
    def value(self) -> list[int]:
        """The docstring is kept."""
        self.computed += 1
        if self.slow:
            self.inside.set()
            self.go.wait(60)
        return [self.computed]


def test_a_lazy_attribute_is_computed_once_for_each_instance() -> None:
    first, second = Sample(), Sample()
    assert first.value is first.value
    assert first.value is not second.value
    assert (first.computed, second.computed) == (1, 1)
    assert Sample.value.__doc__ == "The docstring is kept."


@pytest.mark.process
def test_a_child_forked_while_a_thread_computes_computes_too() -> None:
    held = Sample(slow=True)
    thread = threading.Thread(target=lambda: held.value)
    thread.start()
    try:
        assert held.inside.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(0 if Sample().value == [1] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        held.go.set()
        thread.join()


def test_nothing_uses_the_cached_property_that_takes_a_lock() -> None:
    users = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.alias) and node.name == "cached_property")
        or (isinstance(node, ast.Attribute) and node.attr == "cached_property")
    ]
    assert users == []
