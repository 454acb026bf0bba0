"""Read the tiles of Triton configs: a list in a source file, or a JSON of configs. Imports no Triton."""

from __future__ import annotations

import ast
import json
from collections import Counter
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
    fitting = [
        row
        for row in rows
        if all(value & -value == value > 0 for name, value in zip(names, row, strict=True) if name in sizes)
    ]
    if not fitting:
        raise UsageError(
            f"--triton {place}: no config has sizes that are powers of two, as cuTile's tiles are"
        )
    note = (
        f"search_space is of {counted(len(configs), 'Triton config')}: {len(fitting)} with different values; "
        "warps and stages are left out, as cuTile has no counterpart"
    )
    used = {*names.values(), "num_warps", "num_stages"}
    others = sorted({name for config in configs for name in config} - used)
    if rows != fitting:
        others.insert(0, f"{len(rows) - len(fitting)} whose tiles are no powers of two")
    note += f"; so are {', '.join(others)}" if others else ""
    return Tiles(names=tuple(names), values=tuple(fitting), note=note)


def _of_json(place: str) -> Iterator[Mapping[str, Any]]:
    """Yield the configs of a JSON object of objects, such as vLLM's by number of tokens."""
    try:
        content = json.loads(read_bytes(Path(place)))
        yield from (config for config in content.values() if isinstance(config, dict))
    except (ValueError, AttributeError) as error:
        raise UsageError(f"--triton {place}: it is no JSON object of configs") from error


def _of_source(place: str) -> list[Mapping[str, Any]]:
    path, _, name = place.rpartition(":")
    try:
        names = _names(ast.parse(read_bytes(Path(path or place))))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"--triton {place}: {path or place} is no Python source") from error
    lists = [known for known, node in names.items() if "Config(" in ast.unparse(node)]
    known = f"NAME is one of {', '.join(lists) or 'none'}"
    if not path or names.get(name, _UNKNOWN) is _UNKNOWN:
        raise UsageError(f"--triton {place}: write FILE.py:NAME of what is assigned once; {known}")
    try:
        configs: list[Mapping[str, Any]] = _value(names[name], names)
        if not _are_configs(configs):
            raise _UnreadableError(names[name])
    except (_UnreadableError, TypeError, ValueError) as error:
        node = error.args[0] if isinstance(error, _UnreadableError) else names[name]
        text = f"line {node.lineno} is no list of literal configs: {ast.unparse(node)[:60]}"
        raise UsageError(f"--triton {place}: {text}; {known}") from error
    return configs


class _UnreadableError(Exception):
    """An expression has a value only where it is run."""


_UNKNOWN = ast.Pass()
"""The expression of an argument, and of a name that is assigned twice or changed."""


def _names(scope: ast.Module | ast.FunctionDef) -> dict[str, Any]:
    """Return the functions and the assigned expressions of a scope."""
    functions = [node for node in ast.walk(scope) if isinstance(node, ast.FunctionDef) and node is not scope]
    parts = [part for part in scope.body if not isinstance(part, ast.FunctionDef | ast.ClassDef)]
    found: dict[str, ast.AST] = {}
    changes: Counter[str] = Counter()
    for node in dict.fromkeys([*functions, *(node for part in parts for node in ast.walk(part))]):
        match node:
            case ast.FunctionDef(name=name):
                found[name] = node
                changes[name] += 1
            case ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = node.value
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(value=ast.Name(id=name), attr="append" | "extend" | "insert")
            ):
                changes[name] += 1
    return {name: found.get(name, _UNKNOWN) if count == 1 else _UNKNOWN for name, count in changes.items()}


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return the value of literals, or of a function that returns them; a config is its dict of constants.

    Args:
        node: The expression or the function.
        names: The expressions of names, and the values of a comprehension's variables.

    Raises:
        _UnreadableError: It is something else.
    """
    match node:
        case ast.Name() if (known := names.get(node.id, _UNKNOWN)) is not _UNKNOWN:
            return _value(known, {**names, node.id: _UNKNOWN}) if isinstance(known, ast.AST) else known
        case ast.List() | ast.Tuple():
            return [_value(part, names) for part in node.elts]
        case ast.Dict() if None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {ast.literal_eval(key): _value(value, names) for key, value in pairs if key}
        case ast.ListComp() | ast.GeneratorExp() if not any(loop.ifs for loop in node.generators):
            return [_value(node.elt, {**names, **row}) for row in _rows(node, names)]
        case ast.FunctionDef():
            tuned = [each for call in node.decorator_list for each in _passed(call, "autotune", "configs")]
            returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
            own = {each.arg: _UNKNOWN for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            if len(listed := tuned or returned) == 1:
                return _value(listed[0], names if tuned else {**names, **own, **_names(node)})
        case ast.Call() if config := _passed(node, "Config", "kwargs"):
            return _value(config[0], names)
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            return {str(each.arg): _value(each.value, names) for each in node.keywords}
        case ast.Call(func=ast.Name(id=name)) if isinstance(names.get(name), ast.FunctionDef):
            return _value(node.func, names)
        case ast.Call(args=[*_, last]) if _are_configs(listed := _value(last, names)):
            return listed  # a filter: all that it may keep
        case ast.Constant():
            return node.value
    raise _UnreadableError(node)


def _are_configs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(config, dict) for config in value)


def _rows(node: ast.ListComp | ast.GeneratorExp, names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the values of a comprehension's variables, but of unknown ones that no constant needs."""
    kept = (_passed(node.elt, "Config", "kwargs") or [node.elt])[0]
    used = {each.id for each in ast.walk(kept) if isinstance(each, ast.Name)}
    rows: list[dict[str, Any]] = [{}]
    for loop in node.generators:
        several = isinstance(loop.target, ast.Tuple)
        targets = ast.unparse(loop.target).strip("()").split(", ")
        try:
            items = [item if several else [item] for item in _value(loop.iter, names)]
        except _UnreadableError:
            if used.intersection(targets):
                raise
            continue
        rows = [{**row, **dict(zip(targets, item, strict=True))} for row in rows for item in items]
    return rows


def _passed(call: ast.AST, function: str, name: str) -> list[ast.expr]:
    """Return what a call passes by a name, or first to a function."""
    if not isinstance(call, ast.Call):
        return []
    named = [each.value for each in call.keywords if each.arg == name]
    return named or call.args[: ast.unparse(call.func).split(".")[-1] == function]
