"""The live snapshot: the controller's view, completed with what SQL and the judge know (messages.md).

Its list ``slas`` has the promises that need a look, at most ``live_rows``. Of all others the state goes along
in ``others``, with a few figures; where there are very many they take turns, so that each comes again after
some snapshots. The application server keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog

from pmdaemon.errors import FrameTooLarge
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import frame
from pmdaemon.wire.messages.api import OTHER_KEYS, Snapshot
from sla_server.agreements.compliance import ObjectiveStatus
from sla_server.agreements.slice_history import Counts
from sla_server.rows import Row
from sla_server.services.sql_worker import AHEAD_US, SHOWN_EVENTS

SNAPSHOT_BYTES: Final = frame.MAX_FRAME_BYTES - 4096
EVENT_BYTES: Final = 32_768  # a violation's figures are some 2 KB, names of new volumes some 13 KB
BY_SLICES_ROWS: Final = 200
"""Objectives shown by their newest slice: those that control does not look at."""
OTHERS_ROWS: Final = 1000
"""Promises in one snapshot's ``others``: some 120 KB."""
LEFT_OUT_KNOWN: Final = 1000
LEFT_OUT_US: Final = 60_000_000  # SQL is read more often
Key = tuple[str, str]
"""(agreement, objective)."""
log = structlog.get_logger("services")
_NOT_JUDGED: Final[Row] = {
    "compliance": None,
    "coverage": None,
    "budget_remaining": None,
    "budget_minutes_left": None,
    "slices": Counts().states(),
    "target": None,
    "burn_1h": None,
    "alerts": [],
    "good_s": None,
    "bad_s": None,
}


class _Known(NamedTuple):
    """All promises and their states, in one order. Two lists: there may be 64,000, of which few are shown."""

    keys: Sequence[Key]
    states: Sequence[str]


class _LeftOut(NamedTuple):
    """An event that cannot be shown, since when, and when it was last read."""

    reason: str
    since_us: int
    seen_us: int


class Shown:
    """The newest events, whichever process raised them, and the processes. Belongs to the main loop.

    An event that cannot be shown (its time lies ahead, a key is missing, it is too large) is left out,
    logged, and counted in ``problems``: no event takes the others with it.
    """

    def __init__(self, events: Iterable[Row], now_us: int) -> None:
        self.processes: list[Row] = []
        self._events: dict[str, Row] = {}
        self._next_other = 0
        self._left_out: dict[str, _LeftOut] = {}
        self.add(events, now_us)

    def add(self, events: Iterable[Row], now_us: int) -> None:
        """Events of ours at once, and all again as SQL has them; the same one counts once."""
        for row in events:
            if (reason := _why_not_shown(row, now_us)) is None:
                self._events.setdefault(row["event_id"], row)
            else:
                self._leave_out(row, reason, now_us)
        self._events = {row["event_id"]: row for row in self.events()}

    def _leave_out(self, row: Row, reason: str, now_us: int) -> None:
        name = excerpt(row.get("event_id"))
        known = self._left_out.get(name)
        if known is None:
            log.error("event-not-shown", event_id=name, kind=excerpt(row.get("kind")), reason=reason)
            if len(self._left_out) >= LEFT_OUT_KNOWN:
                self._left_out.clear()
        since_us = now_us if known is None else known.since_us
        self._left_out[name] = _LeftOut(reason, since_us, now_us)

    def problems(self, now_us: int) -> list[Row]:
        """A row for the page's list of problems if events are left out that were read lately."""
        self._left_out = {
            name: item for name, item in self._left_out.items() if now_us - item.seen_us <= LEFT_OUT_US
        }
        if not self._left_out:
            return []
        event_id, newest = next(reversed(self._left_out.items()))
        text = (
            f"{len(self._left_out)} events cannot be shown; the newest of them, {event_id}, {newest.reason}"
        )
        since_us = min(item.since_us for item in self._left_out.values())
        return [{"process": "services", "what": "events", "since_us": since_us, "reason": text}]

    def events(self) -> list[Row]:
        """Newest first."""
        newest = sorted(self._events.values(), key=lambda row: (row["at_us"], row["event_id"]), reverse=True)
        return newest[:SHOWN_EVENTS]

    def compose(
        self,
        view: Mapping[str, Any],
        mode: str,
        standings: Mapping[Key, ObjectiveStatus],
        policy: Row | None,
        now_us: int,
        database: str = "",
    ) -> Row:
        """The whole snapshot; ``database``: why SQL cannot be read, "" if it can."""
        slas = []
        for row in (_with_slice(row, standings) for row in view["slas"]):
            standing = standings.get((row["name"], row["objective"]))
            slas.append({**row, **_judged(standing)})
        promises: Sequence[Key] = view.get("promises", ())
        by_slices = [(key, s.shown) for key, s in standings.items() if s.shown is not None]
        if by_slices:
            live = {*promises, *((row["name"], row["objective"]) for row in slas)}
            by_slices = [(key, row) for key, row in by_slices if key not in live]
        by_slices.sort(key=lambda entry: entry[1]["state"] not in ("violating", "at-risk"))
        rows = ({**row, **_judged(standings[key])} for key, row in by_slices[:BY_SLICES_ROWS])
        slas += sorted(rows, key=lambda row: (row["name"], row["objective"]))
        more = by_slices[BY_SLICES_ROWS:]
        known = _Known(
            [*promises, *(key for key, _ in more)],
            [*view.get("states", ()), *(str(row["state"]) for _, row in more)],
        )
        others = self._others(known, {(row["name"], row["objective"]) for row in slas}, standings)
        keys = ("name", "state", "restarts", "since_us")
        totals = view.get("totals", {})
        states = Counter(totals.get("slas", {}))
        states.update(str(row["state"]) for _, row in by_slices)
        return {
            **{name: part for name, part in view.items() if name not in ("promises", "states")},
            "others": others,
            "totals": {**totals, "slas": dict(states)},
            "at_us": now_us,
            "mode": mode,
            "slas": slas,
            "processes": [{key: row.get(key) for key in keys} for row in self.processes],
            "events": self.events(),
            "policy": policy,
            "database": database,
        }

    def _others(
        self,
        known: _Known,
        shown: Collection[Key],
        standings: Mapping[Key, ObjectiveStatus],
    ) -> list[list[Any]]:
        """Those without a row: [agreement, objective, state] and the other values of ``OTHER_KEYS``."""
        first = self._next_other if self._next_other < len(known.keys) else 0
        self._next_other = last = first + OTHERS_ROWS
        found: list[list[Any]] = []
        for key, state in zip(known.keys[first:last], known.states[first:last], strict=True):
            if key in shown:
                continue
            judged = _judged(standings.get(key))
            found.append([*key, state, *(judged[name] for name in OTHER_KEYS[3:])])
        return found


def _judged(standing: ObjectiveStatus | None) -> Row:
    """What the judge adds to an objective; ``good_s`` and ``bad_s`` only grow until services restart."""
    if standing is None:
        return _NOT_JUDGED
    good_us, bad_us = standing.judged_us
    return {
        **standing.snapshot(),
        "target": standing.target,
        "burn_1h": round(standing.burn_1h, 4),
        "alerts": sorted(standing.alerts),
        "good_s": good_us // 1_000_000,
        "bad_s": bad_us // 1_000_000,
    }


def _why_not_shown(row: Row, now_us: int) -> str | None:
    """What is wrong with an event; None if it can be shown."""
    for key in ("event_id", "kind", "severity", "element", "subject", "text"):
        if not isinstance(row.get(key), str):
            return f"has no text as {key!r}"
    at_us = row.get("at_us")
    if type(at_us) is not int or not 0 <= at_us <= now_us + AHEAD_US:
        return f"has the time {excerpt(at_us)}, which is none or more than a day ahead"
    size = len(strict_json.dumps(row))
    return f"has {size} bytes, limit {EVENT_BYTES}" if size > EVENT_BYTES else None


def _with_slice(row: Mapping[str, Any], standings: Mapping[tuple[str, str], ObjectiveStatus]) -> Row:
    """A live row; of a promised rate with what was delivered in the newest slice: windows are too short."""
    if row.get("promised") is None:
        return dict(row)
    standing = standings.get((row["name"], row["objective"]))
    shown = standing.shown if standing is not None else None
    return {**row, "measured": shown["measured"] if shown is not None else None}


def snapshot_frame(view: Row) -> bytes:
    """SNAPSHOT; one that exceeds a frame header goes as JSON in the blob, and its header says ``json: true``.

    What has no form in JSON is replaced, and what exceeds a frame is cut: the longest list loses its last
    half, again and again, and ``cut_short`` says how many rows are missing of which.
    """
    try:
        return Snapshot(view["at_us"], view).encode()
    except (FrameTooLarge, TypeError, ValueError, OverflowError):
        text = strict_json.dumps(view).encode()
    missing: dict[str, int] = {}
    while len(text) > SNAPSHOT_BYTES:
        lists = {name: rows for name, rows in view.items() if isinstance(rows, list) and rows}
        if not lists:
            view = {"at_us": view["at_us"], "mode": view["mode"]}
        else:
            name = max(lists, key=lambda name: len(strict_json.dumps(lists[name])))
            kept = lists[name][: len(lists[name]) // 2]
            missing[name] = missing.get(name, 0) + len(lists[name]) - len(kept)
            view = {**view, name: kept, "cut_short": missing}
        text = strict_json.dumps(view).encode()
    if missing:
        log.error("snapshot-cut-short", **missing)
    return Snapshot(view["at_us"], view).encode_as_json(text)
