"""A lane as its sender sees it: the linked list it alone writes.

Form `lanes`: every sender has a list of its own, so linking needs no lock; what is given up is the total
order between senders (M1). The form `shared` (one list for all, linked under a robust mutex) would replace
``_link`` and ``_unlink`` and keep slots, rings and takers as they are.

**Post.** Slots for all recipients are filled and chained among themselves; then *one* store, the
predecessor's NEXT, makes the whole chain visible. x86-64 keeps stores in order, so whoever sees that store
sees the slots. An urgent chain goes behind the last urgent slot still linked, so urgent slots always form
the front of the list; FRONT is counted up to tell takers to look there.

**Reclaim.** Only a recipient marks a slot TAKEN, only the sender frees it, later, when it posts. Per route,
from the oldest payload on: ring space is free as soon as the slot is TAKEN; the slot is unlinked (one
store), then freed (one store: generation + 1). The list's tail is never unlinked: it is *parked* and goes
when another has become the tail. A slot is freed before the next one is unlinked; takers rely on that
(``lookahead``).

**What a crash can leave.** After every single store the chain from HEAD is valid. Slots may be filled but
not linked, or unlinked but not freed: ``adopt`` frees whatever is not reachable. It only repeats such
stores, so it may itself die anywhere. HEAD, NEXT, STATE are shared; everything else here is a private
mirror that ``adopt`` rebuilds. ``_interrupted`` is set while shared memory and mirror differ; if an
exception leaves it set, the next post adopts first.

Thread: one, the posting thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

from pmdaemon.mailbox.doorbell import Ringer
from pmdaemon.mailbox.errors import MailboxCorrupt, MessageTooLarge
from pmdaemon.mailbox.layout import (
    C_FRONT,
    C_HEAD,
    C_SEQUENCE,
    COUNT_LIMIT,
    FLAG_URGENT,
    FREE,
    MASK32,
    READY,
    S_ADDRESS,
    S_CHECK,
    S_NEXT,
    S_POSITION,
    S_SEQUENCE,
    S_STATE,
    SLOT_WORDS,
    TAKEN,
    Layout,
)
from pmdaemon.mailbox.ring import Outlet

RECLAIM_BATCH: Final = 64
"""Look for taken slots once in so many posts of a route: the look is amortised, and the list that a taker
walks after a reset holds at most that many dead slots a route."""


class LaneWriter:
    """The list of one sender.

    Attributes:
        posts, bytes_posted: copies linked, and their payload bytes. full: copies refused.
        linked, reclaimed: slots since attach.
    """

    def __init__(
        self,
        words: memoryview,
        layout: Layout,
        sender: int,
        outlets: Sequence[Outlet],
        ringer: Ringer,
        where: str,
    ) -> None:
        control = layout.control_word(sender)
        self._words = words
        self._where = where
        self._sender = layout.participants[sender]
        self._slots = layout.slots_per_sender
        self._first_word = layout.slots_word(sender)
        self._head_word = control + C_HEAD
        self._front_word = control + C_FRONT
        self._sequence_word = control + C_SEQUENCE
        self._outlets = outlets
        self._by_address = {outlet.address: outlet for outlet in outlets}
        self._ringer = ringer
        fence = threading.Lock()
        self._fence_in, self._fence_out = fence.acquire, fence.release
        self._state_word = [self._first_word + slot * SLOT_WORDS + S_STATE for slot in range(self._slots)]
        self._next_word = [word + S_NEXT for word in self._state_word]
        self._next_word.append(self._head_word)
        self.posts = self.bytes_posted = self.full = self.reclaimed = 0
        self.adopt()

    def adopt(self) -> None:
        """Rebuild the mirror from shared memory and free what an interrupted post or reclaim left behind.

        Raises:
            MailboxCorrupt: the chain is damaged in a way that no crash of ours can cause.
        """
        self._interrupted = True
        # The mirror is a circle of slots closed by ``root``, which stands for HEAD and for the end.
        root = self._slots
        self._refs = [0] * (root + 1)  # each slot's reference in its present use
        self._starts = [0] * root  # position of its payload
        self._next, self._previous = [root] * (root + 1), [root] * (root + 1)
        self._free: list[int] = []
        self._parked = self._last_urgent = root
        chain = self._walk()
        for before, slot in zip([root, *chain], [*chain, root], strict=True):
            self._next[before], self._previous[slot] = slot, before
        linked = set(chain)
        for slot in range(root - 1, -1, -1):  # downwards, so that slot 0 is used first
            if slot not in linked:
                self._refs[slot] = self._make_free(slot)
                self._free.append(slot)
        self._sequence = self._words[self._sequence_word]
        if self._sequence >= COUNT_LIMIT:
            raise MailboxCorrupt(self._where, f"sequence {self._sequence:#x} is impossible")
        self._adopt_routes(chain)
        if self._last_urgent != root:
            self._announce_urgent()  # we may have died between an urgent link and its announcement
        self._interrupted = False

    def _walk(self) -> list[int]:
        """Slots reachable from HEAD, in order, each checked; notes the last urgent one."""
        words = self._words
        chain: list[int] = []
        seen = bytearray(self._slots)
        reference = words[self._head_word]
        while reference:
            slot = (reference & MASK32) - 1
            if not 0 <= slot < self._slots or seen[slot]:
                raise MailboxCorrupt(self._where, f"link {reference:#x} leads outside the lane or back")
            word = self._first_word + slot * SLOT_WORDS
            state = words[word]
            if state >> 8 != reference >> 32 or state & 0xFF not in (READY, TAKEN):
                raise MailboxCorrupt(self._where, f"slot {slot} is linked in state {state:#x}")
            if words[word + S_CHECK] & FLAG_URGENT:
                self._last_urgent = slot
            seen[slot] = 1
            self._refs[slot] = reference
            chain.append(slot)
            reference = words[word + S_NEXT]
        return chain

    def _make_free(self, slot: int) -> int:
        """Free an unreachable slot if it is not free; returns its reference for the next use."""
        word = self._first_word + slot * SLOT_WORDS + S_STATE
        state = self._words[word]
        generation = state >> 8 & MASK32
        if state & 0xFF != FREE:
            generation = generation + 1 & MASK32
            self._words[word] = generation << 8 | FREE
        return generation << 32 | slot + 1

    def _adopt_routes(self, chain: Iterable[int]) -> None:
        """Rebuild every route's pending slots and ring positions from the linked slots."""
        words = self._words
        found: dict[int, list[tuple[int, int, int]]] = {address: [] for address in self._by_address}
        for slot in chain:
            word = self._first_word + slot * SLOT_WORDS
            address = words[word + S_ADDRESS] & MASK32
            if address not in found:
                raise MailboxCorrupt(self._where, f"slot {slot} is addressed {address:#x}, which is no route")
            # By sequence: it is the order of the ring also where empty payloads share a position.
            found[address].append((words[word + S_SEQUENCE], words[word + S_POSITION], slot))
        for address, entries in found.items():
            outlet = self._by_address[address]
            outlet.pending.clear()
            outlet.written = 0
            waiting = False  # payloads before the first READY slot are free, and may be overwritten already
            for _, position, slot in sorted(entries):
                if position >= COUNT_LIMIT or (outlet.written > position and outlet.pending):
                    raise MailboxCorrupt(self._where, f"payload of slot {slot} lies in an impossible place")
                if not waiting and words[self._state_word[slot]] & 0xFF == READY:
                    waiting = True
                    outlet.freed = position
                self._starts[slot] = position
                outlet.pending.append(slot)
                outlet.written = position + (words[self._state_word[slot] + S_ADDRESS] >> 32) + 7 & -8
            if not waiting:
                outlet.freed = outlet.written
            if outlet.written - outlet.freed > outlet.size:
                raise MailboxCorrupt(self._where, f"more in the ring to {outlet.recipient} than it holds")
            outlet.reclaim_at = min(outlet.quota, len(outlet.pending) + RECLAIM_BATCH)

    def post(self, outlets: Sequence[Outlet], payload: bytes | memoryview, urgent: bool) -> list[Outlet]:
        """Link one copy of ``payload`` for each outlet that has room; returns the outlets that had none.

        Raises:
            MessageTooLarge: it can never fit one of the rings; nothing was posted.
            MailboxCorrupt: a stranger wrote into this lane.
        """
        if self._interrupted:
            self.adopt()
        length = len(payload)
        need = length + 7 & -8
        full: list[Outlet] = []
        for outlet in outlets:
            size = outlet.size
            if length >= size:
                raise MessageTooLarge(self._sender, outlet.recipient, length, size)
            if len(outlet.pending) >= outlet.reclaim_at or outlet.written + need - outlet.freed > size:
                self._reclaim(outlet)
                if len(outlet.pending) >= outlet.quota or outlet.written + need - outlet.freed > size:
                    full.append(outlet)
        if full:
            self.full += len(full)
            outlets = [outlet for outlet in outlets if outlet not in full]
            if not outlets:
                return full
        self._link(outlets, payload, need, urgent)
        # Race: our link must be visible before we load SLEEP, as the sleeper's SLEEP is before it looks once
        # more; else each could miss the other's store. A lock's acquire is a full fence on x86-64.
        self._fence_in()
        self._fence_out()
        words = self._words
        for outlet in outlets:
            if words[outlet.sleep_word]:
                # Cleared before the ring: cleared after it, we might wipe out the *next* sleep's word.
                words[outlet.sleep_word] = 0
                self._ringer.ring(outlet.recipient)
        return full

    def _link(self, outlets: Sequence[Outlet], payload: bytes | memoryview, need: int, urgent: bool) -> None:
        """Fill one slot for each outlet, last one first, and make the chain visible by one store."""
        words, refs, after, before = self._words, self._refs, self._next, self._previous
        length = len(payload)
        check = crc32(payload) | (FLAG_URGENT if urgent else 0)
        self._interrupted = True
        self._sequence = sequence = self._sequence + 1
        # Stored before the link: a number may be lost in a crash, never used twice.
        words[self._sequence_word] = sequence
        left = self._last_urgent if urgent else before[self._slots]
        following = right = after[left]
        reference = refs[right]
        for outlet in reversed(outlets):
            slot = self._free.pop()  # cannot fail: the quotas add up to less than the slots
            position = outlet.written
            if length:
                outlet.ring.write(position, payload, length)
            word = self._state_word[slot]
            words[word + S_NEXT] = reference
            words[word + S_ADDRESS] = length << 32 | outlet.address
            words[word + S_POSITION] = position
            words[word + S_CHECK] = check
            words[word + S_SEQUENCE] = sequence
            reference = refs[slot]
            words[word] = reference >> 32 << 8 | READY
            self._starts[slot] = position
            after[slot] = following
            before[following] = slot
            following = slot
            outlet.written = position + need
            outlet.pending.append(slot)
        words[self._next_word[left]] = reference  # the commit
        after[left] = following
        before[following] = left
        if urgent:
            self._last_urgent = before[right]
            self._announce_urgent()
        self._interrupted = False
        self.posts += len(outlets)
        self.bytes_posted += length * len(outlets)

    def _announce_urgent(self) -> None:
        """Tell takers to look at the head. Without it their own resets (M5) find the chain, later."""
        self._words[self._front_word] = self._words[self._front_word] + 1 & MASK32

    def _reclaim(self, outlet: Outlet) -> None:
        """Free what the outlet's recipient has taken, oldest first.

        Raises:
            MailboxCorrupt: a pending slot is in a state that neither we nor its recipient store.
        """
        words, root = self._words, self._slots
        tail = self._previous[root]
        self._interrupted = True
        if self._parked not in (root, tail):
            self._unlink(self._parked)
            self._parked = root
        pending = outlet.pending
        while pending:
            slot = pending[0]
            ready = self._refs[slot] >> 32 << 8 | READY
            state = words[self._state_word[slot]]
            if state == ready:
                break
            if state != ready - READY + TAKEN:
                raise MailboxCorrupt(self._where, f"slot {slot} turned from {ready:#x} into {state:#x}")
            pending.popleft()
            if slot == tail:
                self._parked = slot
            else:
                self._unlink(slot)
        outlet.freed = self._starts[pending[0]] if pending else outlet.written
        outlet.reclaim_at = min(outlet.quota, len(pending) + RECLAIM_BATCH)
        self._interrupted = False

    def _unlink(self, slot: int) -> None:
        """Take a slot that is not the tail out of the list, then free it."""
        words, after, before = self._words, self._next, self._previous
        left, right = before[slot], after[slot]
        words[self._next_word[left]] = self._refs[right]
        generation = (self._refs[slot] >> 32) + 1 & MASK32
        words[self._state_word[slot]] = generation << 8 | FREE
        after[left] = right
        before[right] = left
        self._refs[slot] = generation << 32 | slot + 1
        self._free.append(slot)
        self.reclaimed += 1
        if slot == self._last_urgent:  # what stands before an urgent slot is urgent, or the head
            self._last_urgent = left

    def fill_ratio(self, outlet: Outlet) -> float:
        """Share of the outlet's ring that holds payloads not taken yet, 0 to 1. Any thread; approximate."""
        waiting = 0
        for slot in list(outlet.pending):
            word = self._state_word[slot]
            if self._words[word] & 0xFF == READY:
                waiting += (self._words[word + S_ADDRESS] >> 32) + 7 & -8
        return min(1.0, waiting / outlet.size)
