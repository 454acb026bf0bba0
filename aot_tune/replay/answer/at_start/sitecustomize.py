"""Start-up module of each Python in a program of `aot-tune run` or `record`, and in its children.

It hides the environment's own ``sitecustomize``, so it imports that first.
"""

import os
import sys
from importlib import import_module

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _import_own() -> None:
    """Import the environment's own ``sitecustomize``, as Python would have done."""
    ours = sys.modules.pop("sitecustomize", None)
    folders = [*sys.path]
    sys.path[:] = [folder for folder in folders if os.path.abspath(folder or ".") != _FOLDER]
    try:
        import_module("sitecustomize")
    except ImportError:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
    finally:
        sys.path[:] = folders


def _start() -> None:
    """Call the function that the program's parent named, as ``module:function``."""
    module, _, function = os.environ.get("AOT_TUNE_AT_START", "").partition(":")
    if not module:
        return
    try:
        getattr(import_module(module), function)()
    except Exception as error:  # whatever goes wrong here, the program runs
        sys.stderr.write(
            f"aot-tune: this Python runs without replay or recording: {type(error).__name__}: {error}\n"
        )


_import_own()
_start()
