"""Unified mode (P15): the outbound work in the core's own thread, the inbound thread only wakes it.

Two threads take turns with everything the inbound side owns (selector, connections, publisher):

    pm-in-0   armed: waits in the selector, posts and sweeps when their time comes; at the first reply it
    serves what is ready, hands over and sleeps pm-core-0 sends; once handed over, it drains what is ready
    without waiting, again and again between its sends; when nothing is ready it arms pm-in-0 and sleeps
    until a poll is due, mail arrives or it is handed over again

So the inbound thread is switched to once a burst, not once a reply; while a round of replies comes in, one
thread runs. The turn is the boolean ``_is_core_turn``: written by the core when it arms, and after it has
read ``_handed``. The two eventfds order it: the side that writes one does not touch the inbound side again
before it has read the other.

Source: P15. ``pairs = "unified"``; measured beside the pair by ``benchmarks/poll.py``.
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import Final

from pmdaemon.poller.inbound import Inbound
from pmdaemon.poller.outbound import Outbound
from pmdaemon.runtime.stop import Stop

DRAINS_A_TURN: Final = 8  # rounds of reading before it is the sends' turn again


def _wait(*fds: int, timeout_ms: int | None = None) -> None:
    sleeper = select.poll()  # descriptors above 1023 are common here, ``select.select`` refuses them
    for fd in fds:
        sleeper.register(fd, select.POLLIN)
    sleeper.poll(timeout_ms)


class UnifiedCore:
    """Both threads' work; ``run`` and ``run_inbound`` are their targets."""

    def __init__(self, inbound: Inbound, outbound: Outbound) -> None:
        self._inbound = inbound
        self._outbound = outbound
        self._armed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_core_turn = True
        self.handovers = 0

    # -- pm-core-0

    def run(self, stop: Stop) -> None:
        """Work until the stop."""
        while not stop.is_set():
            if self.step():
                self.sleep(stop)
        os.eventfd_write(self._armed, 1)  # let the other thread see the stop and shut the inbound side

    def sleep(self, stop: Stop) -> None:
        """Until a poll is due, mail arrives, pm-in-0 hands over or the stop."""
        self._outbound.sleep(self._handed, stop)

    def step(self) -> bool:
        """Send what is due, then drain for a turn; True when there is nothing left but to sleep."""
        self._outbound.step()
        if not self._is_core_turn:
            self._is_core_turn = self._read(self._handed)
        if not self._is_core_turn:
            return True
        for _ in range(DRAINS_A_TURN):
            if not self._inbound.step(0):
                self._is_core_turn = False
                os.eventfd_write(self._armed, 1)
                return True
        return False

    # -- pm-in-0

    def run_inbound(self, stop: Stop) -> None:
        """Wait for first replies until the stop, then shut the inbound side."""
        self._inbound.watch(stop)
        while not stop.is_set():
            self.wait_once(stop)
        # The core has armed us for the last time, or died: it does not touch the inbound side again.
        _wait(self._armed, timeout_ms=5000)
        self._inbound.shut(stop.reason)

    def wait_once(self, stop: Stop) -> None:
        """Sleep until armed; then wait for a first reply, serve what is ready and hand over."""
        _wait(self._armed, stop.fileno())
        if not self._read(self._armed):
            return
        while not stop.is_set():
            if self._inbound.step():
                self.handovers += 1
                os.eventfd_write(self._handed, 1)
                return
        os.eventfd_write(self._armed, 1)  # stopped while it was our turn: it stays ours

    @staticmethod
    def _read(fd: int) -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(fd) > 0
        return False

    def close(self) -> None:
        """Give the descriptors back; call when both threads are joined."""
        os.close(self._armed)
        os.close(self._handed)
