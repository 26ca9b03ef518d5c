"""The recipient's search: slots inspected, resets by cause, adaptive threshold, damage.

Words of the segment are stored and read directly: damage, and what a death leaves, have no public way in.
"""

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox.errors import MailboxCorrupt
from pmdaemon.mailbox.message import THRESHOLD_FIRST
from pmdaemon.mailbox.reader import THRESHOLD_MAX, LaneReader
from tests.support.mailbox import drain, make_mesh


def reader_of(box: Mailbox, number: int = 0) -> LaneReader:
    return box._readers[number]


def test_foreign_messages_are_inspected_once(path: Path) -> None:
    make_mesh(path, "a", "b", "c", slots=2048, ring_bytes=1 << 16)
    with attach(path, "a") as a, attach(path, "b") as b:
        for _ in range(1000):
            a.post("c", b"foreign")
        assert b.take() == []
        assert reader_of(b).inspected == 1000
        for number in range(100):
            a.post("b", b"%d" % number)
            assert drain(b) == [b"%d" % number]
        assert reader_of(b).inspected == 1100
        assert b.stats()["resets"] == {"invalid": 0, "scans": 0, "idle": 0, "urgent": 0, "returned": 0}


def test_an_empty_look_inspects_nothing(path: Path) -> None:
    make_mesh(path, "a", "b", "c", slots=2048, ring_bytes=1 << 16)
    with attach(path, "a") as a, attach(path, "b") as b:
        for _ in range(500):
            a.post("c", b"foreign")
        b.take()
        for _ in range(20):
            b.take()
        assert (reader_of(b).scans, reader_of(b).inspected) == (21, 500)


def test_a_look_ahead_into_a_reused_slot_is_reset(path: Path) -> None:
    make_mesh(path, "a", "b", "c", slots=9, ring_bytes=1024)
    with attach(path, "a") as a, attach(path, "b") as b, attach(path, "c") as c:
        a.post("c", b"0")
        b.take()  # b's look-ahead is c's slot
        for number in range(1, 20):
            drain(c)
            a.post("c", b"%d" % number)
        a.post("b", b"for b")
        assert drain(b) == [b"for b"]
        assert b.stats()["resets"]["invalid"] == 1


def test_counters_since_reset_and_since_met(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"x")
        b.take()  # finds one, then looks once more
        reader = reader_of(b)
        assert (reader.scans_since_reset, reader.scans_since_met) == (2, 1)
        b.take()
        assert (reader.scans_since_reset, reader.scans_since_met) == (3, 2)
        a.post("b", b"y", urgent=True)
        b.take()
        assert (reader.scans_since_reset, reader.scans_since_met) == (1, 1)


def test_an_idle_recipient_looks_from_the_head_now_and_then_and_ever_less(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("c", b"foreign")
        for _ in range(3 * THRESHOLD_FIRST):
            b.take()
        reader = reader_of(b)
        assert reader.resets["idle"] == 3  # after 1/4, then 2/4, then 4/4 of the first threshold
        assert reader.threshold == 8 * THRESHOLD_FIRST
        reader.threshold = THRESHOLD_MAX
        for _ in range(4 * THRESHOLD_FIRST):
            b.take()
        assert reader.threshold == THRESHOLD_MAX


def test_a_busy_recipient_is_reset_by_the_number_of_scans(path: Path) -> None:
    make_mesh(path, "a", "b", "c", slots=64)
    with attach(path, "a") as a, attach(path, "b") as b:
        reader = reader_of(b)
        a.post("c", b"stays")
        for _ in range(THRESHOLD_FIRST // 2 + 50):
            a.post("b", b"x")
            assert len(b.take()) == 1  # two scans each
        assert reader.resets["scans"] == 1
        assert reader.resets["idle"] == 0
        assert reader.threshold == 2 * THRESHOLD_FIRST


def test_nothing_linked_in_front_of_the_look_ahead_is_passed_over_for_good(path: Path) -> None:
    # The sender dies after the link and before the announcement: only the recipient's own reset helps (M7).
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("c", b"foreign")
        b.take()
        front = a._words[a._writer._front_word]
        a.post("b", b"in front", urgent=True)
        a._words[a._writer._front_word] = front
        reader = reader_of(b)
        looks = 0
        while not (got := b.take()):
            looks += 1
            assert looks <= THRESHOLD_FIRST
        assert got[0].payload == b"in front"
        assert reader.resets == {"invalid": 0, "scans": 0, "idle": 1, "urgent": 0, "returned": 0}
        assert reader.threshold == THRESHOLD_FIRST // 2  # skipping happens here: look more often


def test_a_circle_is_noticed(path: Path) -> None:
    make_mesh(path, "a", "b", "c", slots=64, ring_bytes=4096)
    with attach(path, "a") as a, attach(path, "b") as b:
        for _ in range(20):
            a.post("c", b"foreign")
        writer = a._writer
        tail = writer._previous[writer._slots]
        a._words[writer._next_word[tail]] = writer._refs[writer._next[writer._slots]]
        with pytest.raises(MailboxCorrupt, match="leads back"):
            b.take()


@pytest.mark.parametrize(
    ("word", "value", "problem"),
    [
        (lay.S_NEXT, 999, "outside"),
        (lay.S_NEXT, 7 << 32 | 2, "freed"),
        (lay.S_STATE, 77, "linked in state"),
        (lay.S_ADDRESS, 9, "addressed"),
        (lay.S_ADDRESS, 1 << 16 | 2, "addressed"),
    ],
)
def test_damage_on_the_way_is_noticed(path: Path, word: int, value: int, problem: str) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("c", b"one")
        a.post("c", b"two")
        a._words[a._writer._first_word + word] = value
        for _ in range(2):  # and is noticed each time
            with pytest.raises(MailboxCorrupt, match=problem):
                b.take()


def test_a_stale_head_is_noticed(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a._words[a._writer._head_word] = 5 << 32 | 1
        with pytest.raises(MailboxCorrupt, match="freed"):
            b.take()
        with pytest.raises(MailboxCorrupt, match="freed"):
            b.prepare_sleep()
        assert a._words[b._sleep_word] == 0


def test_an_impossible_length_is_noticed(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"one")
        a._words[a._writer._first_word + lay.S_ADDRESS] |= 1 << 60
        with pytest.raises(MailboxCorrupt, match="in a ring of 1024"):
            b.take()


def test_a_changed_payload_is_discarded_and_the_next_goes_on(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        for payload in (b"good", b"bad!", b"fine"):
            a.post("b", payload)
        at_bytes, _ = a._segment.layout.ring_at_bytes("a", "b")
        a._segment.memory[at_bytes + 8] ^= 1
        assert [message.payload for message in b.take()] == [b"good"]
        with pytest.raises(MailboxCorrupt, match="message 2 has a wrong checksum"):
            b.take()
        assert drain(b) == [b"fine"]
        assert b.stats()["discarded"] == 1


def test_words_of_a_long_payload_that_changed_places_are_noticed(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=16_384)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", bytes(range(250)) * 40)
        at_bytes, _ = a._segment.layout.ring_at_bytes("a", "b")
        words = a._segment.memory
        words[at_bytes : at_bytes + 16] = words[at_bytes + 8 : at_bytes + 16] + words[at_bytes : at_bytes + 8]
        with pytest.raises(MailboxCorrupt, match="message 1 has a wrong checksum"):
            b.take()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pokes=st.lists(st.tuples(st.integers(0, 400), st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))))
)
def test_whatever_stands_in_the_segment_the_answer_is_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, pokes: list[tuple[int, int]]
) -> None:
    path = make_mesh(tmp_path_factory.mktemp("fuzz") / "main", "a", "b", "c", slots=8, ring_bytes=64)
    a, b, c = (attach(path, name) for name in "abc")
    for number in range(2):
        a.post(("b", "c"), b"%d" % number)
    a.post_many("b", (b"four", b"five"))  # a bundle
    b.take(1)
    first = a._segment.layout.control_word(0)
    for offset, value in pokes:
        if first + offset < len(a._words):
            a._words[first + offset] = value
    for _ in range(3):
        for action in (lambda: a.post(("b", "c"), b"more"), b.take, c.take, b.prepare_sleep):
            with contextlib.suppress(MailboxError):
                action()
    for box in (a, b, c):
        box.close()
    for name in "abc":
        with contextlib.suppress(MailboxError):
            attach(path, name).close()
