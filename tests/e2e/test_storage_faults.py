"""Storage that hangs, then storage that fails: it is said, and nobody is slowed down for it."""

from __future__ import annotations

import signal
from typing import Any

from tests.e2e.conftest import Driver
from tests.e2e.test_cycle import events, gold_state
from tests.support.stage import GOLD_IOPS, Stage


def fault(stage: Stage) -> str:
    return next((row["fault"] for row in stage.live().get("backends", []) if row["fault"]), "")


def row_of_gold(stage: Stage) -> dict[str, Any]:
    return next((row for row in stage.live().get("slas", []) if row["name"] == "erp-gold"), {})


def newest(stage: Stage, kind: str) -> dict[str, Any] | None:
    return next((event for event in reversed(events(stage)) if event["kind"] == kind), None)


def test_storage_that_hangs_and_fails_is_seen_and_nobody_is_slowed_down(stage: Stage, driver: Driver) -> None:
    gold_agent, batch_agent = stage.agents
    stage.set_mode("enforce")
    gold = driver.start(gold_agent.socket(stage), "erp-db", rate_iops=GOLD_IOPS)
    batch = driver.start(batch_agent.socket(stage), "batch", depth=1)
    stage.wait(lambda: gold_state(stage) == "ok", "the promise kept")
    (disk,) = stage.running("disk")

    disk.send_signal(signal.SIGSTOP)
    try:
        stage.wait(lambda: gold_state(stage) == "violating", "the promise broken by a disk that hangs")
        stage.wait(lambda: fault(stage) == "hangs", "the backend's fault")
        stage.wait(lambda: newest(stage, "storage-fault"), "the event of the fault")
        assert gold_state(stage) == "violating"
        opened = stage.wait(lambda: newest(stage, "violation-opened"), "the event of the violation")
        assert opened["text"].startswith("erp-gold/latency is violated")
        stage.wait(lambda: row_of_gold(stage).get("stall_us", 0) > 0, "the time without a completion")
    finally:
        disk.send_signal(signal.SIGCONT)
    stage.wait(lambda: gold_state(stage) == "ok" and not fault(stage), "the promise kept again")

    disk.send_signal(signal.SIGUSR2)  # every I/O fails
    stage.wait(lambda: gold_state(stage) == "violating", "the promise broken by a disk that fails")
    stage.wait(lambda: fault(stage) == "fails", "the backend's fault")
    stage.wait(lambda: row_of_gold(stage).get("failed_ratio", 0) > 0.5, "most I/Os shown as failed")
    disk.send_signal(signal.SIGUSR2)
    stage.wait(lambda: gold_state(stage) == "ok", "the promise kept again")

    assert "throttle-set" not in {event["kind"] for event in events(stage)}
    driver.stop(gold)
    driver.stop(batch)
    assert gold.errors
