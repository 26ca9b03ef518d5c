"""kill -9 of each process under load: it comes back, the cycle goes on, nothing is lost or counted twice."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.e2e.conftest import Driver
from tests.support.browser import text_of
from tests.support.stage import LIMIT_S, Stage
from tests.support.stored_cuts import wait_for_more_cuts

KILLED = {
    "delivery": "sla_server.process delivery",
    "dbmanager": "sla_server.process dbmanager",
    "services": "sla_server.process services",
    "pair": "-m pmdaemon pair",
    "link": "gateway_agent.link.main",
    "appserver": "sla_server.process appserver",
    "pmdaemon": "-m pmdaemon run",
}
SHOWN_AS = {"pair": "pair-0", "link": "the link"}


def stored_ios(stage: Stage) -> dict[str, int]:
    """Lifetime reads and writes of each volume, as the database has them."""
    return {row["volume"]: row["reads"] + row["writes"] for row in stage.get("volumes")["items"]}


def newest_cuts(stage: Stage) -> list[int]:
    return [row["last_cut_us"] or 0 for row in stage.live().get("gateways", [])]


@pytest.fixture(scope="module")
def seen_by_clients() -> dict[str, int]:
    """I/Os that clients of this module's stage have had answered, by volume."""
    return {"erp-db": 0, "batch": 0}


@pytest.mark.parametrize("victim", list(KILLED))
def test_kill_9(stage: Stage, driver: Driver, victim: str, seen_by_clients: dict[str, int]) -> None:
    gold_agent, greedy_agent = stage.agents
    loads = {
        "erp-db": driver.start(gold_agent.socket(stage), "erp-db", rate_iops=80),
        "batch": driver.start(greedy_agent.socket(stage), "batch", depth=4),
    }
    stage.wait(lambda: all(len(load.done) > 100 for load in loads.values()), "load")
    killed = stage.kill(KILLED[victim])
    assert killed, f"no process of {victim} was found"
    counted = {name: len(load.done) for name, load in loads.items()}
    killed_us = time.time() * 1e6

    stage.wait(lambda: not set(killed) & set(stage.pids(KILLED[victim])), "the killed process gone")
    stage.wait(lambda: stage.pids(KILLED[victim]), f"{victim} started again")
    stage.wait(
        lambda: (cuts := newest_cuts(stage)) and min(cuts) > killed_us + 1e6,
        "new cuts from both gateways",
        limit_s=120,
    )
    stage.wait(lambda: shown_restarted(stage, victim, since_us=killed_us), f"the page to say so of {victim}")
    if victim == "pmdaemon":
        assert lost_gateways(stage, since_us=killed_us) == [], "the server's own restart is no lost gateway"
    for name, load in loads.items():
        stage.wait(lambda name=name, load=load: len(load.done) > counted[name], f"more I/O of {name}")
        driver.stop(load)
        assert not load.errors, f"application I/O of {name} saw the death of {victim}"

    for name, load in loads.items():
        seen_by_clients[name] += len(load.done)
    found = wait_for_counts(stage, seen_by_clients)
    assert found == seen_by_clients, (
        f"the database must hold what the clients saw, exactly, after the death of {victim}"
    )


def shown_restarted(stage: Stage, victim: str, since_us: float) -> bool:
    """Whether the live view, which the page shows as it is, has the restart among its newest events."""
    return any(
        event["kind"] == "process-restarted"
        and event["at_us"] > since_us
        and f"{SHOWN_AS.get(victim, victim)} was restarted" in event["text"]
        for event in stage.live().get("events", [])
    )


def lost_gateways(stage: Stage, since_us: float) -> list[str]:
    """Texts of stored events that call a gateway lost."""
    events = stage.get("events?limit=100")["items"]
    return [row["text"] for row in events if row["kind"] == "gateway-lost" and row["at_us"] > since_us]


def wait_for_counts(stage: Stage, expected: dict[str, int], limit_s: float = LIMIT_S) -> dict[str, int]:
    """The stored counts as soon as they are right, else as they are at the limit (or once they exceed)."""
    end_s = time.monotonic() + limit_s
    while True:
        found = stored_ios(stage)
        if found == expected or time.monotonic() > end_s:
            wait_for_more_cuts(stage, 4)  # a double count would arrive late, yet before newer cuts
            return stored_ios(stage)
        time.sleep(0.2)


def test_the_page_says_so(stage: Stage) -> None:
    def have_restarted() -> bool:
        rows: list[dict[str, Any]] = stage.get("processes")["items"]
        return {"dbmanager", "services", "appserver"} <= {row["name"] for row in rows if row["restarts"]}

    stage.wait(have_restarted, "the restarts in the rows of processes")

    def restarted() -> set[str]:
        events = stage.get("events?limit=200")["items"]
        return {event["subject"] for event in events if event["kind"] == "process-restarted"}

    wanted = {"delivery", "dbmanager", "services", "appserver", "pmdaemon", "pair-0"}
    stage.wait(lambda: restarted() >= wanted, "the events of all, which are stored later than shown")
    gateways = {row["name"] for row in stage.get("gateways")["items"]}
    assert gateways & restarted(), "the link's restart is its gateway's event"
    page = text_of(f"http://127.0.0.1:{stage.api_port}/", "#processes", wait_css="#processes li")
    for name in ("dbmanager", "services", "appserver", "pmdaemon"):
        assert re.search(rf"{name}, \d+ restart", page), page
