"""Compute an attribute when it is first read. Unlike functools.cached_property, takes no lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """Compute an attribute when it is first read, and keep it in the instance's ``__dict__``.

    On Python 3.10 and 3.11 `functools.cached_property` holds one lock for all instances of a class. A child
    that is forked while another thread computes would inherit the lock locked and wait for ever, and threads
    would wait for each other. Here two threads may both compute the attribute. So the computation must give
    equal values and have no effects.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> lazy[T] | T:
        if instance is None:
            return self
        # Later reads find the value in the instance: a class's attribute without __set__ comes after it. Two
        # threads both take the first value.
        kept: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return kept
