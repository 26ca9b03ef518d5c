"""Clients of one volume, and volumes of one group: who is held, who is not, and what people are shown."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Driver
from tests.support.stage import GOLD_IOPS, GREEDY_DEPTH, PROMISE_MS, Agent, Stage

AGREEMENT = f"""\
apiVersion: storage-sla/v1
kind: SLA
metadata: {{name: host-a-gold}}
spec:
  scope: {{clients: [host-a], volumes: [erp-db], io: any}}
  priority: gold
  objectives:
  - name: latency
    indicator: {{metric: latency, percentile: 95}}
    demand_curve:
    - {{up_to_iops: 150, value_ms: {PROMISE_MS:g}}}
    applicability: {{min_ios_per_slice: 100}}
    budgeting: {{method: timeslices, slice: 10s, target: 0.95}}
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One agent that tells clients apart by the export they ask for, and an agreement with one of them."""
    with Stage(tmp_path_factory.mktemp("shared")) as stage:
        stage.start_disk()
        stage.start_server()
        volumes = {name: stage.disk_uri.format(name) for name in ("erp-db", "copies")}
        stage.start_agent(Agent("gateway-a", volumes, extra_toml='client_rule = "export-suffix"'))
        stage.wait(stage.gateways_up, "the gateway")
        path = stage.folder / "host-a.yaml"
        path.write_text(AGREEMENT)
        stage.sla("apply", "-f", str(path))
        yield stage


def state(stage: Stage) -> str:
    return next((row["state"] for row in stage.live().get("slas", [])), "")


def throttles(stage: Stage) -> list[dict[str, Any]]:
    return [row for row in stage.snapshot()["throttles"] if row["state"] != "observed"]


def held(stage: Stage) -> dict[str, int]:
    """The most I/Os that were held back at the end of a cut, by client, as stored."""
    with contextlib.closing(
        sqlite3.connect(f"file:{stage.folder}/data/sla.db?mode=ro", uri=True, timeout=60)
    ) as database:
        rows = database.execute(
            "SELECT s.client, max(r.held_max) FROM rollups r JOIN streams s USING (stream_id) GROUP BY 1"
        )
        return dict(rows.fetchall())


def test_the_greedy_client_is_held_and_the_promised_one_is_not(shared: Stage, driver: Driver) -> None:
    where = shared.agents[0].socket(shared)
    promised = driver.start(where, "erp-db@host-a", rate_iops=GOLD_IOPS)
    shared.wait(lambda: state(shared) == "ok", "host-a in order while alone")
    greedy = driver.start(where, "erp-db@greedy", depth=GREEDY_DEPTH)
    shared.wait(lambda: state(shared) == "violating", "the promise broken by the other client")

    shared.set_mode("enforce")
    throttle = shared.wait(
        lambda: next((row for row in throttles(shared) if row["state"] in ("confirmed", "seen")), None),
        "a cap of the client, confirmed by the gateway",
    )
    assert (throttle["volume"], throttle["client"]) == ("erp-db", "greedy")
    assert (throttle["source"], throttle["victim"]) == ("control", "host-a-gold/latency")
    shared.wait(lambda: state(shared) == "ok", "the promise kept again")
    assert {(row["volume"], row["client"]) for row in throttles(shared)} == {("erp-db", "greedy")}
    assert all(row["cap_cost_per_s"] is None for row in shared.snapshot()["volumes"]), "the volume has no cap"

    shared.wait(lambda: held(shared).get("greedy", 0) > 0, "that the greedy client was held, stored")
    assert held(shared)["host-a"] == 0
    assert "greedy" in shared.sla("get", "throttles").stdout
    why = shared.sla("why", "erp-db").stdout
    assert "client greedy of erp-db is throttled to" in why
    assert "to keep host-a-gold/latency" in why

    driver.stop(promised)
    shared.wait(lambda: not throttles(shared), "the client released after the other one stopped")
    driver.stop(greedy)
    assert not promised.errors
    assert not greedy.errors
    assert not promised.hung


def test_a_client_is_throttled_by_hand_and_released(shared: Stage, driver: Driver) -> None:
    where = shared.agents[0].socket(shared)
    loads = [driver.start(where, f"erp-db@{client}", depth=4) for client in ("host-a", "greedy")]
    asked = ("erp-db", "--client", "greedy", "--iops", "20", "--reason", "test")
    assert "client greedy of erp-db: at most " in shared.sla("throttle", "set", *asked).stdout
    row = shared.wait(
        lambda: next((row for row in throttles(shared) if row["state"] == "seen"), None),
        "the rate of the client seen within its cap",
    )
    assert (row["client"], row["ops_per_s"], row["source"]) == ("greedy", 20, "manual")
    before = [len(load.done) for load in loads]
    shared.wait(lambda: len(loads[0].done) >= before[0] + 200, "the other client at work")
    assert len(loads[1].done) - before[1] < len(loads[0].done) - before[0]
    refused = shared.sla("throttle", "set", *asked[:2], "nobody", *asked[3:], check=False)
    assert refused.returncode
    assert "it has greedy, host-a" in refused.stderr
    released = shared.sla("throttle", "release", "erp-db", "--client", "greedy").stdout
    assert released == "client greedy of erp-db: released 1 throttle\n"
    shared.wait(lambda: not throttles(shared), "the client released")
    for load in loads:
        driver.stop(load)


def test_a_client_is_throttled_over_all_its_volumes_and_released(shared: Stage, driver: Driver) -> None:
    where = shared.agents[0].socket(shared)
    streams = ("erp-db@greedy", "copies@greedy", "copies@host-a")
    loads = [driver.start(where, stream, depth=4) for stream in streams]
    shared.wait(lambda: all(len(load.done) > 20 for load in loads), "all of them at work")
    rate, burst_s = 40.0, 1.0
    refused = shared.sla("throttle", "set", "--client", "nobody", "--iops", "9", "--reason", "x", check=False)
    assert refused.returncode
    assert "no client 'nobody' is known" in refused.stderr
    asked = ("--client", "greedy", "--iops", f"{rate:g}", "--burst", f"{burst_s:g}", "--reason", "test")
    assert "client greedy: at most 40 IOPS until " in shared.sla("throttle", "set", *asked).stdout
    row = shared.wait(
        lambda: next((row for row in throttles(shared) if row["state"] == "seen"), None),
        "the rate of the client over both volumes seen within its cap",
    )
    assert (row["volume"], row["client"], row["group_name"]) == ("", "greedy", "")
    assert row["members"].keys() >= {"erp-db", "copies"}
    since_s, before = time.monotonic(), [len(load.done) for load in loads]
    shared.wait(lambda: len(loads[2].done) >= before[2] + 300, "the other client at work")
    done = [len(load.done) - count for load, count in zip(loads, before, strict=True)]
    assert sum(done[:2]) <= rate * (time.monotonic() - since_s + burst_s) + 2 * 4
    shared.wait(
        lambda: min(len(load.done) - count for load, count in zip(loads, before, strict=True)) > 20, "both"
    )
    shared.wait(lambda: any(row["worst_hold_us"] > 0 for row in throttles(shared)), "how long I/Os were held")
    shown = shared.sla("get", "throttles").stdout
    assert any(line.startswith("client ") and "40 IOPS" in line for line in shown.splitlines()), shown
    why = " ".join(shared.sla("why", "copies").stdout.split())
    assert "for client greedy over all its volumes together" in why, why
    released = shared.sla("throttle", "release", "--client", "greedy").stdout
    assert released == "client greedy: released 1 throttle\n"
    shared.wait(lambda: not throttles(shared), "the client released")
    before = [len(load.done) for load in loads]
    shared.wait(lambda: len(loads[0].done) >= before[0] + 200, "it goes on without a cap")
    for load in loads:
        driver.stop(load)
        assert not load.errors


def test_volumes_share_a_cap_as_a_group_and_are_released(shared: Stage, driver: Driver) -> None:
    where = shared.agents[0].socket(shared)
    loads = [driver.start(where, f"{volume}@host-a", depth=4) for volume in ("erp-db", "copies")]
    asked = ("--group", "night", "erp-db=3", "copies", "--iops", "40", "--reason", "test", "--force")
    assert "group night: at most " in shared.sla("throttle", "set", *asked).stdout
    row = shared.wait(
        lambda: next((row for row in throttles(shared) if row["state"] == "seen"), None),
        "the rate of both volumes together seen within their cap",
    )
    assert (row["volume"], row["group_name"], row["members"]) == ("", "night", {"erp-db": 3, "copies": 1})
    before = [len(load.done) for load in loads]
    shared.wait(lambda: len(loads[0].done) >= before[0] + 120, "the heavier volume at work")
    done = [len(load.done) - count for load, count in zip(loads, before, strict=True)]
    assert 0 < done[1] < done[0]
    shared.wait(lambda: any(row["worst_hold_us"] > 0 for row in throttles(shared)), "how long I/Os were held")
    shown = shared.sla("get", "throttles").stdout
    assert "night" in shown, shown
    why = " ".join(shared.sla("why", "copies").stdout.split())
    assert "for all volumes of group night together" in why, why
    refused = shared.sla("throttle", "set", "--group", "day", *asked[2:], check=False)
    assert refused.returncode
    assert "is in group 'night'" in refused.stderr
    released = shared.sla("throttle", "release", "--group", "night").stdout
    assert released == "group night: released 1 throttle\n"
    shared.wait(lambda: not throttles(shared), "the group released")
    for load in loads:
        driver.stop(load)
        assert not load.errors
