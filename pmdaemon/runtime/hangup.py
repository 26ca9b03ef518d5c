"""A signal as a request: a flag that selectors can wait for. SIGHUP asks to read the configuration again.

A process that has no handler yet would die of the signal. So a parent keeps SIGHUP blocked while it starts a
child (``blocked``); the child's first thread inherits that, those that it starts too, and a signal sent
meanwhile waits until ``install``.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType


class Hangup:
    """Whether SIGHUP, or another signal, has come since the last look.

    Thread: ``install`` and ``take`` the main one's.
    """

    def __init__(self, number: signal.Signals = signal.SIGHUP) -> None:
        self._number = number
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def install(self) -> None:
        """Take SIGHUP from now on, also one that has waited."""

        def handler(_number: int, _frame: FrameType | None) -> None:
            self.set()

        signal.signal(self._number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {self._number})

    def set(self) -> None:
        """As if the signal had come. Safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def take(self) -> bool:
        """Whether it has come since the last call; several count as one."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def fileno(self) -> int:
        """Descriptor that is readable until ``take``."""
        return self._fd

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._fd)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Keep SIGHUP from this thread, and from the children that it starts until they ``install``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
