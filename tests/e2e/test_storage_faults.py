"""Storage that hangs, fails, dies or is slow, under the whole product: it is said, and no one is slowed down.

One server for all of them. What the gateway alone makes of such storage: test_nbd_faults.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Driver, whole_product
from tests.e2e.test_cycle import events, gold_state
from tests.support import nbd_client
from tests.support.load import Load
from tests.support.stage import GOLD_IOPS, PROMISE_MS, Stage

# An episode ends soon after the promise is kept again, so that each test has one of its own.
CALM = "[services.control]\nepisode_calm_s = 2\nepisode_calm_max_s = 2\n"
SLOW_MS, SLOW_AT_ONCE = 1.5 * PROMISE_MS, 64  # no queue: each I/O is late by itself
DIALS = 20
SLICE_LIMIT_S = 240.0  # a slice of 10 s is judged within 30 s of its end


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with whole_product(tmp_path_factory.mktemp("faults"), CALM) as running:
        running.set_mode("enforce")
        yield running


@pytest.fixture
def gold(stage: Stage, driver: Driver) -> Iterator[Load]:
    """A client of the promise beside one of its neighbour; the promise is kept, no episode is open."""
    if not stage.running("disk"):
        stage.start_disk()
    yield start(stage, driver)
    driver.close_loads()


def start(stage: Stage, driver: Driver) -> Load:
    gold_agent, batch_agent = stage.agents
    gold = driver.start(gold_agent.socket(stage), "erp-db", rate_iops=GOLD_IOPS)
    driver.start(batch_agent.socket(stage), "batch", depth=1)
    stage.wait(lambda: gold_state(stage) == "ok" and not open_episode(stage), "the promise kept")
    return gold


def now_us() -> int:
    return time.time_ns() // 1000


def fault(stage: Stage) -> str:
    return next((row["fault"] for row in stage.live().get("backends", []) if row["fault"]), "")


def row_of_gold(stage: Stage) -> dict[str, Any]:
    return next((row for row in stage.live().get("slas", []) if row["name"] == "erp-gold"), {})


def open_episode(stage: Stage) -> dict[str, Any] | None:
    """The event that opened it."""
    last = next((event for event in reversed(events(stage)) if event["kind"].startswith("violation-")), None)
    return last if last is not None and last["kind"] == "violation-opened" else None


def newest(stage: Stage, kind: str, since_us: int) -> dict[str, Any] | None:
    found = (event for event in reversed(events(stage)) if event["kind"] == kind)
    return next((event for event in found if event["at_us"] > since_us), None)


def episode(stage: Stage) -> dict[str, Any]:
    """The event of the open episode: of two windows of at most three, or of two slices.

    Slices where I/O that was slow just before their boundary and just after it makes both bad: what the test
    before left in them may open the episode before this one's storage is slow; it then goes on.
    """
    found: dict[str, Any] = stage.wait(lambda: open_episode(stage), "the event of the violation")
    assert found["text"].startswith("erp-gold/latency is violated")
    details = found["details"]
    if details.get("slices_over") is None:
        assert 2 <= details["windows_over"] <= details["windows"] <= 3
    else:
        assert (details["slices_over"], details["u"] >= 1, details["latency_us"]) == (2, True, None)
    return found


def bad_slice(stage: Stage, since_us: int) -> dict[str, Any] | None:
    rows = stage.get("slas/erp-gold/slices")["items"]
    return next((row for row in rows if row["state"] == "bad" and row["start_us"] >= since_us), None)


def assert_nobody_is_throttled(stage: Stage) -> None:
    assert stage.snapshot()["throttles"] == []
    assert "throttle-set" not in {event["kind"] for event in events(stage)}


def test_storage_that_hangs(stage: Stage, gold: Load) -> None:
    since_us = now_us()
    (disk,) = stage.running("disk")
    disk.send_signal(signal.SIGSTOP)
    try:
        stage.wait(lambda: gold_state(stage) == "violating", "the promise broken by a disk that hangs")
        stage.wait(lambda: fault(stage) == "hangs", "the backend's fault")
        stage.wait(lambda: newest(stage, "storage-fault", since_us), "the event of the fault")
        assert gold_state(stage) == "violating"
        episode(stage)
        stage.wait(lambda: row_of_gold(stage).get("stall_us", 0) > 0, "the time without a completion")
    finally:
        disk.send_signal(signal.SIGCONT)
    stage.wait(lambda: gold_state(stage) == "ok" and not fault(stage), "the promise kept again")
    assert_nobody_is_throttled(stage)


def test_storage_that_fails(stage: Stage, gold: Load) -> None:
    (disk,) = stage.running("disk")
    disk.send_signal(signal.SIGUSR2)  # every I/O fails
    stage.wait(lambda: gold_state(stage) == "violating", "the promise broken by a disk that fails")
    stage.wait(lambda: fault(stage) == "fails", "the backend's fault")
    stage.wait(lambda: row_of_gold(stage).get("failed_ratio", 0) > 0.5, "most I/Os shown as failed")
    episode(stage)
    disk.send_signal(signal.SIGUSR2)
    stage.wait(lambda: gold_state(stage) == "ok", "the promise kept again")
    assert_nobody_is_throttled(stage)
    assert gold.errors


def test_storage_that_is_killed(stage: Stage, gold: Load, driver: Driver) -> None:
    since_us = now_us()
    (disk,) = stage.running("disk")
    disk.kill()
    disk.wait()
    path = stage.agents[0].socket(stage)
    stage.wait(lambda: driver.has_ended(gold), "the end of the client's connection")

    def is_broken() -> bool:
        """As clients do, which come again and again."""
        assert asyncio.run(dial(path, "erp-db", DIALS)) == 0, "no client is let in without storage"
        return gold_state(stage) == "violating"

    stage.wait(is_broken, "the promise broken by a disk that is gone")
    assert episode(stage)["details"]["failed_ratio"] > 0

    def is_judged() -> dict[str, Any] | None:
        asyncio.run(dial(path, "erp-db", DIALS))
        return bad_slice(stage, since_us)

    row = stage.wait(is_judged, "a bad slice", limit_s=SLICE_LIMIT_S)
    # Refused clients are failures and, from the first attempt on, a time without a completion.
    assert row["reason"] in ("failed", "hung")
    assert_nobody_is_throttled(stage)
    stage.start_disk()
    start(stage, driver)  # the promise is kept again


async def dial(path: Any, export: str, times: int) -> int:
    """How many of so many attempts to open the export succeed."""
    opened = 0
    for _ in range(times):
        reader, writer = await asyncio.open_unix_connection(str(path))
        try:
            await nbd_client.client_handshake(reader, writer, export)
            opened += 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
    return opened


def test_storage_that_is_slow(stage: Stage, gold: Load, driver: Driver) -> None:
    (disk,) = stage.running("disk")
    driver.close_loads()
    stage.stop("disk", disk)
    since_us = now_us()
    stage.start_disk(SLOW_MS, SLOW_AT_ONCE)
    try:
        driver.start(stage.agents[0].socket(stage), "erp-db", rate_iops=GOLD_IOPS)
        stage.wait(lambda: gold_state(stage) == "violating", "the promise broken by a slow disk")
        found = episode(stage)
        if found["details"]["latency_us"] is not None:  # of windows: slices may hold what failed at the stop
            assert found["details"]["latency_us"] > 1000 * PROMISE_MS
            assert (found["details"]["failed_ratio"], found["details"]["windows_stalled"]) == (0, 0)
        stage.wait(
            lambda: (row_of_gold(stage).get("latency_us") or 0) > 1000 * PROMISE_MS, "the latency shown"
        )
        row = stage.wait(lambda: bad_slice(stage, since_us), "a bad slice", limit_s=SLICE_LIMIT_S)
        assert row["missed"] > 0.05 * row["n"]
        assert "VIOLATED" in stage.sla("get", "slas").stdout
    finally:
        stage.stop("disk", *stage.running("disk"))
