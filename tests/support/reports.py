"""Stored rows that reports are made of, in memory: what a reader of SQL answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from sla_server.agreements.load import load_documents
from sla_server.db.queries.reports import RUN_COLUMNS, SINGLE
from sla_server.db.reports import NO_REPORT, ChainEnd
from sla_server.reports.accounts import end_us_of
from sla_server.rows import Row
from tests.support.agreements import FULL, agreement, maintenance_text

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US


def at_us(text: str, tz: str = "UTC") -> int:
    """A local time, ``2026-10-03 08:00``."""
    local = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(tz))
    return round(local.astimezone(UTC).timestamp()) * 1_000_000


def version_row(text: str, version: int, applied_us: int, ended_us: int | None = None, **more: Any) -> Row:
    """A row of ``agreements``."""
    document = agreement(text)
    row = {"name": document.name, "version": version, "spec": document.spec_json(), "applied_us": applied_us}
    return {**row, "priority": document.spec.priority, "applied_by": "ann", "ended_us": ended_us, **more}


def slice_row(start_us: int, state: str = "good", **more: Any) -> Row:
    """A row of ``slices``; a bad one is slow."""
    length_us = more.get("length_us", MINUTE_US)
    row = {
        "name": "gold",
        "objective": "latency",
        "start_us": start_us,
        "revision": 0,
        "version": 1,
        "length_us": length_us,
        "state": state,
        "n": 0 if state == "no_data" else 1000,
        "missed": 400 if state == "bad" else 3,
        "offered_iops": 100.0,
        "threshold_us": 12_000,
        "coverage_ratio": 0.2 if state == "no_data" else 1.0,
        "inexact": False,
        "ours": False,
        "judged_us": start_us + length_us + 5_000_000,
        "reason": {"bad": "slow", "no_data": "no-samples", "not_applicable": "few-ios"}.get(state, ""),
        "measured": None,
    }
    return {**row, **more}


def episode_row(opened_us: int, closed_us: int | None, **more: Any) -> Row:
    """A row of ``episodes``."""
    row = {"episode_id": f"e-{opened_us}", "name": "gold", "objective": "latency", "opened_us": opened_us}
    return {**row, "closed_us": closed_us, "worst_u": 4.0, **more}


def throttle_row(volume: str, from_us: int, to_us: int | None, **more: Any) -> Row:
    """A row of ``throttles``."""
    row = {
        "throttle_id": f"t-{volume}-{from_us}", "volume": volume, "group_name": "", "source": "control",
        "victim": "gold/latency", "state": "seen" if to_us is None else "released", "cost_per_s": 290.0,
        "requested_us": from_us, "confirmed_us": from_us + 1_000_000, "seen_us": None, "released_us": to_us,
        "expires_us": None, "members": None,
    }  # fmt: skip
    return {**row, **more}


def _as_runs(rows: Iterable[Row]) -> list[Row]:
    """As ``SqlReader`` reads them for a report: like slices that follow each other are one row."""
    found: list[Row] = []
    for row in rows:
        if row["state"] in SINGLE:
            found.append(row)
            continue
        run = {**{column: row[column] for column in RUN_COLUMNS}, "slices": 1}
        last = found[-1] if found else {"state": "bad"}
        if last["state"] not in SINGLE and {**run, "start_us": 0, "slices": 0} == {
            **last,
            "start_us": 0,
            "slices": end_us_of(last) - row["start_us"],
        }:
            last["slices"] += 1
        else:
            found.append(run)
    return found


@dataclass
class StoredRows:
    """As much of ``SqlReader`` as reports ask."""

    versions: list[Row] = field(default_factory=list)
    slices: list[Row] = field(default_factory=list)
    other_documents: list[Row] = field(default_factory=list)
    stored_episodes: list[Row] = field(default_factory=list)
    stored_throttles: list[Row] = field(default_factory=list)
    stored_decisions: list[Row] = field(default_factory=list)
    stored_outages: list[Row] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    held: dict[str, Row] = field(default_factory=dict)
    since_us: int | None = 0
    alive_us: int = 0
    issued_rows: list[Row] = field(default_factory=list)

    @property
    def reports(self) -> StoredRows:
        return self

    @property
    def pages(self) -> StoredRows:
        return self

    def label_rows(self) -> tuple[list[Row], list[Row]]:
        return [], []

    def agreement_versions(self, name: str) -> list[Row]:
        return [row for row in self.versions if row["name"] == name]

    def documents(self) -> list[Row]:
        return self.other_documents

    def report_objectives(self, name: str, from_us: int, to_us: int) -> list[str]:
        return sorted({row["objective"] for row in self._slices(name, from_us, to_us)})

    def _slices(self, name: str, from_us: int, to_us: int) -> Iterable[Row]:
        return (row for row in self.slices if row["name"] == name and from_us <= row["start_us"] < to_us)

    def slices_as_of(
        self,
        name: str,
        objective: str,
        from_us: int,
        to_us: int,
        as_of_us: int,
        limit: int,
        *,
        whole: bool = True,
    ) -> list[Row]:
        newest: dict[int, Row] = {}
        for row in sorted(self._slices(name, from_us, to_us), key=lambda row: int(row["revision"])):
            if row["objective"] == objective and row["judged_us"] <= as_of_us:
                newest[row["start_us"]] = row
        rows = [{**newest[start_us], "slices": 1} for start_us in sorted(newest)][:limit]
        return rows if whole else _as_runs(rows)

    def revised_after(self, name: str, objective: str, from_us: int, to_us: int, as_of_us: int) -> int:
        rows = self._slices(name, from_us, to_us)
        return len(
            {row["start_us"] for row in rows if row["objective"] == objective and row["judged_us"] > as_of_us}
        )

    def judged_until(self, as_of_us: int, of: tuple[str, str] | None = None) -> int:
        judged = [row for row in self.slices if row["judged_us"] <= as_of_us]
        own = [row for row in judged if of in (None, (row["name"], row["objective"]))]
        return max((row["start_us"] + row["length_us"] for row in own), default=0)

    def alive_until(self) -> int:
        return self.alive_us

    def episodes_between(self, name: str, from_us: int, to_us: int, limit: int) -> list[Row]:
        return [
            row
            for row in self.stored_episodes
            if row["name"] == name
            and row["opened_us"] < to_us
            and (row["closed_us"] is None or row["closed_us"] > from_us)
        ][:limit]

    def throttles_between(
        self,
        from_us: int,
        to_us: int,
        limit: int,
        *,
        victims: Collection[str] = (),
        volumes: Collection[str] = (),
    ) -> list[Row]:
        return [
            row
            for row in self.stored_throttles
            if row["requested_us"] < to_us
            and (row["released_us"] is None or row["released_us"] > from_us)
            and row["state"] not in ("observed", "refused")
            and (row["victim"] in victims or row["volume"] in volumes)
        ][:limit]

    def decisions(self, **asked: Any) -> list[Row]:
        return [
            row
            for row in self.stored_decisions
            if row["victim"] in asked["victims"] and asked["from_us"] < row["at_us"] <= asked["until_us"]
        ]

    def decisions_from_us(self) -> int | None:
        return self.since_us

    def outages(self, from_us: int, to_us: int) -> list[Row]:
        return [row for row in self.stored_outages if row["from_us"] < to_us and row["to_us"] > from_us]

    def volume_names(self) -> list[str]:
        return self.volumes

    def held_back(self, volume: str, hours_us: Collection[int]) -> Row | None:
        return self.held.get(volume) if hours_us else None

    def rollups_from_us(self) -> int | None:
        return None

    def streams(self) -> list[Row]:
        return []

    def progress(self) -> dict[str, int]:
        return {}

    # -- Issued reports

    def issued(
        self,
        limit: int = 100,
        before: int | None = None,
        name: str | None = None,
        names: Collection[str] | None = None,
        *,
        match: str = "",
        period: str = "",
    ) -> list[Row]:
        rows = [row for row in self.issued_rows if name in (None, row["name"])]
        rows = [row for row in rows if match.lower() in row["name"].lower()]
        rows = [row for row in rows if row["period"].startswith(period)]
        rows = [row for row in rows if names is None or row["name"] in names]
        rows = [row for row in rows if before is None or row["number"] < before]
        listed = sorted(rows, key=lambda row: -int(row["number"]))[:limit]
        return [{key: value for key, value in row.items() if key != "body"} for row in listed]

    def issued_report(self, report_id: str) -> Row | None:
        return next(
            (row for row in self.issued_rows if report_id in (row["report_id"], str(row["number"]))), None
        )

    def report_bodies(self, numbers: Collection[int]) -> dict[int, str]:
        return {row["number"]: row["body"] for row in self.issued_rows if row["number"] in numbers}

    def ended_agreements(self) -> list[Row]:
        newest = {row["name"]: row for row in self.versions}
        return [row for row in newest.values() if row["ended_us"] is not None]

    def issued_after(self, number: int, limit: int) -> list[Row]:
        return [row for row in self.issued_rows if row["number"] > number][:limit]

    def taken_away(self, limit: int) -> list[Row]:
        return []

    def audit_of(self, report_id: str) -> Row | None:
        return None

    # -- The store of the report job

    @property
    def reader(self) -> StoredRows:
        return self

    def append(self, name: str, period: str, make: Callable[[ChainEnd], Any]) -> Row | None:
        of_period = [row for row in self.issued_rows if (row["name"], row["period"]) == (name, period)]
        previous = self.issued_rows[-1]["digest"] if self.issued_rows else NO_REPORT
        row = make(ChainEnd(len(self.issued_rows) + 1, previous, of_period[-1] if of_period else None))
        if row is not None:
            self.issued_rows.append(dict(row))
        return row


def example_month() -> tuple[StoredRows, int]:
    """October 2026 of erp-gold, with all that a report can say; and a time after it.

    Slices of a quarter of an hour, an edit on the 12th, work on the 6th, storage that hung on the 14th,
    neighbours on the 20th, a gap on the 22nd, the end of summer time on the 25th.
    """
    tz = "Europe/Berlin"
    quarter = 15 * MINUTE_US
    text = FULL.replace("slice: 1m", "slice: 15m")
    start, end, edit = (at_us(f"2026-{day} 00:00", tz) for day in ("10-01", "11-01", "10-12"))
    rows = StoredRows(
        [
            version_row(text.replace("target: 0.995", "target: 0.99"), 1, start - 20 * DAY_US, edit),
            version_row(text, 2, edit, applied_by="bea"),
        ]
    )
    marks = {
        at_us("2026-10-14 10:00", tz): ("bad", {"reason": "hung", "missed": 120, "n": 120}),
        at_us("2026-10-14 10:15", tz): ("bad", {"reason": "failed", "missed": 80, "n": 400}),
        at_us("2026-10-20 09:00", tz): ("bad", {"missed": 300}),
        at_us("2026-10-20 09:15", tz): ("bad", {"missed": 90, "inexact": True}),
        at_us("2026-10-22 12:00", tz): ("no_data", {"ours": True, "reason": "cuts-lost"}),
        at_us("2026-10-22 12:15", tz): ("no_data", {}),
        at_us("2026-10-23 08:00", tz): ("not_applicable", {}),
        at_us("2026-10-23 08:15", tz): ("good", {"inexact": True}),
    }
    at = start
    while at < end:
        local = datetime.fromtimestamp(at // 1_000_000, ZoneInfo(tz))
        state, more = marks.get(at, ("good", {}))
        if local.weekday() > 4 or not 8 <= local.hour < 18:
            state, more = "excluded", {"reason": "outside service hours"}
        elif local.day == 6 and 9 <= local.hour < 11:
            missed = 500 if local.hour == 9 else 0
            state, more = "excluded", {"reason": "maintenance move: new shelf", "missed": missed}
        if (local.day, local.hour) != (27, 14):  # an hour that was never judged
            version = 1 if at < edit else 2
            rows.slices.append(
                slice_row(at, state, **{"name": "erp-gold", "version": version, "length_us": quarter,
                                        "threshold_us": 5000, **more})
            )  # fmt: skip
        at += quarter
    hung, slow = at_us("2026-10-14 10:02", tz), at_us("2026-10-20 09:01", tz)
    rows.stored_episodes = [
        episode_row(hung, hung + 26 * MINUTE_US, name="erp-gold", worst_u=20.0),
        episode_row(slow, slow + 21 * MINUTE_US, name="erp-gold", worst_u=6.4),
    ]
    rows.stored_throttles = [
        throttle_row("batch", slow + MINUTE_US, slow + 41 * MINUTE_US, victim="erp-gold/latency"),
        throttle_row("scan", slow + 2 * MINUTE_US, slow + 20 * MINUTE_US, victim="erp-gold/latency"),
        throttle_row("vol-17", slow + 9 * HOUR_US, slow + 9 * HOUR_US + 90_000_000, victim="hr-gold/latency"),
    ]
    rows.held = {"batch": {"ios": 181_223, "delay_us": 4_180_500_000}}
    work = maintenance_text(
        "move", scope="agreements: [erp-gold]", reason="new shelf",
        when='start: "2026-10-06T09:00", duration: 2h, tz: Europe/Berlin',
    )  # fmt: skip
    (loaded,) = load_documents(work, 60)
    rows.other_documents = [
        {"kind": "Maintenance", "name": "move", "version": 1, "document": work, "applied_by": "carl",
         "spec": loaded.document.spec_json(), "applied_us": at_us("2026-10-04 10:00", tz), "ended_us": None}
    ]  # fmt: skip
    rows.stored_outages = [{"from_us": at_us("2026-10-27 13:50", tz), "to_us": at_us("2026-10-27 15:02", tz)}]
    return rows, at_us("2026-11-04 00:00", tz)
