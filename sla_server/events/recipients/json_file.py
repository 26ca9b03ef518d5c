"""A file of JSON lines, one notice a line, synced before it is confirmed.

Rotation: a file that would grow beyond its limit becomes NAME.1, NAME.1 becomes NAME.2, and the oldest beyond
``keep`` is removed. A file that another program has renamed or removed (logrotate) is made again at the next
delivery; ``reopen`` lets go of it at once, for SIGHUP.

What a crash can leave: a line without its end. It was not confirmed, so it is written again; the torn piece
is cut off when the file is opened. A full disk leaves the file as it was before the batch.

Thread: the recipient's; ``reopen`` and ``close`` from any. ``_lock`` guards the descriptor.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.files import make_directory, sync_directory
from sla_server.events.documents import FileSpec
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, retry
from sla_server.events.recipients.network import reason_of

_TAIL_BYTES: Final = 64 << 10


class JsonFile:
    """See the module."""

    kind = "file"

    def __init__(
        self, name: str, spec: FileSpec, files_dir: Path, *, timeout_s: float, most_notices: int
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self._spec = spec
        self._path = files_dir / spec.path
        self._most_bytes = round(spec.rotate_mb * 1e6)
        self._fd = -1
        self._lock = threading.Lock()
        self._reopen = threading.Event()

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``; a disk has no timeout, so the engine's limit holds for one that hangs."""
        lines = [strict_json.dumps(notice.as_json(), ensure_ascii=False) for notice in notices]
        content = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
        with self._lock:
            try:
                self._open()
                if (size := os.fstat(self._fd).st_size) and size + len(content) > self._most_bytes:
                    self._rotate()
                self._append(content)
            except OSError as exc:
                self._close()
                return retry(f"{self._path}: {reason_of(exc)}")
            if self._reopen.is_set():  # meanwhile
                self._close()
        return CONFIRMED

    def reopen(self) -> None:
        """Let go of the file, after what is being written; the next line opens it again. Never waits."""
        self._reopen.set()
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def close(self) -> None:
        """See ``Recipient``."""
        self.reopen()

    def _open(self) -> None:
        if self._fd >= 0 and not self._reopen.is_set() and self._is_same():
            return
        self._reopen.clear()
        self._close()
        make_directory(self._path.parent, 0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        sync_directory(self._path.parent)  # a process that has died since may have made it
        self._cut_torn_line()

    def _is_same(self) -> bool:
        try:
            there = self._path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        ours = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _cut_torn_line(self) -> None:
        """A last line without its end is of a writer that died; its notice comes again."""
        size = end = os.fstat(self._fd).st_size
        while end:
            start = max(0, end - _TAIL_BYTES)
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)

    def _rotate(self) -> None:
        self._close()
        numbered = [
            self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._spec.keep + 1)
        ]
        for older, newer in zip(reversed(numbered), reversed(numbered[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._path.replace(numbered[0])
        self._open()

    def _append(self, content: bytes) -> None:
        size = os.fstat(self._fd).st_size
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(self._fd, left) :]
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)  # the batch comes again, as a whole
            raise

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
