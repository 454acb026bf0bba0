"""What a shipped kernel's hashes are made of: code alone, and nothing that changes while it runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_BEFORE_AND_AFTER = """
import json, math
import torch
from aot_tune.bench.gpu import shipped
from aot_tune.declare.fingerprint.hashing import check_hash, source_hash

def hashes():
    return {name: [source_hash(one.tunable), check_hash(one.tunable)] for name, one in shipped().items()}

def elements(problem):
    return math.prod(value for value in problem.values() if type(value) is int and value)

before = hashes()
for one in shipped().values():
    problem = min(one.tunable.typical_problems, key=elements)
    for seed in (0, 1):
        one.tunable.reference(*one.tunable.make_args(problem, torch.device("cpu"), seed))
print(json.dumps([before, hashes()]))
"""


@pytest.mark.slow
@pytest.mark.process
def test_hashes_are_the_same_before_and_after_use() -> None:
    """A cache in a module, which a hash took in, made each sweep's journal one that could not be resumed."""
    told = subprocess.run(
        [sys.executable, "-c", _BEFORE_AND_AFTER], capture_output=True, text=True, check=True, timeout=120
    )
    before, after = json.loads(told.stdout)
    assert len(before) > 10
    assert after == before
