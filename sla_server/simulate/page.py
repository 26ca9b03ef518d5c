"""A simulation's result as one HTML page: tables, charts (inline SVG), nothing from elsewhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from sla_server.simulate.figures import PromiseFigures, VolumeFigures
from sla_server.simulate.report import Result, headline, promised_text, verdicts

Points = Sequence[tuple[float, float | None]]
WIDTH, HEIGHT = 900, 190
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 26
COLOURS: Final = {"off": "#b3261e", "observe": "#8a6d00", "enforce": "#1a5fb4"}
GREY: Final = "#666"
NAMES: Final = {
    "mean_latency": "mean latency",
    "iops": "delivered",
    "throughput": "delivered",
    "availability": "longest time without a completion",
}
_STYLE: Final = """
body{font:15px/1.45 system-ui,sans-serif;max-width:960px;margin:1.5em auto;padding:0 1em;color:#1c1c1c}
h1{font-size:1.35em} h2{font-size:1.1em;margin:1.6em 0 .3em} table{border-collapse:collapse;margin:.6em 0}
th,td{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right} th:first-child,td:first-child,
th:nth-child(2),td:nth-child(2){text-align:left} svg{width:100%;height:auto} .k{margin-right:1.2em}
.note{color:#555}
"""


def as_html(result: Result) -> str:
    """The whole page."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>Simulation: {escape(result.plan.title)}</title><style>{_STYLE}</style></head><body>",
        "<h1>What the control loop does with this load</h1>",
        *(f"<p>{escape(line)}</p>" for line in headline(result)),
        *(f"<p class=note>{escape(note)}</p>" for note in result.plan.notes),
        "<ul>",
        *(f"<li>{escape(line)}</li>" for line in verdicts(result)),
        "</ul>",
        _promise_table(result),
        _volume_table(result),
    ]
    for index in range(len(result.modes[0].promises)):
        parts.append(_promise_chart(result, index))
    for index in range(len(result.modes[0].users)):
        parts.append(_volume_chart(result, index))
    return "\n".join([*parts, "</body></html>\n"])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _promise_table(result: Result) -> str:
    heads = ("agreement", "mode", "promised", "measured", "bad s", "of s", "compliance", "coverage")
    return _table(heads, [_promise_row(p, each.mode) for each in result.modes for p in each.promises])


def _promise_row(p: PromiseFigures, mode: str) -> list[str]:
    return [
        p.name,
        mode,
        promised_text(p),
        _text(p.measured, f" {p.unit}"),
        str(p.bad_s),
        str(p.judged_s),
        _ratio(p.compliance),
        _ratio(p.coverage),
    ]


def _volume_table(result: Result) -> str:
    heads = (
        "volume",
        "mode",
        "priority",
        "IOPS",
        "MB/s",
        "kept",
        "p95",
        "caps",
        "turns",
        "in 60 s",
        "lowest",
    )
    return _table(heads, [_volume_row(v, each.mode) for each in result.modes for v in each.users])


def _volume_row(v: VolumeFigures, mode: str) -> list[str]:
    return [
        v.volume,
        mode,
        v.priority,
        f"{v.iops:,.0f}",
        f"{v.bytes_per_s / 1e6:.1f}",
        _ratio(v.kept_ratio),
        _text(v.p95_ms, " ms"),
        str(v.changes),
        str(v.turns),
        str(v.turns_a_minute),
        _text(v.least_cost, " weighted IOPS"),
    ]


def _text(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.4g}{unit}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{math.floor(value * 1000) / 10:.1f} %"


def _promise_chart(result: Result, index: int) -> str:
    first = result.modes[0].promises[index]
    lines = {each.mode: each.promises[index].series for each in result.modes if each.mode != "observe"}
    if not lines:
        lines = {each.mode: each.promises[index].series for each in result.modes}
    name = f"p{first.percentile:g} latency" if first.percentile is not None else NAMES.get(first.metric, "")
    per_unit = 1e3 if first.metric == "availability" else 1.0
    limits = (
        [value / per_unit for value in first.thresholds_ms] if first.promised is None else [first.promised]
    )
    most = 4 * limits[-1] if first.promised is None else math.inf
    title = f"{first.name}: {name}, {first.unit}"
    return _chart(title, lines, [(value, f"{value:g} {first.unit}") for value in limits], most)


def _volume_chart(result: Result, index: int) -> str:
    lines: dict[str, Points] = {}
    for each in result.modes:
        if each.mode != "observe" or len(result.modes) == 1:
            lines[each.mode] = each.users[index].series
    last = result.modes[-1].users[index]
    caps: list[tuple[float, float | None]] = []
    before: float | None = None
    for at, cost in last.caps:
        caps += [(at, before), (at, cost and cost / last.mean_cost)]
        before = cost and cost / last.mean_cost
    if caps:
        caps.append((result.plan.spans[-1][1], before))
        lines["cap"] = caps
    return _chart(f"{last.volume}: I/Os a second", lines, [], math.inf)


def _chart(title: str, lines: dict[str, Points], limits: Sequence[tuple[float, str]], most: float) -> str:
    """One chart; values above ``most`` are drawn at the top edge."""
    points = [(x, y) for line in lines.values() for x, y in line if y is not None]
    if not points:
        return f"<h2>{escape(title)}</h2><p class=note>no I/O</p>"
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    highest = max([*(y for _, y in points), *(limit for limit, _ in limits)])
    top = min(highest, most) * 1.05 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1) * (WIDTH - LEFT - RIGHT)
        return LEFT + across, HEIGHT - BOTTOM - min(y / top, 1.0) * (HEIGHT - TOP - BOTTOM)

    drawn = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        *_axes(first, last, top),
    ]
    for value, text in limits:
        _, y = place(first, value)
        drawn.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GREY}" '
            f'stroke-dasharray="5 4"/><text x="{WIDTH - RIGHT}" y="{y - 4:.1f}" font-size="11" '
            f'text-anchor="end" fill="{GREY}">{escape(text)}</text>'
        )
    for name, line in lines.items():
        colour = COLOURS.get(name, "#2a7d2a")
        for piece in _pieces(line):
            path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in piece)
            drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" points="{path}"/>')
    drawn.append("</svg>")
    keys = "".join(
        f'<span class=k style="color:{COLOURS.get(name, "#2a7d2a")}">&#9632; {escape(name)}</span>'
        for name in lines
    )
    cut = " (cut off at the top)" if highest > most else ""
    return f"<h2>{escape(title)}{cut}</h2><div>{keys}</div>{''.join(drawn)}"


def _axes(first: float, last: float, top: float) -> list[str]:
    base, style = HEIGHT - BOTTOM, f'font-size="11" text-anchor="end" fill="{GREY}"'
    drawn = [
        f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}" fill="none" stroke="#aaa"/>',
        f'<text x="{LEFT - 6}" y="{base + 4}" {style}>0</text>',
        f'<text x="{LEFT - 6}" y="{TOP + 8}" {style}>{top:,.4g}</text>',
    ]
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        drawn.append(
            f'<text x="{x:.1f}" y="{HEIGHT - 8}" font-size="11" text-anchor="{anchor}" fill="{GREY}">'
            f"{first + share * (last - first):,.0f} s</text>"
        )
    return drawn


def _pieces(line: Points) -> list[list[tuple[float, float]]]:
    """A line without its gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in line:
        if y is not None:
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
