"""The thread of forecasts and commands, turn by turn."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.commands import CommandFailed, CommandRunner
from pmdaemon.runtime.stop import Stop
from sla_server.storage_resources.actions import CommandDone, CommandOrder
from sla_server.storage_resources.config import StorageCommand
from sla_server.storage_resources.pools import DAY_US, PoolForecast, PoolKey
from sla_server.storage_resources.worker import (
    AGAIN_S,
    FORECAST_S,
    MOST_A_TURN,
    StorageWorker,
    as_stored,
    forecast_of,
    usable_days,
)
from tests.support.services import FakeStore

NOW_US = 20_000 * DAY_US + 1


def day(owner: str, number: int, used: int) -> dict[str, object]:
    return {"owner": owner, "pool": "data", "day_us": number * DAY_US, "size_bytes": 1000, "used_bytes": used}


def forecasts(worker: StorageWorker) -> dict[PoolKey, PoolForecast]:
    found = {}
    while not worker.found.empty():
        each = worker.found.get_nowait()
        assert isinstance(each, PoolForecast)
        found[each.key] = each
    return found


def test_each_pool_is_forecast_from_the_days_that_have_ended() -> None:
    store = FakeStore()
    growing = [day("a", 19_980 + number, 100 + 10 * number) for number in range(20)]
    today = day("a", 20_000, 999)
    old = [day("b", 19_900 + number, number) for number in range(20)]
    store.tables["pool_days"] = [*growing, today, *old]
    clock = FakeClock(unix_us=NOW_US)
    worker = StorageWorker(store, clock, Stop())  # type: ignore[arg-type]
    clock.advance(AGAIN_S + 1)
    worker.turn()
    (found,) = forecasts(worker).values()
    assert (found.key, found.forecast.days, found.newest_us) == (("a", "data"), 20, 19_999 * DAY_US)
    assert found.forecast.full_us == 20_071 * DAY_US, "290 on the 20th day, 10 a day: 71 days"


def passed(store: FakeStore, now_us: int) -> dict[PoolKey, PoolForecast]:
    """What a worker's first pass has found."""
    clock = FakeClock(unix_us=now_us - round((AGAIN_S + 1) * 1e6))
    worker = StorageWorker(store, clock, Stop())  # type: ignore[arg-type]
    clock.advance(AGAIN_S + 1)
    worker.turn()
    return forecasts(worker)


def as_by_the_job(store: FakeStore, now_us: int, *owners: str) -> list[dict[str, Any]]:
    """What the job stores of these owners' days; through JSON, as it is kept."""
    days = store.tables["pool_days"]
    rows = [
        as_stored(
            forecast_of(PoolKey(owner, "data"), usable_days([d for d in days if d["owner"] == owner], now_us),
                        now_us), now_us)
        for owner in owners
    ]  # fmt: skip
    stored: list[dict[str, Any]] = json.loads(json.dumps(rows))
    return stored


def test_what_the_space_job_has_found_is_what_would_be_found_here_and_is_taken() -> None:
    store = FakeStore()
    store.tables["pool_days"] = [
        day(owner, 19_980 + number, 100 + growth * number) for owner, growth in (("a", 10), ("b", 0))
        for number in range(20)
    ]  # fmt: skip
    computed = passed(store, NOW_US)
    assert list(computed) == [("a", "data"), ("b", "data")]
    store.of_space_job = NOW_US, as_by_the_job(store, NOW_US, "a", "b")
    store.reads.clear()
    assert passed(store, NOW_US + 60_000_000) == computed
    assert "pool_days" not in store.reads
    store.of_space_job = NOW_US, as_by_the_job(store, NOW_US, "a")
    assert passed(store, NOW_US + 60_000_000) == computed, "the pool that the job did not know is computed"
    assert store.reads.count("pool_days") == 1


@pytest.mark.parametrize(
    ("later_us", "drop"),
    [
        (round(FORECAST_S * 1e6) + 1, ""),  # a pass ago
        (-1, ""),  # of the future
        (0, "r2"),  # of another release
    ],
)
def test_what_the_space_job_has_found_in_other_days_is_computed_again(later_us: int, drop: str) -> None:
    store = FakeStore()
    store.tables["pool_days"] = [day("a", 19_980 + number, 100 + 10 * number) for number in range(20)]
    rows = as_by_the_job(store, NOW_US, "a")
    store.of_space_job = NOW_US, [{key: value for key, value in row.items() if key != drop} for row in rows]
    assert passed(store, NOW_US + later_us)
    assert "pool_days" in store.reads


def test_a_day_that_has_ended_since_the_job_ran_has_more_to_say() -> None:
    store = FakeStore()
    store.tables["pool_days"] = [day("a", 19_980 + number, 100 + 10 * number) for number in range(21)]
    before_us = NOW_US + DAY_US - 60_000_000
    store.of_space_job = before_us, as_by_the_job(store, before_us, "a")
    (found,) = passed(store, before_us + 120_000_000).values()
    assert found.newest_us == 20_000 * DAY_US


@pytest.mark.parametrize("away", ["space_results", "pool_keys", "pool_days"])
def test_while_the_database_is_away_nothing_is_found_and_it_is_tried_again(away: str) -> None:
    store, clock, stop = FakeStore(), FakeClock(unix_us=NOW_US), Stop()
    store.tables["pool_days"] = [day("a", 19_999, 5)]
    store.away = {away}
    worker = StorageWorker(store, clock, stop)  # type: ignore[arg-type]
    clock.advance(AGAIN_S + 1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    for _ in range(2):
        seen = len(store.reads)
        while len(store.reads) == seen:
            clock.advance(AGAIN_S + 1)
            thread.join(0.05)
    stop.set("test")
    thread.join(60)
    assert not thread.is_alive()
    assert worker.found.empty()


def ordered(name: str) -> CommandOrder:
    command = StorageCommand(name=name, argv=["/bin/echo", name], dry_run=False)
    return CommandOrder(command, "a", "data", "host/data", {})


def test_forecasts_of_a_fleet_are_a_few_a_turn_and_a_command_goes_first() -> None:
    store, clock = FakeStore(), FakeClock(unix_us=NOW_US)
    owners = [f"gw-{number}" for number in range(2 * MOST_A_TURN + 1)]
    store.tables["pool_days"] = [day(owner, 19_999, 5) for owner in owners]
    worker = StorageWorker(store, clock, Stop())  # type: ignore[arg-type]
    worker.turn()
    assert worker.found.empty(), "the first ones are due later"
    clock.advance(AGAIN_S + 1)
    worker.turn()
    assert [key.owner for key in forecasts(worker)] == owners[:MOST_A_TURN]
    worker.order(ordered("archive"))
    worker.turn()
    assert isinstance(worker.found.get_nowait(), CommandDone)
    assert worker.found.empty()
    worker.turn()
    worker.turn()
    assert [key.owner for key in forecasts(worker)] == owners[MOST_A_TURN:]
    for _ in range(3):
        worker.turn()
    assert worker.found.empty(), "the next pass is in an hour"
    clock.advance(FORECAST_S)
    worker.turn()
    assert [key.owner for key in forecasts(worker)] == owners[:MOST_A_TURN]


def test_a_pass_goes_on_where_the_database_went_away() -> None:
    store, clock = FakeStore(), FakeClock(unix_us=NOW_US)
    owners = [f"gw-{number}" for number in range(MOST_A_TURN + 1)]
    store.tables["pool_days"] = [day(owner, 19_999, 5) for owner in owners]
    worker = StorageWorker(store, clock, Stop())  # type: ignore[arg-type]
    clock.advance(AGAIN_S + 1)
    worker.turn()
    forecasts(worker)
    store.away = {"pool_days"}
    worker.turn()
    store.away = set()
    worker.turn()
    assert worker.found.empty(), "it is tried again after a while"
    clock.advance(AGAIN_S + 1)
    worker.turn()
    assert [key.owner for key in forecasts(worker)] == owners[MOST_A_TURN:]


def test_a_command_that_cannot_be_killed_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its I/O hangs in the kernel, perhaps in the very pool that is full."""
    monkeypatch.setattr(CommandRunner, "run", hanging)
    worker = StorageWorker(FakeStore(), FakeClock(unix_us=NOW_US), Stop())  # type: ignore[arg-type]
    for name in ("archive", "expire", "archive"):
        worker.order(ordered(name))
    for _ in range(3):
        worker.turn()
    problems = [worker.found.get_nowait() for _ in range(3)]
    assert [each.problem for each in problems if isinstance(each, CommandDone)] == [
        "/bin/echo: first run",
        "/bin/echo: first run",
        "/bin/echo: it hangs",
    ]


def hanging(runner: CommandRunner, argv: list[str], *_args: object, **_more: object) -> str:
    said = "it hangs" if runner._stuck else "first run"
    runner._stuck = object()  # type: ignore[assignment]
    raise CommandFailed(argv[0], said)
