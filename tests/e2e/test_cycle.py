"""The main job, as states and order: broken promise, throttle, promise kept, release."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Driver
from tests.support.paths import ROOT
from tests.support.stage import GOLD_IOPS, GREEDY_DEPTH, Stage


def gold_state(stage: Stage) -> str:
    return next((row["state"] for row in stage.live().get("slas", []) if row["name"] == "erp-gold"), "")


def events(stage: Stage) -> list[dict[str, Any]]:
    return list(reversed(stage.get("events?limit=200")["items"]))


def test_the_cycle_closes(stage: Stage, driver: Driver, tmp_path: Path) -> None:
    gold_agent, greedy_agent = stage.agents
    gold = driver.start(gold_agent.socket(stage), "erp-db", rate_iops=GOLD_IOPS)
    stage.wait(lambda: gold_state(stage) == "ok", "gold in order while alone")

    greedy = driver.start(greedy_agent.socket(stage), "batch", depth=GREEDY_DEPTH)
    stage.wait(lambda: gold_state(stage) == "violating", "the promise broken by the neighbour")
    assert not [row for row in stage.snapshot()["throttles"] if row["state"] != "observed"], (
        "observe only observes"
    )

    stage.wait(lambda: stage.get("why/batch")["status"] == "observed", "what enforce would do is stored")

    stage.set_mode("enforce")
    throttle = stage.wait(
        lambda: next(
            (row for row in stage.snapshot()["throttles"] if row["state"] in ("confirmed", "seen")), None
        ),
        "a throttle confirmed by the gateway",
    )
    assert throttle["volume"] == "batch"
    assert throttle["source"] == "control"
    assert "erp-gold" in throttle["victim"]
    assert throttle["text"], "a reason in words"
    told = stage.wait(lambda: why_confirmed(stage), "the decision stored, with its confirmation")
    then_us = told["at_us"]
    stage.wait(lambda: gold_state(stage) == "ok", "the promise kept again")
    screenshot(stage, tmp_path)

    driver.stop(gold)
    stage.wait(lambda: not stage.snapshot()["throttles"], "the neighbour released after gold stopped")
    driver.stop(greedy)
    assert not gold.errors
    assert not greedy.errors

    # The live view is ahead of the database by up to a flush.
    stage.wait(
        lambda: {"throttle-released", "violation-closed"} <= {event["kind"] for event in events(stage)},
        "the release and the end of the violation stored",
    )
    kinds = [event["kind"] for event in events(stage)]
    for kind in ("gateway-up", "violation-opened", "throttle-set", "violation-closed", "throttle-released"):
        assert kind in kinds, f"event {kind} is missing in {kinds}"
    assert stage.get("why/batch")["status"] == "free"
    assert "was throttled to" in stage.get(f"why/batch?at_us={then_us}")["headline"]
    assert "batch is not throttled." in stage.sla("why", "batch").stdout
    assert kinds.index("violation-opened") < kinds.index("throttle-set") < kinds.index("throttle-released")


def why_confirmed(stage: Stage) -> dict[str, Any] | None:
    """Why batch is throttled, once the cap is confirmed there; with who used what and the promise."""
    found: dict[str, Any] = stage.get("why/batch")
    lines = {section["title"]: " ".join(section["lines"]) for section in found["sections"]}
    if found["status"] != "throttled" or "Confirmed by" not in lines["Why"]:
        return None
    assert "to keep erp-gold/latency" in found["headline"]
    assert "erp-gold/latency (gold)" in lines["It protects"]
    assert "batch: " in lines["Who used it"]
    assert "throttled batch" in lines["Decided"] or "batch from" in lines["Decided"]
    return found


def screenshot(stage: Stage, folder: Path) -> None:
    """The page during a real run; kept in docs/ when asked for (make screenshot)."""
    from tests.support.browser import take_screenshot

    shot = folder / "dashboard.png"
    take_screenshot(f"http://127.0.0.1:{stage.api_port}/", shot, 1280, 1000, "[data-throttle]")
    assert shot.stat().st_size > 20_000, "a page with content"
    if os.environ.get("SLA_KEEP_SCREENSHOT"):
        shutil.copy(shot, ROOT / "docs" / "dashboard.png")


def test_a_manual_throttle_is_set_and_released_from_the_command_line(stage: Stage, driver: Driver) -> None:
    stage.set_mode("enforce")
    greedy = driver.start(stage.agents[1].socket(stage), "batch", depth=8)
    stage.sla("throttle", "set", "batch", "--iops", "100", "--reason", "test")
    row = stage.wait(
        lambda: next((row for row in stage.snapshot()["throttles"] if row["state"] == "seen"), None),
        "the throttle seen in the measured rate",
    )
    assert row["source"] == "manual"
    stage.sla("throttle", "release", "batch")
    stage.wait(lambda: not stage.snapshot()["throttles"], "the throttle released")
    driver.stop(greedy)
    wanted = {"throttle-set", "throttle-release"}
    stage.wait(
        lambda: wanted <= {entry["action"] for entry in stage.get("audit")["items"]}, "the audit's entries"
    )


def test_the_agreements_are_judged_and_stored(stage: Stage) -> None:
    def judged() -> list[dict[str, Any]]:
        return [row for row in stage.get("slas/erp-gold/slices")["items"] if row["state"] in ("good", "bad")]

    rows = stage.wait(judged, "judged slices")
    for row in rows:
        assert row["state"] == ("bad" if row["missed"] > 0.05 * row["n"] else "good")
