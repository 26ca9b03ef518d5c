"""What each table shows: a column is a heading, a function of the row, and how it may shrink.

Pure: rows in (as the API gives them), a rich table out. Numbers are never cut; names fold over lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    title: str
    value: Callable[[Row, int], str | Text]
    """(row, now in us) -> cell."""
    number: bool = False


@dataclass(frozen=True, slots=True)
class TableKind:
    """One kind of thing that can be listed."""

    path: str
    columns: tuple[Column, ...]
    empty: str
    """What to do next when there is nothing to list."""


def _live(row: Row, key: str) -> Any:
    return (row.get("live") or {}).get(key)


def _plain(key: str) -> Callable[[Row, int], str]:
    return lambda row, _now_us: str(row.get(key) if row.get(key) not in (None, "") else formatting.DASH)


def _counted(key: str) -> Column:
    return Column(key.upper(), lambda row, _now_us: formatting.count(row.get(key)), number=True)


def state_of(state: Any) -> Text:
    """State of an objective, in words and colour."""
    text, style = formatting.STATES.get(str(state), (str(state or "unknown"), ""))
    return Text(text, style)


def severity_of(row: Row) -> Text:
    """Severity of an event."""
    return Text(str(row.get("severity", "")), formatting.SEVERITIES.get(str(row.get("severity")), ""))


def rollups_of(row: Row) -> str:
    """How many rollups a policy was computed from."""
    return formatting.count((row.get("job") or {}).get("rollups"))


def what_of(row: Row) -> str:
    """Text of an event, with its subject before it where the text does not name it."""
    subject, text = str(row.get("subject") or ""), str(row.get("text") or "")
    if not text:
        return subject or formatting.DASH
    return text if not subject or subject in text else f"{subject}: {text}"


def gateway_state(row: Row) -> Text:
    """State of a gateway."""
    style = {
        "up": formatting.GOOD,
        "recovered": formatting.GOOD,
        "stalled": formatting.WARN,
        "detached": formatting.WARN,
    }.get(str(row.get("state")), formatting.BAD)
    return Text(str(row.get("state") or formatting.DASH), style)


def held_late(row: Row) -> Text:
    """I/Os that a throttle held for longer than the gateway's ``max_hold_s``, and the longest delay."""
    longest_us = _live(row, "longest_hold_us")
    if not longest_us:
        return Text(formatting.DASH)
    return Text(
        f"{formatting.count(_live(row, 'late_ios'))} (\u2264 {formatting.latency(longest_us)})",
        formatting.WARN,
    )


def clock_of(row: Row) -> str:
    """How far a gateway's clock is off; nothing before its first cut, when nothing is known."""
    return formatting.skew(row.get("clock_offset_us")) if row.get("last_cut_us") else formatting.DASH


KINDS: Final = {
    "gateways": TableKind(
        "/gateways",
        (
            Column("NAME", _plain("name")),
            Column("STATE", lambda row, _now_us: gateway_state(row)),
            Column(
                "LAST CUT", lambda row, now_us: formatting.ago(row.get("last_cut_us"), now_us), number=True
            ),
            Column("CLOCK", lambda row, _now_us: clock_of(row), number=True),
            Column("STREAMS", lambda row, _now_us: formatting.count(_live(row, "streams")), number=True),
            Column("LOST CUTS", lambda row, _now_us: formatting.count(row.get("dropped_cuts")), number=True),
            Column("ADDRESS", _plain("address")),
        ),
        "No gateway has connected. Start an agent beside the storage: gateway-agent run --config FILE",
    ),
    "volumes": TableKind(
        "/volumes",
        (
            Column("VOLUME", _plain("volume")),
            Column("BACKEND", _plain("backend")),
            Column("IOPS", lambda row, _now_us: formatting.count(_live(row, "iops")), number=True),
            Column("P95", lambda row, _now_us: formatting.latency(_live(row, "p95_us")), number=True),
            Column("P99", lambda row, _now_us: formatting.latency(_live(row, "p99_us")), number=True),
            Column("CAP/s", lambda row, _now_us: formatting.count(_live(row, "cap_cost_per_s")), number=True),
            _counted("reads"),
            _counted("writes"),
        ),
        "No volume is known yet. Start an agent beside the storage: gateway-agent run --config FILE",
    ),
    "slas": TableKind(
        "/slas",
        (
            Column("AGREEMENT", lambda row, _now_us: objective_of(row)),
            Column("STATE", lambda row, _now_us: state_of(row.get("state"))),
            Column("NOW", lambda row, _now_us: formatting.latency(row.get("latency_us")), number=True),
            Column("PROMISED", lambda row, _now_us: promise(row), number=True),
            Column("KEPT", lambda row, _now_us: formatting.percent(row.get("compliance"), 2), number=True),
            Column("COVER", lambda row, _now_us: formatting.percent(row.get("coverage")), number=True),
            Column(
                "BUDGET", lambda row, _now_us: formatting.percent(row.get("budget_remaining"), 0), number=True
            ),
        ),
        "No agreement is in force. Write one and apply it: sla apply -f agreement.yaml",
    ),
    "throttles": TableKind(
        "/throttles",
        (
            Column("VOLUME", _plain("volume")),
            Column("AT MOST", lambda row, _now_us: formatting.cap(row)),
            Column("STATE", _plain("state")),
            Column("TOO LATE", lambda row, _now_us: held_late(row), number=True),
            Column("BY", lambda row, _now_us: str(row.get("who") or row.get("source") or formatting.DASH)),
            Column("SINCE", lambda row, _now_us: formatting.when(row.get("requested_us"))),
            Column("REASON", lambda row, _now_us: str(row.get("text") or row.get("reason") or "")),
        ),
        "No throttle was ever set.",
    ),
    "events": TableKind(
        "/events",
        (
            Column("TIME", lambda row, _now_us: formatting.when(row.get("at_us"))),
            Column("SEVERITY", lambda row, _now_us: severity_of(row)),
            Column("KIND", _plain("kind")),
            Column("WHAT", lambda row, _now_us: what_of(row)),
        ),
        "Nothing has happened yet.",
    ),
    "policies": TableKind(
        "/policies",
        (
            Column("VERSION", _plain("version"), number=True),
            Column("STATE", _plain("state")),
            Column("CREATED", lambda row, _now_us: formatting.when(row.get("created_us"))),
            Column("ROLLUPS", lambda row, _now_us: rollups_of(row), number=True),
            Column("BY", _plain("published_by")),
        ),
        "No policy was computed yet: sla policy run",
    ),
}


def objective_of(row: Row) -> str:
    """agreement/objective, or the agreement alone if it has none."""
    return "/".join(str(row[key]) for key in ("name", "objective") if row.get(key)) or formatting.DASH


def promise(row: Row) -> str:
    """Percentile and threshold."""
    if row.get("threshold_us") is None:
        return formatting.DASH
    return f"p{row.get('percentile', 0):g} {formatting.latency(row['threshold_us'])}"


def by_objective(rows: Sequence[Row]) -> list[Row]:
    """Agreements as the API lists them -> one row an objective.

    An objective that is not judged, and an agreement without any, have a row that says so.
    """
    spread: list[Row] = []
    for row in rows:
        plain = {key: value for key, value in row.items() if key not in ("live", "objectives")}
        live = row.get("live") or []
        judged = {entry.get("objective") for entry in live}
        others = [one for one in row.get("objectives") or [] if one["name"] not in judged]
        spread += [{**plain, **entry} for entry in live]
        spread += [
            {**plain, "objective": one["name"], "state": None if one["metric"] == "latency" else "not-judged"}
            for one in others
        ]
        if not live and not others:
            spread.append({**plain, "state": "no-objective" if row.get("objectives") == [] else None})
    return spread


def build(columns: Sequence[Column], rows: Sequence[Row], now_us: int) -> Table:
    """The table; fits whatever width it is printed at by folding names and texts."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.number else "left",
            min_width=len(column.title),  # a folded heading is unreadable
            no_wrap=column.number,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(_cell(column.value(row, now_us)) for column in columns))
    return table


def _cell(value: str | Text) -> str | Text:
    """What gateways and people have written goes to a terminal here: no control characters."""
    text = printable_lines(value if isinstance(value, str) else value.plain)
    return text if isinstance(value, str) else Text(text, value.style)
