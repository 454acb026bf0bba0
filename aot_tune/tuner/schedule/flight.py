"""Several kernels of a sweep at once: the next begins before a GPU or a compiler rests. Knows no kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

BESIDE = 2
"""Kernels in flight beside one for each GPU. More would only wait for those before them."""

_LOOK_S = 0.1
"""Seconds after which the waiting thread looks again whether the next one may begin."""

K = TypeVar("K")
R = TypeVar("R")


def may_begin(*, in_flight: int, planned: bool, gpus: int, waiting: int, compilers_rest: bool) -> bool:
    """Whether the next kernel begins beside those that are in flight.

    Args:
        in_flight: Number of kernels that have begun and not ended.
        planned: Whether all of these have said what they need.
        gpus: Number of GPUs.
        waiting: Number of tasks that no GPU has drawn yet.
        compilers_rest: Whether a compiling process has nothing to do.
    """
    if not in_flight:
        return True
    return planned and in_flight < gpus + BESIDE and (waiting < gpus or compilers_rest)


class Flight(Generic[K, R]):
    """Does something with each of several kernels, each in a thread of its own.

    Args:
        work: Does it.
        begins: Whether the next may begin, given how many are in flight.
        stop: Ends what the threads wait for, where one of them fails or the caller is interrupted.
        stopped: What they raise then; it is not what went wrong.
    """

    def __init__(
        self,
        work: Callable[[K], R],
        *,
        begins: Callable[[int], bool],
        stop: Callable[[], None],
        stopped: type[BaseException],
    ) -> None:
        self._work, self._begins, self._stop, self._stopped = work, begins, stop, stopped
        self._changed = threading.Condition()
        self._results: dict[int, R] = {}
        self._errors: list[BaseException] = []
        self._running = 0

    def run(self, kernels: Sequence[K]) -> list[R]:
        """Do all; return the results in the same order.

        Raises:
            Exception: The first error. Nothing runs any more.
        """
        threads: list[threading.Thread] = []
        try:
            for place, kernel in enumerate(kernels):
                if not self._waited(lambda running: self._begins(running)):
                    break
                with self._changed:
                    self._running += 1
                threads.append(
                    threading.Thread(
                        target=self._do, args=(place, kernel), name=f"aot_tune kernel {place}", daemon=True
                    )
                )
                threads[-1].start()
            self._waited(lambda running: not running)
        finally:
            if self._running:
                self._stop()
            for thread in threads:
                thread.join()
        if self._errors:
            raise next((one for one in self._errors if not isinstance(one, self._stopped)), self._errors[0])
        return [self._results[place] for place in range(len(kernels))]

    def _waited(self, enough: Callable[[int], bool]) -> bool:
        """Wait until there is enough, or an error; whether there is none."""
        with self._changed:
            while not self._errors and not enough(self._running):
                self._changed.wait(_LOOK_S)
            return not self._errors

    def _do(self, place: int, kernel: K) -> None:
        try:
            result = self._work(kernel)
            with self._changed:
                self._results[place] = result
        except BaseException as error:  # raised where `run` waits
            with self._changed:
                self._errors.append(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
