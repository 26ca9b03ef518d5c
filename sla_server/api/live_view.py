"""The live view: the newest snapshot, a short trend of each agreement, and the places for live streams.

``services`` posts a snapshot a second (large ones less often); the mailbox thread puts it here, any number
of request threads read or wait. A snapshot is turned into JSON once, however many pages watch.

State, all under the lock of ``_changed``: ``_newest`` (number, time of receipt, snapshot, JSON), ``_trend``
(one small point a snapshot, 15 minutes at one a second), ``_others`` (the newest state of each promise, when
it came and since when it is so: those that snapshots have no rows of take turns to come), ``_reports`` (the
newest of dbmanager and of the supervisor, for when ``services`` are silent), ``_streams`` (places taken),
``_closed``. Numbers count from 1 in this process only; a stream says so with its first event, so a restart
confuses no page.
Nothing survives a restart and nothing needs to: the next snapshot comes within a second.

Source: DESIGN.md 11; docs/formats/messages.md, "Live snapshot".
"""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import structlog

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.api import OTHER_KEYS
from pmdaemon.wire.messages.server import Pressure
from sla_server.api.errors import TooManyStreams

TREND_POINTS: Final = 900  # 15 minutes at one a second; a point is about 100 B an objective
LISTS: Final = ("gateways", "volumes", "slas", "throttles", "backends", "processes", "events", "problems")
OTHER_LEAST: Final = 6
"""Values that such a row has at least; the rest is null where services are older."""
STATE_FRESH_NS: Final = 300_000_000_000
"""A promise that no snapshot had for so long has ended: 64,000 take turns within 200 s."""
REPORT_FRESH_US: Final = 10_000_000  # five of them missed
EMPTY: Final[dict[str, Any]] = {
    "at_us": 0,
    "mode": None,
    "policy": None,
    "database": "",
    **{name: [] for name in LISTS},
}
log = structlog.get_logger("api-live")
_States = dict[tuple[str, str], tuple[int, dict[str, Any]]]
_ACTIVE: Final = frozenset(("requested", "sent", "confirmed", "seen"))


@dataclass(frozen=True, slots=True)
class Newest:
    """One snapshot as received. ``number`` 0 means that none came yet."""

    number: int
    received_ns: int  # less the time for which it waited to be received
    snapshot: dict[str, Any]
    json_text: str


class StreamPlace:
    """One taken place for a live stream; ``release`` may be called more than once."""

    def __init__(self, view: LiveView) -> None:
        self._view: LiveView | None = view

    def release(self) -> None:
        """Free the place."""
        view, self._view = self._view, None
        if view is not None:
            view._free_place()


class LiveView:
    """The state that the pages show. Thread: every method from any thread; ``put`` from one."""

    def __init__(self, clock: Clock, *, streams_max: int, stale_after_s: float) -> None:
        self._clock = clock
        self.streams_max = streams_max
        self._stale_after_s = stale_after_s
        self._changed = threading.Condition()  # guards everything below
        self._newest = Newest(0, 0, dict(EMPTY), json.dumps(EMPTY))
        self._trend: deque[tuple[int, dict[str, tuple[Any, Any, bool]]]] = deque(maxlen=TREND_POINTS)
        self._others: _States = {}
        self._reports: dict[str, Pressure] = {}
        self._streams = 0
        self._closed = False

    def put(self, snapshot: dict[str, Any]) -> None:
        """Take a new snapshot and wake all waiting threads.

        Raises:
            ValueError: it is not of the documented form; nothing is changed. A bad row alone is dropped, and
                a value that JSON has no form for is replaced.
        """
        if not isinstance(snapshot.get("at_us"), int):
            raise ValueError("snapshot without an integer at_us")
        full = {**EMPTY, **snapshot}
        others = full.pop("others", None)
        dropped = 0
        for name in LISTS:
            if not isinstance(full[name], list):
                raise ValueError(f"snapshot's {name} is not a list")
            rows = [row for row in full[name] if isinstance(row, dict)]
            dropped += len(full[name]) - len(rows)
            full[name] = rows
        if dropped:
            log.warning("snapshot-rows-dropped", rows=dropped)
        text = strict_json.dumps(full)
        point = _trend_point(full)
        # It may have waited in the mailbox, for this process or from before its start. All processes of a
        # server have one clock.
        waited_ns = max(self._clock.unix_us() - full["at_us"], 0) * 1000
        with self._changed:
            self._newest = Newest(self._newest.number + 1, self._clock.monotonic_ns() - waited_ns, full, text)
            self._trend.append((full["at_us"], point))
            self._keep_others(others, full)
            self._changed.notify_all()

    def _keep_others(self, rows: Any, snapshot: dict[str, Any]) -> None:
        """Take the states that came; forget the others if all came, or if most are of promises that are gone.

        Under the lock.
        """
        totals = snapshot.get("totals")
        states = totals.get("slas") if isinstance(totals, dict) else None
        counts = states.values() if isinstance(states, dict) else ()
        promises = sum(count for count in counts if isinstance(count, int))
        rows = rows if isinstance(rows, list) else []
        former = self._others
        if promises <= len(rows) + len(snapshot["slas"]) or len(self._others) > 2 * promises:
            self._others = {}
        for row in rows:
            if isinstance(row, list | tuple) and OTHER_LEAST <= len(row) <= len(OTHER_KEYS):
                values = dict(zip(OTHER_KEYS, row, strict=False))
                self._keep_state({**dict.fromkeys(OTHER_KEYS), **values}, former, snapshot["at_us"])
        for entry in snapshot["slas"]:  # the next time it may be among the others, and its turn not come yet
            self._keep_state({name: entry.get(name) for name in OTHER_KEYS}, former, snapshot["at_us"])

    def _keep_state(self, row: dict[str, Any], former: _States, at_us: int) -> None:
        """Take one promise's state; ``since_us`` is null until a change of it was seen. Under the lock."""
        key = str(row["name"]), str(row["objective"])
        _came_ns, before = former.get(key, (0, None))
        row["since_us"] = None
        if before is not None:
            row["since_us"] = before["since_us"] if before["state"] == row["state"] else at_us
        self._others[key] = self._newest.received_ns, row

    def others(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(agreement, objective) to ``OTHER_KEYS`` and ``since_us``: the newest state of every promise."""
        with self._changed:
            oldest_ns = self._clock.monotonic_ns() - STATE_FRESH_NS
            return {key: row for key, (came_ns, row) in self._others.items() if came_ns >= oldest_ns}

    def put_report(self, report: Pressure) -> None:
        """Take a report of dbmanager or of the supervisor."""
        with self._changed:
            self._reports[report.name] = report

    def reported_problems(self) -> list[dict[str, Any]]:
        """What dbmanager cannot use and which parts hang, by the reports that are not old."""
        with self._changed:
            reports = [self._reports.get(name) for name in ("supervisor", "dbmanager")]
        now_us = self._clock.unix_us()
        return [
            {"process": problem.what if report.name == "supervisor" else report.name, **problem._asdict()}
            for report in reports
            if report is not None and now_us - report.at_us <= REPORT_FRESH_US  # it may have waited here
            for problem in report.problems
        ]

    def newest(self) -> Newest:
        """The newest snapshot (number 0 and empty lists before the first)."""
        with self._changed:
            return self._newest

    def wait_newer(self, number: int, timeout_s: float) -> Newest | None:
        """Sleep until there is a snapshot after ``number``; None at the timeout or the close."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._newest.number > number, timeout_s)
            return None if self._closed or self._newest.number <= number else self._newest

    def age_s(self) -> float | None:
        """Seconds since the newest snapshot came; None before the first."""
        newest = self.newest()
        return None if newest.number == 0 else (self._clock.monotonic_ns() - newest.received_ns) / 1e9

    def is_stale(self) -> bool:
        """Whether no snapshot came recently: ``services`` is down or overloaded."""
        age_s = self.age_s()
        return age_s is None or age_s > self._stale_after_s

    def trend(self) -> dict[str, Any]:
        """Latency against promise of the last minutes, column-wise.

        Returns:
            ``{at_us: [n], slas: {"NAME/OBJECTIVE": {latency_us, threshold_us, throttled: [n]}}}``; null where
            an objective had no value.
        """
        with self._changed:
            points = list(self._trend)
        keys = sorted({key for _, point in points for key in point})
        missing = (None, None, False)
        columns: dict[str, Any] = {}
        for key in keys:
            rows = [point.get(key, missing) for _, point in points]
            columns[key] = {
                "latency_us": [row[0] for row in rows],
                "threshold_us": [row[1] for row in rows],
                "throttled": [row[2] for row in rows],
            }
        return {"at_us": [at_us for at_us, _ in points], "slas": columns}

    def take_place(self) -> StreamPlace:
        """Take a place for one more live stream.

        Raises:
            TooManyStreams: all are taken.
        """
        with self._changed:
            if self._streams >= self.streams_max:
                raise TooManyStreams(self.streams_max)
            self._streams += 1
        return StreamPlace(self)

    def _free_place(self) -> None:
        with self._changed:
            self._streams -= 1

    @property
    def streams(self) -> int:
        """Places taken."""
        with self._changed:
            return self._streams

    @property
    def closed(self) -> bool:
        """Whether the process is stopping; streams end."""
        with self._changed:
            return self._closed

    def close(self) -> None:
        """End every wait, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _measured_us(row: dict[str, Any]) -> Any:
    """What a promise's limit is compared with: a latency, or for how long nothing was answered."""
    if row.get("metric") in ("iops", "throughput"):
        return None
    keys = ("measured", "stall_us") if row.get("metric") == "availability" else ("latency_us", "measured")
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _helped(snapshot: dict[str, Any]) -> set[str]:
    """Promises for which a volume is throttled: those that asked, and all others that the loop helps."""
    victims = {str(row.get("backend")): row.get("victims") for row in snapshot["backends"]}
    found = set[str]()
    for row in snapshot["throttles"]:
        if str(row.get("state")) not in _ACTIVE:
            continue
        found.add(str(row.get("victim", "")))
        others = victims.get(str(row.get("backend"))) if row.get("source") == "control" else None
        found.update(map(str, others) if isinstance(others, list) else ())
    return found


def _trend_point(snapshot: dict[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
    """Per objective: (latency or stall in us, threshold_us, whether a volume is throttled for it)."""
    helped = {name.partition("/")[0] for name in _helped(snapshot)}
    return {
        f"{row.get('name')}/{row.get('objective')}": (
            _measured_us(row),
            row.get("threshold_us"),
            str(row.get("name")) in helped,
        )
        for row in snapshot["slas"]
    }
