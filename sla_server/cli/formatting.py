"""Numbers, times and states as text for tables; a dash where there is no value, never a 0."""

from __future__ import annotations

import time
from typing import Any, Final

DASH: Final = "-"
GOOD, WARN, BAD = "green", "yellow", "bold red"
STATES: Final = {
    "ok": ("kept", GOOD),
    "at-risk": ("AT RISK", WARN),
    "violating": ("VIOLATED", BAD),
    "no-data": ("no data", WARN),
    "idle": ("idle", "dim"),
    "out-of-curve": ("above demand", "dim"),
    "no-objective": ("no objective", "dim"),
    "not-judged": ("not judged", "dim"),
}
SEVERITIES: Final = {"critical": BAD, "error": BAD, "warning": WARN}


def count(value: Any) -> str:
    """A whole number with separators."""
    return DASH if value is None else f"{value:,.0f}"


def latency(us: Any) -> str:
    """Microseconds in the unit a person would use."""
    if us is None:
        return DASH
    if us < 995:
        return f"{us:.0f}us"
    if us < 999_500:
        return f"{us / 1000:.{2 if us < 9_995 else 1 if us < 99_950 else 0}f}ms"
    return f"{us / 1e6:.1f}s"


def skew(offset_us: Any) -> str:
    """How far a gateway's clock is ahead (+) or behind (-); ``offset_us`` is what corrects it."""
    if offset_us is None:
        return DASH
    if abs(offset_us) < 1000:
        return "<1ms"
    ahead_s = -offset_us / 1e6
    return f"{ahead_s:+.1f}s" if abs(ahead_s) >= 0.9995 else f"{ahead_s * 1000:+.0f}ms"


def rate(bytes_per_s: Any) -> str:
    """Bytes a second."""
    return DASH if bytes_per_s is None else f"{bytes_per_s / 1e6:.1f}MB/s"


def percent(ratio: Any, digits: int = 1) -> str:
    """A ratio in percent, rounded down: 99.996 % must not read as 100 %."""
    if ratio is None:
        return DASH
    scale = 10**digits
    return f"{int(ratio * 100 * scale + 1e-9) / scale:.{digits}f}%"


def span(seconds: float) -> str:
    """A duration, in one unit."""
    whole = max(0, round(seconds))
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "m"), (172_800, 3600, "h")):
        if whole < limit:
            return f"{round(whole / unit)}{name}"
    return f"{round(whole / 86_400)}d"


def ago(at_us: Any, now_us: int) -> str:
    """How long since a time."""
    return DASH if not at_us else span((now_us - at_us) / 1e6)


def when(at_us: Any) -> str:
    """A time in this machine's zone; with the date before it when it was not today."""
    if not at_us:
        return DASH
    at, now = time.localtime(at_us / 1e6), time.localtime()
    today = (at.tm_year, at.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if today else "%m-%d %H:%M:%S", at)


def cap(row: dict[str, Any]) -> str:
    """What a throttle allows."""
    parts = []
    if row.get("cost_per_s") is not None:
        parts.append(f"{count(row['cost_per_s'])} cost/s")
    if row.get("ops_per_s") is not None:
        parts.append(f"{count(row['ops_per_s'])} IOPS")
    if row.get("bytes_per_s") is not None:
        parts.append(rate(row["bytes_per_s"]))
    return ", ".join(parts) or DASH


def sentence(text: Any) -> str:
    """An error's text as a sentence; "" for none."""
    told = str(text or "").strip().rstrip(".")
    return f"{told[0].upper()}{told[1:]}." if told else ""
