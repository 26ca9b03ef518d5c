"""What the kernel could not write of a file: whether there was such, and that it is believed no more.

The kernel says so once, by each descriptor that was open then: to whoever asks for a sync, even if nobody
looks at the answer. It goes on to show what it could not write, and counts it as written. And ext4, where the
file had no block before, does not write it properly when it comes again: the block stays marked as never
written, the sync succeeds, and after a power cut there are zeroes (seen with Linux 6.18; XFS and btrfs were
not tried). So whoever writes something again must have the pages of the file dropped first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Final

NOT_POSSIBLE: Final = frozenset((95, 22, 38))  # EOPNOTSUPP, EINVAL (devices, at odd places), ENOSYS
_WAIT_BEFORE: Final = 1  # of sync_file_range(2): for what is on its way to the disk
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def missed_error(fd: int) -> int:
    """Error number of something that could not be written, unless this descriptor was asked since.

    sync_file_range(2) says so without a flush of the disk, which fdatasync(2) would do once more.

    Raises:
        OSError: the same, where the kernel has to be asked by a sync.
    """
    if _libc.sync_file_range(fd, 0, 1, _WAIT_BEFORE) == 0:
        return 0
    error = ctypes.get_errno()
    if error in NOT_POSSIBLE:
        os.fdatasync(fd)
        return 0
    return error


def forget_pages(fd: int) -> None:
    """Drop what the kernel has of a file in memory, once what it has not tried to write is written, too.

    Pages that a process has mapped stay. What is read then is what is on the disk.
    """
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.fdatasync(fd)
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
