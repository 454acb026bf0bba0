"""The command line and the child of the bench's section `replay`, which do as a script says.

The script is JSON in the variable ``REPLAY_SCRIPT``: ``answers`` has by process and command what is answered,
``searches`` whether recording writes a table, ``log`` the file to which each command is appended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SCRIPT: dict[str, Any] = json.loads(os.environ.get("REPLAY_SCRIPT", "{}"))


def record(words: list[str]) -> None:
    folder = Path(words[words.index("--out") + 1], "sm90")
    if SCRIPT["searches"]:
        folder.mkdir(parents=True)
        (folder / "library.ops._kernel.json").write_text("{}")
    serve("record")


def compile_(words: list[str]) -> None:
    assert words == ["--arch", "sm90", "--kernel", "library.ops._kernel"], words
    Path(os.environ["AOT_TUNE_TABLES"], "sm90", "cubins.aot").write_bytes(b"")


def serve(process: str) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        do, shape = command["do"], command.get("shape", "")
        with Path(SCRIPT["log"]).open("a") as log:
            log.write(f"{process} {do}{shape}\n")
        answers = SCRIPT["answers"].get(process, {})
        answer = answers.get(f"{do}{shape}", answers.get(do, {"ms": 100.0, "us": 10.0, "searches": 0}))
        if answer == "hangs":
            time.sleep(60)
        if answer == "dies":
            sys.exit("Traceback\nCUDA error: out of memory")
        print(json.dumps(answer), flush=True)


def main(words: list[str]) -> None:
    if words[0] == "record":
        record(words)
    elif words[0] == "compile":
        compile_(words[1:])
    elif words[0] == "run":
        prebuilt = Path(words[words.index("--tables") + 1]).name == "archives"
        assert prebuilt == ("--no-compiler" in words)
        serve("cubins" if prebuilt else "compiled")
    else:
        serve("bare")


if __name__ == "__main__":
    main(sys.argv[1:])
