"""A mutex in shared memory that survives its holder: the only lock of the mailbox, form `shared` only.

A robust, process-shared pthread mutex. When a holder dies the kernel marks it, and the next ``acquire`` gets
it together with that news (EOWNERDEAD), which the *first* ``trylock`` may already bring: it then belongs to
us. What the dead holder left half done is told by the list's DIRTY word, not by the news, so that a death
during repair, and an exception within the locked part, need no case of their own.

Never waits long: the locked part is a handful of stores. A holder that was stopped (SIGSTOP, a debugger)
makes ``acquire`` return False after ``PATIENCE_S``.

Trust: glibc follows no pointer of the mutex that it has not written itself under the lock, as long as its
kind is ours; hence the kind is checked each time. Calls go through ``PyDLL`` (the interpreter's lock is
kept): a trylock is shorter than giving that lock away.

Source: pthread_mutexattr_setrobust(3); glibc, bits/struct_mutex.h for x86-64 (offsets of lock and kind).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from pmdaemon.mailbox.errors import MailboxCorrupt
from pmdaemon.runtime.clock import Deadline

PATIENCE_S: Final = 0.1
"""Time for a living holder to be given a processor; the locked part itself takes microseconds."""
_SPINS: Final = 20  # longer than one locked part
_YIELDS: Final = 200  # then let a holder run that shares our processor; then sleep in small pieces
_NAP_S: Final = 0.0002
_KIND_WORD: Final = 2  # low half: __kind, at byte 16
_KIND: Final = 16 | 128  # PTHREAD_MUTEX_ROBUST_NORMAL_NP | PTHREAD_MUTEX_PSHARED_BIT
_TID_MASK: Final = 0x3FFFFFFF
_PROCESS_SHARED: Final = 1
_ROBUST: Final = 1

_libc: Final = ctypes.PyDLL(None)


def make(memory: mmap.mmap, at_bytes: int) -> None:
    """Initialise a mutex in a mapping that nobody else uses yet.

    Raises:
        OSError: the system knows no such mutexes.
    """
    attributes = ctypes.create_string_buffer(64)  # pthread_mutexattr_t: 4 bytes on glibc
    here = ctypes.c_char.from_buffer(memory, at_bytes)
    for code in (
        _libc.pthread_mutexattr_init(attributes),
        _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST),
        _libc.pthread_mutex_init(ctypes.byref(here), attributes),
    ):
        if code:
            raise OSError(code, os.strerror(code))


class RobustMutex:
    """A mutex made by ``make``, as one process sees it. ``where`` names the segment in errors.

    Attributes:
        release: unlocks. waits: times that somebody else held it.

    Guards: NEXT, PREVIOUS and the list block of the form `shared`.
    Thread: one, the posting thread (attach excepted, which comes before).
    """

    def __init__(self, memory: mmap.mmap, words: memoryview, at_bytes: int, where: str) -> None:
        self._words = words
        self._word = at_bytes // 8
        self._kind_word = self._word + _KIND_WORD
        self._where = where
        # The address outlives the ctypes object: the mapping does not move until it is closed.
        self._address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory, at_bytes)))
        self._trylock = _libc.pthread_mutex_trylock
        unlock = _libc.pthread_mutex_unlock
        self.release: Callable[[], int] = functools.partial(unlock, self._address)
        self.waits = 0

    def acquire(self) -> bool:
        """Lock; False if a living process held it all the time.

        Raises:
            MailboxCorrupt: the mutex was overwritten, or a repair has failed before.
        """
        code = self.attempt()
        return not code or self.settle(code)

    def attempt(self) -> int:
        """Try to lock; 0 if that was all, else ``settle`` must be asked.

        Raises:
            MailboxCorrupt: the mutex was overwritten.
        """
        if self._words[self._kind_word] & 0xFFFFFFFF != _KIND:
            raise MailboxCorrupt(self._where, "the mutex was overwritten")
        return self._trylock(self._address)  # type: ignore[no-any-return]

    def settle(self, code: int) -> bool:
        """What follows an ``attempt`` that was not 0: wait, or take over from the dead; see ``acquire``."""
        if code == errno.EBUSY:
            if self._words[self._word] & _TID_MASK == threading.get_native_id():
                return True  # an exception of a signal handler came right behind our own trylock
            code = self._wait()
            if code == errno.EBUSY:
                return False
        if code == errno.EOWNERDEAD:
            code = _libc.pthread_mutex_consistent(self._address)
        if code:
            raise MailboxCorrupt(self._where, f"the mutex cannot be locked ({os.strerror(code)})")
        return True

    def _wait(self) -> int:
        self.waits += 1
        deadline = Deadline(PATIENCE_S)
        tries = 0
        while True:
            code: int = self._trylock(self._address)
            if code != errno.EBUSY:
                return code
            tries += 1
            if tries < _SPINS:
                continue
            if tries < _YIELDS:
                os.sched_yield()
                continue
            if deadline.passed:
                self._check_holder()
                return code
            time.sleep(_NAP_S)

    def _check_holder(self) -> None:
        """The kernel frees the mutex of a holder that dies: one that does not exist never held it."""
        holder = self._words[self._word] & _TID_MASK
        if not os.path.exists(f"/proc/{holder}") and self._words[self._word] & _TID_MASK == holder:
            raise MailboxCorrupt(self._where, f"the mutex names a holder, {holder}, that does not exist")
