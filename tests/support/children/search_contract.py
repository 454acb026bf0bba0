"""A child process that asks cuTile's search and ours the same, under the cuda-tile that is first on its path.

It prints one line of JSON: what each of the two answered or raised.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support import driver
from tests.support.driver import FakeTensor

driver.install()

from aot_tune.nvidia import cutile  # noqa: E402
from aot_tune.replay.answer.door import exhaustive_search as ours  # noqa: E402
from aot_tune.replay.answer.install import install, uninstall  # noqa: E402
from aot_tune.serve import runtime  # noqa: E402
from tests.support.tuned_once import SPACE, hints_of, scale_kernel  # noqa: E402

X, OUT = FakeTensor((1024,)), FakeTensor((1024,))


def _grid(config: Any) -> tuple[int, int, int]:
    return (-(-1024 // config.TILE), 1, 1)


def _args(config: Any) -> tuple[Any, ...]:
    return (X, OUT, 1024, 2.0, config.TILE)


def _raise(*_: Any) -> Any:
    raise LookupError("of the library")


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by position": ((SPACE[:2], 0, _grid, scale_kernel, _args, hints_of), {"quiet": True}),
    "by name": (
        (),
        {"search_space": SPACE[:2], "stream": 0, "grid_fn": _grid, "kernel": scale_kernel, "args_fn": _args}
        | {"quiet": True},
    ),
    "a tuple as space": ((tuple(SPACE[:2]), 0, _grid, scale_kernel, _args), {"quiet": True}),
    "a kernel by config": ((SPACE[:2], 0, _grid, lambda config: scale_kernel, _args), {"quiet": True}),
    "no hints": ((SPACE[:2], 0, _grid, scale_kernel, _args, None), {"quiet": True}),
    "an empty space": (([], 0, _grid, scale_kernel, _args), {"quiet": True}),
    "no arguments": ((), {}),
    "too many arguments": ((SPACE, 0, _grid, scale_kernel, _args, hints_of, True), {}),
    "an unknown keyword": ((SPACE, 0, _grid, scale_kernel, _args), {"quite": True}),
    "a space without a length": ((iter(SPACE), 0, _grid, scale_kernel, _args), {"quiet": True}),
    "a space that is None": ((None, 0, _grid, scale_kernel, _args), {"quiet": True}),
    "a grid that raises": ((SPACE[:2], 0, _raise, scale_kernel, _args), {"quiet": True}),
    "arguments that raise": ((SPACE[:2], 0, _grid, scale_kernel, _raise), {"quiet": True}),
    "hints that raise": ((SPACE[:2], 0, _grid, scale_kernel, _args, _raise), {"quiet": True}),
    "a kernel that raises": ((SPACE[:2], 0, _grid, _raise, _args), {"quiet": True}),
    "a kernel that is None": ((SPACE[:2], 0, _grid, None, _args), {"quiet": True}),
    "a kernel that is a function": ((SPACE[:2], 0, _grid, scale_kernel._pyfunc, _args), {"quiet": True}),
    "too few of the kernel's": ((SPACE[:2], 0, _grid, scale_kernel, lambda c: (X, OUT)), {"quiet": True}),
    "configs that cannot be spelled": (([object()], 0, lambda c: (1, 1, 1), scale_kernel, _raise), {}),
    "one config that fails": (
        ([SimpleNamespace(TILE=3), SPACE[0]], 0, _grid, scale_kernel, _args),
        {"quiet": True},
    ),
    "a stream that is none": ((SPACE[:2], "0", _grid, scale_kernel, _args), {"quiet": True}),
}


def answer_of(search: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = call
    try:
        result = search(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return {
        "type": f"{type(result).__module__}.{type(result).__qualname__}",
        "best": [type(result.best).__qualname__, str(result.best)],
        "successes": [type(result.successes).__qualname__, *map(str, result.successes)],
        "failures": [
            type(result.failures).__qualname__,
            *([str(config), kind.__name__, message] for config, kind, message in result.failures),
        ],
    }


def main() -> None:
    with driver.stand_in() as stand_in, warnings.catch_warnings():
        warnings.simplefilter("error")
        stand_in.elapsed_ms = lambda symbol: 0.01 if "_I32" in symbol else 0.05
        theirs = cutile.own_search()
        answers = {name: [answer_of(one, call) for one in (theirs, ours)] for name, call in CALLS.items()}
        described = [
            [str(inspect.signature(one)), one.__name__, one.__qualname__, one.__module__, one.__doc__]
            for one in (theirs, ours)
        ]
        from cuda.tile import tune

        install()
        installed = [cutile.stands_in(tune.exhaustive_search), str(inspect.signature(tune.exhaustive_search))]
        uninstall()
        given_back = tune.exhaustive_search is theirs
    runtime.use(None)
    told = {"answers": answers, "described": described, "installed": installed, "given_back": given_back}
    json.dump({"version": cutile.version(), **told}, sys.stdout)


if __name__ == "__main__":
    main()
