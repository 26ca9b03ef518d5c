"""What the model found wrong with a value, in words that say what to write instead. Pure.

The model's checks speak of types and bounds. Those who make agreements think in percent, milliseconds and
names, so the usual mistakes (99.5 for 0.995, 0.95 for 95, "5ms" for 5, a name for a list of names) are met by
the value that was meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from sla_server.agreements.model import Agreement
from sla_server.agreements.objectives import METRICS

MAX_SHOWN: Final = 80  # characters of a wrong value that a problem repeats
_SEE: Final = "See docs/formats/agreement.md"
_RATIOS: Final = ("target", "below", "credit", "credit_cap", "min_read_fraction")
_UNITS: Final = ("ms", "us", "s", "%", "iops", "kib", "mb/s", "mbps", "i/o/s")


def explain(item: Any, path: Sequence[int | str]) -> tuple[str, str]:
    """Problem and fix for one error of pydantic at ``path`` (without the tags of unions)."""
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    if kind == "agreement":
        return context["problem"], context["fix"]
    if kind == "missing":
        return "is required", f"Add the key {path[-1]}"
    if kind == "extra_forbidden":
        return "there is no such key here", _other_key(str(path[-1]))
    if kind in ("literal_error", "enum", "union_tag_invalid"):
        expected = context.get("expected") or context.get("expected_tags")
        if tuple(path[-2:]) == ("indicator", "metric"):
            expected = ", ".join(METRICS)
        return f"{shown(value)} is not possible here", f"Use one of {expected}"
    if kind == "union_tag_not_found":
        return "the key 'type' is required", "Add type: calendar or type: rolling"
    if kind == "too_short":
        return "is empty", "Name at least one"
    if kind == "list_type":
        fix = f"Write it in brackets: [{value}]" if isinstance(value, str) else _SEE
        return f"should be a list (the value is {shown(value)})", fix
    return f"{item['msg'].removeprefix('Input ')} (the value is {shown(value)})", _meant(value, str(path[-1]))


def shown(value: Any) -> str:
    """The value as Python writes it, cut short."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits is not written out
        return "a very long number"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _meant(value: Any, key: str) -> str:
    """What was probably meant by a number that is refused; "" if that cannot be said."""
    number, is_percent = _number_in(value)
    if number is None:
        return ""
    if key in _RATIOS:
        if key == "target" and number == 1:
            return "Write 0.999 for 99.9 %: a target of 1 leaves no error budget"
        if is_percent or 1 < number <= 100:
            return f"Write {number / 100:g} for {number:g} %" if number < 100 else "Write a share below 1"
    if key == "percentile" and 0 < number < 1:
        return f"Write {number * 100:g}: percentiles are in percent"
    return f"Write {number:g}: the unit is part of the key's name" if isinstance(value, str) else ""


def _number_in(value: Any) -> tuple[float | None, bool]:
    """The number in ``5``, ``"5ms"`` or ``"99.5 %"``, and whether it is in percent."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None, False
    text = str(value)[:40].strip().lower() if isinstance(value, str) else value
    is_percent = isinstance(text, str) and text.endswith("%")
    if isinstance(text, str):
        for unit in _UNITS:
            text = text.removesuffix(unit)
    try:
        return float(text), is_percent
    except (ValueError, OverflowError):
        return None, False


def _other_key(key: str) -> str:
    known = _known_keys()
    if key in known:
        return f"{key} belongs elsewhere in the document: {_SEE.lower()}"
    close = difflib.get_close_matches(key, known, n=1)
    return f"Did you mean {close[0]}?" if close else f"Remove it, or {_SEE.lower()}"


@cache
def _known_keys() -> tuple[str, ...]:
    schema = Agreement.model_json_schema()
    models = [schema, *schema.get("$defs", {}).values()]
    return tuple(sorted({key for model in models for key in model.get("properties", {})}))
