"""Small files, replaced whole: a reader sees the old content or the new, never half; and durable directories.

Every durable small file of the product is written here (docs/design/3-durable-files.md lists them).

The new content is written beside the file, under ``.NAME.PID``, and renamed over it. What a crash can leave:
that file aside; the next process of the same number removes it, and no process reads it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Final

from pmdaemon.errors import ConfigError

_NEVER_SYNCED: Final = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS)


def write_whole(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Replace ``path`` (mode 0600).

    Durability: survives the death of this process; with ``synced`` also a power cut.

    Raises:
        OSError: no room, not writable, no such directory, or the disk fails; ``path`` is as it was; or,
            if only the directory could not be synced, it is new, and after a power cut old or new. It names
            a file, also where the kernel does not: a write or a sync.
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
    except BaseException as exc:
        aside.unlink(missing_ok=True)
        if isinstance(exc, OSError) and exc.filename is None:
            exc.filename = str(path)
        raise
    if synced:
        sync_directory(path.parent)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make ``path`` and its missing parents, if it is not there.

    Durability: its name, and those of the parents that were made, are on disk on return, also when a process
    that has died since made them. The parent of one that exists is left alone if it may not be opened, or is
    of a kind that cannot be synced (a read-only root that holds a mount point).

    ``mode`` is that of ``path``; parents that are missing get the usual one.

    Raises:
        OSError: it cannot be made, it is a file, or the disk fails.
    """
    if path.is_dir():
        try:
            sync_directory(path.parent)
        except OSError as exc:
            if exc.errno not in _NEVER_SYNCED:
                raise
        return
    make_directory(path.parent)
    path.mkdir(mode=mode, exist_ok=True)
    try:
        sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()  # else the next try would find it and take it for durable
        raise


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file with its mode, aside and renamed as by ``write_whole``; on disk on return.

    Raises:
        OSError: ``target`` is as it was, see ``write_whole``.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copy2(source, aside)
        sync_file(aside)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def sync_file(path: Path) -> None:
    """What was written to ``path``, by whatever process, is on disk on return.

    Raises:
        OSError: the disk fails, or has failed to take a part of it since it was written.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
        OSError: it cannot be examined.
    """
    status = path.stat()
    mode = status.st_mode & 0o777
    if not mode & 0o077:
        return
    if status.st_uid == os.geteuid() and (is_ours or not any(path.iterdir())):
        path.chmod(0o700)
        return
    raise ConfigError(what, f"{path} can be entered by others (mode {mode:04o})", f"Run: chmod 700 {path}")
