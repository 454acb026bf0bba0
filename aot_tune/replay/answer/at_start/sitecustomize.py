"""Start-up module of each Python in a program of `aot-tune run` or `record`, and in its children.

It hides the environment's own ``sitecustomize``, so it runs that first.
"""

import os
import site
import sys
from contextlib import suppress
from importlib import import_module

_FOLDER = os.path.normpath(os.path.dirname(__file__))


def _run_own() -> None:
    """Run the environment's own ``sitecustomize``, and report its errors, as Python would have done."""
    ours, folders = sys.modules.pop("sitecustomize", None), [*sys.path]
    sys.path[:] = [folder for folder in folders if os.path.normpath(folder) != _FOLDER]
    try:
        site.execsitecustomize()
    finally:
        sys.path[:] = folders
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


def _start() -> None:
    """Replay or record, as the program's parent asked; where that fails, one line, or this process's end."""
    if not os.environ.get("AOT_TUNE_START_OPTIONS"):
        return
    try:
        import_module("aot_tune.replay.answer.program").begin()
    except Exception as error:
        if getattr(error, "name", None) == "aot_tune" and not _has_cutile():
            return  # a Python of another environment, which searches nothing
        ends = os.environ.get("AOT_TUNE_ON_MISS", "").strip() == "error"
        what = "may not run" if ends else "runs"
        line = f"aot-tune: this Python {what} without replay or recording: {type(error).__name__}: {error}\n"
        with suppress(OSError):  # stderr is closed
            os.write(2, line.encode(errors="backslashreplace"))
        if ends:
            os._exit(1)  # SystemExit would print how Python starts


def _has_cutile() -> bool:
    with suppress(Exception):  # there is no package cuda, or a broken one
        return import_module("importlib.util").find_spec("cuda.tile") is not None
    return False


try:
    _run_own()
finally:
    _start()
