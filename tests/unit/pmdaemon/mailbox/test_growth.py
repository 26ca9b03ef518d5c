"""Rings of which only a first part is reserved: what they cost, when they grow, that they hold the whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pmdaemon.mailbox import Layout, Mailbox, Route, attach, create_segment
from pmdaemon.mailbox.errors import LayoutInvalid, MailboxFull
from pmdaemon.mailbox.layout import FIRST_BYTES
from pmdaemon.wire.frame import MAX_FRAME_BYTES
from tests.support import mailbox
from tests.support.mailbox import abandon, audit, drain

PAGE = os.sysconf("SC_PAGE_SIZE")
FIRST = 4 * PAGE
RING = 16 * PAGE
SLACK = 8 * PAGE  # parts of pages at the borders, header, slots


@pytest.fixture
def path(path: Path) -> Path:
    create_segment(path, Layout(("a", "b"), (Route("a", "b", RING),), 256, mailbox.FORM, FIRST))
    return path


@pytest.fixture
def boxes(path: Path) -> Iterator[tuple[Mailbox, Mailbox]]:
    with attach(path, "a") as a, attach(path, "b") as b:
        yield a, b


def ring_bytes(path: Path) -> int:
    """Bytes that the ring takes, more or less."""
    return path.stat().st_blocks * 512 - 256 * 64 * 2


def test_layout_reserves_the_first_part_of_each_ring() -> None:
    whole = Layout(("a", "b"), (Route("a", "b", FIRST_BYTES), Route("b", "a", 64)), 8)
    assert whole.reserved(()) == [(0, whole.total_bytes)]
    partly = Layout(("a", "b"), (Route("a", "b", 256), Route("b", "a", 128)), 8, first_bytes=64)
    first, second = (partly.ring_at_bytes(*names)[0] for names in (("a", "b"), ("b", "a")))
    assert partly.reserved(()) == [(0, first + 64), (second, 64)]
    assert partly.room("a")[1:] == [(first, 64), (second, 64)]
    assert partly.reserved(("b",)) == [(0, partly.slots_word(1) * 8)]
    for wrong in (0, 65, 1 << 32):
        with pytest.raises(LayoutInvalid, match=f"first_bytes is {wrong},"):
            Layout(("a",), (), 8, first_bytes=wrong)


def test_a_ring_whose_recipient_keeps_up_never_grows(path: Path, boxes: tuple[Mailbox, Mailbox]) -> None:
    a, b = boxes
    for number in range(64):
        a.post("b", b"%4d" % number + b"x" * (PAGE // 2))
        assert drain(b)[0][:4] == b"%4d" % number
        b.release()
    a.post_many("b", [b"1" * PAGE, b"2" * PAGE, b"3" * PAGE])
    assert len(drain(b)) == 3
    assert a._outlets["b"][0].reserved == FIRST
    assert ring_bytes(path) <= FIRST + SLACK


@pytest.mark.parametrize("many", [False, True])
def test_a_ring_whose_recipient_takes_nothing_holds_as_much_as_a_whole_one(
    path: Path, boxes: tuple[Mailbox, Mailbox], many: bool
) -> None:
    a, b = boxes
    for _ in range(5):  # somewhere in its first part
        a.post("b", b"x" * 512)
        drain(b)
    b.release()
    payloads = [bytes([number]) * (PAGE // 2) for number in range(2 * RING // PAGE)]
    posted = 0
    if many:
        with pytest.raises(MailboxFull) as caught:
            a.post_many("b", [*payloads, b"one too many" * PAGE])
        posted = caught.value.posted
    else:
        for payload in payloads:
            a.post("b", payload)
            posted += 1
    assert posted >= len(payloads) - 1, "but for directories of bundles"
    with pytest.raises(MailboxFull):
        a.post("b", b"y" * PAGE)
    assert drain(b) == payloads[:posted]
    assert a._outlets["b"][0].reserved == RING
    audit(a)


def test_a_message_larger_than_the_first_part_makes_it_grow(boxes: tuple[Mailbox, Mailbox]) -> None:
    a, b = boxes
    for size in (FIRST + 1, 3 * FIRST, RING - 8):
        a.post("b", b"z" * size)
        assert len(drain(b)[0]) == size
        b.release()


def test_the_next_process_goes_on_where_the_last_one_wrote(path: Path) -> None:
    a, b = attach(path, "a"), attach(path, "b")
    a.post("b", b"1" * 3 * FIRST)
    a.post("b", b"2" * 64)
    abandon(a)
    with attach(path, "a") as again:
        assert again._outlets["b"][0].reserved == RING
        again.post("b", b"3" * 64)
        assert [payload[:1] for payload in drain(b)] == [b"1", b"2", b"3"]
        audit(again)
    b.close()


def test_without_room_in_the_file_system_it_is_full_and_says_so_once_a_pause(
    boxes: tuple[Mailbox, Mailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = boxes
    asked, now_ns = [], [10**9]

    def refuse(_fd: int, at_bytes: int, size: int) -> None:
        asked.append((at_bytes, size))
        raise OSError(errno.ENOSPC, "No space left on device")

    a.post("b", b"0" * (FIRST // 2))
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr("pmdaemon.mailbox.segment.os.posix_fallocate", refuse)
        patch.setattr("pmdaemon.mailbox.segment.time.monotonic_ns", lambda: now_ns[0])
        for _ in range(3):
            with pytest.raises(MailboxFull):
                a.post("b", b"1" * FIRST)
        assert len(asked) == 1
        now_ns[0] += 2 * 10**9
        with pytest.raises(MailboxFull):
            a.post("b", b"1" * FIRST)
        a.post("b", b"2" * 64)  # still has room
    assert asked == [(a._outlets["b"][0].start + FIRST, FIRST)] * 2
    assert [line["event"] for line in logs] == ["ring-not-enlarged"] * 2
    assert [len(payload) for payload in drain(b)] == [FIRST // 2, 64]
    b.release()
    a.post("b", b"3" * 2 * FIRST)  # there is room again
    assert [len(payload) for payload in drain(b)] == [2 * FIRST]
    audit(a)


@pytest.mark.parametrize("size", [FIRST * 7 // 8, FIRST], ids=["nearly all", "all"])
@pytest.mark.parametrize("many", [False, True])
def test_without_room_to_grow_what_fits_into_the_first_part_finds_room_once_all_is_taken(
    boxes: tuple[Mailbox, Mailbox], monkeypatch: pytest.MonkeyPatch, many: bool, size: int
) -> None:
    a, b = boxes

    def refuse(_fd: int, _at_bytes: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pmdaemon.mailbox.segment.os.posix_fallocate", refuse)
    a.post("b", b"1" * (FIRST * 3 // 8))  # not past half of it
    assert len(drain(b)) == 1
    b.release()
    large = b"2" * size
    a.post_many("b", [large]) if many else a.post("b", large)
    assert drain(b) == [large]
    assert a._outlets["b"][0].reserved == FIRST
    audit(a)


def test_every_frame_fits_into_the_first_part() -> None:
    """So on a full file system no message is held up for good, nor what has to stay behind it."""
    assert Layout(("a", "b"), (Route("a", "b", RING),), 8).first_bytes >= MAX_FRAME_BYTES
