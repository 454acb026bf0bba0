"""What the real backend asks of cuTile, without a GPU."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.tuner.measure.worker.backend import Trial
from aot_tune.tuner.measure.worker.gpu import WARM_LAUNCHES, GpuBackend
from aot_tune.values.config import Config


def test_the_cache_is_filled_by_reading_after_the_arguments_are_renewed_and_before_each_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    trial = Trial(config=Config(constants={"tile": 64}))
    backend: Any = GpuBackend.__new__(GpuBackend)
    case = SimpleNamespace(
        prepare=lambda: done.append("poisoned"), renew=lambda: done.append("renewed"), args=()
    )
    backend._cases = [case]
    backend._round = SimpleNamespace(flush=lambda: done.append("read"))
    backend._launches = Counter({trial.config: WARM_LAUNCHES})
    backend._stream = 0
    monkeypatch.setattr(backend, "_kernel", lambda trial: "kernel")
    monkeypatch.setattr(backend, "_arguments", lambda config, case: ("arguments",))

    def search(configs: Any, stream: int, grid: Any, kernel: Any, args: Any, **options: Any) -> Any:
        assert options["flush_l2"] is False, "what cuTile writes would go to memory while the kernel runs"
        for _ in range(2):
            assert args(configs[0]) == ("arguments",)
            done.append("launched")
        return SimpleNamespace(best=SimpleNamespace(mean_us=5.0, error_margin_us=0.1, num_samples=2))

    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", search)
    assert backend.time(trial).mean_us == 5.0
    assert done == ["poisoned", *["renewed", "read", "launched"] * 2]
