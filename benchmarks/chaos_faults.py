"""Faults of one process for some seconds: stopped, or without address space. Each ends by itself.

Thread: the caller's; timers end the faults.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from pathlib import Path


class ProcessFaults:
    """See the module."""

    def __init__(self) -> None:
        self._frozen: set[int] = set()

    def freeze(self, pid: int, for_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        self._frozen.add(pid)
        threading.Timer(for_s, self._thaw, (pid,)).start()

    def thaw_all(self) -> None:
        """End what is still frozen."""
        for pid in list(self._frozen):
            self._thaw(pid)

    def _thaw(self, pid: int) -> None:
        if pid in self._frozen:
            self._frozen.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @staticmethod
    def starve(pid: int, for_s: float) -> None:
        """No address space beyond what it has: a thread that starts now may die before it has begun."""
        with contextlib.suppress(OSError):  # it has just died
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            before = resource.prlimit(pid, resource.RLIMIT_AS)
            if before[0] != before[1]:
                return  # it has none already; what is put back later must be what it had at first
            resource.prlimit(pid, resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), before[1]))
            threading.Timer(for_s, ProcessFaults._feed, (pid, before)).start()

    @staticmethod
    def _feed(pid: int, limits: tuple[int, int]) -> None:
        with contextlib.suppress(OSError):  # it has died
            resource.prlimit(pid, resource.RLIMIT_AS, limits)
