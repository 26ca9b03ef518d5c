"""Who holds a lock: a process by its number *and* start time, because numbers are used again.

A zombie executes nothing any more and counts as gone. All processes live in one PID namespace.
Source: Q7; proc(5), /proc/PID/stat, fields 3 (state) and 22 (starttime).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class LockOwner(NamedTuple):
    """A process: number, and start in clock ticks since boot."""

    pid: int
    start_ticks: int


def owner_of(pid: int) -> LockOwner | None:
    """The living process of that number, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command name before may hold blanks and brackets
    return None if fields[0] in "ZXx" else LockOwner(pid, int(fields[19]))


def myself() -> LockOwner:
    """This process."""
    owner = owner_of(os.getpid())
    assert owner is not None  # we are running
    return owner


def is_alive(owner: LockOwner) -> bool:
    """Whether that very process still runs."""
    return owner_of(owner.pid) == owner
