"""One process at a time looks after a store of files: the server, or a command of ``sla storage``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sla_server.db.errors import StorageBusy


@contextmanager
def storage_lock(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold ``directory/storage.lock``; the kernel drops it when the process dies.

    Args:
        directory: the store's ``lock_dir``.
        wait: sleep until it is free.

    Raises:
        StorageBusy: held by another.
    """
    path = directory / "storage.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as exc:
            raise StorageBusy(path) from exc
        yield
    finally:
        os.close(fd)
