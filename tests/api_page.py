"""Write `aot_tune/API.md`, the page of the public names: ``python -m tests.api_page``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import aot_tune

PATH = Path(__file__).parents[1] / "aot_tune" / "API.md"

SECTIONS = {
    "Declaring a kernel": ("Tunable", "Config", "Problem", "Pow2", "Exact", "Close", "Work", "blank"),
    "GPUs": ("Arch", "Device"),
    "Launching": ("prime", "workspace", "Workspace"),
    "Searches of libraries": ("install", "uninstall", "exhaustive_search"),
}

_WIDEST = 100
"""The most characters of a signature on one line."""

_HEAD = """\
# The public names

`import aot_tune` provides these names, each imported at its first use. [The changelog](../CHANGELOG.md) says
which of them may change. `aot_tune.inputs` has random tensors for `make_args`, `aot_tune.kernels` the shipped
kernels, and `aot_tune.errors` every error that is raised. This page is generated: `python -m tests.api_page`.
"""


def generated() -> bytes:
    """The bytes of the page: names, signatures and the first paragraphs of docstrings."""
    lines = [_HEAD]
    for section, names in SECTIONS.items():
        lines.append(f"## {section}\n")
        for name in names:
            lines += _entry(name)
    return "\n".join(lines).encode()


def _entry(name: str) -> Iterator[str]:
    value = getattr(aot_tune, name)
    home = aot_tune._HOMES[name]
    yield f"### `{name}`\n"
    if value.__module__ == f"aot_tune.{home}":
        doc, signature = _first_line(value), _signature(name, value)
    else:  # it has the signature and the docstring of cuTile's function, whichever release is installed
        doc, signature = _first_line(import_module(f"aot_tune.{home}")), f"{name}(...)"
    yield f"{doc} Defined in `aot_tune/{home.replace('.', '/')}.py`.\n"
    yield f"```python\n{signature}\n```\n"
    methods = list(_methods(value)) if inspect.isclass(value) else []
    if methods:
        yield "\n".join(methods) + "\n"


def _methods(value: type) -> Iterator[str]:
    """The public methods and properties that a class defines itself."""
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"- `.{name}`: {_first_line(member)}"
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            called = getattr(value, name)
            parts, arrow = _parts(called, skip=int(inspect.isfunction(member)))
            yield f"- `.{name}({', '.join(parts)}){arrow}`: {_first_line(called)}"


def _first_line(value: object) -> str:
    """The first paragraph of a docstring."""
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "`")


def _signature(name: str, value: Any) -> str:
    parts, arrow = _parts(value)
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= _WIDEST:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _parts(value: Any, skip: int = 0) -> tuple[list[str], str]:
    """The parameters behind the first `skip`, and the arrow with what is returned; none for a class."""
    signature = inspect.signature(value)
    parts, keyword_only = [], False
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
        keyword_only |= parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
        parts.append(_parameter(parameter))
    returned = signature.return_annotation
    nothing = inspect.isclass(value) or returned is signature.empty
    return parts, "" if nothing else f" -> {_text(returned)}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {_text(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {'...' if callable(parameter.default) else repr(parameter.default)}"
    return text


def _text(annotation: Any) -> str:
    """An annotation as it is written in the source."""
    return str(getattr(annotation, "__forward_arg__", annotation))


if __name__ == "__main__":
    PATH.write_bytes(generated())
