"""Rows of the supervisor: kept until they are durable, the newest ones first of all."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.mailbox.errors import MailboxCorrupt, MessageDamaged
from pmdaemon.wire.kinds import Kind
from sla_server import recorder
from sla_server.recorder import MAX_ROWS, RESEND, Recorder
from tests.support.fake_mailbox import FakeMailbox, Taken


@pytest.fixture
def box() -> FakeMailbox:
    return FakeMailbox()


@pytest.fixture
def made(box: FakeMailbox) -> Recorder:
    found = Recorder()
    found.attach(box)
    return found


def add(made: Recorder, *numbers: int) -> None:
    for number in numbers:
        made.add("processes", {"name": "services", "restarts": number}, 0)


def posted(box: FakeMailbox) -> list[int]:
    """What was posted since the last call."""
    found = box.take_posted(Kind.RECORD)
    return [row["restarts"] for _to, header in found for _table, row in header["rows"]]


def answer(box: FakeMailbox, *places: int) -> None:
    """Dbmanager calls these frames durable, by their place among all that were posted."""
    records = box.to("dbmanager", Kind.RECORD)
    for place in places:
        box.deliver("dbmanager", Kind.RECORDED, {"req": records[place].header["req"], "ok": True})


def test_rows_leave_at_once_and_are_kept_until_they_are_durable(made: Recorder, box: FakeMailbox) -> None:
    add(made, 1, 2)
    assert posted(box) == [1, 2]
    assert (made.waiting(), made.has_recorded) == (2, False)
    answer(box, 0)
    made.flush(1)
    assert (made.waiting(), made.has_recorded) == (1, True)
    answer(box, 1, 1)
    made.flush(2)
    made.flush(2 + RESEND.last_ns)
    assert (made.waiting(), posted(box)) == (0, [])


def test_a_row_without_an_answer_is_posted_again(made: Recorder, box: FakeMailbox) -> None:
    add(made, 1)
    made.flush(RESEND.first_ns - 1)
    assert posted(box) == [1]
    made.flush(RESEND.first_ns)
    assert posted(box) == [1]


def test_a_new_mailbox_gets_what_the_former_one_had(made: Recorder, box: FakeMailbox) -> None:
    add(made, 1, 2)
    made.attach(None)
    add(made, 3)
    assert posted(box) == [1, 2]
    newer = FakeMailbox()
    made.attach(newer)
    made.flush(1)
    assert posted(newer) == [1, 2, 3]


def test_the_newest_rows_stay(made: Recorder, box: FakeMailbox) -> None:
    box.full = {"dbmanager"}
    add(made, *range(MAX_ROWS + 7))
    assert made.waiting() == MAX_ROWS
    box.full = set()
    made.flush(1)
    assert posted(box) == list(range(7, MAX_ROWS + 7))


def test_a_row_that_fits_no_frame_is_dropped(made: Recorder, box: FakeMailbox) -> None:
    made.add("events", {"text": "x" * 70_000}, 0)
    add(made, 1)
    assert (made.waiting(), posted(box)) == (1, [1])


def test_a_message_that_is_no_frame_is_passed_by(made: Recorder, box: FakeMailbox) -> None:
    add(made, 1)
    box.inbox.append(Taken("dbmanager", b"torn"))
    answer(box, 0)
    made.flush(1)
    assert made.waiting() == 0


@pytest.mark.parametrize(
    ("error", "discarded"),
    [(MessageDamaged("lane of dbmanager", 5), 2), (MailboxCorrupt("lane of dbmanager", "a link"), 0)],
)
def test_damage_in_its_own_mailbox_ends_nothing(
    made: Recorder, box: FakeMailbox, error: MailboxCorrupt, discarded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn() -> list[Any]:
        raise error

    monkeypatch.setattr(box, "take", torn)
    add(made, 1)
    made.flush(1)
    assert (posted(box), made.discarded) == ([1], discarded)


def test_a_mailbox_that_cannot_post_keeps_the_rows(
    made: Recorder, box: FakeMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(recorder.log, "warning", lambda _event, error, rows: waits.append(f"{error}; {rows}"))
    broken = MailboxCorrupt("lane of supervisor", "a link")

    def refuse(*_post: object) -> None:
        raise broken

    with monkeypatch.context() as patch:
        patch.setattr(box, "post_many", refuse)
        add(made, 1)
    assert waits == [f"{broken}; 1"]
    made.flush(1)
    assert posted(box) == [1]


def test_an_event_has_an_identity_and_says_who_reports_it(made: Recorder, box: FakeMailbox) -> None:
    for _ in range(2):
        made.add_event("clock-stepped", "info", "server", "text", {"by_us": 1}, at_us=7, now_ns=0)
    (_, first), (_, second) = [row for _to, header in box.take_posted(Kind.RECORD) for row in header["rows"]]
    assert first == second
    assert (first["element"], first["subject"], first["kind"]) == ("supervisor", "server", "clock-stepped")
