"""Static facts decide what bounds most winners of the shipped tables, without a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from aot_tune.declare.discovery import OWN_KERNELS, find_tunables
from aot_tune.tables import store
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.tuner.profile.facts import classify, facts_of
from aot_tune.tuner.profile.run import launched
from tests.support.samples import SM90

KERNELS = (
    *("softmax", "layer_norm", "rms_norm", "gated_activation", "rope", "fused_add_rms_norm"),
    *("cross_entropy", "attention", "attention_varlen"),
)


@pytest.mark.slow
def test_static_facts_decide_three_quarters_of_the_winners() -> None:
    """Only those are compiled that neither the launch nor a roof decides."""
    found, open_, every = find_tunables([OWN_KERNELS]), 0, 0
    with CompileFeed(partial(CompilePool, usable_cores(), folder=Path("build/test-cubins"))) as feed:
        for name in KERNELS:
            kernel = DeviceKernel(found[name], SM90)
            table = store.read_table(store.table_path(store.package_folder(kernel.tunable), SM90, name))
            facts = {entry.bucket: launched(kernel, entry.bucket, entry.config) for entry in table.entries}
            left = [
                entry
                for entry in table.entries
                if classify(facts_of(facts[entry.bucket], kernel.device, None, None, us=entry.mean_us))
                == "latency"
            ]
            jobs = {entry.bucket: kernel.job(entry.bucket, entry.config) for entry in left}
            feed.submit(jobs.values())
            results = feed.wait({job.key for job in jobs.values()}, lambda: None)
            for entry in left:
                compiled = results[jobs[entry.bucket].key]
                assert isinstance(compiled, Compiled)
                own = facts_of(
                    facts[entry.bucket], kernel.device, compiled.resources, compiled.loop, us=entry.mean_us
                )
                open_ += classify(own) == "latency"
            every += len(table.entries)
    print(f"{every - open_} of {every} decided")
    assert every - open_ >= 0.75 * every
