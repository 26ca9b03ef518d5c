"""A published policy under real I/O: once it is enforced, it keeps a promise that reaction alone broke."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sla_server import config as configuration
from sla_server.db.policies import open_policies
from tests.e2e.conftest import Driver, whole_product
from tests.support.load import Load
from tests.support.stage import GOLD_IOPS, GREEDY_DEPTH, Stage

CAP = 100.0  # cost units a second: a quarter of what the modelled disk can do
SLICES = 3  # of a burst, after the one in which it begins
TRIES = 4  # a machine that is busy with other things breaks a promise by itself; reaction alone, each time


@pytest.fixture
def product(tmp_path: Path) -> Iterator[Stage]:
    with whole_product(tmp_path) as running:
        yield running


def publish(stage: Stage) -> int:
    """A policy that caps the greedy volume in every hour, stored as the job stores it."""
    config = configuration.load(stage.config_path)
    row = {"volume": "batch", "cost_per_s": CAP, "demand_p50": CAP, "demand_p95": 400.0}
    with closing(open_policies(config.database, config.data_dir)) as store:
        caps = [{**row, "hour_of_week": hour} for hour in range(168)]
        return store.publish(caps, job={}, report={}, published_by="test")


def slices(stage: Stage, state: str, from_us: int = 0) -> list[dict[str, Any]]:
    rows = stage.get("slas/erp-gold/slices")["items"]
    return [row for row in rows if row["state"] == state and row["start_us"] >= from_us]


def policy_throttles(stage: Stage, *states: str) -> list[dict[str, Any]]:
    rows = stage.live().get("throttles", [])
    return [row for row in rows if row["source"] == "policy" and row["state"] in states]


def burst(stage: Stage, driver: Driver) -> Load:
    return driver.start(stage.agents[1].socket(stage), "batch", depth=GREEDY_DEPTH)


def is_kept_through_a_burst(stage: Stage, driver: Driver) -> bool:
    """Whether no slice is bad from the one in which a burst under the policy's cap begins."""
    length_us = stage.slice_s * 1_000_000
    from_us = stage.snapshot()["at_us"] // length_us * length_us
    greedy = burst(stage, driver)
    stage.wait(lambda: policy_throttles(stage, "seen"), "the cap in the measured rate", limit_s=120)

    def judged() -> bool:
        return len(slices(stage, "good", from_us) + slices(stage, "bad", from_us)) > SLICES

    stage.wait(judged, "slices of the burst judged", limit_s=240)
    driver.stop(greedy)
    return not slices(stage, "bad", from_us)


def test_a_policy_keeps_a_promise_through_a_burst_that_reaction_alone_broke(
    product: Stage, driver: Driver
) -> None:
    stage = product
    stage.set_mode("enforce")
    gold = driver.start(stage.agents[0].socket(stage), "erp-db", rate_iops=GOLD_IOPS)
    version = publish(stage)
    stage.wait(lambda: (stage.live().get("policy") or {}).get("version") == version, "the policy in force")
    stage.wait(lambda: slices(stage, "good"), "the promise kept while gold is alone", limit_s=120)

    # Observed: the loop acts when the burst is there, and that is too late for the slice.
    greedy = burst(stage, driver)
    stage.wait(lambda: slices(stage, "bad"), "a slice that reaction alone could not keep", limit_s=180)
    assert not policy_throttles(stage, "requested", "sent", "confirmed", "seen")
    held = stage.wait(lambda: stage.snapshot()["policy_stage"]["would_hold"], "what it would have held")
    assert [(row["volume"], row["backend"]) for row in held] == [("batch", "disk-1")]
    assert "batch" in stage.sla("policy", "would-hold").stdout
    driver.stop(greedy)
    stage.wait(lambda: not stage.snapshot()["throttles"], "the loop has released its caps", limit_s=120)

    # Enforced: the cap is there before the burst, which the promise outlives.
    stage.sla("mode", "enforce", "--backend", "disk-1", "--policy")
    stage.wait(lambda: policy_throttles(stage, "confirmed", "seen"), "the policy's cap confirmed")
    assert any(is_kept_through_a_burst(stage, driver) for _ in range(TRIES)), "the promise kept throughout"
    assert "at most 100 weighted IOPS" in stage.sla("policy", "explain", "batch").stdout

    # Rolled back: there is no policy before it.
    assert "no policy is in force" in stage.sla("policy", "rollback").stdout
    stage.wait(lambda: not policy_throttles(stage, "confirmed", "seen"), "the policy's cap released")
    driver.stop(gold)
    assert not gold.errors
    wanted = {"policy-mode", "policy-applied", "policy-rollback"}
    stage.wait(
        lambda: wanted <= {entry["action"] for entry in stage.get("audit?limit=200")["items"]}, "the audit"
    )
    (row,) = stage.get("policies")["items"]
    assert row["state"] == "rolled-back"
