"""The way to SQL: what dbmanager did not refuse is not lost, and nothing grows while it is away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.clock import Deadline, FakeClock
from sla_server.events.recipients.base import Notice, Outcome
from sla_server.events.sql_link import MOST_ROWS, NO_ANSWER, RecordRecipient, SqlLink
from sla_server.services.record_sender import RecordSender
from tests.support.deliveries import event
from tests.support.fake_mailbox import FakeMailbox


class Answering(SqlLink):
    """Says at once why rows are not durable."""

    said = ""

    def store(self, rows: Sequence[dict[str, Any]], deadline: Deadline) -> str:
        return self.said


@pytest.fixture
def link(tmp_path: Path) -> Answering:
    return Answering(tmp_path / "main.mbx", FakeClock())


def full_sender_says() -> str:
    """What a record sender without room says of rows."""
    said: list[tuple[bool, str]] = []
    sender = RecordSender(FakeMailbox(), "tag", 1, sender="delivery")
    sender.append([("events", event(1).row())], lambda ok, error: said.append((ok, error)))
    [(ok, error)] = said
    assert not ok
    return error


def test_rows_that_found_no_room_are_tried_again_and_only_dbmanager_refuses(link: Answering) -> None:
    recipient, notices = RecordRecipient(link), [Notice(event(1), "@sql", 1)]
    outcomes = []
    for link.said in ("", NO_ANSWER, full_sender_says(), "events: at_us is missing"):
        outcomes.append(recipient.deliver(notices, Deadline(1.0)).outcome)
    assert outcomes == [Outcome.CONFIRMED, Outcome.RETRY, Outcome.RETRY, Outcome.REFUSED]


def test_without_a_mailbox_what_waits_is_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    link = SqlLink(tmp_path / "main.mbx", FakeClock())
    for _ in range(MOST_ROWS // 100 + 5):
        link.report({"recipient": "r", "event_id": str(n)} for n in range(100))
    link.step()
    assert sum(len(rows) for rows, _ in link._submitted) == MOST_ROWS
    assert link.lost == 5


def test_rows_that_nobody_waits_for_any_more_are_not_kept(tmp_path: Path) -> None:
    link = SqlLink(tmp_path / "main.mbx", FakeClock())
    for _ in range(3):
        assert link.store([event(1).row()], Deadline(0.0)) == NO_ANSWER
    assert len(link._submitted) == 0
