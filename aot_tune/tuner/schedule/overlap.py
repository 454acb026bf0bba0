"""Several kernels of a sweep at once: the next begins before a GPU or a compiler rests. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

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


def run_overlapping(
    work: Callable[[K], R],
    kernels: Sequence[K],
    *,
    begins: Callable[[int], bool],
    stop: Callable[[], None],
    stopped: type[BaseException],
) -> list[R]:
    """Do something with each of several kernels, in order; the next begins beside those that run.

    Args:
        work: Does it, in a thread of its own.
        kernels: The kernels.
        begins: Whether the next may begin, given how many run; always where none does.
        stop: Ends what the threads wait for, where one of them fails or the caller is interrupted.
        stopped: What they raise then; it is not what went wrong.

    Returns:
        The results in the order of the kernels.

    Raises:
        Exception: The first error. Nothing runs any more.
    """
    errors: list[BaseException] = []
    futures: list[Future[R]] = []

    def tried(kernel: K) -> R:
        try:
            return work(kernel)
        except BaseException as error:
            errors.append(error)  # in the order in which they come
            raise

    with ThreadPoolExecutor(max(len(kernels), 1), thread_name_prefix="aot_tune kernel") as threads:
        try:
            for kernel in kernels:
                while not errors and not begins(len(running := _running(futures))):
                    wait(running, _LOOK_S, FIRST_COMPLETED)
                if errors:
                    break
                futures.append(threads.submit(tried, kernel))
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if _running(futures):
                stop()
    if errors:
        raise next((error for error in errors if not isinstance(error, stopped)), errors[0])
    return [future.result() for future in futures]


def _running(futures: Sequence[Future[R]]) -> list[Future[R]]:
    return [future for future in futures if not future.done()]
