"""Figures of reports as people read them, in the agreement's own time zone. Pure.

What is not known is a dash. A share is rounded down: 99.996 % must not read as 100 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from sla_server.agreements.periods import to_local

if TYPE_CHECKING:
    from sla_server.reports.document import ReportedBudget, ReportedObjective

DASH: Final = "–"


def percent(ratio: float | None, digits: int = 3) -> str:
    """A share of 1, rounded down."""
    if ratio is None:
        return DASH
    scale = 10**digits
    text = f"{math.floor(ratio * 100 * scale + 1e-9) / scale:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def edited(one: ReportedObjective) -> str:
    """A remark where the target was edited in the period: it is not what the versions promised together."""
    if one.promised is None or one.promised == one.target:
        return ""
    return f" by its versions together; the target is {percent(one.target)} now"


def overspent(budget: ReportedBudget) -> float:
    """Seconds of bad time beyond what was allowed, 0 for a budget that lasted."""
    return max(0.0, budget.spent_s - budget.allowed_s)


def duration(seconds: float | None) -> str:
    """Two units at most: 3 d 4 h, 12 min, 45 s."""
    if seconds is None:
        return DASH
    rest = round(abs(seconds))
    parts: list[str] = []
    for name, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count and len(parts) < 2:
            parts.append(f"{count} {name}")
        elif parts:
            break
    return ("-" if seconds < 0 else "") + " ".join(parts or ["0 s"])


def moment(at_us: int | None, tz: str) -> str:
    """``2026-10-03 08:00``, with seconds where there are any."""
    if at_us is None:
        return DASH
    at = to_local(at_us, tz)
    return at.strftime("%Y-%m-%d %H:%M:%S" if at.second else "%Y-%m-%d %H:%M")


def span(from_us: int, to_us: int | None, tz: str) -> str:
    """From when until when; the date once, if it is the same."""
    begin = moment(from_us, tz)
    if to_us is None:
        return f"since {begin}"
    end = moment(to_us, tz)
    return f"{begin} to {end[11:] if end[:10] == begin[:10] else end}"


def latency(us: float | None) -> str:
    """Microseconds in the unit a person would use."""
    if us is None:
        return DASH
    if us < 1000:
        return f"{us:.0f} us"
    return f"{us / 1000:.3g} ms" if us < 1_000_000 else f"{us / 1e6:.3g} s"


def measured(metric: str, value: float | None) -> str:
    """What was measured of an indicator."""
    if value is None:
        return DASH
    if metric == "iops":
        return f"{value:.0f} I/Os a second"
    return f"{value / 1e6:.3g} MB a second" if metric == "throughput" else latency(value)


def count(value: int | None) -> str:
    """A whole number with separators."""
    return DASH if value is None else f"{value:,}"
