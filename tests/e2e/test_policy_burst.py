"""A policy's burst (rate and bucket) under real I/O: what fits the bucket passes, then the rate holds.

Nothing is timed: what a gateway held back is what it counted as delay.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sla_server import config as configuration
from sla_server.db.policies import open_policies
from tests.e2e.conftest import Driver, whole_product
from tests.support.stage import Stage

CAP = 100.0  # cost units a second
BURST_S = 4.0
AT_ONCE = 300  # I/Os of 4 KiB, 319 units: three seconds of the cap, and less than its bucket
HELD_US = 1_000_000  # far less than the last of them waits without a bucket


@pytest.fixture
def product(tmp_path: Path) -> Iterator[Stage]:
    with whole_product(tmp_path) as running:
        yield running


def publish(stage: Stage, burst_s: float | None) -> None:
    """A policy that caps the volume in every hour; until its cap is in force at the gateway."""
    config = configuration.load(stage.config_path)
    row = {"volume": "batch", "cost_per_s": CAP, "demand_p50": CAP, "demand_p95": 400.0, "burst_s": burst_s}
    with closing(open_policies(config.database, config.data_dir)) as store:
        caps = [{**row, "hour_of_week": hour} for hour in range(168)]
        version = store.publish(caps, job={}, report={}, published_by="test")
    stage.wait(lambda: (stage.live().get("policy") or {}).get("version") == version, "the policy in force")

    def is_held() -> bool:
        rows = [row for row in stage.live().get("throttles", []) if row["source"] == "policy"]
        return [(row["burst_s"], row["state"]) for row in rows if row["state"] in ("confirmed", "seen")] in (
            [(burst_s, "confirmed")],
            [(burst_s, "seen")],
        )

    stage.wait(is_held, f"a cap with a burst of {burst_s} s confirmed by the gateway", limit_s=120)


def counted(stage: Stage) -> tuple[int, int]:
    """I/Os of the volume that completed, and for how long the gateway held them back in all, us."""
    statement = (
        "SELECT coalesce(sum(r.reads + r.writes), 0), coalesce(sum(r.delay_sum_us), 0) "
        "FROM rollups r JOIN streams s ON s.stream_id = r.stream_id WHERE s.volume = 'batch'"
    )
    path = stage.folder / "data" / "sla.db"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        ios, delay_us = connection.execute(statement).fetchone()
    return int(ios), int(delay_us)


def burst(stage: Stage, driver: Driver) -> tuple[int, int]:
    """So many I/Os at once, then hardly any; what was counted of them."""
    before = counted(stage)
    gaps_s = itertools.chain(itertools.repeat(0.0, AT_ONCE), itertools.repeat(0.5))
    load = driver.start(stage.agents[1].socket(stage), "batch", gaps_s=gaps_s)  # type: ignore[arg-type]
    stage.wait(lambda: counted(stage)[0] >= before[0] + AT_ONCE, "the burst in SQL", limit_s=240)
    driver.stop(load)
    assert not load.errors
    after = counted(stage)
    return after[0] - before[0], after[1] - before[1]


def test_what_fits_the_bucket_of_a_policy_s_cap_is_not_held_back(product: Stage, driver: Driver) -> None:
    stage = product
    stage.set_mode("enforce")
    stage.sla("mode", "enforce", "--backend", "disk-1", "--policy")
    publish(stage, BURST_S)
    ios, held_us = burst(stage, driver)
    assert ios >= AT_ONCE
    assert held_us == 0, "all of it passed at once"

    publish(stage, None)  # the same rate with the bucket of gateways, 20 ms
    ios, held_us = burst(stage, driver)
    assert ios >= AT_ONCE
    assert held_us > HELD_US, "the same burst waits for the rate"
