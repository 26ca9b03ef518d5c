"""Processes of a PMDaemon: its pairs are children of its template."""

from __future__ import annotations

import psutil


def pair_pids(daemon_pid: int) -> list[int]:
    """Process ids of the pairs that run, by their numbers."""
    found = {}
    for process in psutil.Process(daemon_pid).children(recursive=True):
        command = process.cmdline()
        if "--index" in command:
            found[int(command[command.index("--index") + 1])] = process.pid
    return [found[index] for index in sorted(found)]
