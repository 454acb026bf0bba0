"""A Ray cluster as GPUs and compilers. Those marked `ray` start one of three nodes: `make test-ray`."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from aot_tune.errors import UsageError
from aot_tune.tuner.ray import cluster
from aot_tune.tuner.ray.cluster import Cluster
from tests.support.samples import SM90


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"--ray needs Ray: pip install 'aot-tune\[ray\]'"):
        Cluster("", SM90, (), print)


def test_a_client_address_is_refused_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "installed", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(UsageError, match="give this command on a machine of the cluster"):
        Cluster("ray://head:10001", SM90, (), print)
