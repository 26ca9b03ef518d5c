"""What differs between two documents, field by field.

Works on the JSON form that ``spec_json`` gives, defaults filled in, so a key that is left out and the same
value written out are equal. Members of a list that carry a ``name`` (objectives) are compared by it, others
by their place; a list of plain values is one field. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

MAX_BYTES: Final = 16_000
"""Of a difference in the audit log: a row travels in a message of 64 KiB, and the versions keep the rest."""
MAX_LINE: Final = 76
"""Of a value in a unified difference, so that the line fits 80 columns."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field with two values; None: the field is not there."""

    field: str
    before: Any
    after: Any

    def as_dict(self) -> dict[str, Any]:
        """As the audit log and the API have it."""
        return asdict(self)

    def line(self) -> str:
        """``field: before -> after``."""
        return f"{self.field}: {value_text(self.before)} -> {value_text(self.after)}"


def differences(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[FieldChange]:
    """Fields that differ, in the order of the documents.

    Args:
        before: ``spec_json`` of the older document; None: there is none.
        after: of the newer one.
    """
    old, new = dict(_fields(before or {}, "")), dict(_fields(after or {}, ""))
    names = [*old, *(name for name in new if name not in old)]
    changes = [FieldChange(name, old.get(name), new.get(name)) for name in names]
    return [change for change in changes if change.before != change.after]


def bounded(changes: Sequence[FieldChange], limit_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """The changes as JSON values, as many as fit; a last entry says how many were left out."""
    rows: list[dict[str, Any]] = []
    room = limit_bytes
    for change in changes:
        row = change.as_dict()
        room -= len(json.dumps(row))
        if room < 0:
            left_out = len(changes) - len(rows)
            return [*rows, {"field": f"and {left_out} more fields", "before": None, "after": None}]
        rows.append(row)
    return rows


def unified(changes: Sequence[FieldChange], before_title: str, after_title: str) -> list[str]:
    """Lines of a unified difference: a heading of two lines, then of each field what went and what came."""
    lines = [f"--- {before_title}", f"+++ {after_title}"]
    for change in changes:
        lines.append(f"@@ {change.field}")
        old, new = _values(change.before), _values(change.after)
        lines += [f"-  {text}" for text in old if text not in new]
        lines += [f"+  {text}" for text in new if text not in old]
        if set(old) == set(new):
            lines.append("   the order has changed")
    return lines


def value_text(value: Any) -> str:
    """A value in one line, shortened; ``none`` for what is not there."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 3]}..."


def _values(value: Any) -> list[str]:
    if value is None:
        return []
    return [value_text(item) for item in value] if isinstance(value, list) else [value_text(value)]


def _fields(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _fields(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            name = item.get("name", place) if isinstance(item, dict) else place
            yield from _fields(item, f"{path}[{name}]")
    else:
        yield path, value if value not in ({}, []) else None
