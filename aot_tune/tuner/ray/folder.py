"""The folder where a node of a cluster keeps cubins. Knows no Ray."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from aot_tune.errors import TuneError


def node_folder() -> Path:
    """The folder of a node's cubins. It stays, so that the next sweep finds what this one compiled.

    Raises:
        TuneError: It cannot be made, or belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"aot-tune-cubins-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise TuneError(f"{folder}: no folder for cubins can be made there ({error.strerror})") from error
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise TuneError(f"{folder} belongs to another user; remove it, or set TMPDIR for the nodes of Ray")
    return folder
