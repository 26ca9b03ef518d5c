"""A cap of one client over volumes of two planes of one agent, and of a second gateway, by the real link.

What is counted has one direction only: no more than the rate allows for the time that passed. Of each part a
burst may pass at once, and again where a part grows.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Driver
from tests.support.load import Load
from tests.support.planes import can_connect
from tests.support.servers import tree_of
from tests.support.stage import Agent, Stage

RATE = 40.0
SECOND_PLANE = """\
client_rule = "export-suffix"
[[plane]]
name = "nbd-1"
listen = ["unix:{sockets}/second.nbd"]
[[export]]
volume = "copies"
backend = "disk-1"
plane = "nbd-1"
upstream = "{upstream}"
"""


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path / "stage") as stage:
        stage.start_disk()
        stage.start_server()
        more = SECOND_PLANE.format(sockets=stage.sockets, upstream=stage.disk_uri.format("copies"))
        stage.start_agent(Agent("gateway-a", {"erp-db": stage.disk_uri.format("erp-db")}, extra_toml=more))
        other = {"scans": stage.disk_uri.format("scans")}
        stage.start_agent(Agent("gateway-b", other, extra_toml='client_rule = "export-suffix"'))
        stage.wait(stage.gateways_up, "the gateways")
        yield stage


def throttle(stage: Stage, state: str = "seen") -> dict[str, Any] | None:
    return next((row for row in stage.snapshot()["throttles"] if row["state"] == state), None)


def kill(stage: Stage, name: str, word: str) -> None:
    """SIGKILL to the one of an agent's processes whose command has this word."""
    found = tree_of(stage.running(name)[0].pid)
    (pid,) = (pid for pid in found if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    os.kill(pid, signal.SIGKILL)


class Counted:
    """I/Os of loads since it was made, held against the rate."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads, self._before, self._since_s = loads, [len(each.done) for each in loads], time.monotonic()

    def each(self) -> list[int]:
        return [len(each.done) - before for each, before in zip(self._loads, self._before, strict=True)]

    def is_at(self, total: int) -> bool:
        return sum(self.each()) >= total

    def most(self) -> float:
        """The rate, with a fifth of slack for bursts of parts that move; and what was under way."""
        return 1.2 * RATE * (time.monotonic() - self._since_s + 1) + sum(each.depth for each in self._loads)


def test_a_client_has_one_rate_over_two_planes_and_a_second_gateway(planes: Stage, driver: Driver) -> None:
    sockets = planes.sockets
    where = {name: planes.agents[index].socket(planes) for index, name in enumerate(("erp-db", "scans"))}
    where["copies"] = sockets / "second.nbd"
    loads = [driver.start(path, f"{volume}@greedy", depth=4) for volume, path in where.items()]
    other = driver.start(where["copies"], "copies@other", depth=4)
    planes.wait(lambda: all(len(each.done) > 20 for each in (*loads, other)), "all of them at work")
    asked = ("throttle", "set", "--client", "greedy", "--iops", f"{RATE:g}", "--reason", "test")
    planes.wait(lambda: not planes.sla(*asked, check=False).returncode, "the client known to the server")
    row = planes.wait(
        lambda: (found := throttle(planes)) and len(found["members"]) == 3 and found,
        "the rate over all planes seen within its cap",
    )
    assert row["members"].keys() == {"erp-db", "copies", "scans"}

    counted = Counted(loads)
    planes.wait(lambda: counted.is_at(400), "the client goes on at its rate")
    assert sum(counted.each()) <= counted.most()
    assert min(counted.each()) > 20, "it starves nowhere"

    # It turns to one volume: its parts elsewhere follow, and the sum is still no more.
    for load in loads[:2]:
        driver.stop(load)
    counted = Counted(loads[2:])
    planes.wait(lambda: counted.is_at(600), "the client goes on at one plane")
    assert sum(counted.each()) <= counted.most()

    # The link that divides dies: planes hold their parts, and the next link goes on.
    kill(planes, "gateway-a", "gateway_agent.link.main")
    counted = Counted(loads[2:])
    planes.wait(lambda: counted.is_at(300), "the client goes on without the link")
    assert sum(counted.each()) <= counted.most()

    # A plane dies: the next one has the cap again, by its first reads.
    kill(planes, "gateway-a", "nbd-0")
    planes.wait(lambda: not can_connect(where["erp-db"]), "the end of the plane")
    planes.wait(lambda: can_connect(where["erp-db"]), "the next plane")
    late = driver.start(where["erp-db"], "erp-db@greedy", depth=4)
    planes.wait(lambda: len(late.done) > 20, "the client at the next plane")
    counted = Counted([loads[2], late])
    planes.wait(lambda: counted.is_at(400), "both")
    assert sum(counted.each()) <= counted.most()

    # The server dies and comes back: the cap holds throughout, and can be released.
    planes.running("server")[0].kill()
    counted = Counted([loads[2], late])
    planes.wait(lambda: counted.is_at(200), "the client without the server")
    planes.start_server()
    planes.wait(lambda: throttle(planes), "the cap restored")
    assert sum(counted.each()) <= counted.most()
    assert "client greedy: released" in planes.sla("throttle", "release", "--client", "greedy").stdout
    before = [len(each.done) for each in (loads[2], late)]
    planes.wait(
        lambda: all(
            len(each.done) >= count + 200 for each, count in zip((loads[2], late), before, strict=True)
        ),
        "both without a cap",
    )
    for load in (loads[2], late, other):
        driver.stop(load)
        assert not load.errors
