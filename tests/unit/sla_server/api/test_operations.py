from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox.errors import MessageDamaged
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.api import ServiceResponse
from sla_server.api.errors import NotFound, ServiceRefused, TooLarge, Unavailable
from sla_server.api.live_view import LiveView
from sla_server.api.mailbox_thread import MailboxThread, RequestPoster
from sla_server.api.operations import KEPT_OPERATIONS, WAITING_MAX, Operations
from tests.support.api import AnsweringMailbox, FakeMessage, snapshot


class Asked:
    """Collects what is posted; ``reply`` answers from within the post, as a fast ``services`` would."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.headers: list[dict[str, Any]] = []
        self.reply: dict[str, Any] | None = None
        self.operations = Operations(self.post, FakeClock(), wait_s=wait_s)

    def post(self, message: bytes) -> None:
        self.headers.append(frame.decode(message).header)
        if self.reply is not None:
            self.operations.answer(ServiceResponse.parse({"req": self.headers[-1]["req"], **self.reply}))


def test_an_answer_within_the_wait() -> None:
    asked = Asked()
    asked.reply = {"ok": True, "code": 200, "body": {"mode": "enforce"}}
    operation = asked.operations.ask("mode", "token", {"mode": "enforce"})
    assert operation.done.is_set()
    assert operation.result() == {"mode": "enforce"}
    assert asked.headers[0]["op"] == "mode"
    assert asked.headers[0]["who"] == "token"
    assert asked.operations.pending == 0


def test_no_answer_leaves_an_operation_that_ends_later() -> None:
    asked = Asked()
    operation = asked.operations.ask("delete", "token", {"name": "x"})
    assert not operation.done.is_set()
    assert asked.operations.find(operation.req).describe()["state"] == "pending"
    assert asked.operations.answer(
        ServiceResponse.parse({"req": operation.req, "ok": False, "code": 404, "body": {}})
    )
    assert asked.operations.find(operation.req).describe()["state"] == "failed"
    assert not asked.operations.answer(ServiceResponse.of(operation.req, 200, {})), "an operation ends once"
    assert not asked.operations.answer(ServiceResponse.of("never-asked", 200, {}))


def test_a_refusal_keeps_code_words_and_errors() -> None:
    asked = Asked()
    errors = [{"line": 3, "field": "spec.objectives", "problem": "is empty"}]
    asked.reply = {"ok": False, "code": 422, "body": {"errors": errors}}
    with pytest.raises(ServiceRefused) as caught:
        asked.operations.ask("apply", "token", {"documents": ""}).result()
    assert caught.value.status == 422
    assert caught.value.problem()["errors"] == errors


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ({"ok": True}, 200),
        ({"ok": False}, 500),
        ({"ok": False, "code": 200}, 500),
        ({"ok": True, "code": 9999}, 200),
    ],
)
def test_a_strange_answer_still_ends_the_operation(reply: dict[str, Any], code: int) -> None:
    asked = Asked()
    asked.reply = reply
    assert asked.operations.ask("mode", "token", {}).code == code


def test_services_own_not_yet_is_no_answer() -> None:
    asked = Asked()
    operation = asked.operations.ask("apply", "token", {})
    assert asked.operations.answer(
        ServiceResponse.parse({"req": operation.req, "ok": True, "code": 202, "body": {"state": "accepted"}})
    )
    assert operation.describe()["state"] == "pending"
    assert asked.operations.answer(
        ServiceResponse.parse({"req": operation.req, "ok": True, "code": 200, "body": {"applied": []}})
    )
    assert operation.result() == {"applied": []}


def test_a_full_mailbox_means_nothing_was_asked() -> None:
    def full(_message: bytes) -> None:
        raise MailboxError("no room for services")

    operations = Operations(full, FakeClock(), wait_s=0.0)
    with pytest.raises(Unavailable, match="no room"):
        operations.ask("mode", "token", {})
    assert operations.pending == 0


def test_a_body_that_fits_no_message() -> None:
    with pytest.raises(TooLarge, match="Split"):
        Asked().operations.ask("apply", "token", {"documents": "x" * 70_000})


def test_old_operations_are_forgotten() -> None:
    asked = Asked()
    first = asked.operations.ask("mode", "token", {})
    for _ in range(KEPT_OPERATIONS):
        asked.operations.ask("mode", "token", {})
    with pytest.raises(NotFound):
        asked.operations.find(first.req)


def test_at_most_eight_threads_wait() -> None:
    """With all places of waiting taken, a further change is not waited for, however long the wait is."""
    asked = Asked(wait_s=3600.0)
    asked.operations._waiting = WAITING_MAX
    assert not asked.operations.ask("mode", "token", {}).done.is_set()
    assert asked.operations._waiting == WAITING_MAX


def test_the_mailbox_thread_dispatches_and_survives_rubbish(
    mailbox: AnsweringMailbox, clock: FakeClock
) -> None:
    live = LiveView(clock, streams_max=1, stale_after_s=5.0)
    operations = Operations(RequestPoster(mailbox), clock, wait_s=0.0)
    thread = MailboxThread(mailbox, live, operations, Stop())
    mailbox.answer = None
    operation = operations.ask("mode", "token", {"mode": "observe"})
    mailbox.arrive(Kind.SNAPSHOT, snapshot(5))
    mailbox.waiting.append(type(mailbox.waiting[0])(b"rubbish"))
    mailbox.arrive(Kind.SNAPSHOT, {"at_us": "not a time"})
    mailbox.arrive(Kind.LEASE, {})
    report = {"name": "dbmanager", "at_us": clock.unix_us(), "fullness": {}, "refused": {}}
    mailbox.arrive(
        Kind.PRESSURE, {**report, "problems": [{"what": "parquet", "since_us": 1, "reason": "full"}]}
    )
    mailbox.arrive(Kind.PRESSURE, {"name": "dbmanager"})
    mailbox.arrive(Kind.RESPONSE, {"req": operation.req, "ok": True, "code": 200, "body": {}})
    assert thread.step() == 7
    assert [row["what"] for row in live.reported_problems()] == ["parquet"]
    assert live.newest().snapshot["at_us"] == 5
    assert operation.done.is_set()
    assert thread.step() == 0


def test_a_damaged_message_does_not_end_the_thread(
    mailbox: AnsweringMailbox, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveView(clock, streams_max=1, stale_after_s=5.0)
    thread = MailboxThread(mailbox, live, Operations(RequestPoster(mailbox), clock, wait_s=0.0), Stop())

    def torn() -> list[FakeMessage]:
        raise MessageDamaged("lane of services", 1)

    with monkeypatch.context() as patch:
        patch.setattr(mailbox, "take", torn)
        assert thread.step() == 1  # it does not sleep while messages wait behind
    assert thread.step() == 0


def test_a_snapshot_too_large_for_a_header_comes_as_json(mailbox: AnsweringMailbox, clock: FakeClock) -> None:
    live = LiveView(clock, streams_max=1, stale_after_s=5.0)
    thread = MailboxThread(mailbox, live, Operations(RequestPoster(mailbox), clock, wait_s=0.0), Stop())
    text = json.dumps(snapshot(7)).encode()
    for header in ({"at_us": 7, "json": True, "bytes": len(text)}, {"at_us": 8, "json": True}):
        mailbox.waiting.append(FakeMessage(frame.encode(Kind.SNAPSHOT, header, text)))
    assert thread.step() == 2
    assert live.newest().snapshot["slas"][0]["name"] == "erp-gold"
    assert live.newest().number == 1, "one without its length is dropped"


def test_the_mailbox_thread_ends_with_the_stop(mailbox: AnsweringMailbox, clock: FakeClock) -> None:
    stop = Stop()
    live = LiveView(clock, streams_max=1, stale_after_s=5.0)
    body = MailboxThread(mailbox, live, Operations(RequestPoster(mailbox), clock, wait_s=0.0), stop)
    stop.set()
    thread = threading.Thread(target=body.run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
