"""Doorbells: a FIFO wakes a recipient that sleeps in a selector.

Only a sleeper is rung: the recipient sets its SLEEP word, searches once more and then waits; a sender that
finds the word set clears it and writes one byte. Busy traffic costs no system call. A lost ring costs at
most ``BACKSTOP_S``, because no recipient sleeps longer than that before it searches again.

A FIFO is opened by path, so a restarted recipient is found again; it stays in place when its process dies.
Ringing never blocks and never raises: a missing, unread or full FIFO means that no process sleeps there, or
that it was rung before.

Thread: ``Bell`` belongs to the taking thread, ``Ringer`` to the posting thread.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from pmdaemon.mailbox.errors import SegmentUnsafe, segment_unusable

BACKSTOP_S: Final = 0.05
"""Longest sleep between two searches. Twenty idle ones a second cost 0.01 % of a core, a lost ring 50 ms."""

_COMMON_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


def bell_path(segment: Path, participant: str) -> Path:
    """Where a participant's FIFO lies: beside the segment."""
    return segment.with_name(f"{segment.name}.{participant}.bell")


class Bell:
    """The recipient's own FIFO, made if it is missing.

    Raises:
        SegmentUnsafe: something else lies at its path.
        SegmentError: the operating system refuses to make or open it.
    """

    def __init__(self, path: Path) -> None:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # Read and write: with a writer in this process the FIFO never reports end of file.
            self._fd = os.open(path, os.O_RDWR | _COMMON_FLAGS)
        except OSError as exc:
            raise segment_unusable(path, "make the doorbell", exc) from exc
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise SegmentUnsafe(path, "is no FIFO", "Remove it; the server makes its doorbells itself")

    def fileno(self) -> int:
        """Descriptor that is readable after a ring."""
        return self._fd

    def drain(self) -> None:
        """Forget all rings so far."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Close the descriptor; the FIFO stays for the next incarnation."""
        os.close(self._fd)


class Ringer:
    """Rings the bells of others; keeps one descriptor a recipient.

    Attributes:
        rings: bells rung. missed: no process had the FIFO open, or it was full.
    """

    def __init__(self, segment: Path) -> None:
        self._segment = segment
        self._fds: dict[str, int] = {}
        self.rings = 0
        self.missed = 0

    def ring(self, participant: str) -> None:
        """Wake ``participant`` if it sleeps. Never raises, never blocks."""
        for _ in range(2):  # a second try: the FIFO may have been replaced since it was opened
            fd = self._fds.get(participant, -1)
            try:
                if fd < 0:
                    fd = self._fds[participant] = self._open(participant)
                os.write(fd, b"\1")
            except BlockingIOError:
                break  # full: it is readable already
            except OSError:
                # No such FIFO, no reader, or the reader of the old FIFO is gone (EPIPE).
                self._forget(participant)
                if fd < 0:
                    break
            else:
                self.rings += 1
                return
        self.missed += 1

    def _open(self, participant: str) -> int:
        fd = os.open(bell_path(self._segment, participant), os.O_WRONLY | _COMMON_FLAGS)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError("not a FIFO")
        return fd

    def _forget(self, participant: str) -> None:
        fd = self._fds.pop(participant, -1)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close all descriptors."""
        for participant in list(self._fds):
            self._forget(participant)
