"""The sender's list: reclaim, quotas, parked tail, repair of an interrupted post.

Words of the segment are stored and read directly: damage, and what a death leaves, have no public way in.
"""

import dataclasses
from pathlib import Path

import pytest

from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox.errors import MailboxCorrupt, MailboxFull
from pmdaemon.mailbox.layout import Layout, Route
from pmdaemon.mailbox.segment import create_segment
from pmdaemon.mailbox.writer import RECLAIM_BATCH
from tests.support.mailbox import (
    abandon,
    audit,
    drain,
    fail_stores,
    linked_slots,
    make_mesh,
    mesh,
    revive,
    run_mortal,
)


def post_until_full(box: Mailbox, recipient: str, payload: bytes) -> int:
    for count in range(10_000):
        try:
            box.post(recipient, payload)
        except MailboxFull:
            return count
    raise AssertionError("never full")


def test_slots_and_ring_are_used_again_for_ever(path: Path) -> None:
    make_mesh(path, "a", "b", slots=8, ring_bytes=256)
    with attach(path, "a") as a, attach(path, "b") as b:
        for number in range(500):
            a.post("b", b"%d" % number * 20)
            assert drain(b) == [b"%d" % number * 20]
        audit(a)


def test_a_quota_of_one_slot_is_enough(path: Path) -> None:
    make_mesh(path, "a", "b", "c", slots=3, ring_bytes=64)
    with attach(path, "a") as a, attach(path, "b") as b:
        for number in range(20):
            a.post("b", b"%d" % number, urgent=number % 3 == 0)
            assert drain(b) == [b"%d" % number]
            audit(a)


def test_urgent_messages_alone_do_not_choke_behind_a_taken_tail(path: Path) -> None:
    make_mesh(path, "a", "b", slots=4, ring_bytes=256)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"normal")
        drain(b)
        for number in range(50):
            a.post("b", b"%d" % number, urgent=True)
            assert drain(b)[-1] == b"%d" % number
        audit(a)


def test_the_whole_ring_serves_one_message_after_the_other(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=1024)
    with attach(path, "a") as a, attach(path, "b") as b:
        for number in range(20):
            a.post("b", bytes([number]) * 1023)
            assert drain(b) == [bytes([number]) * 1023]


def test_a_recipient_that_takes_nothing_costs_the_others_nothing(path: Path) -> None:
    make_mesh(path, "a", "b", "c", slots=9, ring_bytes=1024)
    with attach(path, "a") as a, attach(path, "c") as c:
        assert post_until_full(a, "b", b"") == 4  # out of slots, not of ring
        for number in range(100):
            a.post("c", b"%d" % number)
            assert drain(c) == [b"%d" % number]
        with pytest.raises(MailboxFull) as caught:
            a.post(("b", "c"), b"both")
        assert caught.value.recipients == ("b",)
        assert drain(c) == [b"both"]
        assert post_until_full(a, "b", b"") == 0
        with attach(path, "b") as b:
            assert drain(b) == [b""] * 4
        assert post_until_full(a, "b", b"") == 4
        audit(a)


def test_a_full_ring_frees_exactly_what_was_taken(path: Path) -> None:
    make_mesh(path, "a", "b", slots=64, ring_bytes=1024)
    with attach(path, "a") as a, attach(path, "b") as b:
        assert post_until_full(a, "b", b"x" * 100) == 9  # 104 bytes each
        b.take(3)
        assert post_until_full(a, "b", b"x" * 100) == 0  # they are in hand
        b.release()
        assert post_until_full(a, "b", b"x" * 100) == 3
        assert len(drain(b)) == 9


def test_dead_slots_stay_few(path: Path) -> None:
    make_mesh(path, "a", "b", slots=1024, ring_bytes=1 << 16)
    with attach(path, "a") as a, attach(path, "b") as b:
        for _ in range(1000):
            a.post("b", b"x")
            b.take()
        assert len(linked_slots(a)) <= RECLAIM_BATCH + 1


def test_a_post_interrupted_by_an_exception_is_repaired_by_the_next(path: Path) -> None:
    make_mesh(path, "a", "b", "c", slots=16)
    with attach(path, "a") as a, attach(path, "b") as b, attach(path, "c") as c:
        a.post(("b", "c"), b"first")
        words, memory = a._writer._words, a._writer._memory
        fail_stores(a, 7)
        assert not run_mortal(lambda: a.post(("b", "c"), b"lost"))
        revive(a, words, memory)
        a.post(("b", "c"), b"second")
        assert drain(b) == drain(c) == [b"first", b"second"]
        audit(a)


def test_ring_space_freed_behind_a_parked_tail_is_not_freed_twice_by_adoption(path: Path) -> None:
    # The tail's slot stays linked while its ring space is used again: adoption must not count it.
    make_mesh(path, "a", "b", ring_bytes=1024)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"1" * 1000)
        assert drain(b) == [b"1" * 1000]
        a.post("b", b"2" * 1000)
        again = attach(path, "a")
        with pytest.raises(MailboxFull):
            again.post("b", b"3" * 1000)
        assert drain(b) == [b"2" * 1000]
        again.post("b", b"3" * 1000)
        assert drain(b) == [b"3" * 1000]
        again.close()


def test_empty_payloads_between_others_are_adopted(path: Path) -> None:
    make_mesh(path, "a", "b")
    payloads = [b"", b"x", b"", b"", b"yy", b""]
    with attach(path, "a") as a, attach(path, "b") as b:
        for _ in range(10):
            a.post("b", b"")
        drain(b)
        a._writer._reclaim(a._writer._outlets[0])  # from here on slots are used in descending order
        for payload in payloads:
            a.post("b", payload)
        again = attach(path, "a")
        again.post("b", b"last")
        assert drain(b) == [*payloads, b"last"]
        audit(again)
        again.close()


def test_a_slot_unlinked_but_not_freed_at_death_is_not_taken_for_its_former_self(path: Path) -> None:
    create_segment(path, dataclasses.replace(mesh("a", "b", "c", slots=7, ring_bytes=64), form="lanes"))
    b, c = attach(path, "b"), attach(path, "c")
    a = attach(path, "a")
    a.post("c", b"0" * 50)
    assert b.take() == []  # the look-ahead of b is slot 0 now
    a.post("b", b"1")
    assert drain(c) == [b"0" * 50]
    fail_stores(a, 1)
    assert not run_mortal(
        lambda: a.post("c", b"2" * 50)
    )  # needs the ring: unlinks slot 0 and dies before it is freed
    abandon(a)
    with attach(path, "a") as a:
        a.post("b", b"3")  # in slot 0: b, looking behind slot 0, would never see it
        assert a._writer._previous[a._writer._slots] == 0
        assert drain(b) == [b"1", b"3"]
        assert b.stats()["resets"]["invalid"] == 1
    b.close()
    c.close()


@pytest.mark.parametrize(
    ("word", "value", "problem"),
    [
        (lay.S_NEXT, 999, "outside"),
        (lay.S_NEXT, 1, "back"),
        (lay.S_STATE, 77, "linked in state"),
        (lay.S_ADDRESS, 0x55, "no route"),
        (lay.S_ADDRESS, 1 | 5000 << 32, "impossible place|more in the ring"),
        (lay.S_POSITION, 1 << 40, "impossible place|more in the ring"),
    ],
)
def test_a_damaged_lane_is_not_adopted(path: Path, word: int, value: int, problem: str) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        a.post("b", b"one")
        a.post("b", b"two")
        a._words[a._writer._first_word + word] = value
        with pytest.raises(MailboxCorrupt, match=problem):
            attach(path, "a")


def test_an_impossible_sequence_is_not_adopted(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        a._words[a._writer._sequence_word] = 1 << 63
        with pytest.raises(MailboxCorrupt, match="sequence"):
            attach(path, "a")


def test_a_slot_overwritten_by_a_stranger_is_noticed_when_it_is_reclaimed(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=64)
    with attach(path, "a") as a:
        a.post("b", b"x" * 60)
        a._words[a._writer._first_word] = 12345
        with pytest.raises(MailboxCorrupt, match="slot 0 turned"):
            a.post("b", b"y" * 60)


def test_generations_wrap(path: Path) -> None:
    create_segment(path, Layout(("a", "b"), (Route("a", "b", 256),), 3))
    a, b = attach(path, "a"), attach(path, "b")
    for slot in range(3):
        a._words[a._writer._first_word + slot * 8] = 0xFFFFFFFE << 8
    a.close()
    a = attach(path, "a")
    for number in range(30):
        a.post("b", b"%d" % number)
        assert drain(b) == [b"%d" % number]
        audit(a)
    assert max(reference >> 32 for reference in a._writer._refs) < 100
    a.close()
    b.close()
