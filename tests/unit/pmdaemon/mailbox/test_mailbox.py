"""The facade: posting, taking, sleeping, errors, restarts."""

import dataclasses
import os
import select
import signal
from pathlib import Path

import pytest

from pmdaemon.mailbox import Layout, Route, attach, create_segment
from pmdaemon.mailbox.doorbell import bell_path
from pmdaemon.mailbox.errors import (
    LayoutMismatch,
    MailboxError,
    MailboxFull,
    MessageTooLarge,
    ParticipantBusy,
)
from tests.support.mailbox import abandon, drain, forked, make_mesh, mesh


def ringing(box: object) -> bool:
    return bool(select.select([box], [], [], 0)[0])


def test_a_message_goes_over(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"hello")
        (message,) = b.take()
        assert (message.sender, message.payload, message.sequence) == ("a", b"hello", 1)
        assert b.take() == []
        assert a.take() == []


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", b""),
        (b"abc", b"abc"),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abc"), b"abc"),
        (memoryview(b"abcd")[::2], b"ac"),
        (memoryview(bytes(range(16))).cast("Q"), bytes(range(16))),
        ([b"ab", memoryview(b"cd"), b""], b"abcd"),
        ((), b""),
    ],
)
def test_payloads_may_be_bytes_views_or_parts(path: Path, payload: bytes, expected: bytes) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", payload)
        assert drain(b) == [expected]


def test_megabytes_go_over(path: Path) -> None:
    create_segment(path, Layout(("a", "b"), (Route("a", "b", 4 << 20),), 8))
    payload = os.urandom(3 << 20)
    with attach(path, "a") as a, attach(path, "b") as b:
        for _ in range(3):
            a.post("b", payload)
            assert drain(b) == [payload]


def test_each_recipient_gets_one_copy_with_one_sequence(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b, attach(path, "c") as c:
        a.post(["b", "c", "b"], b"all")
        a.post("c", b"one")
        a.post([], b"nobody")
        assert [(m.payload, m.sequence) for m in b.take()] == [(b"all", 1)]
        assert [(m.payload, m.sequence) for m in c.take()] == [(b"all", 1), (b"one", 2)]


def test_urgent_messages_come_first_in_their_own_order(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"1")
        b.take()
        for payload, urgent in ((b"2", False), (b"u1", True), (b"3", False), (b"u2", True)):
            a.post("b", payload, urgent=urgent)
        assert drain(b) == [b"u1", b"u2", b"2", b"3"]
        assert b.stats()["resets"]["urgent"] == 1


def test_urgent_order_survives_a_restart_of_the_sender(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"1")
        a.post("b", b"u1", urgent=True)
        with attach(path, "a") as again:
            again.post("b", b"u2", urgent=True)
            again.post("b", b"2")
        assert drain(b) == [b"u1", b"u2", b"1", b"2"]


def test_taking_is_limited_by_number_and_by_bytes_but_never_stuck(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=4096)
    with attach(path, "a") as a, attach(path, "b") as b:
        for number in range(10):
            a.post("b", b"%d" % number * 100)
        assert [len(b.take(max_messages=3)), len(b.take(max_bytes=250)), len(b.take(max_bytes=1))] == [
            3,
            2,
            1,
        ]
        assert b.take(0) == []
        assert len(b.take()) == 4


def test_lanes_are_served_in_turn(path: Path) -> None:
    create_segment(path, dataclasses.replace(mesh("a", "b", "c"), form="lanes"))
    with attach(path, "a") as a, attach(path, "b") as b, attach(path, "c") as c:
        for _ in range(10):
            a.post("c", b"busy")
        b.post("c", b"rare")
        assert b"rare" in [message.payload for _ in range(2) for message in c.take(3)]


def test_a_full_recipient_is_named_and_the_others_served(path: Path) -> None:
    make_mesh(path, "a", "b", "c", "d")
    with attach(path, "a") as a, attach(path, "b") as b, attach(path, "c") as c, attach(path, "d") as d:
        a.post(("b", "d"), b"x" * 900)
        with pytest.raises(MailboxFull) as caught:
            a.post(("b", "c", "d"), b"y" * 200)
        assert caught.value.recipients == ("b", "d")
        assert caught.value.retryable
        assert drain(c) == [b"y" * 200]
        assert drain(b) == drain(d) == [b"x" * 900]
        a.post(caught.value.recipients, b"y" * 200)
        assert drain(b) == drain(d) == [b"y" * 200]
        assert drain(c) == []
        assert a.stats()["full"] == 2


def test_what_can_never_fit_is_refused_before_anything_is_posted(path: Path) -> None:
    create_segment(path, Layout(("a", "b", "c"), (Route("a", "b", 4096), Route("a", "c", 64)), 8))
    with attach(path, "a") as a, attach(path, "b") as b:
        with pytest.raises(MessageTooLarge, match="to 'c' must be smaller"):
            a.post(("b", "c"), b"x" * 64)
        with pytest.raises(MailboxError, match=r"'d'.*b, c"):
            a.post(("b", "d"), b"x")
        with pytest.raises(MailboxError, match="no route"):
            b.post("a", b"x")
        assert drain(b) == []
        assert a.recipients == ("b", "c")
        a.post(("b", "c"), b"x" * 63)
        assert drain(b) == [b"x" * 63]


def test_a_participant_may_post_to_itself(path: Path) -> None:
    create_segment(path, Layout(("a",), (Route("a", "a", 256),), 8))
    with attach(path, "a") as a:
        for number in range(50):
            a.post("a", b"%d" % number)
            assert drain(a) == [b"%d" % number]


def test_messages_and_sequence_survive_restarts_of_both_sides(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        assert a.incarnation == 1
        a.post("b", b"1")
        a.post("b", b"2")
    with attach(path, "b") as b:
        assert [message.payload for message in b.take(1)] == [b"1"]
    with attach(path, "a") as a:
        assert a.incarnation == 2
        a.post("b", b"3")
    with attach(path, "b") as b:
        assert [(m.payload, m.sequence) for m in b.take()] == [(b"2", 2), (b"3", 3)]


def test_sequence_goes_on_when_everything_was_taken_and_freed(path: Path) -> None:
    make_mesh(path, "a", "b", slots=4)
    with attach(path, "b") as b:
        sequences = []
        for _ in range(10):
            with attach(path, "a") as a:
                a.post("b", b"x", urgent=True)
            sequences += [message.sequence for message in b.take()]
        assert sequences == list(range(1, 11))


def test_a_living_holder_keeps_its_name_and_a_dead_one_does_not(path: Path) -> None:
    make_mesh(path, "a", "b")
    ready, attached = os.pipe()

    def child() -> None:
        attach(path, "a")
        os.write(attached, b"!")
        signal.pause()

    with forked(child) as pid:
        assert os.read(ready, 1) == b"!"
        with pytest.raises(ParticipantBusy, match=str(pid)) as caught:
            attach(path, "a")
        assert caught.value.pid == pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        attach(path, "a").close()
    os.close(ready)
    os.close(attached)


def test_an_unknown_name_and_a_foreign_file_are_refused(path: Path) -> None:
    make_mesh(path, "a", "b")
    with pytest.raises(MailboxError, match="it has a, b"):
        attach(path, "z")
    path.with_name("other").write_bytes(b"x" * 256)
    path.with_name("other").chmod(0o600)
    with pytest.raises(LayoutMismatch):
        attach(path.with_name("other"), "a")


def test_closed_is_closed_and_leaks_no_descriptor(path: Path) -> None:
    make_mesh(path, "a", "b")
    before = set(os.listdir("/proc/self/fd"))
    a, b = attach(path, "a"), attach(path, "b")
    assert not b.prepare_sleep() or a.post("b", b"x") is None
    a.close()
    a.close()
    b.close()
    assert set(os.listdir("/proc/self/fd")) == before
    for action in (lambda: a.post("b", b"x"), a.take, a.prepare_sleep, a.stats):
        with pytest.raises(MailboxError, match="is closed"):
            action()


def test_a_failed_attach_leaves_nothing_open_and_the_name_free(path: Path) -> None:
    make_mesh(path, "a", "b")
    bell_path(path, "a").write_bytes(b"")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Exception, match="FIFO"):
        attach(path, "a")
    assert set(os.listdir("/proc/self/fd")) == before
    bell_path(path, "a").unlink()
    with attach(path, "a") as a:
        assert a._words[a._pid_word] == os.getpid()  # as another process reads it


def test_only_a_sleeper_is_rung(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"1")
        assert not ringing(b)
        assert not b.prepare_sleep()  # something is waiting
        drain(b)
        assert b.prepare_sleep()
        a.post("b", b"2")
        a.post("b", b"3")
        assert ringing(b)
        assert a.stats()["rings"] == 1
        b.awake()
        assert not ringing(b)
        assert drain(b) == [b"2", b"3"]
        assert b.prepare_sleep()
        b.awake()
        a.post("b", b"4")
        assert not ringing(b)


def test_a_recipient_that_died_asleep_is_not_rung_when_it_is_back(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        b = attach(path, "b")
        assert b.prepare_sleep()
        abandon(b)
        with attach(path, "b") as b:
            a.post("b", b"x")
            assert a.stats()["rings"] == 0
            assert drain(b) == [b"x"]


def test_a_look_before_sleep_takes_nothing(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b:
        for recipient in "cbcb":
            a.post(recipient, recipient.encode())
        for _ in range(3):
            assert not b.prepare_sleep()
        assert len(drain(b)) == 2


def test_ringing_fails_silently_when_the_bell_is_gone(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        assert b.prepare_sleep()
        bell_path(path, "b").unlink()
        a.post("b", b"x")
        assert a.stats()["rings_missed"] == 1
        assert drain(b) == [b"x"]


def test_wait_returns_at_once_when_something_is_there_or_no_time_is_given(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        assert not b.wait(0)
        a.post("b", b"x")
        assert b.wait(60)
        assert b.wait(0)
        drain(b)
        assert not b.wait(0)


def test_stats_count(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post(("b", "c"), b"x" * 512)
        a.post("b", b"x" * 256)
        stats = a.stats()
        assert (stats["posts"], stats["bytes_posted"], stats["full"]) == (3, 1280, 0)
        assert stats["ring_fill_ratio"] == {"b": 0.75, "c": 0.5}
        b.take()
        b.release()
        stats = b.stats()
        assert (stats["takes"], stats["bytes_taken"], stats["slots_inspected"]) == (2, 768, 3)
        assert a.stats()["ring_fill_ratio"] == {"b": 0.0, "c": 0.5}
