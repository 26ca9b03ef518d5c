"""Pools: levels with hysteresis, rows, days, volumes; a restart repeats and swallows nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pmdaemon.wire.messages.space import Space
from sla_server.rows import Row, Rows
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.pools import (
    DAY_US,
    MOST_KNOWN_POOLS,
    MOST_KNOWN_VOLUMES,
    UNREAD_US,
    StoragePools,
    StoredPools,
)
from sla_server.storage_resources.watermarks import CRITICAL, OK, WARN, Marks, next_level

NOW_US = 20_000 * DAY_US + 3_600_000_000
MINUTE_US = 60_000_000
RECORD_US = 5 * MINUTE_US
GIB = 1 << 30
VOLUME = {"name": "lv1", "size_bytes": 50 * GIB, "used_bytes": None, "volume": "", "in_use": False}


def reading(used: float, at_us: int = NOW_US, **more: Any) -> Space:
    """A pool of 100 GiB."""
    return replace(
        Space("data", "lvm", "disk-1", 100 * GIB, round(used * GIB), None, 0, 0, (), at_us), **more
    )


class Manager:
    """Pools, and what SQL would have of them."""

    def __init__(self, **config: Any) -> None:
        self.config = StorageConfig(**config)
        self.tables: dict[str, dict[tuple[Any, ...], Row]] = {}
        self.pools = StoragePools(self.config)

    def add(self, space: Space, now_us: int | None = None) -> list[Row]:
        """The events."""
        rows = self.pools.add("gw-1", "host-1", space, space.at_us if now_us is None else now_us)
        return self.keep(rows)

    def keep(self, rows: Rows) -> list[Row]:
        keys = {"pools": 2, "pool_volumes": 3, "pool_days": 3, "events": 1}
        names = {3: {"pool_volumes": "name", "pool_days": "day_us"}}
        for table, row in rows:
            key = (row["event_id"],) if table == "events" else (row["owner"], row["pool"])
            if keys[table] == 3:
                key = (*key, row[names[3][table]])
            stored = self.tables.setdefault(table, {})
            stored[key] = {**stored.get(key, {}), **row}
        return [row for table, row in rows if table == "events"]

    def restart(self) -> None:
        stored = {
            name: list(self.tables.get(name, {}).values()) for name in ("pools", "pool_days", "pool_volumes")
        }
        self.pools = StoragePools(
            self.config, StoredPools(stored["pools"], stored["pool_days"], stored["pool_volumes"])
        )

    def row(self) -> Row:
        return self.tables["pools"]["gw-1", "data"]


MARKS = Marks(0.8, 0.9, 0.02)


@pytest.mark.parametrize("level", ["", OK, WARN, CRITICAL])
@pytest.mark.parametrize("ratio", [0.0, 0.77, 0.785, 0.8, 0.87, 0.885, 0.9, 1.0])
def test_every_level_at_every_ratio(level: str, ratio: float) -> None:
    """By hand: a mark is entered at once and left 0.02 below."""
    expected = WARN if ratio >= 0.8 else OK
    if ratio >= 0.9 or (level == CRITICAL and ratio > 0.88):
        expected = CRITICAL
    elif level in (WARN, CRITICAL) and ratio > 0.78:
        expected = WARN
    assert next_level(level, ratio, MARKS) == expected


def test_a_pool_that_fills_up_and_is_emptied_raises_one_event_a_level() -> None:
    manager = Manager()
    steps = [50, 79.9, 80, 79, 81, 90, 89, 88.5, 87, 85, 79, 77, 79]
    said = []
    for number, used in enumerate(steps):
        events = manager.add(reading(used, NOW_US + number * MINUTE_US))
        said += [(used, event["kind"], event["severity"]) for event in events]
    assert said == [
        (80, "space-low", "warning"),
        (90, "space-low", "critical"),
        (87, "space-low", "warning"),
        (77, "space-enough", "info"),
    ]
    assert (manager.row()["level"], manager.row()["used_bytes"]) == (OK, 79 * GIB)


def test_the_text_says_how_full_and_which_mark() -> None:
    (event,) = Manager().add(reading(92))
    assert event["text"] == (
        "pool host-1/data is nearly full: 92.0% (92.0 GiB of 100.0 GiB); the critical mark is 90%"
    )
    assert (event["element"], event["subject"]) == ("pool", "host-1/data")
    (event,) = Manager().add(reading(10, other_ratio=0.95))
    assert "95.0% of its metadata, 10.0% (10.0 GiB of 100.0 GiB) of its bytes" in event["text"]


def test_a_restart_repeats_no_event_and_swallows_none() -> None:
    manager = Manager(record_s=3600)
    assert [event["kind"] for event in manager.add(reading(85))] == ["space-low"]
    manager.restart()
    assert manager.add(reading(85.5, NOW_US + MINUTE_US)) == []
    assert manager.add(reading(79, NOW_US + 2 * MINUTE_US)) == [], "within the hysteresis"
    manager.restart()
    (event,) = manager.add(reading(60, NOW_US + 3 * MINUTE_US))
    assert (event["kind"], event["details"]["before"]) == ("space-enough", WARN)


def test_rows_are_stored_now_and_then_and_at_once_when_something_happens() -> None:
    manager = Manager(record_s=300)
    stored = []
    for minute, used in ((0, 10), (1, 10.5), (2, 11.1), (3, 11.2), (7, 11.3), (8, 11.3)):
        rows = manager.pools.add(
            "gw-1", "host-1", reading(used, NOW_US + minute * MINUTE_US), NOW_US + minute * MINUTE_US
        )
        stored.append(bool(rows))
    assert stored == [True, False, True, False, True, False], "first; 1 % more; 300 s"


def test_each_day_has_its_last_reading_its_least_and_its_most() -> None:
    manager = Manager(record_s=3600)
    for at_us, used in ((0, 20), (1, 10.9), (2, 15), (24 * 60, 16)):
        manager.add(reading(used, NOW_US + at_us * MINUTE_US))
    manager.restart()
    manager.add(reading(12, NOW_US + (24 * 60 + 30) * MINUTE_US))
    days = [row for _, row in sorted(manager.tables["pool_days"].items())]
    figures = [
        [row[key] / GIB for key in ("used_bytes", "least_bytes", "most_bytes")] + [row["readings"]]
        for row in days
    ]
    assert figures == [
        [15, pytest.approx(10.9), 20, 3],
        [12, 12, 16, 2],
    ]
    assert [row["day_us"] for row in days] == [20_000 * DAY_US, 20_001 * DAY_US]


def test_an_older_reading_is_dropped_but_not_behind_one_of_a_clock_that_was_ahead() -> None:
    manager = Manager()
    manager.add(reading(10))
    assert manager.add(reading(95, NOW_US - MINUTE_US), NOW_US) == []
    manager.add(reading(11, NOW_US + DAY_US), NOW_US)
    assert [event["kind"] for event in manager.add(reading(95, NOW_US + MINUTE_US))] == ["space-low"]


def test_volumes_are_new_change_and_go() -> None:
    manager = Manager()
    served = {**VOLUME, "name": "lv2", "volume": "vol-2", "in_use": True}
    manager.add(reading(10, volumes=(VOLUME, served), volume_count=2))
    grown = {**VOLUME, "size_bytes": 60 * GIB}
    manager.add(reading(20, NOW_US + 1 * RECORD_US, volumes=(grown,), volume_count=1))
    rows = manager.tables["pool_volumes"]
    assert rows["gw-1", "data", "lv1"]["size_bytes"] == 60 * GIB
    assert rows["gw-1", "data", "lv1"]["first_seen_us"] == NOW_US
    assert rows["gw-1", "data", "lv2"]["gone_us"] == NOW_US + 1 * RECORD_US
    manager.add(reading(30, NOW_US + 2 * RECORD_US, volumes=(), volume_count=200))
    assert rows["gw-1", "data", "lv1"]["gone_us"] is None, "it may be among those that are not named"
    manager.add(reading(40, NOW_US + 3 * RECORD_US, volumes=(served,), volume_count=1))
    assert rows["gw-1", "data", "lv2"]["gone_us"] is None, "it is back"


def test_what_one_owner_can_make_us_keep_is_bounded() -> None:
    manager = Manager()
    events = []
    for number in range(MOST_KNOWN_POOLS + 20):
        events += manager.add(reading(10, pool=f"pool-{number}"))
    assert len(list(manager.pools.states())) == len(manager.tables["pools"]) == MOST_KNOWN_POOLS
    assert [event["kind"] for event in events] == ["gateway-over-limit"]
    manager.restart()
    assert len(manager.add(reading(95, pool="one-more"))) == 1, "said again, and nothing else"
    assert len(manager.add(reading(95, pool="pool-7"))) == 1, "those that are known are read on"
    assert manager.pools.add("gw-2", "host-2", reading(10), NOW_US), "and those of others"


def test_volumes_of_a_pool_are_bounded_and_looked_at_every_record_s() -> None:
    """It says that there are more than it names, and names others each time."""
    manager = Manager()
    for number in range(40):
        named = tuple({**VOLUME, "name": f"lv-{number}-{at}"} for at in range(128))
        at_us = NOW_US + number * RECORD_US // 4
        manager.add(reading(10 + number % 2 * 50, at_us, volumes=named, volume_count=1000))
    (state,) = manager.pools.states()
    assert len(state.volumes) <= MOST_KNOWN_VOLUMES
    assert len(manager.tables["pool_volumes"]) == 10 * 128, "each fourth reading"


def test_a_volume_that_nothing_uses_is_reported_once_after_its_days() -> None:
    manager = Manager(orphan_days=2)
    used = {**VOLUME, "name": "a", "in_use": True}
    unknown = {**VOLUME, "name": "b", "in_use": None}
    served = {**VOLUME, "name": "c", "volume": "vol-1"}
    said = []
    for day in (0, 1, 2, 3):
        if day == 3:
            manager.restart()
        volumes = (VOLUME, used, unknown, served)
        said.append(manager.add(reading(10, NOW_US + day * DAY_US, volumes=volumes, volume_count=4)))
    assert [len(events) for events in said] == [0, 0, 1, 0]
    assert said[2][0]["text"] == (
        "volume lv1 of pool host-1/data (50.0 GiB) was neither served by an export nor open for 2 days"
    )
    back = {**VOLUME, "in_use": True}
    manager.add(reading(10, NOW_US + 4 * DAY_US, volumes=(back,), volume_count=1))
    assert manager.tables["pool_volumes"]["gw-1", "data", "lv1"]["unused_since_us"] is None


def test_oversubscription_begins_and_ends_once() -> None:
    manager = Manager(oversubscription_ratio=3)
    said = []
    for minute, provisioned in enumerate((300, 301, 400, 200, 200)):
        if minute == 2:
            manager.restart()
        space = reading(10, NOW_US + minute * MINUTE_US, provisioned_bytes=provisioned * GIB, volume_count=9)
        said.append([event["kind"] for event in manager.add(space)])
    assert said == [[], ["space-oversubscribed"], [], ["space-subscribed"], []]


def test_oversubscription_about_its_limit_is_one_event() -> None:
    manager = Manager(oversubscription_ratio=3, hysteresis_ratio=0.02)
    said = []
    for minute, provisioned in enumerate((301, 299, 301, 295, 301, 293, 299, 301)):
        if minute == 3:
            manager.restart()
        space = reading(10, NOW_US + minute * MINUTE_US, provisioned_bytes=provisioned * GIB, volume_count=9)
        said += [(minute, event["kind"]) for event in manager.add(space)]
    assert said == [(0, "space-oversubscribed"), (5, "space-subscribed"), (7, "space-oversubscribed")]


def test_rules_have_other_marks_for_some_pools() -> None:
    manager = Manager(rule=[{"pools": "host-1/*", "warn_ratio": 0.3, "critical_ratio": 0.4}, {"pools": "*"}])
    assert manager.add(reading(35))[0]["severity"] == "warning"
    assert Manager(rule=[{"pools": "host-2/*", "warn_ratio": 0.3}]).add(reading(35)) == []
    with pytest.raises(ValueError, match=r"rule a: warn_ratio 0.95 must be below critical_ratio 0.9"):
        StorageConfig(rule=[{"pools": "a", "warn_ratio": 0.95}])  # type: ignore[list-item]


def test_a_gateway_that_is_called_server_has_no_pools_of_the_server() -> None:
    """A rule or a command may be for server/* alone."""
    pools = StoragePools(StorageConfig())
    pools.add("gw-1", "server", reading(10), NOW_US)
    pools.add("server", "server", reading(10), NOW_US)
    assert [state.name for state in pools.states()] == ["gw-1/data", "server/data"]


def test_what_is_known_of_a_pool_that_nothing_reads_any_more_ends() -> None:
    manager = Manager(oversubscription_ratio=2.0)
    manager.add(reading(85, provisioned_bytes=300 * GIB))
    manager.restart()
    last_us = NOW_US + UNREAD_US
    assert manager.keep(manager.pools.end_unread(last_us, None)) == []
    ended = manager.keep(manager.pools.end_unread(last_us + 1, None))
    assert [event["kind"] for event in ended] == ["space-enough", "space-subscribed"]
    assert ended[0]["text"] == "nothing is known of pool host-1/data any more: it is not read any more"
    assert (manager.row()["level"], manager.row()["conditions"]) == (OK, {})
    manager.restart()
    assert manager.keep(manager.pools.end_unread(last_us + DAY_US, None)) == []
    again = manager.add(reading(85, last_us + 2 * DAY_US, provisioned_bytes=300 * GIB))
    assert [event["kind"] for event in again] == ["space-low", "space-oversubscribed"]


def test_a_pool_that_is_read_keeps_what_is_known_of_it() -> None:
    manager = Manager()
    manager.add(reading(85))
    assert manager.pools.end_unread(NOW_US + MINUTE_US, ["other"]) == [], "it is a gateway's"
    assert manager.row()["level"] == WARN
