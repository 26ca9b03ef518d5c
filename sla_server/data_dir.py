"""Who holds the data directory: one server, by ``flock`` on ``<data_dir>/lock``, which also has its pid.

The descriptor is close-on-exec, so no child keeps the lock: it ends with the supervisor, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.files import close_directory, make_directory
from sla_server.errors import ServerRunning


def prepare_data_dir(data_dir: Path) -> None:
    """Make the data directory (mode 0700), or see that the one that is there is closed to others.

    Raises:
        ConfigError: it is open to others, and is not known to be a data directory.
        OSError: it cannot be made or looked at.
    """
    make_directory(data_dir, 0o700)
    close_directory(data_dir, "data_dir", is_ours=(data_dir / "lock").exists())


def lock_data_dir(data_dir: Path) -> int:
    """Create and lock the data directory; returns the descriptor that holds the lock.

    Raises:
        ServerRunning: another process holds it; names its pid.
        ConfigError: it is open to others.
        OSError: it cannot be made or written.
    """
    prepare_data_dir(data_dir)
    fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as exc:
        holder = _pid_in(fd)
        os.close(fd)
        raise ServerRunning(data_dir, holder or None) from exc
    except OSError:
        os.close(fd)
        raise
    return fd


def running_pid(data_dir: Path) -> int | None:
    """Pid of the server that holds the data directory, 0 if it cannot be told, None without a server.

    Raises:
        OSError: the directory cannot be used.
    """
    try:
        fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(fd)
    finally:
        os.close(fd)
    return None


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdecimal() else 0


def wait_stopped(data_dir: Path, limit_s: float) -> bool:
    """Wait until nobody holds the data directory; False after the limit."""
    deadline = Deadline(limit_s)
    while running_pid(data_dir) is not None:
        if deadline.passed:
            return False
        time.sleep(0.05)
    return True
