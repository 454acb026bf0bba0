"""The folder of a node's cubins. Imports no Ray."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from aot_tune.errors import TuneError


def node_folder() -> Path:
    """Return the folder of a node's cubins, which stays for the next sweep.

    Raises:
        TuneError: It cannot be created, or belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"aot-tune-cubins-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise TuneError(f"{folder}: the folder for cubins cannot be created ({error.strerror})") from error
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise TuneError(f"{folder} belongs to another user; remove it, or set TMPDIR for the nodes of Ray")
    return folder
