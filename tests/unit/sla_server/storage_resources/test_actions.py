"""Actions: which commands are due, how often; who is refused an agreement, and told why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pmdaemon.space.watcher import SourceBack, SourceFailed
from pmdaemon.wire.messages.space import Space
from sla_server.agreements.load import load_documents
from sla_server.agreements.volume_labels import LabelBook
from sla_server.rows import Row
from sla_server.storage_resources.actions import CommandDone, CommandOrder
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.forecast import Forecast
from sla_server.storage_resources.manager import ServedVolumes, StorageManager
from sla_server.storage_resources.pools import DAY_US, PoolForecast, PoolKey, StoredPools
from tests.support.agreements import simple

NOW_US = 20_000 * DAY_US
HOUR_US = 3_600_000_000
ARCHIVE = {"name": "archive", "argv": ["/usr/local/bin/archive", "--old"], "at": "warn", "dry_run": False}


def space(used: int, at_us: int, **more: Any) -> Space:
    keys = {"pool": "data", "kind": "lvm", "backend": "array-1", "size_bytes": 100, "used_bytes": used}
    rest = {"other_ratio": None, "provisioned_bytes": 0, "volume_count": 0, "volumes": (), "at_us": at_us}
    return Space(**{**keys, **rest, **more})


SERVED = ServedVolumes({"array-1": ["vol-1"], "array-2": ["vol-9"]}, {"gw-1": ["vol-1", "vol-9"]})
OF_ANOTHER = ServedVolumes({"array-1": ["vol-1"]}, {"gw-1": ["mine"], "gw-2": ["vol-1", "vol-9"]})


class Site:
    """A manager, what the threads have found, what was ordered, and what is in SQL."""

    def __init__(self, *commands: Any, **config: Any) -> None:
        self.config = StorageConfig(command=list(commands), **config)
        self.found: list[Any] = []
        self.orders: list[CommandOrder] = []
        self.tables: dict[str, dict[Any, Row]] = {"pools": {}, "pool_actions": {}}
        self.manager = self._make()

    def _make(self) -> StorageManager:
        stored = StoredPools(
            list(self.tables["pools"].values()), actions=list(self.tables["pool_actions"].values())
        )
        return StorageManager(self.config, stored, self._take, self.orders.append)

    def _take(self) -> list[Any]:
        found, self.found = self.found, []
        return found

    def restart(self) -> None:
        self.manager = self._make()

    def read(self, used: int, at_us: int, **more: Any) -> list[Row]:
        return self._keep(self.manager.read("gw-1", "host-1", space(used, at_us, **more), SERVED, at_us))

    def tick(self, now_us: int, *found: Any) -> list[Row]:
        """The events."""
        self.found += found
        return self._keep(self.manager.tick(now_us))

    def done(self, now_us: int, problem: str = "", said: str = "") -> list[Row]:
        return self.tick(now_us, CommandDone(self.orders[-1], problem, said))

    def refuse(self, documents: Any, now_us: int) -> list[Row]:
        """The events of agreements that are refused."""
        return self._keep(self.manager.refusals(documents, (), SERVED, LabelBook(), now_us)[1])

    def _keep(self, rows: Any) -> list[Row]:
        for table, row in rows:
            if table in self.tables:
                key = row.get("action_id") or (row["owner"], row["pool"])
                self.tables[table][key] = row
        return [row for table, row in rows if table == "events"]


def test_a_command_is_run_once_a_while_and_its_end_is_recorded() -> None:
    site = Site(ARCHIVE)
    site.read(79, NOW_US)
    site.tick(NOW_US)
    assert site.orders == [], "below its level"
    site.read(85, NOW_US + 1)
    for second in range(5):
        assert site.tick(NOW_US + 2 + second * 1_000_000) == []
    (order,) = site.orders
    assert (order.pool_name, order.variables["SLA_LEVEL"]) == ("host-1/data", "warn")
    assert order.variables["SLA_USED_BYTES"] == "85"
    (event,) = site.done(NOW_US + 9_000_000, said="It said: 3 snapshots removed")
    assert (event["kind"], event["severity"]) == ("space-action", "info")
    assert event["text"] == (
        "archive (/usr/local/bin/archive --old) was run for pool host-1/data, which was warn. "
        "It said: 3 snapshots removed"
    )
    site.read(86, NOW_US + HOUR_US)
    site.tick(NOW_US + HOUR_US + 3)
    assert len(site.orders) == 2
    assert [row["state"] for row in site.tables["pool_actions"].values()] == ["done", "started"]


def test_a_command_that_takes_the_server_with_it_is_not_run_again_and_again() -> None:
    site = Site({**ARCHIVE, "most_a_day": 2})
    for minute in range(0, 600, 5):
        at_us = NOW_US + minute * 60_000_000
        site.read(85, at_us)
        site.tick(at_us)
        site.restart()
    assert len(site.orders) == 2
    (row, *_) = site.tables["pool_actions"].values()
    assert row["state"] == "started"
    assert row["text"].endswith("because pool host-1/data is warn (85.0% used); nothing is known of its end")


def test_one_that_takes_longer_than_its_pause_is_not_ordered_again_before_it_has_ended() -> None:
    """Else a slow one would leave a queue of orders behind, of a pool that has room again by then."""
    site = Site({**ARCHIVE, "every_s": 60, "limit_s": 600, "most_a_day": 1000})
    for minute in range(0, 10, 2):
        site.read(85, NOW_US + minute * 60_000_000)
        site.tick(NOW_US + minute * 60_000_000)
    assert len(site.orders) == 1
    site.done(NOW_US + 9 * 60_000_000)
    site.tick(NOW_US + 9 * 60_000_000 + 1)
    assert len(site.orders) == 2


def test_one_that_fails_is_a_warning() -> None:
    site = Site(ARCHIVE)
    site.read(85, NOW_US)
    site.tick(NOW_US)
    (event,) = site.done(NOW_US + 5, problem="archive: exit status 1: no tape")
    assert event["severity"] == "warning"
    assert event["text"].endswith("and failed: archive: exit status 1: no tape")


def test_dry_run_says_once_a_level_what_would_be_run() -> None:
    site = Site({**ARCHIVE, "dry_run": True})
    site.read(85, NOW_US)
    (event,) = site.tick(NOW_US)
    assert "would be run because pool host-1/data is warn (85.0% used); dry_run is on" in event["text"]
    assert site.tick(NOW_US + 2 * HOUR_US) == []
    site.restart()
    assert site.tick(NOW_US + 2 * HOUR_US) == []
    site.read(10, NOW_US + 2 * HOUR_US)
    site.read(85, NOW_US + 2 * HOUR_US + 1)
    assert len(site.tick(NOW_US + 2 * HOUR_US + 1)) == 1
    assert site.orders == []


def test_the_limit_of_a_day_holds_over_restarts_and_is_said_once() -> None:
    site = Site({**ARCHIVE, "most_a_day": 2})
    said: list[list[str]] = []
    for hour in range(27):
        at_us = NOW_US + hour * (HOUR_US + 10)
        site.read(85, at_us)
        events = site.tick(at_us)
        if len(site.orders) > sum(map(len, said)) - sum("limited" in each for each in said):
            events += site.done(at_us + 1)
        said.append([event["details"]["state"] for event in events])
        site.restart()
    ran = [hour for hour, states in enumerate(said) if "done" in states]
    assert ran == [0, 1, 24, 25]
    assert [hour for hour, states in enumerate(said) if "limited" in states] == [2, 26]


def test_a_pool_that_is_not_read_any_more_causes_nothing() -> None:
    site = Site(ARCHIVE, refuse_agreements="warn")
    site.read(95, NOW_US)
    late_us = NOW_US + 4 * HOUR_US
    assert site.tick(late_us) == []
    assert site.orders == []
    assert site.manager.refusals(documents("vol-1"), (), SERVED, LabelBook(), late_us) == ([], [])


def documents(volume: str) -> Any:
    return load_documents(simple("new", volumes=f'"{volume}"'), 60)


VOLUME = {"name": "lv1", "size_bytes": 5, "used_bytes": 1, "volume": "vol-9", "in_use": True}


@pytest.mark.parametrize(
    ("volume", "level", "used", "is_refused"),
    [
        ("vol-1", "critical", 95, True),
        ("vol-9", "critical", 95, True),
        ("vol-*", "critical", 95, True),
        ("other", "critical", 95, False),
        ("vol-1", "critical", 85, False),
        ("vol-1", "warn", 85, True),
        ("vol-1", "never", 99, False),
    ],
)
def test_new_agreements_on_a_full_pool_are_refused(
    volume: str, level: str, used: int, is_refused: bool
) -> None:
    site = Site(refuse_agreements=level)
    site.read(used, NOW_US, volumes=(VOLUME,), volume_count=1)
    asked = documents(volume)
    problems, rows = site.manager.refusals(asked, (), SERVED, LabelBook(), NOW_US)
    assert bool(problems) is bool(rows) is is_refused
    if is_refused:
        assert f"lie in, is {used}% full and takes no new agreements" in problems[0].problem
        assert problems[0].document == "new"
    assert site.manager.refusals(asked, {"new"}, SERVED, LabelBook(), NOW_US) == ([], []), "it is in force"


def test_a_refusal_is_recorded_with_its_reason_once_while_the_pool_is_so_full() -> None:
    site = Site(refuse_agreements="critical")
    site.read(95, NOW_US)
    asked = [each for name in "abcde" for each in load_documents(simple(name, volumes='"vol-1"'), 60)]
    problems, rows = site.manager.refusals(asked, (), SERVED, LabelBook(), NOW_US)
    assert [each.document for each in problems] == list("abcde")
    (table, row), (events, event) = rows
    assert (table, events) == ("pool_actions", "events")
    assert (row["owner"], row["pool"], row["action"], row["state"]) == (
        "gw-1", "data", "refuse-agreements", "refused",
    )  # fmt: skip
    assert row["text"] == event["text"]
    assert row["text"].startswith(
        "agreement a, agreement b, agreement c and 2 more refused: pool host-1/data"
    )
    assert "95% full" in row["text"]
    assert (event["kind"], event["severity"], event["event_id"]) == ("space-action", "info", row["action_id"])
    _, again = site.manager.refusals(asked, (), SERVED, LabelBook(), NOW_US + HOUR_US)
    assert [each["action_id"] for name, each in again if name == "pool_actions"] == [row["action_id"]]
    site.read(50, NOW_US + HOUR_US)
    site.read(95, NOW_US + 2 * HOUR_US)
    _, later = site.manager.refusals(asked, (), SERVED, LabelBook(), NOW_US + 2 * HOUR_US)
    assert later[0][1]["action_id"] != row["action_id"], "it was emptied meanwhile"


def test_what_was_refused_before_a_restart_is_no_run_of_a_command() -> None:
    """Whatever the command is called."""
    site = Site({**ARCHIVE, "name": "refuse-agreements"}, refuse_agreements="warn")
    site.read(85, NOW_US)
    assert site.refuse(documents("vol-1"), NOW_US)
    site.restart()
    site.tick(NOW_US + 1)
    assert [order.command.name for order in site.orders] == ["refuse-agreements"]


def test_a_gateway_cannot_block_agreements_on_the_backend_of_another() -> None:
    site = Site(refuse_agreements="warn")
    kinds = []
    for minute in range(3):
        reading = space(95, NOW_US + minute * 60_000_000, volumes=(VOLUME,), volume_count=1)
        rows = site.manager.read("gw-1", "host-1", reading, OF_ANOTHER, reading.at_us)
        kinds.append([row["kind"] for table, row in rows if table == "events"])
    assert kinds == [["space-low", "space-claim-refused"], [], []]
    for volume in ("vol-1", "vol-9"):
        assert site.manager.refusals(documents(volume), (), OF_ANOTHER, LabelBook(), NOW_US) == ([], [])
    approved = replace(OF_ANOTHER, of={"gw-1": ["mine", "vol-1"], "gw-2": ["vol-1", "vol-9"]})
    assert site.manager.refusals(documents("vol-1"), (), approved, LabelBook(), NOW_US)[0]
    rows = site.manager.read("gw-1", "host-1", space(95, NOW_US + DAY_US), approved, NOW_US + DAY_US)
    assert not [row for table, row in rows if table == "events"]


def test_a_backend_that_nobody_serves_yet_and_a_gateway_not_announced_cause_no_event() -> None:
    for served in (ServedVolumes(), replace(OF_ANOTHER, on={}), replace(OF_ANOTHER, of={})):
        rows = Site().manager.read("gw-1", "host-1", space(10, NOW_US), served, NOW_US)
        assert [table for table, _ in rows] == ["pools", "pool_days"]


def test_a_source_of_the_server_is_an_operators() -> None:
    site = Site(refuse_agreements="warn")
    site.tick(NOW_US, space(95, NOW_US))
    assert site.manager.refusals(documents("vol-1"), (), OF_ANOTHER, LabelBook(), NOW_US)[0]


def test_a_rule_may_refuse_for_some_pools_only() -> None:
    site = Site(rule=[{"pools": "host-1/*", "refuse_agreements": "warn"}])
    site.read(85, NOW_US)
    assert site.manager.refusals(documents("vol-1"), (), SERVED, LabelBook(), NOW_US)[0]


def found(days: float | None, spike: float | None = None, newest_us: int = NOW_US - DAY_US) -> PoolForecast:
    full_us = None if days is None else NOW_US + round(days * DAY_US)
    what = Forecast(30, 1.0, 0.9, full_us, full_us, full_us, "" if full_us else "it does not grow")
    return PoolForecast(PoolKey("gw-1", "data"), what, spike, newest_us)


def test_the_forecast_of_a_pool_that_is_not_read_any_more_is_no_event() -> None:
    site = Site()
    site.read(50, NOW_US)
    assert site.tick(NOW_US + 4 * HOUR_US, found(3, spike=40)) == []
    site.read(50, NOW_US + 5 * HOUR_US)
    assert [event["kind"] for event in site.tick(NOW_US + 5 * HOUR_US, found(3, spike=40))] == [
        "space-forecast",
        "space-growth",
    ]


def test_a_pool_that_will_be_full_soon_is_an_event_with_hysteresis() -> None:
    site = Site(forecast_days=14)
    site.read(50, NOW_US)
    said = []
    for days in (15, 13, 16, 12, 18, 13, None):
        said.append([event["kind"] for event in site.tick(NOW_US, found(days))])
        site.restart()
    assert said == [
        [],
        ["space-forecast"],
        [],
        [],
        ["space-forecast-ended"],
        ["space-forecast"],
        ["space-forecast-ended"],
    ]
    assert site.tables["pools"]["gw-1", "data"]["forecast"]["reason"] == "it does not grow"


def test_a_spike_is_one_event_a_day() -> None:
    site = Site()
    site.read(50, NOW_US)
    said = []
    for newest_us in (NOW_US - DAY_US, NOW_US - DAY_US, NOW_US):
        events = site.tick(NOW_US, found(None, 20.0, newest_us))
        said.append([event["kind"] for event in events])
        site.restart()
    assert said == [["space-growth"], [], ["space-growth"]]


def test_forecasts_of_pools_that_are_not_known_are_dropped() -> None:
    assert Site().tick(NOW_US, found(3)) == []


def test_the_servers_own_sources_are_pools_and_their_failures_events() -> None:
    site = Site()
    outcomes = (SourceFailed("nfs", "it hangs"), SourceBack("nfs"), space(85, NOW_US))
    said = [(event["kind"], event["subject"]) for event in site.tick(NOW_US, *outcomes)]
    assert said == [
        ("space-source-failed", "server/nfs"),
        ("space-source-back", "server/nfs"),
        ("space-low", "server/data"),
    ]
    assert ("server", "data") in site.tables["pools"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ({**ARCHIVE, "argv": ["archive"]}, "must be a path from / on"),
        ({**ARCHIVE, "argv": []}, "argv"),
        ({**ARCHIVE, "every_s": 1}, "every_s"),
    ],
)
def test_a_wrong_command_is_refused(command: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        StorageConfig(command=[command])


def test_two_commands_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two .* have the name archive"):
        StorageConfig(command=[ARCHIVE, ARCHIVE])  # type: ignore[list-item]
