"""Is the process that wrote its number into the segment still there?

A process is named by its number *and* its start time (clock ticks since boot), because numbers are reused.
A zombie executes nothing any more and counts as gone. Reads /proc; all processes of one server live in one
PID namespace (a limit stated in docs/design/2-mailbox.md).
"""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if it is gone or a zombie.

    Source: proc(5), /proc/PID/stat, fields 3 (state) and 22 (starttime). The command name before them may
    hold blanks and brackets, so fields are counted behind its last bracket.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZXx" else int(fields[19])


def is_alive(pid: int, started_ticks: int) -> bool:
    """Whether the process that had this number and start time still runs."""
    return pid > 0 and start_ticks(pid) == started_ticks
