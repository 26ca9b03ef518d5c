"""The database is away (E2): events are recorded and delivered all the same, and are rows once it is back.

A whole server over a PostgreSQL of its own, which is stopped: as its machine would be.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from pmdaemon.reserve.raising import EventRaiser
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from tests.support.deliveries import event
from tests.support.postgres import PostgresServer
from tests.support.receivers import HttpReceiver, status
from tests.support.stage import Agent, Stage

pytestmark = pytest.mark.e2e
EVENTS = 30
DOCUMENTS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: oncall}}
spec: {{webhook: {{url: "{url}"}}, timeout: 50s}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: all}}
spec: {{recipients: [oncall]}}
"""


def came(receiver: HttpReceiver) -> list[dict[str, Any]]:
    """The events that the webhook has, in their order."""
    bodies = [json.loads(body) for _, _, _, body in list(receiver.requests)]
    return [alert["delivery"]["event"] for body in bodies for alert in body["alerts"]]


def of_kind(receiver: HttpReceiver, kind: str) -> list[str]:
    return [each["event_id"] for each in came(receiver) if each["kind"] == kind]


def rows(url: str) -> tuple[list[str], set[str]]:
    """Identities of the rows of events, and of the events that rows say ``oncall`` has confirmed."""
    engine = make_engine(DatabaseConfig(url=url), Path())
    with engine.connect() as connection:
        stored = connection.execute(text("SELECT event_id FROM events")).scalars().all()
        wanted = "SELECT event_id FROM deliveries WHERE recipient = 'oncall' AND state = 'confirmed'"
        confirmed = connection.execute(text(wanted)).scalars().all()
    engine.dispose()
    return list(stored), set(confirmed)


def subjects(receiver: HttpReceiver, kind: str) -> dict[str, str]:
    """Of the events of a kind that came, by identity."""
    return {each["event_id"]: each["subject"] for each in came(receiver) if each["kind"] == kind}


def lost_in_state(stage: Stage) -> bool:
    """Whether the row of the gateway says that it is lost."""
    return [row["state"] for row in stage.get("gateways")["items"]] == ["lost"]


def test_what_is_raised_while_the_database_is_away_is_delivered_then_and_a_row_afterwards(
    tmp_path: Path,
) -> None:
    with (
        PostgresServer() as postgres,
        HttpReceiver(status(200)) as receiver,
        Stage(tmp_path, database_url=(url := postgres.create("away"))) as stage,
    ):
        stage.start_server()
        (tmp_path / "notify.yaml").write_text(DOCUMENTS.format(url=receiver.url))
        stage.sla("apply", "-f", str(tmp_path / "notify.yaml"))
        stage.wait(
            lambda: "oncall" in stage.sla("get", "recipients", check=False).stdout, "the recipient is listed"
        )
        (tmp_path / "image").write_bytes(bytes(1 << 20))
        stage.start_agent(Agent("gateway-a", {"vol-1": str(tmp_path / "image")}))
        stage.wait(stage.gateways_up, "the gateway")
        postgres.stop()
        stage.kill("gateway_agent")
        raiser = EventRaiser(tmp_path / "data" / "events" / "reserve", "outside")
        raiser.initialized()
        now_us = time.time_ns() // 1000
        wanted = [f"e{number}" for number in range(EVENTS)]
        for number in range(EVENTS):
            assert (
                raiser.record(event(number, subject=f"gw-{number}", at_us=now_us + number).row()) is not None
            )
        stage.wait(lambda: set(wanted) <= set(of_kind(receiver, "services-started")), "all are delivered")
        # What the server itself notices of the outage goes the same way.
        stage.wait(lambda: of_kind(receiver, "database-away"), "the outage itself is delivered")
        stage.wait(
            lambda: "gateway-a" in subjects(receiver, "gateway-lost").values(), "and so is a lost gateway"
        )
        assert postgres.process is None, "it was away all the time"
        lost = of_kind(receiver, "gateway-lost")[0]
        own = [name for name in of_kind(receiver, "services-started") if name in wanted]
        assert list(dict.fromkeys(own)) == wanted, "in their order"
        away = of_kind(receiver, "database-away")[0]

        postgres.start()
        stage.wait(lambda: set(rows(url)[0]) >= {*wanted, away, lost}, "all are rows")
        stage.wait(lambda: rows(url)[1] >= {*wanted, away}, "and so is that they were confirmed")
        stage.wait(lambda: of_kind(receiver, "database-back"), "its end is delivered, too")
        stored = rows(url)[0]
        assert sorted(name for name in stored if name in wanted) == sorted(wanted), "each is one row"
        stage.wait(lambda: lost_in_state(stage), "dbmanager has stored the loss, too")
        assert list(subjects(receiver, "gateway-lost")) == [lost], "what both say is one event"
        (row,) = stage.get("inbox?kind=gateway-lost")["items"]
        assert row["event_id"] == lost
        raiser.close()
