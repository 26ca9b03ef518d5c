"""The runtime directory: mailbox segments, port files, the page's login address. Nobody else may enter it.

The default lies in ``/dev/shm/sla-UID``. Anybody can make a directory of that name before us, and its owner
can rename what we make in it and put something else there; so it has to be ours, too, and closed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from pmdaemon.mailbox import default_runtime_dir, ensure_private_dir
from pmdaemon.mailbox.errors import SegmentUnsafe


def prepare_runtime_dir(runtime_dir: Path) -> None:
    """Make the directory (mode 0700) if it is missing, with that of the user around it.

    Raises:
        SegmentUnsafe: one of both belongs to another user, is a link, or is open to others.
        OSError, SegmentError: it cannot be made.
    """
    home = default_runtime_dir()
    if runtime_dir.parent == home and not os.environ.get("RUNTIME_DIRECTORY"):  # that one is systemd's
        close_home(home)
    ensure_private_dir(runtime_dir)


def remove_runtime_dir(runtime_dir: Path) -> None:
    """Remove figures, notes and ports of an ended server, and the directories that are empty then."""
    metrics = runtime_dir / "metrics"
    leftovers = [runtime_dir / name for name in ("gateways.json", "api.port", "login.url", "clock")]
    for path in (*leftovers, *runtime_dir.glob("*.failed"), *metrics.glob("*.prom"), *metrics.glob("*.json")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it, or it is not there
        metrics.rmdir()
    leave_runtime_dir(runtime_dir)


def close_home(home: Path) -> None:
    """Make ``home`` with mode 0700, or give it that mode: earlier releases left it open to readers.

    Its parent is sticky, so one that is ours cannot be replaced by others between look and change.

    Raises:
        SegmentUnsafe: it belongs to another user, or is no directory.
    """
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)
    status = os.lstat(home)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        what = "no directory" if not stat.S_ISDIR(status.st_mode) else "not this user's"
        raise SegmentUnsafe(
            home,
            f"is {what}; user {status.st_uid} made it",
            "Have root remove it, or set runtime_dir to a directory that only this user can enter",
        )
    if status.st_mode & 0o077:
        home.chmod(0o700)


def leave_runtime_dir(runtime_dir: Path) -> None:
    """Remove the directory, and that of the user around it, if they are empty."""
    with contextlib.suppress(OSError):
        runtime_dir.rmdir()
        if runtime_dir.parent == default_runtime_dir():
            runtime_dir.parent.rmdir()
