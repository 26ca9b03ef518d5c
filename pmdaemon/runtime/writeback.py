"""What the kernel could not write of a file: whether there was such, and that it is believed no more.

The kernel says so once, by each descriptor that was open then: to whoever asks for a sync, even if nobody
looks at the answer. It goes on to show what it could not write, and counts it as written. And ext4, where the
file had no block before, does not write it properly when it comes again: the block stays marked as never
written, the sync succeeds, and after a power cut there are zeroes (seen with Linux 6.18, also through
overlayfs; XFS and btrfs write it). So whoever writes something again must have the pages of the file dropped
first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import Final

NOT_POSSIBLE: Final = frozenset((95, 22, 38))  # EOPNOTSUPP, EINVAL (devices, at odd places), ENOSYS
_WAIT_BEFORE: Final = 1  # of sync_file_range(2): for what is on its way to the disk
_TELLING: Final = frozenset((0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010, 0x0102_1994, 0x8584_58F6))
"""File systems of which sync_file_range(2) says the errors: ext2 to ext4, XFS, btrfs, F2FS, and those of
device nodes (tmpfs, ramfs). Of one that lies above another, as overlayfs does, it knows none."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_STATFS_WORDS: Final = 32  # more than struct statfs has; the first one is the type


def missed_error(fd: int) -> int:
    """Error number of something that could not be written, unless this descriptor was asked since.

    sync_file_range(2) says so without a flush of the disk, which fdatasync(2) would do once more.

    Raises:
        OSError: the same, where the kernel has to be asked by a sync.
    """
    error = errno.EOPNOTSUPP
    if _file_system(fd) in _TELLING:
        error = 0 if _libc.sync_file_range(fd, 0, 1, _WAIT_BEFORE) == 0 else ctypes.get_errno()
    if error in NOT_POSSIBLE:
        os.fdatasync(fd)
        return 0
    return error


def _file_system(fd: int) -> int:
    """The number of its type; 0 if that is not known."""
    words = (ctypes.c_long * _STATFS_WORDS)()
    return int(words[0]) & 0xFFFF_FFFF if _libc.fstatfs(fd, words) == 0 else 0


def forget_pages(fd: int) -> None:
    """Drop what the kernel has of a file in memory, once what it has not tried to write is written, too.

    Pages that a process has mapped stay. What is read then is what is on the disk.
    """
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.fdatasync(fd)
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
