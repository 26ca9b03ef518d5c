"""Who raises the copies of the cluster's own streams, and what becomes of a refusal."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import nats.js.errors
from structlog.testing import capture_logs

from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.own_copies import OWN, OwnCopies


class FakeLink:
    """Two streams with one copy and one with three, led by these nodes; refuses so many changes."""

    def __init__(self, refusals: int = 0) -> None:
        self.streams = {
            OWN[0]: {
                "config": {"name": OWN[0], "num_replicas": 1, "max_msgs": 7},
                "cluster": {"leader": "N1"},
            },
            OWN[1]: {"config": {"name": OWN[1], "num_replicas": 1}, "cluster": {"leader": "n2"}},
            OWN[2]: {"config": {"name": OWN[2], "num_replicas": 3}, "cluster": {"leader": "n1"}},
        }
        self.refusals = refusals

    async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        stream = subject.rpartition(".")[2]
        if stream not in self.streams:
            raise nats.js.errors.NotFoundError(code=404, err_code=10059, description="stream not found")
        if subject.startswith("STREAM.UPDATE."):
            if self.refusals:
                self.refusals -= 1
                raise nats.js.errors.APIError(code=400, err_code=10005, description="no suitable peers")
            self.streams[stream]["config"] = body
        return self.streams[stream]


def test_a_node_raises_the_copies_of_what_it_leads_and_changes_nothing_else() -> None:
    link = FakeLink()
    keeper = OwnCopies("n1", 3)
    assert asyncio.run(keeper.round(cast(EngineLink, link))) == [OWN[0]]
    assert link.streams[OWN[0]]["config"] == {"name": OWN[0], "num_replicas": 3, "max_msgs": 7}
    assert asyncio.run(keeper.round(cast(EngineLink, link))) == []
    assert asyncio.run(OwnCopies("n2", 1).round(cast(EngineLink, link))) == []


def test_a_refusal_is_said_once_and_tried_again() -> None:
    link = FakeLink(refusals=2)
    keeper = OwnCopies("n1", 3)
    with capture_logs() as logs:
        rounds = [asyncio.run(keeper.round(cast(EngineLink, link))) for _ in range(3)]
    assert rounds == [[], [], [OWN[0]]]
    assert [line["event"] for line in logs] == ["stream-copies-missing", "stream-copies-raised"]
