"""Rooms that are reserved later: what they cost until then, who notices, and what a lack of space leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pmdaemon.mailbox import Layout, Route, attach, create_segment, describe, probe, reserve_room
from pmdaemon.mailbox.errors import MailboxError, MailboxFull, RoomMissing, SegmentNoSpace
from tests.support import mailbox
from tests.support.mailbox import audit, drain

MIB = 1 << 20
NAMES = ("server", "writer", "pair-0", "pair-1")
LATER = ("pair-0", "pair-1")


def layout() -> Layout:
    routes = [Route("server", "writer", MIB)]
    for name in LATER:
        routes += [Route(name, "server", 4 * MIB), Route("server", name, MIB), Route("writer", name, MIB)]
    return Layout(NAMES, tuple(routes), 256, mailbox.FORM, first_bytes=4 * MIB)


def blocks(path: Path) -> int:
    """Bytes that the file really takes."""
    return path.stat().st_blocks * 512


def test_extents_of_rooms_and_of_the_rest_make_up_the_segment() -> None:
    made = layout()
    slots = 256 * 64
    assert made.room("pair-1") == [
        (made.slots_word(3) * 8, slots),
        (made.ring_at_bytes("pair-1", "server")[0], 6 * MIB),
    ]
    assert made.reserved(()) == [(0, made.total_bytes)]
    assert made.reserved_bytes(LATER) == made.total_bytes - 2 * (6 * MIB + slots)
    assert made.reserved_bytes(("pair-1",)) == made.total_bytes - (6 * MIB + slots)


def test_a_room_costs_nothing_until_it_is_reserved(path: Path) -> None:
    made = layout()
    create_segment(path, made, LATER)
    assert path.stat().st_size == made.total_bytes
    with attach(path, "server") as server, attach(path, "writer") as writer:
        server.post("writer", b"x")
        assert drain(writer) == [b"x"]
        assert drain(server) == []
        assert [person["room_reserved"] for person in describe(path)["participants"]] == [
            True,
            True,
            False,
            False,
        ]
        probe(path)
        assert blocks(path) <= made.reserved_bytes(LATER) + 16 * 4096  # parts of pages at the borders
        with pytest.raises(RoomMissing):
            attach(path, "pair-0")
        reserve_room(path, "pair-0")
        assert blocks(path) >= made.reserved_bytes(("pair-1",))
        assert blocks(path) <= made.reserved_bytes(("pair-1",)) + 16 * 4096
        with attach(path, "pair-0") as pair:
            pair.post("server", b"y" * MIB)
            assert len(drain(server)[0]) == MIB


def test_who_posts_notices_a_room_that_was_reserved_since(path: Path) -> None:
    create_segment(path, layout(), LATER)
    with attach(path, "server") as server, attach(path, "writer") as writer:
        for box in (server, writer):
            assert "pair-0" not in box.expected
            with pytest.raises(MailboxFull) as caught:
                box.post("pair-0", b"nobody there")
            assert caught.value.recipients == ("pair-0",)
            with pytest.raises(MailboxFull):
                box.post_many("pair-0", [b"1", b"", b"3"])
            with pytest.raises(MailboxFull):
                box.post("pair-0", b"")
        server._writer._interrupted = True  # as an exception leaves it: the next post adopts
        reserve_room(path, "pair-0")
        assert server.expected == ("writer", "pair-0")
        with attach(path, "pair-0") as pair:
            server.post("pair-0", b"one")
            server.post_many("pair-0", [b"two", b"three"])
            writer.post(("pair-0",), b"four")
            assert sorted(drain(pair)) == [b"four", b"one", b"three", b"two"]
            with pytest.raises(MailboxFull):
                server.post(("pair-0", "pair-1"), b"five")
            assert drain(pair) == [b"five"]
        audit(server)


def test_a_second_reservation_changes_nothing(path: Path) -> None:
    create_segment(path, layout(), LATER)
    reserve_room(path, "pair-0")
    with attach(path, "pair-0") as pair, attach(path, "server") as server:
        pair.post("server", b"x")
        before = blocks(path)
        reserve_room(path, "pair-0")
        assert blocks(path) == before
        assert drain(server) == [b"x"]
    with pytest.raises(MailboxError, match="no participant"):
        reserve_room(path, "pair-9")


@pytest.mark.parametrize("fails_at", [0, 1])
def test_without_space_the_room_is_not_there_and_the_others_go_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    create_segment(path, layout(), LATER)
    calls: list[int] = []
    real = os.posix_fallocate

    def refuse(fd: int, at_bytes: int, size: int) -> None:
        calls.append(size)
        if len(calls) > fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, at_bytes, size)

    with attach(path, "server") as server, attach(path, "writer") as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(SegmentNoSpace) as caught:
                reserve_room(path, "pair-0")
        assert caught.value.needed_bytes == 6 * MIB + 256 * 64
        with pytest.raises(RoomMissing):
            attach(path, "pair-0")
        server.post("writer", b"x")
        assert drain(writer) == [b"x"]
        reserve_room(path, "pair-0")  # there is space again
        attach(path, "pair-0").close()
