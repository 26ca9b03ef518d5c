"""Events reach a webhook while the database manager stands still, and after the whole server was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.support.receivers import HttpReceiver, status
from tests.support.stage import Stage

pytestmark = pytest.mark.e2e
DOCUMENTS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: oncall}}
spec: {{webhook: {{url: "{url}"}}, timeout: 2s}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: all}}
spec: {{recipients: [oncall], match: {{kinds: [mode-changed, process-restarted]}}}}
"""
LIMIT_S = 120.0


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
        return [
            (alert["delivery"]["event"]["kind"], alert["delivery"]["event"]["subject"])
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

        [pid] = stage.pids("sla_server.process dbmanager")
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
