"""Violation episodes: one row from the moment a promise is broken until it is kept again, over restarts.

The controller says when a violation opens and when it closes, each after a time in which that held
(``control.live_state``); it forgets everything with its process.
The rows in SQL do not, so:

    controller opens, no row open      new row, event ``violation-opened``
    controller opens, a row is open    the row goes on (the process was restarted meanwhile), no second event
    controller closes, a row is open   the row is closed, event ``violation-closed``
    a row is open, the controller      the row is closed after ``SETTLE_US``: the violation ended unseen,
      says something else              or the agreement is gone

Belongs to the main loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sla_server.rows import Row, Rows
from sla_server.services.rows import event_row, identity

SETTLE_US: Final = 20_000_000
"""As ``episode_calm_s``, and longer than the controller needs for three windows after a restart."""
WORSE_RATIO: Final = 1.1  # smaller steps of worst_u are not worth a row a second
_MEASURED: Final = frozenset(("ok", "at-risk", "idle", "out-of-curve", "not-applicable", "excluded"))
Key = tuple[str, str]


def key_of(subject: str) -> Key:
    """(agreement, objective) of an event's subject ``agreement/objective``."""
    name, _, objective = subject.partition("/")
    return name, objective


class Episodes:
    """See the module."""

    def __init__(self, open_rows: Iterable[Row], now_us: int) -> None:
        self._open: dict[Key, Row] = {(row["name"], row["objective"]): dict(row) for row in open_rows}
        self._calm_since: dict[Key, int] = dict.fromkeys(self._open, now_us)

    def open_keys(self) -> frozenset[Key]:
        """Objectives that are being violated."""
        return frozenset(self._open)

    def opened(self, subject: str, text: str, severity: str, details: dict[str, Any], now_us: int) -> Rows:
        """The controller says a violation opened."""
        key = key_of(subject)
        self._calm_since.pop(key, None)
        if key in self._open:
            return []
        row: Row = {
            "episode_id": identity("episode", *key, now_us),
            "name": key[0],
            "objective": key[1],
            "opened_us": now_us,
            "closed_us": None,
            "worst_u": _number(details.get("u")),
        }
        self._open[key] = row
        details = {**details, "episode_id": row["episode_id"]}
        return [
            ("episodes", dict(row)),
            event_row("violation-opened", severity, "sla", subject, text, now_us, details),
        ]

    def closed(self, subject: str, text: str, severity: str, details: dict[str, Any], now_us: int) -> Rows:
        """The controller says that it has ended."""
        row = self._open.pop(key_of(subject), None)
        self._calm_since.pop(key_of(subject), None)
        if row is None:
            return []
        row["closed_us"] = now_us
        seconds = (now_us - row["opened_us"]) / 1e6
        details = {**details, "episode_id": row["episode_id"], "lasted_s": seconds, "worst_u": row["worst_u"]}
        return [
            ("episodes", dict(row)),
            event_row("violation-closed", severity, "sla", subject, text, now_us, details),
        ]

    def update(self, states: Mapping[Key, Row], now_us: int) -> Rows:
        """Once a second with the live states of the open ones: worst value, and those left open."""
        rows: Rows = []
        for key, row in list(self._open.items()):
            live = states.get(key)
            if live is not None and live.get("is_open") and live.get("state") != "violating":
                self._calm_since.pop(key, None)  # the controller waits until it is calm for good
                continue
            if live is not None and live.get("state") == "violating":
                self._calm_since.pop(key, None)
                u = _number(live.get("u"))
                if u > WORSE_RATIO * _number(row["worst_u"]):
                    row["worst_u"] = u
                    rows.append(_progress(row))
                continue
            if live is not None and live.get("state") not in _MEASURED:
                continue  # no data: neither over nor going on
            since_us = min(self._calm_since.setdefault(key, now_us), now_us)  # the clock may go back
            self._calm_since[key] = since_us
            if now_us - since_us >= SETTLE_US:
                subject = f"{key[0]}/{key[1]}"
                why = "the agreement is no longer in force" if live is None else "the promise is kept again"
                rows += self.closed(subject, f"{subject}: {why}", "info", {}, now_us)
        return rows


def _progress(row: Row) -> tuple[str, Row]:
    """What may change while an episode is open."""
    return "episodes", {key: row[key] for key in ("episode_id", "worst_u")}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
