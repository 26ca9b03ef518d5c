"""A false gateway claims the volume of a promise, on the backend of others, in mode enforce."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.wire import cut, frame
from pmdaemon.wire.kinds import Kind
from tests.e2e.conftest import Driver, whole_product
from tests.support import worlds
from tests.support.gateways import Agent, hello, register, schema, streams
from tests.support.stage import PROMISE_MS, Stage

VOLUME = "erp-db"
ENOUGH = 12  # cuts that are taken: a violation takes two windows, a throttle some more
IOS = 100  # inside the curve of the promise


class FalseGateway:
    """Says in every answer that all I/Os of the promised volume took four times the promise."""

    def __init__(self, port: int) -> None:
        self.agent = Agent.dial(port, str(uuid.uuid4()))
        self.entries: list[dict[str, Any]] = []
        self.cuts = 0
        own = self.agent.gateway_id
        self.agent.send(
            hello(own, name="evil-gw"), schema(), register(volumes=[VOLUME]), streams(own, [VOLUME])
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="false-gateway")
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # the end of the connection, perhaps within an answer
            while not self._stopped.is_set():
                received = self.agent.read()
                if received.kind == Kind.THRESHOLDS:
                    self.entries = received.header["entries"]
                elif received.kind == Kind.POLL:
                    self._answer(received.header)

    def _answer(self, poll: dict[str, Any]) -> None:
        self.cuts += 1
        now_us = _now_us()
        made = worlds.cut(
            self.agent.gateway_id, self.cuts, {f"{VOLUME}/host-a": (IOS, 4 * PROMISE_MS)},
            epoch=self.agent.epoch, thresholds_us=(round(PROMISE_MS * 1000),),
        )  # fmt: skip
        said = cut.Cut(**{**_members(made), "start_unix_us": now_us - made.duration_us})
        reply = {
            "poll": poll["poll"], "sent_ns": poll["sent_ns"], "wall_us": now_us, "cuts": 1, "first": None,
            "last": None, "dropped": 0,
        }  # fmt: skip
        self.agent.send(cut.encode(said), frame.encode(Kind.REPLY, reply))

    def close(self) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError):  # the server has ended it
            self.agent.sock.shutdown(2)
        self._thread.join(60)
        self.agent.close()


def _members(made: cut.Cut) -> dict[str, Any]:
    return {name: getattr(made, name) for name in cut.Cut.__slots__}


def _now_us() -> int:
    return time.time_ns() // 1000


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with whole_product(tmp_path) as running:
        running.set_mode("enforce")
        yield running


def left_out(stage: Stage) -> int:
    rows = stage.get("volume-owners?state=pending")["items"]
    return next((int(row["left_out"]) for row in rows if row["name"] == "evil-gw"), 0)


def throttled(stage: Stage) -> set[str]:
    return {row["volume"] for row in stage.get("throttles")["items"] if row["state"] != "observed"}


def test_a_false_gateway_harms_no_neighbour_until_it_is_approved(stage: Stage, driver: Driver) -> None:
    driver.start(stage.agents[1].socket(stage), "batch", depth=4)  # the disk is far from busy
    false = FalseGateway(stage.pm_port)
    try:
        stage.wait(lambda: left_out(stage) >= ENOUGH, "its statistics left out, and counted")
        assert throttled(stage) == set()
        [volume] = [row for row in stage.snapshot()["volumes"] if row["volume"] == VOLUME]
        assert "evil-gw" not in str(volume["gateways"])
        assert false.agent.gateway_id not in volume["gateways"]
        assert false.entries == [], "it is sent no thresholds of the promise"
        events = lambda: stage.get("events?limit=200")["items"]  # noqa: E731
        [event] = stage.wait(
            lambda: [row for row in events() if row["kind"] == "volume-pending"], "the event of it, stored"
        )
        assert event["text"].endswith(f"sla volumes approve {VOLUME} --gateway evil-gw")
        problems = lambda: stage.client.get("/api/v1/health").json()["problems"]  # noqa: E731
        volumes = stage.wait(
            lambda: [row for row in problems() if row["what"] == "volumes"], "the problem that it is"
        )
        assert [row["process"] for row in volumes] == ["evil-gw"]
        assert {row["gateway_id"] for row in stage.get(f"volumes/{VOLUME}")["by_stream"]} <= {
            row["gateway_id"] for row in stage.get("gateways")["items"] if row["name"] == "gateway-a"
        }

        done = stage.sla("volumes", "approve", VOLUME, "--gateway", "evil-gw")
        assert f"{VOLUME}: approved for evil-gw on disk-1; it belongs to evil-gw, gateway-a" in done.stdout
        stage.wait(lambda: throttled(stage) == {"batch"}, "what the same statistics do once they count")
        stage.wait(lambda: [entry["volume"] for entry in false.entries] == [VOLUME], "its thresholds")
        assert f"{VOLUME} belongs to 2 gateways: evil-gw, gateway-a" in stage.sla("get", "volumes").stdout

        stage.sla("volumes", "revoke", VOLUME, "--gateway", "evil-gw")
        stage.wait(lambda: not stage.snapshot()["throttles"], "the neighbour released")
    finally:
        false.close()

    def actions() -> list[str]:
        names = [row["action"] for row in stage.get("audit")["items"]]
        return [name for name in names if name.startswith("volume-")]

    stage.wait(lambda: actions() == ["volume-revoked", "volume-approved"], "both in the audit")
