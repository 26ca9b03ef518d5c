"""At least once, views and returned messages, in both forms.

Words of the segment are stored and read directly: damage, and what a death leaves, have no public way in.
"""

import contextlib
import pickle
from pathlib import Path

import pytest

from pmdaemon.mailbox import LookAhead, attach
from pmdaemon.mailbox.errors import MailboxCorrupt, MailboxError, MailboxFull, PayloadInUse
from tests.support.mailbox import Crash, FailingStores, abandon, audit, drain, make_mesh


def test_who_dies_with_a_batch_in_hand_is_given_it_again(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        b = attach(path, "b")
        for number in range(5):
            a.post("b", b"%d" % number)
        assert len(b.take(2)) == 2
        assert len(b.take(2)) == 2  # the first two are released by this
        abandon(b)
        with attach(path, "b") as b:
            assert drain(b) == [b"2", b"3", b"4"]
        with attach(path, "b") as b:
            assert drain(b) == []


def test_a_block_left_by_an_exception_keeps_the_batch_for_the_next(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        a.post("b", b"x")
        b = attach(path, "b")
        b.take()
        b.__exit__(RuntimeError, RuntimeError(), None)
        with attach(path, "b") as b:
            assert drain(b) == [b"x"]


def test_who_leaves_with_a_batch_that_was_not_processed_keeps_it_for_the_next(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        b = attach(path, "b")
        a.post("b", b"1")
        assert len(b.take()) == 1
        b.close(release=False)
        with attach(path, "b") as b:
            assert drain(b) == [b"1"]


@pytest.mark.parametrize("stored", range(3))
def test_a_release_that_was_interrupted_may_be_repeated(path: Path, stored: int) -> None:
    """An exception of a signal handler comes between two stores; meanwhile the slots are used again."""
    make_mesh(path, "a", "b", slots=8, ring_bytes=512)
    with attach(path, "a") as a, attach(path, "b") as b:
        for number in range(3):
            a.post("b", b"%d" % number)
        assert len(b.take()) == 3
        counter = FailingStores(stored)
        words, b._batch._words = b._batch._words, counter.wrap(b._batch._words)
        with pytest.raises(Crash):
            b.release()
        b._batch._words = words
        for number in range(20):  # into the slots that were released
            with contextlib.suppress(MailboxFull):
                a.post("b", b"new %d" % number)
        b.release()
        came = [*drain(b), *drain(b)]
        a.post("b", b"last")
        assert [*came, *drain(b)][-1] == b"last"
        audit(a)


def test_a_living_recipient_is_not_given_its_batch_again_by_a_reset(path: Path) -> None:
    make_mesh(path, "a", "b", slots=200)
    with attach(path, "a") as a, attach(path, "b", LookAhead(threshold=64, adaptive=False)) as b:
        for number in range(20):
            a.post("b", b"%d" % number)
        assert len(b.take(20)) == 20
        for reader in b._readers:
            reader._reset("scans")
            assert reader.find() < 0
        b.release()


def test_sleeping_releases_the_batch(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=64)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"x" * 60)
        b.take()
        with pytest.raises(MailboxFull):
            a.post("b", b"y" * 60)
        assert b.prepare_sleep()
        b.awake()
        a.post("b", b"y" * 60)


def test_views_are_valid_until_the_batch_is_released(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=4096)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"abc" * 100)
        (message,) = b.take_views()
        assert message.payload == b"abc" * 100
        assert message.payload.readonly
        assert b.take() == []
        with pytest.raises(ValueError, match="released"):
            bytes(message.payload)


def test_a_buffer_taken_of_a_view_keeps_its_batch_in_hand(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=4096)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", bytes(range(64)))
        (message,) = b.take_views()
        user = pickle.PickleBuffer(message.payload)
        for action in (b.take, b.release, b.prepare_sleep):
            with pytest.raises(PayloadInUse, match="copy them"):
                action()
        assert bytes(user) == bytes(range(64))
        user.release()
        b.release()
        assert b.stats()["in_hand"] == 0


def test_closing_with_a_view_in_use_leaves_the_batch_to_the_next(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=4096)
    with attach(path, "a") as a:
        b = attach(path, "b")
        a.post("b", bytes(range(64)))
        user = pickle.PickleBuffer(b.take_views()[0].payload)
        b.close()
        assert bytes(user) == bytes(range(64))
        with attach(path, "b") as b:
            assert drain(b) == [bytes(range(64))]


def test_returned_messages_come_again_in_front_of_later_ones(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        for number in range(4):
            a.post("b", b"%d" % number)
        batch = b.take(3)
        a.post("b", b"later")
        b.give_back([batch[2], batch[0]])
        with pytest.raises(MailboxError, match="message 1 of 'a'"):
            b.give_back([batch[0]])
        assert drain(b) == [b"0", b"2", b"3", b"later"]
        assert sum(reader.resets["returned"] for reader in b._readers) == 1
        with pytest.raises(MailboxError, match="is not in hand"):
            b.give_back(batch)


def test_a_batch_of_posts_is_visible_at_once_and_tells_how_many_fitted(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=1024, slots=8)
    with attach(path, "a") as a, attach(path, "b") as b:
        with pytest.raises(MailboxFull) as caught:
            a.post_many("b", [b"%d" % number * 100 for number in range(15)])
        assert caught.value.posted == 9  # 104 bytes each, with the length in the directory
        assert [(m.payload, m.sequence) for m in b.take()] == [(b"%d" % n * 100, n + 1) for n in range(9)]
        b.release()
        a.post_many("b", [b"u", b"v"], urgent=True)
        assert drain(b) == [b"u", b"v"]
        a.post_many("b", [])


@pytest.mark.parametrize(("adaptive", "expected"), [(False, 64), (True, 128)])
def test_a_threshold_is_fixed_or_adaptive(path: Path, adaptive: bool, expected: int) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b", LookAhead(threshold=64, adaptive=adaptive)) as b:
        a.post("c", b"foreign")
        while not any(reader.resets["idle"] for reader in b._readers):
            b.take()
        assert expected in b.stats()["threshold"]


def test_without_thresholds_there_are_no_counted_resets_and_without_look_ahead_all_is_inspected(
    path: Path,
) -> None:
    make_mesh(path, "a", "b", "c", slots=64, ring_bytes=4096)
    with attach(path, "a") as a, attach(path, "b", LookAhead(threshold=None)) as b:
        for _ in range(20):
            a.post("c", b"foreign")
        for _ in range(5000):
            b.take()
        assert b.stats()["slots_inspected"] == 20
        assert not any(b.stats()["resets"].values())
    with attach(path, "b", LookAhead(enabled=False)) as b:
        for _ in range(10):
            b.take()
        assert b.stats()["slots_inspected"] == 200


def test_a_damaged_view_is_discarded_like_a_copy(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=8192)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"x" * 6000)
        at_bytes, _ = a._segment.layout.ring_at_bytes("a", "b")
        a._segment.memory[at_bytes + 3000] ^= 1
        with pytest.raises(MailboxCorrupt, match="wrong checksum"):
            b.take_views()
        assert b.take_views() == []
