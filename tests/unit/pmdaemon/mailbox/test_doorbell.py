import contextlib
import os
import select
from pathlib import Path

import pytest

from pmdaemon.mailbox.doorbell import Bell, Ringer, bell_path
from pmdaemon.mailbox.errors import SegmentError, SegmentUnsafe


def is_ringing(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_a_ring_is_seen_and_forgotten(path: Path) -> None:
    bell, ringer = Bell(bell_path(path, "b")), Ringer(path)
    assert not is_ringing(bell)
    ringer.ring("b")
    ringer.ring("b")
    assert is_ringing(bell)
    bell.drain()
    assert not is_ringing(bell)
    assert (ringer.rings, ringer.missed) == (2, 0)
    ringer.close()
    bell.close()


def test_ringing_where_nobody_listens_is_counted_only(path: Path) -> None:
    ringer = Ringer(path)
    ringer.ring("nobody")
    os.mkfifo(bell_path(path, "unread"), 0o600)
    ringer.ring("unread")
    bell_path(path, "plain").write_bytes(b"")
    ringer.ring("plain")
    assert (ringer.rings, ringer.missed) == (0, 3)
    assert bell_path(path, "plain").read_bytes() == b""
    ringer.close()


def test_a_full_bell_does_not_block(path: Path) -> None:
    bell, ringer = Bell(bell_path(path, "b")), Ringer(path)
    with contextlib.suppress(BlockingIOError):
        while os.write(bell.fileno(), b"\0" * 4096):
            pass
    ringer.ring("b")
    assert ringer.missed == 1
    bell.drain()
    assert not is_ringing(bell)
    ringer.close()
    bell.close()


def test_a_bell_opened_anew_is_found_through_the_same_fifo(path: Path) -> None:
    bell, ringer = Bell(bell_path(path, "b")), Ringer(path)
    ringer.ring("b")
    bell.close()
    ringer.ring("b")
    assert ringer.missed == 1
    bell = Bell(bell_path(path, "b"))
    ringer.ring("b")
    assert is_ringing(bell)
    ringer.close()
    bell.close()


def test_a_fifo_made_anew_is_found_in_the_same_ring(path: Path) -> None:
    bell, ringer = Bell(bell_path(path, "b")), Ringer(path)
    ringer.ring("b")
    bell.close()
    bell_path(path, "b").unlink()
    bell = Bell(bell_path(path, "b"))
    ringer.ring("b")
    assert is_ringing(bell)
    assert ringer.missed == 0
    ringer.close()
    bell.close()


def test_something_else_in_the_bells_place_is_refused(path: Path) -> None:
    bell_path(path, "b").write_bytes(b"")
    with pytest.raises(SegmentUnsafe, match="no FIFO"):
        Bell(bell_path(path, "b"))
    with pytest.raises(SegmentError, match="cannot "):
        Bell(bell_path(path.parent / "none" / "main", "b"))
