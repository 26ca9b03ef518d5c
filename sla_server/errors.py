"""Errors of the server's own processes.

    SlaError (pmdaemon.errors)
    ├── ServerRunning       another server holds the data directory
    ├── ServerNotRunning    a command needs a running server
    ├── RelayRunning        another relay, or a server, holds the data directory
    ├── RelayNotRunning     a command needs a running relay
    └── JobRunning      79  another run of the same job holds its lock

Sub-packages have their own trees: ``agreements.errors``, ``db.errors``, ``api.errors``, ``cli.errors``.
"""

from __future__ import annotations

from pathlib import Path

from pmdaemon.errors import SlaError


class ServerRunning(SlaError):
    """Another server holds the lock of the data directory."""

    exit_status = 75  # EX_TEMPFAIL
    retryable = True

    def __init__(self, data_dir: Path, pid: int | None) -> None:
        self.data_dir = data_dir
        self.pid = pid
        holder = f"process {pid}" if pid else "another process"
        super().__init__(
            f"{data_dir} is in use by {holder}. Stop it with 'sla-server stop', or give another data_dir"
        )


class ServerNotRunning(SlaError):
    """No server holds the data directory."""

    exit_status = 69  # EX_UNAVAILABLE
    retryable = True

    def __init__(self, data_dir: Path, elsewhere: str = "") -> None:
        self.data_dir = data_dir
        other = f"; an SLA server of another data directory answers at {elsewhere}" if elsewhere else ""
        fix = (
            "Give that one's --config, or stop it first" if elsewhere else "Start one with 'sla-server start'"
        )
        super().__init__(f"no server is running on {data_dir}{other}. {fix}")


class RelayRunning(SlaError):
    """Another process holds the lock of a relay's data directory."""

    exit_status = 75  # EX_TEMPFAIL
    retryable = True

    def __init__(self, data_dir: Path, pid: int | None) -> None:
        self.data_dir = data_dir
        self.pid = pid
        holder = f"process {pid}" if pid else "another process"
        super().__init__(f"{data_dir} is in use by {holder}. End that one first, or give another data_dir")


class RelayNotRunning(SlaError):
    """No relay holds the data directory, or it does not say how it is."""

    exit_status = 69  # EX_UNAVAILABLE
    retryable = True

    def __init__(self, data_dir: Path, problem: str = "no relay is running") -> None:
        self.data_dir = data_dir
        super().__init__(f"{problem} on {data_dir}. Start one with 'sla-server relay --config FILE'")


class JobRunning(SlaError):
    """Another run of the same job holds the lock."""

    retryable = True
    exit_status = 79

    def __init__(self, lock: Path | str, name: str) -> None:
        self.lock = lock
        super().__init__(f"another {name} job is running (it holds {lock}); wait for it to end")
