"""Real I/O in the place of the modelled time of a request: blocks of a file, with O_DIRECT, one at a time.

The disks of today answer I/Os of 4 KiB sooner than generators in Python can make them, so that no queue would
arise. So each request moves a *block* of the file that is large enough to take ``BLOCK_S`` on this machine.
``O_DIRECT`` and ``O_DSYNC`` keep the page cache out: the time is that of the storage, with all that others
do to it meanwhile.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from pathlib import Path
from typing import Final

BLOCK_S: Final = 0.0025
"""400 requests a second, as many as the modelled disk does."""
FILE_BYTES: Final = 128 << 20
LEAST_BYTES: Final = 64 << 10
MOST_BYTES: Final = 8 << 20
TRIES: Final = 15


class DirectFile:
    """See the module. Belongs to one thread.

    Args:
        path: is made, or written over.

    Raises:
        OSError: no room, or its file system takes no O_DIRECT (EINVAL). File systems in memory of newer
            kernels do, and their time is that of a copy: give a path on a disk.
    """

    def __init__(self, path: Path) -> None:
        self._random = random.Random(1)
        self._buffer = mmap.mmap(-1, MOST_BYTES)  # begins at a page, as O_DIRECT wants it
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_DSYNC
        self._file = os.open(path, flags, 0o600)
        try:
            for offset in range(0, FILE_BYTES, MOST_BYTES):  # what was never written is read from nowhere
                os.pwritev(self._file, [self._buffer], offset)
            self.block_bytes = LEAST_BYTES
            while self.block_bytes < MOST_BYTES and self._typical_s() < BLOCK_S:
                self.block_bytes *= 2
        except BaseException:
            self.close()
            raise

    def _typical_s(self) -> float:
        """How long a block takes, half of them writes."""
        times_s = []
        for number in range(TRIES):
            start_s = time.monotonic()
            self.move(is_write=number % 2 == 0)
            times_s.append(time.monotonic() - start_s)
        return statistics.median(times_s)

    def move(self, *, is_write: bool) -> None:
        """Read or write some block.

        Raises:
            OSError: the storage failed.
        """
        offset = self._random.randrange(FILE_BYTES // self.block_bytes) * self.block_bytes
        with memoryview(self._buffer)[: self.block_bytes] as part:
            (os.pwritev if is_write else os.preadv)(self._file, [part], offset)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
        self._buffer.close()
