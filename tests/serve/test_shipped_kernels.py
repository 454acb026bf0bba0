"""The shipped kernels on the launch path: each is followed, so that its launches cost one look-up."""

from __future__ import annotations

import warnings

import pytest

from aot_tune.discovery import OWN_KERNELS, find_tunables
from aot_tune.errors import MissWarning
from aot_tune.serve.dispatch import Dispatcher
from aot_tune.tunable import Tunable
from tests.fake_driver import Driver

SHIPPED = tuple(found.tunable for found in find_tunables([OWN_KERNELS]).values())


@pytest.mark.parametrize("tunable", SHIPPED, ids=lambda tunable: tunable.name)
def test_a_shipped_kernel_is_launched_from_the_memo_without_asking_its_declaration(
    tunable: Tunable, driver: Driver
) -> None:
    dispatcher = Dispatcher(tunable)  # of our own: the declaration's is shared with other tests
    args = tunable.make_args(tunable.typical_problems[0], "meta", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissWarning)
        dispatcher.launch(*args)
    assert dispatcher._form is not None
    assert dispatcher._form.layout is not None
    # By its value only what is one of few: an eps or a scale would make a plan of each.
    assert not any(isinstance(args[at], float) for at, what in dispatcher._form.reads if what == "value")
    assert len(dispatcher._memo) == 1
    dispatcher._plans.clear()
    dispatcher.launch(*args)
    assert dispatcher._plans == {}
    first, second = driver.launches
    assert first == second
