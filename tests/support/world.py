"""The made-up world of the page's tests in a browser and of its pictures: one story, told as of now.

``tests.support.api`` has rows that are the same in each run, of a time of their own. Here they are moved to
now, and figures of different views agree: what an agreement promises, how its hours went, what is left of its
budget, and what its neighbour ``batch`` was held to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Final

from sla_server.agreements.document import CalendarWindow
from sla_server.agreements.periods import period_bounds
from tests.support import api, made_up_events
from tests.support.agreements import FULL, agreement

MINUTE_US: Final = 60_000_000
HOUR_US: Final = 60 * MINUTE_US
DAY_US: Final = 24 * HOUR_US
ERP_GOLD: Final = (
    FULL.replace("volumes: [vol-17]", "volumes: [erp-db]")
    .replace("{up_to_iops: 3000, value_ms: 5}", "{up_to_iops: 150, value_ms: 12}")
    .replace("{up_to_iops: 6000, value_ms: 8}", "{up_to_iops: 300, value_ms: 20}")
    .replace("  service_hours: {calendar: business}\n", "")
)
KEPT: Final = {
    "coverage": 0.998,
    "budget_remaining": 0.93,
    "budget_minutes_left": 201.0,
    "burn_1h": 0.0,
    "target": 0.995,
}
"""What goes with the hours below: 15 bad minutes of the 216 that a month of 30 days allows."""
MONTH: Final = CalendarWindow(type="calendar", period="month", tz="Europe/Berlin")


def kept(at_us: int) -> dict[str, Any]:
    """``KEPT`` with what the hours of the month add up to at a time: an hour without data, a quarter bad."""
    begun_us, _ = period_bounds(MONTH, at_us)
    good = 60 * max((at_us - begun_us) // HOUR_US, 48) - 75
    slices = {"good": good, "bad": 15, "no_data": 60, "not_applicable": 0, "excluded": 0}
    return {**KEPT, "compliance": good / (good + 15), "slices": slices}


def snapshot(at_us: int, **changed: Any) -> dict[str, Any]:
    """``api.snapshot`` with figures that agree with what is stored."""
    shown = api.snapshot(at_us, **changed)
    if "volumes" not in changed:
        (greedy,) = shown["volumes"][1:]
        shown["volumes"] = [shown["volumes"][0], {**greedy, "p50_us": 61_000, "p99_us": 148_000}]
    if "backends" not in changed:
        shown["backends"] = [{**shown["backends"][0], "victims": ["erp-gold/latency"]}]
    if "processes" not in changed:
        shown["processes"] = [{**row, "since_us": at_us - 2 * HOUR_US} for row in shown["processes"]]
    if "slas" not in changed:
        gold, reports, scratch = shown["slas"]
        gilt = kept(at_us)
        silver = {**gilt, "target": 0.99, "compliance": 0.9931, "budget_remaining": 0.31}
        silver |= {"budget_minutes_left": 134.0, "burn_1h": 2.4, "slices": {**gilt["slices"], "bad": 298}}
        shown["slas"] = [
            {**gold, **gilt},
            {**reports, **silver},
            {**scratch, "budget_remaining": None, "budget_minutes_left": None},
        ]
    return shown


def lived(now_us: int, seconds: int) -> Iterator[dict[str, Any]]:
    """The live views of the last seconds, oldest first: how erp-gold was broken, and batch was held back."""
    for ago_s in range(seconds, 0, -1):
        shown = snapshot(now_us - ago_s * 1_000_000)
        wobble_us = round(350 * math.sin(ago_s / 3))
        latency_us = 15_100 - max(0, ago_s - 60) * 170 if ago_s > 42 else 15_100 - min(42 - ago_s, 20) * 295
        gold = {**shown["slas"][0], "latency_us": max(latency_us, 8_400) + wobble_us}
        gold["state"] = "violating" if gold["latency_us"] > 12_000 else "ok"
        reports = {**shown["slas"][1], "latency_us": 18_900 + wobble_us}
        shown["slas"] = [gold, reports, shown["slas"][2]]
        shown["throttles"] = shown["throttles"] if ago_s <= 42 else []
        yield shown


def _caps(hour: int) -> dict[str, Any]:
    """Of one hour of the week: a cap in forty of them, at night."""
    is_night = hour % 24 < 6 and hour < 148
    cap = 300.0 + 90 * (hour % 24) if is_night else None
    return {"hour_of_week": hour, "cost_per_s": cap, "demand_p50": 200.0, "demand_p95": 450.0}


class World(api.FakeSource):
    """Rows as of now."""

    def settle(self) -> None:
        """Accounts and what waits for approval are of these days, too; called once ``shift_us`` is known."""
        now_us, rows = self.now_us, self.access.rows
        made = {"created_us": now_us - 90 * DAY_US, "changed_us": now_us - 90 * DAY_US}
        asked = {"requested_us": now_us - 4 * MINUTE_US, "changed_us": now_us - 4 * MINUTE_US}
        begun = {"created_us": now_us - HOUR_US, "changed_us": now_us - HOUR_US}
        rows["accounts"]["ann"] = api.account(**made)
        rows["api_tokens"]["70c3"] = api.api_token(**made, expires_us=now_us + 275 * DAY_US)
        rows["sessions"]["5e55"] = api.session(**begun, expires_us=now_us + 7 * HOUR_US)
        rows["approvals"]["5c0f"] = api.approval(**asked, expires_us=now_us + 23 * HOUR_US)

    def _moved(self, row: dict[str, Any]) -> dict[str, Any]:
        return api._moved(row, self.shift_us)

    @property
    def now_us(self) -> int:
        return api.NOW_US + self.shift_us

    def happened(self, count: int) -> list[dict[str, Any]]:
        return made_up_events.events(count, self.now_us, made_up_events.AGES_S)

    @staticmethod
    def _agreement_rows(name: str) -> list[dict[str, Any]]:
        rows = api.FakeSource._agreement_rows(name)
        texts = (ERP_GOLD.replace("target: 0.995", "target: 0.99"), ERP_GOLD)
        return [
            {**row, "document": text, "spec": agreement(text).spec_json()}
            for row, text in zip(rows, texts, strict=True)
        ]

    @staticmethod
    def _agreement(name: str) -> dict[str, Any]:
        return World._agreement_rows(name)[-1]

    def agreement(self, name: str, version: int | None = None) -> dict[str, Any] | None:
        row = super().agreement(name, version)
        return row and self._moved(row)

    def agreements(self, in_force: bool = True) -> list[dict[str, Any]]:
        return [self._moved(row) for row in super().agreements(in_force)]

    def agreement_versions(self, name: str) -> list[dict[str, Any]]:
        return [self._moved(row) for row in super().agreement_versions(name)]

    def open_episodes(self, names: Collection[str]) -> list[dict[str, Any]]:
        self._row("open_episodes", sorted(names))
        return []

    def episodes(self, open_only: bool = False, limit: int = 1000, **asked: Any) -> list[dict[str, Any]]:
        rows = super().episodes(open_only, limit, **asked)
        lasted = {"opened_us": self.now_us - 61_000_000, "closed_us": self.now_us - 20_000_000}
        return [] if open_only else [{**row, **lasted, "slices_bad": 1} for row in rows]

    def slice_sums(self, name: str, objective: str, from_us: int, to_us: int) -> list[dict[str, Any]]:
        """What the hours of the period that goes on add up to; more in those before."""
        self._row("slice_sums", name, objective, from_us, to_us)
        if to_us <= self.now_us:
            return [api.slice_sum("good", 43_020, version=1), api.slice_sum("bad", 61, version=1)]
        hours = self.slice_hours(name, objective, from_us, to_us)
        counts: Counter[str] = Counter()
        for hour in hours:
            counts[hour["state"]] += hour["n"]
        return [api.slice_sum(state, n) for state, n in counts.items() if n]

    def slice_hours(self, name: str, objective: str, from_us: int, to_us: int) -> list[dict[str, Any]]:
        """Good hours since the period began, and the two days of ``FakeSource`` at their end."""
        newest = super().slice_hours(name, objective, from_us, to_us)
        begun_us = min((row["hour_us"] for row in newest), default=from_us)
        return [
            *({**api.slice_sum("good", 60), "hour_us": at_us, "newest_us": at_us}
              for at_us in range(from_us, begun_us, HOUR_US)),
            *newest,
        ]  # fmt: skip

    def policies(self, limit: int = 20) -> list[dict[str, Any]]:
        rows = [self._moved(row) for row in super().policies(limit)]
        for row in rows:
            row["report"] |= {"harms": [self._moved(one) for one in row["report"]["harms"]]}
        return rows

    def policy_caps(
        self,
        version: int,
        hour_of_week: int | None = None,
        limit: int | None = None,
        after: str | None = None,
        volume: str | None = None,
    ) -> list[dict[str, Any]]:
        rows = super().policy_caps(version, hour_of_week, limit, after, volume)
        return [{**row, **_caps(hour)} for row in rows for hour in range(168)]

    def jobs(self) -> list[dict[str, Any]]:
        return [self._moved(row) for row in super().jobs()]

    def audit(self) -> list[dict[str, Any]]:
        return [self._moved(row) for row in super().audit()]

    def gateways(self) -> list[dict[str, Any]]:
        return [self._moved(row) for row in super().gateways()]

    def volumes(self) -> list[dict[str, Any]]:
        return [self._moved(row) for row in super().volumes()]

    def streams(self, volume: str | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        use = {"writes": 12_004, "read_bytes": 48_211 << 12, "write_bytes": 12_004 << 12, "errors": 0}
        return [{**row, **use, "last_us": self.now_us} for row in super().streams(volume, limit)]

    def rollup_history(
        self, volume: str, from_us: int, to_us: int, client: str | None = None
    ) -> list[dict[str, Any]]:
        """More and more I/O of ``batch``, of which every fourth counts twice, until it is held back."""
        rows = super().rollup_history(volume, from_us, to_us, client)
        if volume != "batch":
            return rows
        for number, row in enumerate(rows):
            iops = 230.0 if number == len(rows) - 1 else 160.0 + 6 * number
            row |= {"iops": iops, "cost_milli": round(iops * 1.25 * row["length_us"] / 1000)}
        rows[-1] |= {"p50_us": 61_000, "p95_us": 118_000, "p99_us": 131_000}
        return rows

    def pools(self) -> list[dict[str, Any]]:
        rows = [self._moved(row) for row in super().pools()]
        return [{**row, "forecast": self._moved(row["forecast"])} for row in rows]

    def pool_days(self, from_us: int, owner: str = "", pool: str = "") -> list[dict[str, Any]]:
        days_us = self.shift_us // DAY_US * DAY_US
        rows = super().pool_days(from_us, owner, pool)
        return [{**row, "day_us": row["day_us"] + days_us} for row in rows]

    def pool_volumes(self, owner: str = "", pool: str = "") -> list[dict[str, Any]]:
        return [self._moved(row) for row in super().pool_volumes(owner, pool)]

    def pool_actions(self, owner: str, pool: str, limit: int = 200) -> list[dict[str, Any]]:
        return [self._moved(row) for row in super().pool_actions(owner, pool, limit)]
