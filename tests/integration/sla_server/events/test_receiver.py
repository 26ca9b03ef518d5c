"""The receiver of docs/operations/notify.md, against the webhook as it sends."""

from __future__ import annotations

import sqlite3
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from docs.operations.receiver import MOST_AGE_S, receive
from pmdaemon.runtime.clock import Deadline
from sla_server.events.recipients.base import CONFIRMED, Outcome
from sla_server.events.recipients.build import RecipientBuilder
from sla_server.events.recipients.webhook import signature
from tests.support.notices import notice
from tests.support.receivers import HttpReceiver, request_of, status


def test_what_is_sent_twice_is_handled_once(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("shared")
    (tmp_path / "key").chmod(0o600)
    handled: list[int] = []
    failing = [3]

    def handle(alert: dict[str, Any]) -> None:
        number = alert["delivery"]["number"]
        if number in failing:
            failing.remove(number)
            raise ValueError("the ticket system is away")
        handled.append(number)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        _, _, headers, content = request_of(handler)
        with sqlite3.connect(tmp_path / "seen.db") as seen:
            try:
                code = receive(seen, b"shared", headers, content, handle)
            except ValueError:
                code = 500
        seen.close()
        status(code)(handler)

    with HttpReceiver(answer) as receiver:
        spec = {"webhook": {"url": receiver.url, "secret_file": "key"}}
        target = RecipientBuilder(tmp_path, tmp_path, tmp_path)("oncall", spec)
        assert target.deliver([notice(1), notice(2)], Deadline(60)) == CONFIRMED
        assert target.deliver([notice(1), notice(2)], Deadline(60)) == CONFIRMED  # confirmed twice
        assert target.deliver([notice(2), notice(3), notice(4)], Deadline(60)).outcome is Outcome.RETRY
        assert target.deliver([notice(2), notice(3), notice(4)], Deadline(60)) == CONFIRMED
        (tmp_path / "key").write_text("other")
        assert target.deliver([notice(5)], Deadline(60)).reason == "HTTP 401"
        target.close()
    assert handled == [1, 2, 3, 4]


def test_an_old_request_is_not_taken() -> None:
    with sqlite3.connect(":memory:") as seen:
        for headers in ({}, {"Sla-Signature": "t=x,v1=1"}, {"Sla-Signature": signature("s", 1, b"{}")}):
            assert receive(seen, b"s", headers, b"{}", lambda _alert: None) == 401
    seen.close()
    assert MOST_AGE_S == 300
