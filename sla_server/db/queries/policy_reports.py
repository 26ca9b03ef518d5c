"""What views ask of the reports of policies again and again, without reading a report again.

A report is as large as the fleet, megabytes on a large one, and that of a version never changes. It is read
once; what is kept is small: of the few versions that were looked at last what their backends can take and who
hurt whom, of each version that was listed its back-test. What differs between the caps of two versions never
changes, either, and both have 168 caps of each volume: some pages of it are kept. Which version is the
newest, and when one was computed, is asked each time: a row of some numbers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Executable, select

from pmdaemon.runtime import strict_json
from sla_server.db import schema
from sla_server.db.queries import policies
from sla_server.rows import Row

TESTS_MAX: Final = 4096
"""Versions whose back-test is kept; many times as many as ever are in SQL."""
REPORTS_MAX: Final = 4
"""Versions of which more than the back-test is kept."""
PAGES_MAX: Final = 8
"""Pages of differences that are kept, of 2,000 volumes at most: some 10 MB."""
Made = tuple[int, int]
"""Version, and when it was computed: after a restore a number may be that of another policy."""


@dataclass(frozen=True, slots=True)
class KeptReport:
    """What one version says of what backends can take, and of who hurt whom.

    Attributes:
        least: backend to the least load at which some promise on it is still kept, where that is known.
    """

    version: int
    created_us: int
    least: Mapping[str, float]
    _capacity: Mapping[str, str]
    _curves: Mapping[str, str]
    _harms: str

    @classmethod
    def of(cls, made: Made, report: Row | None) -> KeptReport:
        """Of a report; an empty one if there is none."""
        capacity = (report or {}).get("capacity") or ()
        curves = (report or {}).get("curves") or ()
        least: dict[str, float] = {}
        for one in capacity:
            if (cost := one.get("cost_per_s")) is not None:
                least[one["backend"]] = min(cost, least.get(one["backend"], cost))
        harms = sorted((report or {}).get("harms") or (), key=_order_of_harm)
        return cls(*made, least, _texts(capacity), _texts(curves), _text(harms))

    def capacity(self, backend: str | None = None) -> list[Row]:
        """How much one backend, or each, can take while a promise on it is kept, and why."""
        return _rows(self._capacity.values() if backend is None else [self._capacity.get(backend)])

    def curves(self, backend: str) -> list[Row]:
        """Latency by load of each promise on one backend."""
        return _rows([self._curves.get(backend)])

    def harms(self) -> list[Row]:
        """Volumes and the promises that they hurt, the largest share of each promise first."""
        return _rows([self._harms])


def _texts(rows: Iterable[Row]) -> dict[str, str]:
    """Rows by backend, as JSON: decoded they would take ten times the memory."""
    by_backend: dict[str, list[Row]] = {}
    for row in rows:
        by_backend.setdefault(str(row.get("backend")), []).append(row)
    return {name: _text(some) for name, some in by_backend.items()}


def _text(rows: list[Row]) -> str:
    return json.dumps(rows, separators=(",", ":"))


def _order_of_harm(row: Row) -> tuple[Any, ...]:
    names = (str(row.get(key)) for key in ("backend", "sla", "objective"))
    return *names, row.get("step") or 0, -(row.get("share") or 0.0)


def _rows(texts: Iterable[str | None]) -> list[Row]:
    return [row for text in texts if text for row in strict_json.loads(text)]


class PolicyReports:
    """The questions; ``read`` runs a statement (``SqlReader``). Thread: any.

    State, under ``_lock``: ``_reports``, ``_back_tests``, ``_changes``, what was asked for last at the end.
    The lock is held while any of them is read, so that of many pages that ask at once one reads it.
    """

    def __init__(self, read: Callable[[Executable], list[Row]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._reports: dict[Made, KeptReport] = {}
        self._back_tests: dict[Made, Row] = {}
        self._changes: dict[tuple[Made | None, Made | None, int, str], list[Row]] = {}

    def newest(self) -> KeptReport | None:
        """Of the newest version, whatever its state; None: no policy was ever computed."""
        table = schema.policies
        statement = select(table.c.version, table.c.created_us).order_by(table.c.version.desc()).limit(1)
        return next((self.report_of(row) for row in self._read(statement)), None)

    def report_of(self, head: Row) -> KeptReport:
        """Of the version of this ``version`` and ``created_us``."""
        made = head["version"], head["created_us"]
        with self._lock:
            kept = self._reports.pop(made, None)
            if kept is None:
                report = self._report(made)
                kept = KeptReport.of(made, report)
                self._back_tests.setdefault(made, back_test_of(report))
            self._reports[made] = kept
            while len(self._reports) > REPORTS_MAX:
                del self._reports[next(iter(self._reports))]
            return kept

    def head(self, version: int) -> Row | None:
        """Version, state, and when it was computed; None: there is no such version."""
        table = schema.policies
        columns = table.c.version, table.c.state, table.c.created_us
        return next(iter(self._read(select(*columns).where(table.c.version == version))), None)

    def back_tests(self, wanted: Iterable[Made]) -> dict[int, Row]:
        """Version to what its back-test found, without the rows of single backends; {} without one."""
        with self._lock:
            if len(self._back_tests) > TESTS_MAX:
                self._back_tests.clear()
            for made in (listed := list(wanted)):
                if made not in self._back_tests:
                    self._back_tests[made] = back_test_of(self._report(made))
            return {made[0]: self._back_tests[made] for made in listed}

    def changes(self, before: int, after: int, limit: int, after_volume: str = "") -> list[Row]:
        """See ``policies.changes``; rows are not to be changed."""
        table = schema.policies
        versions = select(table.c.version, table.c.created_us).where(table.c.version.in_({before, after}))
        made = {row["version"]: (row["version"], row["created_us"]) for row in self._read(versions)}
        key = made.get(before), made.get(after), limit, after_volume
        statement = policies.changes(before, after, limit, after_volume)
        if None in key:  # caps without their version: they are being deleted
            return self._read(statement)
        with self._lock:
            rows = self._changes.pop(key, None)
            if rows is None:
                rows = self._read(statement)
            self._changes[key] = rows
            while len(self._changes) > PAGES_MAX:
                del self._changes[next(iter(self._changes))]
            return list(rows)

    def _report(self, made: Made) -> Any:
        table = schema.policies
        statement = select(table.c.report).where(table.c.version == made[0], table.c.created_us == made[1])
        text = next((row["report"] for row in self._read(statement)), None)
        return strict_json.loads(text) if text else None


def back_test_of(report: Row | None) -> Row:
    """What a report says of its back-test, as lists of versions have it."""
    tested = (report or {}).get("back_test")
    if not isinstance(tested, dict):
        return {}
    return {"back_test": {name: value for name, value in tested.items() if name != "backends"}}
