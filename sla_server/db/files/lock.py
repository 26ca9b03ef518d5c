"""One process at a time looks after a data directory's files: the server, or a command of ``sla storage``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sla_server.db.errors import StorageBusy


@contextmanager
def storage_lock(data_dir: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold ``data_dir/storage.lock``; the kernel drops it when the process dies.

    Args:
        data_dir: exists.
        wait: sleep until it is free.

    Raises:
        StorageBusy: held by another.
    """
    path = data_dir / "storage.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as exc:
            raise StorageBusy(path) from exc
        yield
    finally:
        os.close(fd)
