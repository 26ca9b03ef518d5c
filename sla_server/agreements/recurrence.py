"""Recurrence rules of maintenance (RFC 5545), over naive local time: what is accepted, and when they happen.

dateutil reads them. What it would search for very long is refused before it is asked, and what it refuses is
worded here: its own messages are for programmers. It walks a rule from its start; ``Occurrences`` begins such
a walk shortly before the time that is asked about, and remembers what it found there.

State: parsed rules and their occurrences, cached; any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from dateutil.rrule import rrulestr

from sla_server.agreements.fields import format_duration, refuse, shown

LAST_YEAR: Final = 9999
SEARCHED_YEARS: Final = 200  # any date on any weekday comes within 40 years
SHORTEST_REPEAT: Final = timedelta(hours=1)
# A rule of these is searched for a fraction of a second (``_happens``); one of seconds, for very long.
_FREQUENCIES: Final = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY")
_PARTS: Final = {
    "FREQ": f"one of {', '.join(_FREQUENCIES)}",
    "INTERVAL": "a whole number from 1",
    "COUNT": "a whole number from 1",
    "UNTIL": "a local time without Z, for example 20271231T000000",
    "WKST": "one of MO, TU, WE, TH, FR, SA, SU",
    "BYDAY": "days such as MO,TU, or 1SU for the first Sunday",
    "BYMONTH": "months from 1 to 12",
    "BYMONTHDAY": "days from 1 to 31, or -1 for the last",
    "BYYEARDAY": "days from 1 to 366, or -1 for the last",
    "BYWEEKNO": "weeks from 1 to 53",
    "BYHOUR": "hours from 0 to 23",
    "BYMINUTE": "minutes from 0 to 59",
    "BYSECOND": "seconds from 0 to 59",
    "BYSETPOS": "positions such as 1 or -1",
    "BYEASTER": "days from Easter Sunday, for example 1",
}
"""Key of a part of a rule -> what its value is."""
_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


MOST_KEPT: Final = 20_000
"""Occurrences that are remembered of one rule: two years of hourly work."""
_STEPS: Final = {"HOURLY": timedelta(hours=1), "DAILY": timedelta(days=1), "WEEKLY": timedelta(weeks=1)}
_MONTHS: Final = {"MONTHLY": 1, "YEARLY": 12}
_DAY_PARTS: Final = frozenset(("BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY", "BYWEEKDAY", "BYEASTER"))
"""With one of these a rule says itself on which days it happens; else its start says so."""


class Occurrences:
    """When a rule happens; walked from near the time asked for, with a COUNT once from its start."""

    def __init__(self, rrule: str, start: datetime) -> None:
        self.walked = 0
        """Occurrences that were computed so far."""
        self._text = rrule
        self._start = start.replace(microsecond=0)
        self._parts = _parts_of(rrule)
        self._limit_by_date()
        is_frequent = self._parts.get("FREQ", "") in {**_STEPS, **_MONTHS}
        self._can_begin_later = is_frequent and "COUNT" not in self._parts
        self._lock = threading.Lock()
        self._starts: list[datetime] = []
        self._from = self._reached = datetime.min  # what is known: all of [from, reached]
        self._walk: Iterator[datetime] = iter(self._rule(self._start, {}))

    def between(self, first: datetime, last: datetime) -> list[datetime]:
        """Its occurrences in [first, last], in order."""
        with self._lock:
            is_known = self._from <= first <= self._reached and len(self._starts) <= MOST_KEPT
            if not is_known and self._can_begin_later:
                self._begin_near(first)
            while self._reached <= last:
                at = next(self._walk, None)
                if at is None:
                    self._reached = datetime.max
                    break
                self.walked += 1
                self._starts.append(at)
                self._reached = at
            return self._starts[bisect_left(self._starts, first) : bisect_right(self._starts, last)]

    def _rule(self, start: datetime, more: dict[str, str]) -> Iterable[datetime]:
        text = ";".join(f"{key}={value}" for key, value in {**self._parts, **more}.items()) or self._text
        rule: Iterable[datetime] = rrulestr(text, dtstart=start)
        return rule

    def _limit_by_date(self) -> None:
        """Where nothing is left out between two occurrences, COUNT is as good as an UNTIL."""
        parts = self._parts
        step = _STEPS.get(parts.get("FREQ", ""))
        if step is None or "COUNT" not in parts or any(key.startswith("BY") for key in parts):
            return
        try:
            last = self._start + (int(parts["COUNT"]) - 1) * int(parts.get("INTERVAL", "1")) * step
        except OverflowError:
            last = datetime.max
        if "UNTIL" in parts:
            until = _until(parts["UNTIL"])
            if until is None:
                return
            last = min(last, until)
        if last >= self._start:
            del parts["COUNT"]
            parts["UNTIL"] = f"{last:%Y%m%dT%H%M%S}"

    def _begin_near(self, first: datetime) -> None:
        """Walk again, from a whole number of intervals after the start, and at least one before ``first``."""
        start, more = self._start, dict[str, str]()
        interval = int(self._parts.get("INTERVAL", "1"))
        frequency = self._parts.get("FREQ", "")
        if frequency in _STEPS:
            count = (first - start) // _STEPS[frequency] // interval - 1
            if count > 0:
                start += count * interval * _STEPS[frequency]
        elif frequency in _MONTHS:
            months = (first.year - start.year) * 12 + first.month - start.month
            count = months // _MONTHS[frequency] // interval - 1
            if count > 0:
                more = self._days_of_start(frequency)
                month = start.month - 1 + count * interval * _MONTHS[frequency]
                start = start.replace(year=start.year + month // 12, month=month % 12 + 1, day=1)
                start = start.replace(month=1) if frequency == "YEARLY" else start
        self._walk = iter(self._rule(start, more))
        self._starts = []
        self._from = datetime.min if start == self._start else first
        self._reached = self._from

    def _days_of_start(self, frequency: str) -> dict[str, str]:
        """What the rule says by its start alone, and must say itself where it is walked from another."""
        if not _DAY_PARTS.isdisjoint(self._parts):
            return {}
        month = {"BYMONTH": str(self._start.month)} if frequency == "YEARLY" else {}
        return {"BYMONTHDAY": str(self._start.day)} | (month if "BYMONTH" not in self._parts else {})


def _parts_of(rrule: str) -> dict[str, str]:
    """Key of a part -> its value; of what is more than one rule {}."""
    lines = rrule.upper().split()
    pairs = [part.partition("=") for part in lines[0].split(";")] if len(lines) == 1 else []
    return {key: value for key, _, value in pairs}


@lru_cache(maxsize=4096)
def recurrence_of(rrule: str, start: datetime) -> Occurrences:
    """The parsed rule over naive local time; it remembers the occurrences it has computed."""
    return Occurrences(rrule, start)


def check_rule(rrule: str, start: datetime, length: timedelta) -> None:
    """See that a rule can be read, happens at all, and not before its last occurrence has ended.

    Raises:
        PydanticCustomError: names the part that is wrong, and what it may be.
    """
    _check_parts(rrule)
    first: datetime | None = None
    second: datetime | None = None
    try:
        if _happens(rrule, start):
            rule: Any = rrulestr(rrule, dtstart=start)
            first = rule.after(start, inc=True)
            second = rule.after(first) if first is not None else None
    except _UNREADABLE as exc:
        raise refuse(*_what_is_wrong(rrule), key="rrule") from exc
    if first is None:
        raise refuse(*_why_never(rrule, start), key="rrule")
    if second is not None and second - first < max(SHORTEST_REPEAT, length):
        apart, least = (format_duration(round(d.total_seconds())) for d in (second - first, SHORTEST_REPEAT))
        what = f"the least is {least}"
        if length > SHORTEST_REPEAT:
            what = f"one lasts {format_duration(round(length.total_seconds()))}"
        problem = f"{shown(rrule)} repeats after {apart}, and {what}"
        raise refuse(problem, "Use a longer interval, or shorter work", key="rrule")


def _why_never(rrule: str, start: datetime) -> tuple[str, str]:
    """Problem and fix of a rule without an occurrence."""
    for part in rrule.split(";"):
        key, _, value = part.partition("=")
        if key.strip().upper() == "UNTIL" and (until := _until(value)) is not None:
            problem = f"{shown(rrule)} never happens before its UNTIL, {until:%Y-%m-%dT%H:%M}"
            if until < start:
                problem = f"UNTIL, {until:%Y-%m-%dT%H:%M}, is before the start, {start:%Y-%m-%dT%H:%M}"
            return problem, "Give a later UNTIL, or leave it out"
        if key.strip().upper() == "COUNT" and value.strip() == "0":
            return "COUNT is 0, the least is 1", "Give how often it happens, or leave it out"
    return f"{shown(rrule)} never happens: no day fits all of its parts", "Remove one of them"


def _until(value: str) -> datetime | None:
    for form in ("%Y%m%dT%H%M%S", "%Y%m%d"):
        try:
            return datetime.strptime(value.strip(), form)
        except ValueError:
            continue
    return None


def _happens(rrule: str, start: datetime) -> bool:
    """Whether the rule, whatever its UNTIL and COUNT, has an occurrence within 200 years.

    dateutil gives up a search at the end of year 9999 only, which takes seconds from here. The calendar
    repeats every 400 years, so the same is asked of a start that is late enough to leave 200 to 600 of them.
    """
    parts = [part for part in rrule.split(";") if part.upper().partition("=")[0] not in ("UNTIL", "COUNT")]
    late = start.replace(year=start.year + (LAST_YEAR - start.year - SEARCHED_YEARS) // 400 * 400)
    return rrulestr(";".join(parts), dtstart=late).after(late, inc=True) is not None


def _check_parts(rrule: str) -> None:
    """Refuse what dateutil would take but never come back from, or what brings dates of its own."""
    name, colon, rest = rrule.partition(":")
    if colon and name.strip().upper() == "RRULE" and rest.isprintable() and ":" not in rest:
        raise refuse(f"{shown(rrule)} begins with 'RRULE:'", f"Write {shown(rest)} alone", key="rrule")
    if not rrule.isprintable() or ":" in rrule:
        raise refuse(
            f"{shown(rrule)} is more than one rule",
            "Give the rule alone, e.g. FREQ=WEEKLY;BYDAY=SU",
            key="rrule",
        )
    for part in rrule.upper().split(";"):
        key, _, value = part.partition("=")
        if key == "FREQ" and value not in _FREQUENCIES:
            raise refuse(
                f"{shown(value)} is no frequency for maintenance",
                f"Use one of {', '.join(_FREQUENCIES)}",
                key="rrule",
            )
        if key == "INTERVAL" and not (value.isascii() and value.isdigit() and int(value)):
            raise refuse(f"the rule's INTERVAL is {shown(value)}", "Use a whole number from 1", key="rrule")


def _what_is_wrong(rrule: str) -> tuple[str, str]:
    """Problem and fix of a rule that dateutil cannot read: the first part of it that is wrong."""
    example = "Write for example FREQ=WEEKLY;BYDAY=SU"
    if not rrule:
        return "the rule is empty", example
    for part in rrule.split(";"):
        key, equals, value = part.partition("=")
        known = _PARTS.get(key.strip().upper())
        if not part:
            return f"{shown(rrule)} has an empty part", "Remove the semicolon that has nothing behind it"
        if not equals:
            return f"{shown(part)} is no part of a recurrence rule: it has no '='", example
        if known is None:
            return f"a recurrence rule has no {shown(key)}", f"Use {', '.join(_PARTS)}"
        if not _is_readable(part if key.strip().upper() == "FREQ" else f"FREQ=DAILY;{part}"):
            return f"{key} cannot be {shown(value)}", f"Give {known}"
    if "FREQ=" not in rrule.upper():
        return f"{shown(rrule)} does not say how often", f"Add FREQ: {_PARTS['FREQ']}"
    return f"{shown(rrule)} is not a recurrence rule", example


def _is_readable(rrule: str) -> bool:
    try:
        rrulestr(rrule, dtstart=datetime(LAST_YEAR, 1, 1))  # read only: nothing is searched
    except _UNREADABLE:
        return False
    return True
