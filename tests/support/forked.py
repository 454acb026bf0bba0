"""Runs Python on a module or code in a process of its own that need not import torch: 3 s of CPU time less.

The process is forked by the tuner's fork server. It has the variables, folder, path, streams and exit code of
``python -m MODULE`` or ``python -c CODE``; only what an interpreter reads at its very start, such as
``OMP_NUM_THREADS``, is that of the tests.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from aot_tune.tuner.process import fork_server

Result = subprocess.CompletedProcess[str]


def python(
    words: Sequence[str], folder: Path, variables: Mapping[str, str], text: str = "", timeout: float = 300.0
) -> Result:
    """Run Python with words that begin with ``-m`` or ``-c``, and return its output and exit code."""
    request = json.dumps([list(words), str(folder), dict(variables)])
    with (
        tempfile.TemporaryFile("w+") as asked,
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        for file, content in ((asked, request), (given, text)):
            file.write(content)
            file.seek(0)
        numbers = [file.fileno() for file in (asked, given, out, err)]
        child = fork_server.start(f"{__name__}:main", numbers, err.fileno(), dict(os.environ))
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
        for file in (out, err):
            file.seek(0)
        return Result(list(words), code, out.read(), err.read())


def main(asked: int, given: int, out: int, err: int) -> NoReturn:
    """Be that process."""
    for descriptor, standard in ((given, 0), (out, 1), (err, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    with os.fdopen(asked) as file:
        words, folder, variables = json.load(file)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.dont_write_bytecode = bool(variables.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = [folder, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    code = _run(*words)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(option: str, what: str, *arguments: str) -> int:
    """Run a module or code as the main program, and return its exit code."""
    sys.argv = [what if option == "-m" else option, *arguments]
    try:
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
