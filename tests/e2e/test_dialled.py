"""``sla gateways`` through the whole product: added, dialled, recognised, removed."""

from __future__ import annotations

import contextlib
import json
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pmdaemon.wire.kinds import Kind
from tests.support.gateways import DEADLINE_S, Agent
from tests.support.stage import Stage


@pytest.fixture
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server without agents."""
    with Stage(tmp_path_factory.mktemp("dialled")) as running:
        running.start_server()
        yield running


def listed(stage: Stage) -> list[dict[str, Any]]:
    return list(stage.get("gateway-list")["items"])


def answer_to_the_end(agent: Agent) -> None:
    """Answer polls until the server hangs up; a server that does not is a failure."""
    with contextlib.closing(agent), contextlib.suppress(EOFError, ConnectionError):
        while True:
            agent.answer(agent.expect(Kind.POLL))


def test_a_gateway_is_added_and_removed_from_the_command_line(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as worker:
        door.settimeout(2 * DEADLINE_S)
        address = f"127.0.0.1:{door.getsockname()[1]}"
        told = stage.sla("gateways", "add", address, "--name", "host-5").stdout
        assert "dialled as host-5" in told
        agent = Agent(door.accept()[0], str(uuid.uuid4()))
        agent.register(name="host-6")
        ended = worker.submit(answer_to_the_end, agent)
        try:
            stage.wait(
                lambda: [row["answers_as"] for row in listed(stage)] == ["host-6"], "who answers there"
            )

            def shown() -> list[tuple[str, str, str]]:
                rows = json.loads(stage.sla("gateways", "list", "-o", "json").stdout)
                return [(row["address"], row["name"], row["state"]) for row in rows]

            stage.wait(lambda: shown() == [(address, "host-5", "connected")], "it, connected")
            assert "calls itself host-6" in " ".join(stage.sla("gateways", "list").stdout.split())
        finally:
            stage.sla("gateways", "remove", address)
        ended.result(2 * DEADLINE_S)
    stage.wait(lambda: listed(stage) == [], "an empty list")

    def actions() -> list[str]:
        return [row["action"] for row in stage.get("audit")["items"]]

    stage.wait(lambda: actions()[:2] == ["gateway-unlisted", "gateway-listed"], "both, newest first")
