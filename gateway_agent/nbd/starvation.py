"""How long this process has waited for a processor although it wanted to run: the kernel's run delay.

A data plane that its own host keeps waiting sees requests and answers late, and what it counts then is its
host's doing, not the storage's. It says so in each cut (``st``), so that the server slows no neighbour down
for it.

Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat: time on the processor, time
waiting on a run queue, both ns, and the number of turns. It is of the main thread, in which a plane does all
its work but that of file workers. Not in it: what a hypervisor takes away (steal).
"""

from __future__ import annotations

import contextlib
import os


class RunDelay:
    """The kernel's figure for the main thread of this process.

    Args:
        path: for tests.
    """

    def __init__(self, path: str = "/proc/self/schedstat") -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # a kernel without CONFIG_SCHED_INFO: nothing is known
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def total_us(self) -> int:
        """Since the start of the process; 0 where the kernel does not say."""
        if self._fd is None:
            return 0
        try:
            return int(os.pread(self._fd, 128, 0).split()[1]) // 1000
        except (OSError, ValueError, IndexError):
            return 0

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
