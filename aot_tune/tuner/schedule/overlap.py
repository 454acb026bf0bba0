"""Overlap the kernels of a sweep: start the next before a GPU or a compiler is idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

EXTRA_KERNELS = 2
"""Running kernels in addition to one for each GPU. More would only wait for earlier kernels."""

_LOOK_S = 0.1
"""Seconds between two checks whether the next kernel may begin."""

K = TypeVar("K")


def may_begin(*, running: int, planned: bool, gpus: int, waiting: int, compilers_rest: bool) -> bool:
    """Return whether the next kernel may begin.

    Args:
        running: Number of kernels that have begun and not ended.
        planned: Whether all of these have planned their tasks.
        gpus: Number of GPUs.
        waiting: Number of tasks that no GPU has drawn yet.
        compilers_rest: Whether a compiling process is idle.
    """
    if not running:
        return True
    return planned and running < gpus + EXTRA_KERNELS and (waiting < gpus or compilers_rest)


def run_overlapping(
    work: Callable[[K], None],
    kernels: Sequence[K],
    *,
    begins: Callable[[int], bool],
    stop: Callable[[], None],
    stopped: type[BaseException],
) -> None:
    """Process kernels in order, each in a thread of its own; they may overlap.

    Args:
        work: Processes a kernel.
        kernels: The kernels.
        begins: Returns whether the next kernel may begin, given the number of running kernels; true for 0.
        stop: Interrupts the threads' waiting, after one of them failed or the caller was interrupted.
        stopped: The type of error that they raise then, which is not the cause.

    Raises:
        Exception: The first error. Nothing runs any more.
    """
    errors: list[BaseException] = []
    futures: list[Future[None]] = []

    def tried(kernel: K) -> None:
        try:
            work(kernel)
        except BaseException as error:
            errors.append(error)  # in order of time
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


def _running(futures: Sequence[Future[None]]) -> list[Future[None]]:
    return [future for future in futures if not future.done()]
