"""The shipped kernels on the launch path: each is followed, so that its launches cost one look-up."""

from __future__ import annotations

import warnings

import pytest

from aot_tune.errors import MissWarning
from aot_tune.kernels.matmul import matmul_tunable
from aot_tune.kernels.rms_norm import rms_norm_tunable
from aot_tune.kernels.rope import rope_tunable
from aot_tune.serve.dispatch import Dispatcher
from aot_tune.tunable import Tunable
from tests.fake_driver import Driver

SHIPPED = (matmul_tunable, rms_norm_tunable, rope_tunable)


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
    assert not any(what == "value" for _, what in dispatcher._form.reads)
    assert len(dispatcher._memo) == 1
    dispatcher._plans.clear()
    dispatcher.launch(*args)
    assert dispatcher._plans == {}
    first, second = driver.launches
    assert first == second
