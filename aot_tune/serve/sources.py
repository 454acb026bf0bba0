"""Whether a kernel's code here is what its cubins were compiled from. Imports and runs nothing that a file names."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from aot_tune.archive import Origin
from aot_tune.tunable import Tunable

_PLAIN = (bool, int, float, str, type(None))
_ABSENT = object()


def difference(tunable: Tunable, origin: Origin) -> str | None:
    """What of the sources differs from those of an archive; None where the code is the same.

    Files and values are compared first, in less than a millisecond. Where one differs, or where they do not tell all,
    the source hash decides (8 to 16 ms), which leaves comments and positions out.
    """
    changed = _changed(origin)
    if changed is None and origin.complete:
        return None
    from aot_tune.fingerprint import source_hash

    now = source_hash(tunable)
    if now == origin.source_hash:
        return None
    return f"{changed or 'the code'} is not as it was compiled (source {origin.source_hash}, now {now})"


def _changed(origin: Origin) -> str | None:
    for module, digest in origin.files.items():
        if file_digest(module) != digest:
            return f"the file of {module}"
    for place, text in origin.values.items():
        module, _, name = place.partition(":")
        if printed(vars(sys.modules.get(module, object)).get(name, _ABSENT)) != text:
            return f"the value of {name} in {module}"
    return None


def file_digest(module: str) -> str | None:
    """SHA-256 of an imported module's source file; None where it is not imported or has no file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.sha256(Path(path or "").read_bytes()).hexdigest()
    except OSError:
        return None


def printed(value: object) -> str | None:
    """A plain value as text that tells it from every other; None for what is not plain."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) is tuple:
        parts = [printed(part) for part in value]
        return None if None in parts else repr(value)
    return None
