"""Pools of storage over both databases: what is recorded comes back, also after a restart; old rows go."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire.messages.space import Space
from sla_server.db.config import RetentionConfig
from sla_server.db.partitions import Retention
from sla_server.services.store import SqlReads
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.pools import DAY_US, StoragePools, StoredPools
from tests.support.database import Rig
from tests.support.samples import record_message

NOW_US = 20_700 * DAY_US + 3_600_000_000
VOLUMES = tuple(
    {"name": name, "size_bytes": size, "used_bytes": None, "volume": served, "in_use": in_use}
    for name, size, served, in_use in (("a", 5, "vol-1", True), ("b", 50, "", False), ("c", 7, "", None))
)


def reading(used: int, at_us: int, volumes: tuple[Any, ...] = VOLUMES) -> Space:
    return Space("data", "lvm", "disk-1", 100, used, 0.25, 62, len(volumes), volumes, at_us)


def test_what_is_recorded_comes_back_and_a_restart_goes_on(database: Any) -> None:
    rig = Rig(database.config, database.data_dir)
    config = StorageConfig()
    store = SqlReads(rig.reader)
    pools = StoragePools(config, StoredPools())
    for day, used in ((0, 50), (1, 85)):
        at_us = NOW_US + day * DAY_US
        rig.feed(record_message(pools.add("gw-1", "host-1", reading(used, at_us), at_us)))
    later_us = NOW_US + DAY_US + round(config.record_s * 1e6)
    fewer = reading(86, later_us, VOLUMES[:2])
    rig.feed(record_message(pools.add("gw-1", "host-1", fewer, later_us)))

    (row,) = rig.reader.space.pools()
    assert (row["level"], row["used_bytes"], row["other_ratio"], row["conditions"]) == ("warn", 86, 0.25, {})
    found = [(each["name"], each["in_use"]) for each in rig.reader.space.pool_volumes("gw-1", "data")]
    assert found == [("b", False), ("a", True)], "the largest first, without the one that has gone"
    days = rig.reader.space.pool_days(0, "gw-1", "data")
    assert [(each["day_us"] // DAY_US, each["used_bytes"], each["readings"]) for each in days] == [
        (20_700, 50, 1),
        (20_701, 86, 2),
    ]
    assert rig.reader.space.pool_days(NOW_US + DAY_US, "gw-2", "data") == []

    again = StoragePools(config, store.stored_pools(NOW_US))
    events = [row for table, row in again.add("gw-1", "host-1", reading(86, later_us + 1), later_us + 1)
              if table == "events"]  # fmt: skip
    assert events == []
    rig.close()


@pytest.mark.parametrize("age_days", [30, 400])
def test_old_days_actions_and_pools_go(database: Any, age_days: int) -> None:
    rig = Rig(database.config, database.data_dir)
    at_us = NOW_US - age_days * DAY_US
    pools = StoragePools(StorageConfig(), StoredPools())
    action = {
        "action_id": "a",
        "at_us": at_us,
        "owner": "gw-1",
        "pool": "data",
        "action": "x",
        "state": "done",
    }
    rows = [
        *pools.add("gw-1", "host-1", reading(50, at_us), at_us),
        ("pool_actions", {**action, "text": "t"}),
    ]
    rig.feed(record_message(rows))
    Retention(rig.engine, RetentionConfig(), FakeClock(unix_us=NOW_US)).step()
    left = 0 if age_days > 396 else 1
    space = rig.reader.space
    assert [len(space.pools()), len(space.pool_days(0)), len(space.pool_actions("gw-1", "data"))] == [
        left
    ] * 3
    rig.close()
