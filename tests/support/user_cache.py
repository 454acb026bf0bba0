"""A key of the user's cache and a config under it, the same ones for a test and for its child processes."""

from __future__ import annotations

from aot_tune.serve.search.cache import Key
from aot_tune.values.config import Config

CONFIG = Config(constants={"tile_m": 64, "fast": True}, hints={"occupancy": 2})
KEY = Key(
    kernel="scale", arch="sm90", device_name="NVIDIA H200", distribution="mylib 1.0",
    source_hash="0123456789abcdef", cuda_tile="1.7.0", bucket=(("M", 64), ("dtype", "bfloat16")),
)  # fmt: skip
