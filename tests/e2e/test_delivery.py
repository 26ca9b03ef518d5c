"""Events reach their recipients while the database manager stands still, and after the server was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Driver, whole_product
from tests.e2e.test_cycle import gold_state
from tests.support.receivers import HttpReceiver, status
from tests.support.stage import GOLD_IOPS, GREEDY_DEPTH, Stage

pytestmark = pytest.mark.e2e
DOCUMENTS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: oncall}}
spec: {{webhook: {{url: "{url}"}}, timeout: 30s}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: all}}
spec: {{recipients: [oncall], match: {{kinds: [mode-changed, process-restarted]}}}}
"""
VIOLATIONS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: oncall}}
spec: {{webhook: {{url: "{url}"}}, timeout: 30s}}
---
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: book}}
spec: {{file: {{path: book.jsonl}}}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: violations}}
spec: {{recipients: [oncall, book], match: {{kinds: [violation-opened, violation-closed]}}}}
"""
CALM = "[services.control]\nepisode_calm_s = 2\nepisode_calm_max_s = 2\n"
OPENED, CLOSED = "violation-opened", "violation-closed"
LIMIT_S = 180.0


class Answering:
    """A receiver that answers with ``code``; one recipient sends one request after the other."""

    def __init__(self) -> None:
        self.code = 200
        self.codes: list[int] = []
        self.receiver = HttpReceiver(self._answer)

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.codes.append(self.code)
        status(self.codes[-1])(handler)

    def events(self, code: int = 200) -> list[tuple[str, str]]:
        """Kind and subject of what was answered so."""
        return [(event["kind"], event["subject"]) for event in self.all_events(code)]

    def all_events(self, code: int = 200) -> list[dict[str, Any]]:
        """What was answered so."""
        return [
            alert["delivery"]["event"]
            for (_, _, _, body), given in zip(list(self.receiver.requests), list(self.codes), strict=False)
            if given == code
            for alert in json.loads(body)["alerts"]
        ]


def restarted(name: str) -> tuple[str, str]:
    return "process-restarted", name


def test_events_come_without_the_database_manager_and_after_the_death_of_all(tmp_path: Path) -> None:
    answering = Answering()
    with answering.receiver as receiver, Stage(tmp_path) as stage:
        stage.start_server()
        (tmp_path / "notify.yaml").write_text(DOCUMENTS.format(url=receiver.url))
        stage.sla("apply", "-f", str(tmp_path / "notify.yaml"))
        tested = stage.sla("notify", "test", "oncall")
        assert tested.stdout == "oncall: confirmed\n"

        pid = stage.pid("sla_server.process dbmanager")
        os.kill(pid, signal.SIGSTOP)
        asking = subprocess.Popen(
            [sys.executable, "-m", "sla_server.cli", "mode", "enforce"],
            env={
                **os.environ,
                "SLA_SERVER": f"http://127.0.0.1:{stage.api_port}",
                "SLA_CONFIG": str(stage.config_path),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            stage.wait(
                lambda: ("mode-changed", "services") in answering.events(), "the event", limit_s=LIMIT_S
            )
        finally:
            with contextlib.suppress(ProcessLookupError):  # on a slow machine it was killed for its silence
                os.kill(pid, signal.SIGCONT)
        asking.wait(LIMIT_S)

        stage.kill("sla_server.process appserver")
        stage.wait(lambda: restarted("appserver") in answering.events(), "the restart", limit_s=LIMIT_S)
        answering.code = 503
        stage.kill("sla_server.process services")
        stage.wait(lambda: restarted("services") in answering.events(503), "a first try", limit_s=LIMIT_S)
        stage.kill("-m sla_server start")  # and with it all
        stage.wait(lambda: not stage.pids("sla_server.process"), "the end of all", limit_s=LIMIT_S)
        answering.code = 200
        stage.start_server()
        stage.wait(
            lambda: restarted("services") in answering.events(), "the event of before", limit_s=LIMIT_S
        )
        first = list(dict.fromkeys(answering.events()))
        assert first.index(restarted("appserver")) < first.index(restarted("services"))


def written(stage: Stage) -> list[dict[str, Any]]:
    """The events in the file of the recipient "book"."""
    path = stage.folder / "data" / "notices" / "book.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # whole lines
    return [json.loads(line)["event"] for line in lines]


def of_episode(events: list[dict[str, Any]], episode_id: str) -> list[str]:
    """The kinds of its events in the order in which they came, each event once."""
    found = {each["event_id"]: each for each in events if each["details"].get("episode_id") == episode_id}
    return [each["kind"] for each in found.values()]


def kill_all(stage: Stage) -> None:
    """The server's parent first, so that it starts none of the others again."""
    for fragment in ("-m sla_server start", "sla_server.process", "-m pmdaemon"):
        stage.kill(fragment)
    stage.wait(lambda: not stage.pids("sla_server.process") + stage.pids("-m pmdaemon"), "the end of all")


def test_a_violation_that_ends_while_the_server_is_down_ends_for_each_recipient(
    tmp_path: Path, driver: Driver
) -> None:
    answering = Answering()
    with answering.receiver as receiver, whole_product(tmp_path, CALM) as stage:
        (tmp_path / "notify.yaml").write_text(VIOLATIONS.format(url=receiver.url))
        stage.sla("apply", "-f", str(tmp_path / "notify.yaml"))
        gold_agent, greedy_agent = stage.agents
        driver.start(gold_agent.socket(stage), "erp-db", rate_iops=GOLD_IOPS)
        stage.wait(lambda: gold_state(stage) == "ok", "the promise kept", limit_s=LIMIT_S)
        answering.code = 503  # one recipient has confirmed the beginning when the server dies, one has not
        greedy = driver.start(greedy_agent.socket(stage), "batch", depth=GREEDY_DEPTH)

        def begun() -> dict[str, Any] | None:
            """A violation that goes on; the machine's other work may have made one before that is over."""
            refused = {each["event_id"] for each in answering.all_events(503)}
            last = [each for each in written(stage) if each["kind"] in (OPENED, CLOSED)][-1:]
            found = [each for each in last if each["kind"] == OPENED and each["event_id"] in refused]
            return found[0] if found else None

        episode_id = stage.wait(begun, "the beginning", limit_s=LIMIT_S)["details"]["episode_id"]

        kill_all(stage)
        driver.stop(greedy)
        answering.code = 200
        stage.start_server()
        for events in (answering.all_events, lambda: written(stage)):
            stage.wait(
                lambda events=events: CLOSED in of_episode(events(), episode_id),
                "the end of the episode",
                limit_s=LIMIT_S,
            )
            assert of_episode(events(), episode_id) == [OPENED, CLOSED]
