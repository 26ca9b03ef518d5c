"""Small files that outlive the link, written aside and renamed: a reader sees the old or the new, never half.

Durability: of what is kept in state_dir, content and name are on disk when a function returns; if the disk
fails, the old file holds.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import Any

from gateway_agent.errors import AlreadyRunning, StateFileBroken
from pmdaemon.runtime.files import make_directory, sync_directory, write_whole

PLACE = "place.json"
"""In state_dir: ``{runtime_dir}`` of the agent's newest start."""


def read_json(path: Path, fix: str) -> Any:
    """The file's value, or None when there is no such file.

    Raises:
        StateFileBroken: it exists and is not JSON; ``fix`` says what the operator can do.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise StateFileBroken(str(path), f"cannot be read ({exc})", fix) from exc


def write_json(path: Path, value: Any, *, synced: bool) -> None:
    """See ``write_whole``; what lies in runtime_dir need not be synced."""
    write_whole(path, json.dumps(value) + "\n", synced=synced)


def make_private_directory(path: Path) -> None:
    """Create ``path`` (and its parents) with mode 0700.

    Raises:
        StateFileBroken: it cannot be created.
    """
    try:
        make_directory(path, 0o700)
    except OSError as exc:
        raise StateFileBroken(
            str(path),
            f"cannot be created ({exc.strerror})",
            "Set state_dir and runtime_dir to writable places",
        ) from exc


def gateway_id(state_dir: Path, *, may_make: bool = True) -> str:
    """This gateway's UUID, kept in ``state_dir/gateway_id``; the agent's parent makes it at the first start.

    Raises:
        StateFileBroken: it cannot be read or written, or holds something else; a new identity would orphan
            the gateway's history.
    """
    path = state_dir / "gateway_id"
    try:
        if may_make and not path.exists():
            made = str(uuid.uuid4())
            write_whole(path, made + "\n", synced=True)
            return made
        text = path.read_text(errors="replace").strip()
        sync_directory(state_dir)  # the process that made it may have died before its name was on disk
    except OSError as exc:
        raise _unusable(path, exc) from exc
    try:
        return str(uuid.UUID(text))
    except ValueError as exc:
        raise StateFileBroken(
            str(path),
            f"{text[:64]!r} is not a UUID",
            "Restore it from a backup; or, to get a new identity, delete it and spool/ beside it",
        ) from exc


def lock_directory(directory: Path) -> int:
    """Lock ``directory`` for this process; returns the descriptor that holds the lock until it is closed.

    Raises:
        AlreadyRunning: another agent holds it.
        StateFileBroken: it is another user's, or the disk does not take it.
    """
    path = directory / "agent.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise _unusable(path, exc) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise AlreadyRunning(str(path)) from None
    return fd


def _unusable(path: Path, error: OSError) -> StateFileBroken:
    fix = "Run this as the agent's user, and see that its disk has room"
    return StateFileBroken(str(path), f"cannot be used ({error.strerror})", fix)
