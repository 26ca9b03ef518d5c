"""The parent reserves the room of a pair, or lets everybody know that there is none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pmdaemon.mailbox import attach, create_segment
from pmdaemon.mailbox.errors import RoomMissing
from pmdaemon.poller.mailbox_rooms import reserve_pair
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.topology import later_pairs, main_layout


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    create_segment(tmp_path / "main.mbx", main_layout(3), later_pairs(3))
    return tmp_path / "main.mbx"


def test_a_pair_can_attach_once_its_room_is_reserved(segment: Path) -> None:
    attach(segment, "pair-0").close()
    with pytest.raises(RoomMissing):
        attach(segment, "pair-1")
    assert reserve_pair(segment, FakeClock(), 1)
    attach(segment, "pair-1").close()
    with pytest.raises(RoomMissing):
        attach(segment, "pair-2")


def test_without_room_an_event_says_so(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        assert not reserve_pair(segment, FakeClock(), 1)
    with attach(segment, "dbmanager") as keeper:
        (message,) = keeper.take()
    received = frame.decode(message.payload)
    assert received.kind == Kind.RECORD
    ((table, row),) = received.header["rows"]
    assert (table, row["kind"], row["subject"]) == ("events", "no-room-for-pair", "pair-1")
    assert "Enlarge it" in row["text"]


def test_a_pair_that_the_segment_does_not_know_is_not_started(segment: Path) -> None:
    assert not reserve_pair(segment, FakeClock(), 7)


def test_a_segment_that_is_not_made_yet_is_waited_for_by_the_pair(tmp_path: Path) -> None:
    assert reserve_pair(tmp_path / "main.mbx", FakeClock(), 1)
