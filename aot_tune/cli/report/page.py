"""The page of `aot-tune report`: tables as HTML with inline SVG, without scripts and without a network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.report.pictures import STYLE, TINTS, Cell, curves, grid, shade
from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import Entry, geometric_mean
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

FULL_GAIN, FULL_LOSS, FULL_REGRET = 2.0, 0.8, 0.3
"""Gains and the regret with the darkest colours."""

_STYLE = """
:root{color-scheme:only light;background:#fff}
body{font:14px/1.45 system-ui,sans-serif;color:#1b1f24;max-width:1280px;margin:0 auto;padding:20px}
table{border-collapse:collapse;display:block;overflow-x:auto}
th,td{text-align:right;padding:3px 9px;border-bottom:1px solid #d8dee4}
th:first-child,td:first-child{text-align:left}figcaption,summary{font-weight:600}summary{cursor:pointer}
small{color:#57606a;font-weight:400;display:block;max-width:620px}figure{margin:10px 0;overflow-x:auto}
details{border:1px solid #d8dee4;border-radius:8px;margin:12px 0;padding:8px 14px}
.p{display:flex;flex-wrap:wrap;gap:24px 32px;scroll-margin-top:48px}
ol{font-size:12px;padding-left:4px;list-style:none}
i{padding:0 7px;margin-right:6px;font-style:normal}figure{max-width:100%}
"""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A table on the page."""

    new: DeclaredDocument
    """The table."""

    old: DeclaredDocument | None = None
    """The table before, for a page on two sets of tables."""

    least_us: Mapping[Problem, float] | None = None
    """Time in which the memory moves a bucket's arguments once, microseconds; None where it is not known."""

    @property
    def name(self) -> str:
        """Return arch and kernel."""
        return f"{self.new.table.arch}/{self.new.name}"


def page(shown: Sequence[Shown], remarks: Sequence[str] = ()) -> str:
    """Return the page of some tables.

    Args:
        shown: The tables.
        remarks: What the page lacks, a line each.
    """
    archs = ", ".join(dict.fromkeys(str(each.new.table.arch) for each in shown))
    entries = sum(len(each.new.table.entries) for each in shown)
    title = f"Tuned tables of {archs}" if archs else "Tuned tables"
    made = dict.fromkeys(each.new.made_with().rpartition(";")[0] for each in shown)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _summary(each))}</tr>" for each in shown)
    lines = [f"{counted(len(shown), 'kernel')}, {counted(entries, 'bucket')}.", *made, *remarks]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{''.join(f'<p>{escape(line)}</p>' for line in lines)}"
        f"<table><tr>{''.join(f'<th>{head}</th>' for head in _HEADS)}</tr>{rows}</table>"
        f"{''.join(map(_details, shown))}</body></html>\n"
    )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page: nothing."""

_HEADS = ("table", "buckets", "over default", "best", "default wins", "worst regret", "configs", "evidence")


def _summary(shown: Shown) -> tuple[str, ...]:
    """Return a row of the first table, as `aot-tune show` prints it and more."""
    table, (_, _, entries, gain, best, regret, evidence, *_) = shown.new.table, shown.new.overview()
    link = f'<a href="#{escape(shown.name)}">{escape(shown.name)}</a>'
    default_wins = sum(entry.mean_us == entry.default_us for entry in table.entries)
    return link, entries, gain, best, str(default_wins), regret, str(len(table.portfolio)), evidence


def _details(shown: Shown) -> str:
    table = shown.new.table
    changes = _changes(shown)
    heading = f"{shown.name}: {geometric_mean(shown.new.gains):.2f}x over the default"
    heading += f"; gain now / before: {changes.text}" if changes and shown.new.table.entries else ""
    pictures = [picture(shown) for picture in PICTURES] if table.entries else []
    return (  # a link to what is inside opens it
        f"<details><summary>{escape(heading)}</summary>"
        f'<div class="p" id="{escape(shown.name)}">{"".join(pictures)}</div></details>'
    )


def _figure(caption: str, note: str, picture: str, more: str = "") -> str:
    return f"<figure><figcaption>{caption}<small>{note}</small></figcaption>{picture}{more}</figure>"


# The pictures of a table ------------------------------------------------------------------------------------


def gains(shown: Shown) -> str:
    """Draw the gain of each bucket's winner over the default, at the bucket's edge."""
    table, name = shown.new.table, shown.name
    values = shown.new.gains
    label = (
        f"Gain over the default of {name}: {geometric_mean(values):.2f}x in the geometric mean of "
        f"{counted(len(values), 'bucket')}, from {min(values):.2f}x to {max(values):.2f}x"
    )

    def cell(entry: Entry) -> Cell:
        states = {"": (entry.mean_us, entry.default_us)}
        states |= {f"{state} ": (times.mean_us, times.default_us) for state, times in entry.states.items()}
        times = "; ".join(
            f"{state}{us:.2f} us, default {default:.2f}" for state, (us, default) in states.items()
        )
        return Cell(f"{entry.gain:.2f}", _gain_color(entry.gain), f"{times}; {entry.config}")

    return _figure("Gain over the default", "blue: faster than the default", grid(table, cell, label))


def against(shown: Shown) -> str:
    """Draw how each bucket's gain has changed; nothing without a table before."""
    changes = _changes(shown)
    if changes is None:
        return ""
    before, ratios, text = changes
    label = f"Gain now / gain before of {shown.name}: {text}"

    def cell(entry: Entry) -> Cell:
        past = before.get(entry.bucket)
        if past is None:
            return Cell("new", shade(0), f"new: {entry.gain:.2f}x over the default")
        star = "" if past.config == entry.config else "*"
        ratio = ratios[entry.bucket]
        return Cell(
            f"{ratio:.2f}{star}", _gain_color(ratio), f"{past.gain:.2f}x before, {entry.gain:.2f}x now"
        )

    note = "orange: gains less; *: another config"
    return _figure("Gain now / gain before", note, grid(shown.new.table, cell, label))


class _Changes(NamedTuple):
    before: Mapping[Problem, Entry]
    ratios: Mapping[Problem, float]
    text: str


def _changes(shown: Shown) -> _Changes | None:
    """Return the former entries, gains now over gains before, and a text; None without a table before."""
    if shown.old is None:
        return None
    old = shown.old.in_names_of(shown.new)[0]
    before, entries = {entry.bucket: entry for entry in old.table.entries}, shown.new.table.entries
    kept = [(before[entry.bucket], entry) for entry in entries if entry.bucket in before]
    ratios = {entry.bucket: entry.gain / past.gain for past, entry in kept}
    moved = sum(past.config != entry.config for past, entry in kept)
    counts = f"{moved} with another config, {len(entries) - len(kept)} new, {len(before) - len(kept)} gone"
    return _Changes(before, ratios, f"{geometric_mean(ratios.values()):.3f}x; {counts}")


def winners(shown: Shown) -> str:
    """Draw which config of the portfolio wins where."""
    table = shown.new.table
    places = {config: place for place, config in reversed([*enumerate(table.portfolio)])}
    wins = Counter(entry.config for entry in table.entries)
    common, own = _parts(table.portfolio)
    others = sum(count for config, count in wins.items() if config not in places)
    most = max(wins.values())
    label = f"Winners of {shown.name}: {len(wins)} configs win, the most frequent one {most} times"

    def cell(entry: Entry) -> Cell:
        place = places.get(entry.config)
        if place is None:
            return Cell("d", shade(0), f"{entry.mean_us:.2f} us, {entry.config}")
        return Cell(str(place), tints[place], f"{entry.mean_us:.2f} us")

    tints = [TINTS[place % len(TINTS)] for place in range(len(table.portfolio))]
    listed = "".join(
        f'<li><i style="background:{tints[place]}">{place}</i>{escape(own[place])}: {wins[config]}</li>'
        for place, config in enumerate(table.portfolio)
    )
    note = "the number is the config's place below" + (f"; all have {escape(common)}" if common else "")
    note += f"; d: {others} defaults outside of them" if others else ""
    return _figure("Which config wins where", note, grid(table, cell, label), f"<ol>{listed}</ol>")


def _parts(configs: Sequence[Config]) -> tuple[str, list[str]]:
    """Return the parts that configs have in common, and each one's others, as text."""
    parts = [str(config).split(" ") for config in configs]
    common = [part for part in parts[0] if all(part in other for other in parts)] if len(parts) > 1 else []
    return " ".join(common), [
        " ".join(part for part in own if part not in common) or "no other" for own in parts
    ]


def regrets(shown: Shown) -> str:
    """Draw the rule's regret inside each bucket."""
    table = shown.new.table
    values = [entry.regret for entry in table.entries]
    mean = geometric_mean(1 + value for value in values) - 1
    label = f"Regret inside the buckets of {shown.name}: {mean:.1%} in the mean, {max(values):.1%} at worst"

    def cell(entry: Entry) -> Cell:
        return Cell(
            f"{entry.regret:.0%}",
            shade(-entry.regret / FULL_REGRET),
            f"{entry.regret:.1%}, {counted(len(entry.points), 'point')}",
        )

    note = "how much slower the rule's choice is than the best, at the bucket's points, each left out in turn"
    return _figure("Regret between measured sizes", note, grid(table, cell, label))


def memory(shown: Shown) -> str:
    """Draw the share of the memory's bandwidth that each winner reaches; nothing where it is not known."""
    least = shown.least_us
    if least is None:
        return ""
    parts = {entry.bucket: least[entry.bucket] / entry.mean_us for entry in shown.new.table.entries}
    values = parts.values()
    label = f"Share of the memory's bandwidth of {shown.name}: {min(values):.0%} to {max(values):.0%}"

    def cell(entry: Entry) -> Cell:
        part = parts[entry.bucket]
        return Cell(f"{part:.0%}", shade(part), f"{least[entry.bucket]:.2f} of {entry.mean_us:.2f} us")

    note = (
        "time to move all arguments once at the datasheet's bandwidth / the winner's time; short launches "
        "and products have other limits"
    )
    return _figure("Share of the memory's bandwidth", note, grid(shown.new.table, cell, label))


def coverage(shown: Shown) -> str:
    """Draw what each further config of the portfolio is worth, the most useful first."""
    table = shown.new.table
    rows = [
        row
        for entry in table.entries
        for point in entry.points
        if (row := in_worst_state(point).us)[-1] is not None
    ]
    if not rows:
        return ""
    steps, left = [_regrets(rows, [-1])], list(range(len(table.portfolio)))
    members = [-1]
    while left:
        place = min(left, key=lambda place: sum(map(math.log1p, _regrets(rows, [*members, place]))))
        left.remove(place)
        members.append(place)
        steps.append(_regrets(rows, members))
    lines = [
        ("geometric mean", [geometric_mean(1 + value for value in step) - 1 for step in steps]),
        ("95th percentile", [sorted(step)[math.ceil(0.95 * len(step)) - 1] for step in steps]),
        ("worst", [max(step) for step in steps]),
    ]
    label = (
        f"Regret of the best configs of {shown.name} at {counted(len(rows), 'size')}: the default alone "
        f"{lines[0][1][0]:.1%} in the geometric mean, all configs 0%"
    )
    note = (
        "regret of the default with the 0, 1, 2... most useful configs, in the worst state, at "
        f"{counted(len(rows), 'measured size')}"
    )
    return _figure("What each further config is worth", note, curves(lines, label))


def _regrets(rows: Sequence[Sequence[float | None]], members: Sequence[int]) -> list[float]:
    """Return the regret of some columns' fastest at each row; the last column always has a time."""
    return [
        min(time for place in members if (time := row[place]) is not None)
        / min(time for time in row if time is not None)
        - 1
        for row in rows
    ]


PICTURES: tuple[Callable[[Shown], str], ...] = (gains, against, winners, memory, regrets, coverage)
"""The pictures of a table, in order; a picture that a table does not have is empty."""


def _gain_color(gain: float) -> str:
    return shade(math.log(gain) / math.log(FULL_GAIN) if gain > 1 else -math.log(gain) / math.log(FULL_LOSS))
