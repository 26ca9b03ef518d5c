"""RECORDs: durable in order, whatever dbmanager forgets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import RecordRows
from sla_server.services.record_sender import RecordSender
from tests.support.fake_mailbox import FakeMailbox

SECOND_NS = 1_000_000_000


def event(name: str, size: int = 0) -> tuple[str, dict[str, str]]:
    return "events", {"event_id": name, "text": "x" * size}


def make(limit_bytes: int = 1 << 20) -> tuple[RecordSender, FakeMailbox]:
    mailbox = FakeMailbox()
    return RecordSender(mailbox, "tag", limit_bytes), mailbox


def ids(mailbox: FakeMailbox) -> list[tuple[str, list[str]]]:
    """(request, event ids) of what was posted since the last call."""
    return [
        (h["req"], [row["event_id"] for _, row in h["rows"]]) for _, h in mailbox.take_posted(Kind.RECORD)
    ]


def test_rows_are_posted_once_and_forgotten_when_durable() -> None:
    record_sender, mailbox = make()
    record_sender.append([event("a"), event("b")])
    record_sender.flush(0)
    record_sender.flush(SECOND_NS)
    ((request, names),) = ids(mailbox)
    assert names == ["a", "b"]
    assert record_sender.waiting() == 1
    record_sender.recorded(request, True, "", SECOND_NS)
    assert record_sender.waiting() == 0
    record_sender.flush(100 * SECOND_NS)
    assert ids(mailbox) == []


def test_what_is_not_answered_is_sent_again_with_everything_after_it() -> None:
    record_sender, mailbox = make()
    for name in "abc":
        record_sender.append([event(name)])
    record_sender.flush(0)
    requests = [request for request, _ in ids(mailbox)]
    record_sender.recorded(requests[1], True, "", 0)
    record_sender.flush(4 * SECOND_NS)
    assert ids(mailbox) == []
    record_sender.flush(5 * SECOND_NS)
    assert [names for _, names in ids(mailbox)] == [["a"], ["b"], ["c"]]
    record_sender.recorded(requests[0], True, "", 0)
    record_sender.recorded(requests[2], True, "", 0)
    assert record_sender.waiting() == 0


def test_repeats_become_rarer_while_nobody_answers() -> None:
    record_sender, mailbox = make()
    record_sender.append([event("a")])
    sent = []
    for second in range(200):
        record_sender.flush(second * SECOND_NS)
        sent += [second] * len(ids(mailbox))
    assert sent == [0, 5, 15, 35, 75, 135, 195]


def test_a_full_mailbox_keeps_rows_and_their_order() -> None:
    record_sender, mailbox = make()
    mailbox.full = {"dbmanager"}
    record_sender.append([event("a")])
    record_sender.append([event("b")])
    record_sender.flush(0)
    assert ids(mailbox) == []
    mailbox.full = set()
    record_sender.flush(1)
    assert [names for _, names in ids(mailbox)] == [["a"], ["b"]]


def test_what_finds_room_is_posted_once_and_the_rest_later() -> None:
    record_sender, mailbox = make()
    for name in "abc":
        record_sender.append([event(name)])
    mailbox.room = 2
    record_sender.flush(0)
    assert [names for _, names in ids(mailbox)] == [["a"], ["b"]]
    record_sender.flush(1)
    assert [names for _, names in ids(mailbox)] == [["c"]]
    record_sender.flush(2)
    assert ids(mailbox) == []


def test_the_asker_hears_once_all_frames_are_durable() -> None:
    record_sender, mailbox = make()
    heard: list[tuple[bool, str]] = []
    record_sender.append(
        [event(name, 30_000) for name in "abcde"], lambda ok, error: heard.append((ok, error))
    )
    record_sender.flush(0)
    posted = ids(mailbox)
    assert len(posted) > 1
    assert [name for _, names in posted for name in names] == list("abcde")
    for request, _ in posted[:-1]:
        record_sender.recorded(request, True, "", 0)
        record_sender.recorded(request, True, "", 0)
    assert heard == []
    record_sender.recorded(posted[-1][0], False, "no such column", 0)
    assert heard == [(False, "no such column")]


def test_nothing_is_dropped_silently() -> None:
    record_sender, _ = make(limit_bytes=1000)
    heard: list[bool] = []
    record_sender.append([event("a", 600)])
    record_sender.append([event("b", 600)], lambda ok, _error: heard.append(ok))
    assert (record_sender.lost, heard, record_sender.waiting()) == (1, [False], 1)


def test_no_rows_are_durable_at_once_and_a_giant_row_is_refused() -> None:
    record_sender, _ = make()
    heard: list[bool] = []
    record_sender.append([], lambda ok, _error: heard.append(ok))
    assert heard == [True]


def test_a_row_that_fits_no_frame_is_dropped_and_its_neighbours_are_kept() -> None:
    record_sender, mailbox = make()
    odd: list[Any] = [70_000 * "x", 1 << 64, object(), nested(2000)]
    for number, value in enumerate(odd):
        record_sender.append(
            [event(f"a{number}"), ("events", {"event_id": "odd", "text": value}), event(f"b{number}")]
        )
        assert record_sender.lost == number + 1
    record_sender.flush(0)
    sent = [name for _, names in ids(mailbox) for name in names]
    assert sent == [f"{letter}{number}" for number in range(len(odd)) for letter in "ab"]


def test_rows_that_somebody_waits_for_are_recorded_together_or_not_at_all() -> None:
    record_sender, mailbox = make()
    heard: list[tuple[bool, str]] = []
    odd = ("audit", {"audit_id": "1", "after": object()})
    record_sender.append([event("a"), odd], lambda ok, error: heard.append((ok, error)))
    assert (heard[0][0], "a row of audit" in heard[0][1], record_sender.waiting()) == (False, True, 0)
    record_sender.append([event("a")], lambda ok, error: heard.append((ok, error)))
    record_sender.append([event("b")])
    record_sender.flush(0)
    assert [header.get("together") for _, header in mailbox.take_posted(Kind.RECORD)] == [True, None]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_answers_to_others_are_ignored() -> None:
    record_sender, _ = make()
    record_sender.append([event("a")])
    record_sender.recorded("supervisor.1", True, "", 0)
    assert record_sender.waiting() == 1


STEPS = st.lists(st.sampled_from(["append", "flush", "answer", "lose", "full", "room"]), max_size=60)


@given(STEPS)
def test_whatever_is_lost_the_last_word_of_a_key_is_the_newest(steps: list[str]) -> None:
    """A dbmanager that keeps, or loses, what it takes; rows of one key carry a running number."""
    record_sender, mailbox = make()
    stored: list[int] = []
    taken: list[tuple[str, int]] = []
    appended = now_ns = 0

    def take() -> None:
        for _, header in mailbox.take_posted(Kind.RECORD):
            taken.append((header["req"], header["rows"][0][1]["details"]))

    def keep() -> None:
        for request, number in taken:
            stored.append(number)
            record_sender.recorded(request, True, "", now_ns)
        taken.clear()

    for step in [*steps, "room"]:
        now_ns += SECOND_NS
        if step == "append":
            appended += 1
            record_sender.append([("events", {"event_id": "k", "details": appended})])
        elif step == "flush":
            record_sender.flush(now_ns)
            take()
        elif step == "answer":
            keep()
        elif step == "lose":
            taken.clear()
        else:
            mailbox.full = {"dbmanager"} if step == "full" else set()
    for _ in range(3):
        now_ns += 100 * SECOND_NS
        record_sender.flush(now_ns)
        take()
        keep()
    assert record_sender.waiting() == 0
    assert set(stored) == set(range(1, appended + 1))
    assert not stored or stored[-1] == appended


def test_many_rows_are_encoded_once_each_in_frames_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    record_sender, mailbox = make()
    encoded: list[int] = []
    whole = RecordRows.encode

    def counted(message: RecordRows) -> bytes:
        encoded.append(len(message.rows))
        return whole(message)

    monkeypatch.setattr(RecordRows, "encode", counted)  # how often is seen nowhere else
    names = [f"event-{number}" for number in range(1000)]
    record_sender.append([event(name, 200) for name in names])
    assert sum(encoded) == 1000
    monkeypatch.undo()
    record_sender.flush(0)
    assert [name for _, part in ids(mailbox) for name in part] == names
