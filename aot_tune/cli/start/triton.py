"""Read the tiles of Triton configs: a list in a source file, or a JSON of configs. Imports no Triton."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.errors import UsageError
from aot_tune.tables.files import read_bytes
from aot_tune.values.text import counted


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Values of a kernel's constants, from Triton configs."""

    names: tuple[str, ...]
    """The kernel's constants, in its order."""

    values: tuple[tuple[int, ...], ...]
    """Different values of them, in the order of the configs."""

    note: str
    """What they are of, and what was left out."""


def tiles_of(place: str, constants: str, sizes: Sequence[str], known: Sequence[str]) -> Tiles:
    """Read the values of a kernel's constants from Triton configs; warps and stages are left out.

    Args:
        place: ``FILE.json``, or ``FILE.py:NAME`` of a list, a function with one, or an autotuned kernel.
        constants: ``tile_m=BLOCK_SIZE_M,...``: the kernel's constants and the configs' names.
        sizes: Those of the kernel's constants that are sizes of tiles, which must be powers of two.
        known: All constants of the kernel.

    Raises:
        UsageError: There is no such list, it is no list of literals, or it lacks a name.
        StoreError: The file cannot be read.
    """
    given = dict(part.strip().partition("=")[::2] for part in constants.split(","))
    if unknown := [name for name in given if name not in known]:
        raise UsageError(
            f"--constants {constants!r}: the kernel has no constant {unknown[0]!r}; write for example "
            f"{','.join(f'{name}=BLOCK_{name.upper()}' for name in sizes or known)}"
        )
    if missing := [name for name in sizes if not given.get(name)]:
        raise UsageError(f"--constants {constants}: name the config's value of {', '.join(missing)} too")
    names = {name: given[name] for name in known if name in given}
    configs = list(_of_json(place) if place.endswith(".json") else _of_source(place))
    if not configs:
        raise UsageError(f"--triton {place}: it has no config")
    for name in names.values():
        if lacking := [config for config in configs if type(config.get(name)) is not int]:
            raise UsageError(
                f"--constants: a config has no whole number {name}; it has {', '.join(lacking[0])}"
            )
    rows = list(dict.fromkeys(tuple(config[name] for name in names.values()) for config in configs))
    fits = [
        [value & -value == value > 0 or name not in sizes for name, value in zip(names, row, strict=True)]
        for row in rows
    ]
    fitting = [row for row, right in zip(rows, fits, strict=True) if all(right)]
    if not fitting:
        raise UsageError(
            f"--triton {place}: no config has sizes that are powers of two, as cuTile's tiles are"
        )
    note = (
        f"search_space is of {counted(len(configs), 'Triton config')}: {len(fitting)} with different values; "
        "warps and stages are left out, as cuTile has no counterpart"
    )
    note += f"; so are {len(rows) - len(fitting)} whose tiles are no powers of two" if rows != fitting else ""
    used = {*names.values(), "num_warps", "num_stages"}
    others = sorted({name for config in configs for name in config} - used)
    note += f"; so are {', '.join(others)}" if others else ""
    return Tiles(names=tuple(names), values=tuple(fitting), note=note)


def _of_json(place: str) -> Iterator[Mapping[str, Any]]:
    """Yield the configs of a JSON object of objects, such as vLLM's by number of tokens."""
    try:
        content = json.loads(read_bytes(Path(place)))
        yield from (config for config in content.values() if isinstance(config, dict))
    except (ValueError, AttributeError) as error:
        raise UsageError(f"--triton {place}: it is no JSON object of configs") from error


def _of_source(place: str) -> Iterator[Mapping[str, Any]]:
    path, _, name = place.rpartition(":")
    try:
        tree = ast.parse(read_bytes(Path(path or place)))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"--triton {place}: {path or place} is no Python source") from error
    named: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named.setdefault(node.targets[0].id, node.value)
        elif isinstance(node, ast.FunctionDef):
            named.setdefault(node.name, node)
    if not path or name not in named:
        lists = [known for known, node in named.items() if "Config(" in ast.unparse(node)]
        raise UsageError(f"--triton {place}: write FILE.py:NAME; NAME is one of {', '.join(lists) or 'none'}")
    yield from _configs(named[name], {}, named, place)


def _configs(
    node: ast.AST, values: Mapping[str, Any], named: Mapping[str, ast.AST], place: str
) -> Iterator[Mapping[str, Any]]:
    """Yield the configs of an expression of literals; `values` are a comprehension's."""
    if isinstance(node, ast.List | ast.Tuple):
        for part in node.elts:
            yield from _configs(part, values, named, place)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Config" and node.args:
        yield _evaluated(node.args[0], values, place)
    elif isinstance(node, ast.ListComp | ast.GeneratorExp) and not any(each.ifs for each in node.generators):
        targets = [ast.unparse(each.target) for each in node.generators]
        lists = [_evaluated(each.iter, {}, place) for each in node.generators]
        for row in itertools.product(*lists):
            yield from _configs(node.elt, dict(zip(targets, row, strict=True)), named, place)
    elif isinstance(node, ast.Name) and node.id in named:
        yield from _configs(named[node.id], values, {**named, node.id: ast.Pass()}, place)
    elif isinstance(node, ast.FunctionDef):
        tuned = [k.value for call in node.decorator_list if isinstance(call, ast.Call)
                 for k in call.keywords if k.arg == "configs"]  # fmt: skip
        returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
        if len(tuned or returned) != 1:
            raise UsageError(f"--triton {place}: line {node.lineno} has no single list of configs")
        yield from _configs((tuned or returned)[0], values, named, place)
    else:
        line, text = getattr(node, "lineno", "?"), ast.unparse(node)[:60]
        raise UsageError(f"--triton {place}: line {line} is no list of literal configs: {text}")


def _evaluated(node: ast.AST, values: Mapping[str, Any], place: str) -> Any:
    """Return a literal in which a comprehension's variables may stand."""

    class Replaced(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.AST:
            return ast.Constant(values[name.id]) if name.id in values else name

    try:
        # A copy: the next row of a comprehension has other values.
        return ast.literal_eval(Replaced().visit(ast.parse(ast.unparse(node), mode="eval")))
    except ValueError as error:
        line, text = getattr(node, "lineno", "?"), ast.unparse(node)[:60]
        raise UsageError(f"--triton {place}: line {line} is no literal: {text}") from error
