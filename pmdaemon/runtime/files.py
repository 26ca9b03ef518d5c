"""Small files, replaced whole: a reader sees the old content or the new, never half; and syncing a directory.

The new content is written beside the file, under ``.NAME.PID``, and renamed over it. What a crash can leave:
that file aside; the next process of the same number removes it, and nobody reads it.
"""

from __future__ import annotations

import os
from pathlib import Path

from pmdaemon.errors import ConfigError


def write_whole(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Replace ``path`` (mode 0600).

    Durability: survives the death of this process; with ``synced`` also a power cut.

    Raises:
        OSError: no room, not writable, or no such directory; ``path`` is as it was.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            if synced:
                stream.flush()
                os.fsync(fd)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if synced:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Names made, renamed or removed in ``path`` are on disk on return.

    Raises:
        OSError: the disk fails.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def close_directory(path: Path, what: str, *, is_ours: bool = False) -> None:
    """See that no other user can enter a directory that exists.

    One that is ours and empty (made by hand or by another program for us), or one that the caller knows as
    its own, is closed; any other may be a home directory and is left alone.

    Args:
        path: the directory.
        what: the setting or option that names it, for the error.
        is_ours: whether it holds what only this product puts there.

    Raises:
        ConfigError: it stays open to others; says what to do.
        OSError: it cannot be looked at.
    """
    status = path.stat()
    mode = status.st_mode & 0o777
    if not mode & 0o077:
        return
    if status.st_uid == os.geteuid() and (is_ours or not any(path.iterdir())):
        path.chmod(0o700)
        return
    raise ConfigError(what, f"{path} can be entered by others (mode {mode:04o})", f"Run: chmod 700 {path}")
