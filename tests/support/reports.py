"""Stored rows that reports are made of, in memory: what a reader of SQL answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from sla_server.rows import Row
from tests.support.agreements import agreement

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
    return {**row, "closed_us": closed_us, "worst_u": 4.0, "slices_bad": 2, **more}


def throttle_row(volume: str, from_us: int, to_us: int | None, **more: Any) -> Row:
    """A row of ``throttles``."""
    row = {
        "throttle_id": f"t-{volume}-{from_us}", "volume": volume, "group_name": "", "source": "control",
        "victim": "gold/latency", "state": "seen" if to_us is None else "released", "cost_per_s": 290.0,
        "requested_us": from_us, "confirmed_us": from_us + 1_000_000, "seen_us": None, "released_us": to_us,
        "expires_us": None, "members": None,
    }  # fmt: skip
    return {**row, **more}


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

    @property
    def reports(self) -> StoredRows:
        return self

    def agreement_versions(self, name: str) -> list[Row]:
        return [row for row in self.versions if row["name"] == name]

    def documents(self) -> list[Row]:
        return self.other_documents

    def report_objectives(self, name: str, from_us: int, to_us: int) -> list[str]:
        return sorted({row["objective"] for row in self._slices(name, from_us, to_us)})

    def _slices(self, name: str, from_us: int, to_us: int) -> Iterable[Row]:
        return (row for row in self.slices if row["name"] == name and from_us <= row["start_us"] < to_us)

    def slice_revisions(self, name: str, objective: str, from_us: int, to_us: int) -> list[Row]:
        found = (row for row in self._slices(name, from_us, to_us) if row["objective"] == objective)
        return sorted(found, key=lambda row: (row["start_us"], row["revision"]))

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
