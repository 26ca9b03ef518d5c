"""The form `shared`: one list for all senders, in order of arrival, linked under a robust mutex (M1, M8).

Slots, rings and quotas stay as in ``writer``: each sender fills and frees its own. Only linking and unlinking
touch what others touch too, NEXT, PREVIOUS and the list block; they alone are locked, takers never are.

    link     DIRTY = all; PREVIOUS of the chain; *NEXT of the predecessor* (the commit); PREVIOUS of the
             successor, or TAIL; URGENT and FRONT if urgent; DIRTY = 0
    unlink   a run of neighbours: DIRTY = its first slot; *NEXT of the predecessor*; PREVIOUS of the
             successor; URGENT; STATE = free of each; the next run; at last DIRTY = 0

**Mutex.** A robust, process-shared pthread mutex. When a holder dies the kernel marks it, and the next
``acquire`` gets it together with that news (EOWNERDEAD), which the *first* ``trylock`` may already bring: the
mutex then belongs to the caller. What the dead holder left half done follows from the list's DIRTY word, not
from that news, so that a death during repair, and an exception within the locked part, need no case of their
own. ``acquire`` never waits long: the locked part is a handful of stores. A holder that was stopped (SIGSTOP,
a debugger) makes it return False after ``PATIENCE_S``.

glibc follows no pointer of the mutex that it has not written itself under the lock, as long as its kind is
the one made here; hence the kind is checked each time. Calls go through ``PyDLL`` (the interpreter's lock is
kept): a trylock is shorter than giving that lock away. Source: pthread_mutexattr_setrobust(3); glibc,
bits/struct_mutex.h for x86-64 (offsets of lock and kind).

**Repair.** The forward chain is valid after every store, everything else follows from it. The process that
gets the lock and finds DIRTY walks forward once, rewrites PREVIOUS, TAIL and URGENT, frees the run that DIRTY
names if it is linked no more (its slots still name each other), announces the front, and clears DIRTY last: a
death during repair leaves DIRTY, and the next one repeats it. What a dead process unlinked is thus freed
before anything else is unlinked; takers rely on that.

What a dead sender has filled but not linked is freed when its name is attached again; until then it costs
the others nothing. Messages it had linked are taken as usual.

Thread: one, the posting thread; other processes exclude each other by the mutex.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from pmdaemon.mailbox.errors import MailboxBusy, MailboxCorrupt
from pmdaemon.mailbox.layout import (
    FLAG_URGENT,
    FREE,
    L_DIRTY,
    L_FRONT,
    L_HEAD,
    L_MUTEX,
    L_TAIL,
    L_URGENT,
    MASK32,
    READY,
    S_CHECK,
    S_NEXT,
    S_PREVIOUS,
    SLOT_WORDS,
    TAKEN,
)
from pmdaemon.mailbox.writer import Copy, LaneWriter, SenderPlace
from pmdaemon.runtime.clock import Deadline

PATIENCE_S: Final = 0.1
"""Time for a living holder to be given a processor; the locked part itself takes microseconds."""
_SPINS: Final = 20  # longer than one locked part
_YIELDS: Final = 200  # then let a holder run that shares this processor; then sleep in small pieces
_NAP_S: Final = 0.0002
_KIND_WORD: Final = 2  # low half: __kind, at byte 16
_KIND: Final = 16 | 128  # PTHREAD_MUTEX_ROBUST_NORMAL_NP | PTHREAD_MUTEX_PSHARED_BIT
_TID_MASK: Final = 0x3FFFFFFF
_PROCESS_SHARED: Final = 1
_ROBUST: Final = 1

_libc: Final = ctypes.PyDLL(None)


def make_mutex(memory: mmap.mmap, at_bytes: int) -> None:
    """Initialise a mutex in a mapping that no other process uses yet.

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
    """A mutex made by ``make_mutex``, as one process sees it. ``where`` names the segment in errors.

    Attributes:
        release: unlocks. waits: times that another process held it.

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
        return not code or self.finish(code)

    def attempt(self) -> int:
        """Try to lock; 0 if that was all, else ``finish`` must be asked.

        Raises:
            MailboxCorrupt: the mutex was overwritten.
        """
        if self._words[self._kind_word] & 0xFFFFFFFF != _KIND:
            raise MailboxCorrupt(self._where, "the mutex was overwritten")
        return self._trylock(self._address)  # type: ignore[no-any-return]

    def finish(self, code: int) -> bool:
        """What follows an ``attempt`` that was not 0: wait, or take over from the dead; see ``acquire``."""
        if code == errno.EBUSY:
            if self._words[self._word] & _TID_MASK == threading.get_native_id():
                return True  # an exception of a signal handler came right behind this thread's own trylock
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


_ALL: Final = (1 << 64) - 1  # DIRTY while a chain is linked: no slot needs to be freed


class SharedWriter(LaneWriter):
    """One sender's slots in the list of all.

    Attributes:
        repairs: of the list after the death of a process, made by this one.
    """

    def __init__(self, place: SenderPlace) -> None:
        layout, base = place.layout, place.layout.list_word
        self._mutex = RobustMutex(place.memory, place.words, (base + L_MUTEX) * 8, place.where)
        self._list_head, self._list_tail, self._list_urgent = base + L_HEAD, base + L_TAIL, base + L_URGENT
        self._release = self._mutex.release
        self._attempt = self._mutex.attempt
        self._dirty_word, self._list_front = base + L_DIRTY, base + L_FRONT
        self._all_slots = layout.slots_per_sender * len(layout.participants)
        self._all_words = layout.slots_word(0)
        self._before_words = self._all_words - SLOT_WORDS + S_NEXT  # plus index + 1 slots: a NEXT word
        self._first_reference = place.sender * layout.slots_per_sender + 1
        self.repairs = 0
        super().__init__(place)
        self._front_word = self._list_front

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the mutex, over a list that is in order."""
        self._lock()
        try:
            yield
        finally:
            self._mutex.release()

    def _lock(self) -> None:
        code = self._attempt()
        if code and not self._mutex.finish(code):
            self.busy += 1
            raise MailboxBusy(self._sender, tuple(outlet.recipient for outlet in self._outlets))
        if self._words[self._dirty_word]:
            try:
                self._repair()
            except BaseException:
                self._mutex.release()
                raise

    def _adopt_links(self) -> list[int]:
        with self._locked():
            walked = list(self._walk_all())
        first, end = self._first_reference, self._first_reference + self._slots
        chain = []
        for reference in walked:
            if first <= reference & MASK32 < end:
                slot = (reference & MASK32) - first
                self._refs[slot] = reference
                chain.append(slot)
        return chain

    def _walk_all(self) -> Iterator[int]:
        """References of all linked slots in order, each checked."""
        words, count = self._words, self._all_slots
        seen = bytearray(count)
        reference = words[self._list_head]
        while reference:
            slot = (reference & MASK32) - 1
            if not 0 <= slot < count or seen[slot]:
                raise MailboxCorrupt(self._where, f"link {reference:#x} leads outside the list or back")
            word = self._all_words + slot * SLOT_WORDS
            state = words[word]
            if state >> 8 != reference >> 32 or state & 0xFF not in (READY, TAKEN):
                raise MailboxCorrupt(self._where, f"slot {slot} is linked in state {state:#x}")
            seen[slot] = 1
            yield reference
            reference = words[word + S_NEXT]

    def _repair(self) -> None:
        """Rebuild what follows from the forward chain. Called with the mutex held."""
        words, base = self._words, self._all_words
        self.repairs += 1
        tail = urgent = 0
        linked = bytearray(self._all_slots + 1)
        for reference in self._walk_all():
            number = reference & MASK32
            word = base + (number - 1) * SLOT_WORDS
            if words[word + S_PREVIOUS] != tail:
                words[word + S_PREVIOUS] = tail
            if words[word + S_CHECK] & FLAG_URGENT:
                urgent = number
            linked[number] = 1
            tail = number
        words[self._list_tail] = tail
        words[self._list_urgent] = urgent
        self._free_limbo(words[self._dirty_word], linked)
        if urgent:
            words[self._list_front] = words[self._list_front] + 1 & MASK32
        words[self._dirty_word] = 0

    def _free_limbo(self, number: int, linked: bytearray) -> None:
        """Free the run that begins with slot ``number`` (index + 1), as far as it is linked no more."""
        words = self._words
        while 0 < number <= self._all_slots and not linked[number]:
            word = self._all_words + (number - 1) * SLOT_WORDS
            state = words[word]
            if state & 0xFF != FREE:
                words[word] = ((state >> 8) + 1 & MASK32) << 8 | FREE
            linked[number] = 1  # never twice, whatever is written there
            number = words[word + S_NEXT] & MASK32

    def _next_word_of(self, number: int) -> int:
        """Index of the NEXT word of a slot named by index + 1; of the list's HEAD for 0."""
        if number > self._all_slots:
            raise MailboxCorrupt(self._where, f"slot {number} is named, there are {self._all_slots}")
        return self._all_words + (number - 1) * SLOT_WORDS + S_NEXT if number else self._list_head

    def _link(self, chain: Sequence[int], copies: Sequence[Copy], urgent: bool) -> None:
        words = self._words
        self._fill(chain, copies, 0, urgent)
        first = self._refs[chain[0]]
        last = chain[-1] + self._first_reference
        self._lock()
        try:
            left = words[self._list_urgent if urgent else self._list_tail]
            left_next = self._next_word_of(left)
            behind = words[left_next]
            behind_previous = self._next_word_of(behind & MASK32) - S_NEXT + S_PREVIOUS
            words[self._dirty_word] = _ALL
            number = left
            for slot in chain:
                words[self._state_word[slot] + S_PREVIOUS] = number
                number = slot + self._first_reference
            if behind:
                words[self._state_word[chain[-1]] + S_NEXT] = behind
            words[left_next] = first  # the commit
            words[behind_previous if behind else self._list_tail] = last
            if urgent:
                words[self._list_urgent] = last
                self._announce_urgent()
            words[self._dirty_word] = 0
        finally:
            self._mutex.release()

    def _append(self, slot: int, reference: int) -> None:
        words, tail_word, dirty_word = self._words, self._list_tail, self._dirty_word
        self._lock()
        try:
            tail = words[tail_word]
            if 0 < tail <= self._all_slots:
                tail_next = self._before_words + tail * SLOT_WORDS
            else:
                tail_next = self._next_word_of(tail)
            words[dirty_word] = _ALL
            words[self._state_word[slot] + S_PREVIOUS] = tail
            words[tail_next] = reference  # the commit
            words[tail_word] = slot + self._first_reference
            words[dirty_word] = 0
        finally:
            self._release()

    def _unlink(self, slots: Sequence[int]) -> None:
        words, refs, state_word, count = self._words, self._refs, self._state_word, len(slots)
        at = 0
        with self._locked():
            while at < count:
                begin, word = at, state_word[slots[at]]
                at += 1
                behind = words[word + S_NEXT]
                while at < count and behind == refs[slots[at]]:
                    beyond = words[state_word[slots[at]] + S_NEXT]
                    if not beyond:
                        break  # the tail: parked in the next round
                    behind = beyond
                    at += 1
                if not behind:
                    self._parked.append(slots[begin])
                    continue
                self._unlink_run(slots[begin:at], words[word + S_PREVIOUS], behind)
            words[self._dirty_word] = 0

    def _unlink_run(self, run: Sequence[int], left: int, behind: int) -> None:
        """Unlink neighbours between the slot ``left`` (index + 1) and the one that ``behind`` refers to."""
        words = self._words
        left_next = self._next_word_of(left)
        if words[left_next] != self._refs[run[0]]:
            raise MailboxCorrupt(self._where, f"slot {run[0]} is not where its neighbour points")
        right_previous = self._next_word_of(behind & MASK32) - S_NEXT + S_PREVIOUS
        words[self._dirty_word] = run[0] + self._first_reference
        words[left_next] = behind
        words[right_previous] = left
        if words[self._list_urgent] - self._first_reference in run:
            words[self._list_urgent] = left
        self._free_run(run)
