"""Numbers and durations as people write them: what ``3,000``, ``5 ms`` or ``2 hours`` was meant to be.

A document takes plain numbers only; this says what to write instead of what was refused. It guesses nothing
that is then used. Pure.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Final

MOST_CHARACTERS: Final = 60
"""Of a text that is looked at: a longer one is no number that somebody mistyped."""
_NUMBER_AND_UNIT: Final = re.compile("([+-]?[0-9][0-9.,'\u2019_ ]*?) *([a-z\u03bc%/][a-z\u03bc/]*)?")
_SCALES: Final[dict[str, dict[str, float]]] = {
    "ms": {"us": 1e-3, "\u03bcs": 1e-3, "ms": 1, "s": 1e3, "sec": 1e3},
    "s": {"ms": 1e-3, "s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600},
    "iops": {"iops": 1, "ios/s": 1, "io/s": 1, "i/o/s": 1, "/s": 1, "k": 1e3, "kiops": 1e3, "m": 1e6},
    "mbps": {"mbps": 1, "mb/s": 1, "mb": 1, "kb/s": 1e-3, "gb/s": 1e3, "mib/s": 1.048576},
    "kib": {"kib": 1, "k": 1, "b": 1 / 1024, "mib": 1024},
    "slice": {"ios": 1, "i/os": 1, "k": 1e3},
    "percentile": {"%": 1},
}  # fmt: skip
"""End of a key's name -> how much of its unit is one of the unit written."""
_DURATIONS: Final = {
    "s": ("s", "sec", "secs", "second", "seconds"),
    "m": ("m", "min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
    "d": ("d", "day", "days"),
    "w": ("w", "week", "weeks"),
}


def plain(number: float) -> str:
    """A number as a document takes it: no separators, no exponent where one can do without."""
    return f"{number:.15g}"


def number_and_unit(text: str, *, is_share: bool = False) -> tuple[float, str] | None:
    """The number that was meant and the unit behind it, in small letters; None: there is no number.

    Args:
        text: as written; digits of any alphabet's width, separators of thousands, a comma for the point.
        is_share: a ratio or percentile is meant, which has no thousands: its comma is the point.
    """
    text = unicodedata.normalize("NFKC", text[: MOST_CHARACTERS + 1]).strip().lower()
    if len(text) > MOST_CHARACTERS:
        return None
    try:
        number: float | None = float(text)
        unit = ""
    except ValueError:
        match = _NUMBER_AND_UNIT.fullmatch(text)
        number = None if match is None else _number(match[1], is_share)
        unit = "" if match is None else match[2] or ""
    return None if number is None or not math.isfinite(number) else (number, unit)


def scaled(number: float, unit: str, key: str) -> float | None:
    """In the unit of the key's own name: ``5 s`` of ``value_ms`` is 5000; None: it has no such unit."""
    known = _SCALES.get(key.rpartition("_")[2], {})
    if not unit:
        return number
    return number * known[unit] if unit in known else None


def meant_duration(text: str) -> str:
    """``10m`` for ``10 min``; "" if a document has no duration like it."""
    found = number_and_unit(text)
    if found is None or not found[1]:
        return ""
    number, written = found
    unit = next((unit for unit, names in _DURATIONS.items() if written in names), "")
    smaller = {"m": ("s", 60), "h": ("m", 60), "d": ("h", 24), "w": ("d", 7)}
    while unit in smaller and number != int(number):
        unit, number = smaller[unit][0], round(number * smaller[unit][1], 6)
    is_whole = bool(unit) and number == int(number)
    return f"{int(number)}{unit}" if is_whole and 0 < number < 10**6 else ""


def _number(text: str, is_share: bool) -> float | None:
    for separator in (" ", "_", "'", "\u2019"):
        text = text.replace(separator, "")
    point = _point_of(text, is_share)
    other = "." if point == "," else ","
    whole, _, fraction = text.partition(point) if point else (text, "", "")
    groups = re.split("[.,]" if not point else re.escape(other), whole)
    if len(groups) > 1 and not all(len(group) == 3 for group in groups[1:]):
        return None
    try:
        return float(f"{''.join(groups)}.{fraction or 0}")
    except ValueError:
        return None


def _point_of(text: str, is_share: bool) -> str:
    """Which character is the decimal point; "": there is none, and what there is divides thousands."""
    commas, points = text.count(","), text.count(".")
    if commas and points:
        last = "," if text.rindex(",") > text.rindex(".") else "."
        return last if text.count(last) == 1 else ""
    if points == 1:
        return "."
    if commas == 1:
        whole, _, fraction = text.partition(",")
        is_thousand = len(fraction) == 3 and whole.lstrip("+-") not in ("", "0")
        return "" if is_thousand and not is_share else ","
    return ""
