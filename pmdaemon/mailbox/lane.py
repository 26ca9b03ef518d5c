"""The posting side: slots, rings and links of one sender. This class is the form `lanes`.

Form `lanes`: every sender has a list of its own, so linking needs no lock; what is given up is the total
order between senders (M1). The form `shared` (module ``shared``) replaces how a chain is linked, unlinked and
walked; slots, rings, quotas and takers are the same.

**Post.** Slots for all copies are filled and chained among themselves; then *one* store, the
predecessor's NEXT, makes the whole chain visible. x86-64 keeps stores in order, so whoever sees that store
sees the slots. An urgent chain goes behind the last urgent slot still linked, so urgent slots always form
the front of the list; FRONT is counted up to tell takers to look there.

**Reclaim.** Only a recipient marks a slot TAKEN, only the sender frees it, later, when it posts. Per route,
from the oldest payload on: ring space is free as soon as the slot is TAKEN; the slot is unlinked (one
store for a run of neighbours), then freed (one store each: generation + 1). The list's tail is never
unlinked: it is *parked* and goes when another has become the tail. A run is freed entirely before the next
one is unlinked; takers rely on that (``lookahead``).

**What a crash can leave.** After every single store the chain from HEAD is valid. Slots may be filled but
not linked, or unlinked but not freed: ``adopt`` frees whatever is not reachable. It only repeats such
stores, so it may itself die anywhere. HEAD, NEXT, STATE are shared; everything else here is a private
mirror that ``adopt`` rebuilds. ``_interrupted`` is set while shared memory and mirror differ; if an
exception leaves it set, the next post adopts first.

Thread: one, the posting thread.
"""

from __future__ import annotations

import mmap
import struct
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
from pmdaemon.mailbox.ring import CRC_BYTES, Outlet, checksum

_NEXT_GENERATION: Final = 1 << 32
_pack: Final = struct.Struct("=6Q").pack  # STATE to SEQUENCE of a slot that nobody can reach yet
Copy = tuple[Outlet, bytes | memoryview]

RECLAIM_BATCH: Final = 64
"""Look for taken slots once in so many posts of a route: the look is amortised, and the list that a taker
walks after a reset holds at most that many dead slots a route."""


class LaneWriter:
    """One sender's slots, and in the form `lanes` the list they stand in.

    Attributes:
        posts, bytes_posted: copies linked, and their payload bytes. full: copies refused.
        reclaimed: slots freed since attach. busy: posts refused because the list was locked (`shared`).
    """

    _first_reference = 1  # of slot 0 in its generation 0

    def __init__(
        self,
        memory: mmap.mmap,
        words: memoryview,
        layout: Layout,
        sender: int,
        outlets: Sequence[Outlet],
        ringer: Ringer,
        where: str,
    ) -> None:
        control = layout.control_word(sender)
        self._memory = memory
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
        self._at_bytes = [word * 8 for word in self._state_word]
        self._next_word = [word + S_NEXT for word in self._state_word]
        self._next_word.append(self._head_word)
        self.posts = self.bytes_posted = self.full = self.reclaimed = self.busy = 0
        self.adopt()

    def adopt(self) -> None:
        """Rebuild the mirror from shared memory and free what an interrupted post or reclaim left behind.

        Raises:
            MailboxCorrupt: the chain is damaged in a way that no crash of ours can cause.
            MailboxBusy: the list is locked by a process that is stopped.
        """
        self._interrupted = True
        root = self._slots
        self._refs = [0] * (root + 1)  # each slot's reference in its present use
        self._starts = [0] * root  # position of its payload
        self._free: list[int] = []
        self._parked: list[int] = []  # taken, but still linked: the tail
        chain = self._adopt_links()
        linked = set(chain)
        for slot in range(root - 1, -1, -1):  # downwards, so that slot 0 is used first
            if slot not in linked:
                self._refs[slot] = self._make_free(slot)
                self._free.append(slot)
        self._sequence = self._words[self._sequence_word]
        if self._sequence >= COUNT_LIMIT:
            raise MailboxCorrupt(self._where, f"sequence {self._sequence:#x} is impossible")
        self._adopt_routes(chain)
        self._interrupted = False

    def _adopt_links(self) -> list[int]:
        """Rebuild the mirror of the list; returns our linked slots in order."""
        # The mirror is a circle of slots closed by ``root``, which stands for HEAD and for the end.
        root = self._slots
        self._next, self._previous = [root] * (root + 1), [root] * (root + 1)
        self._last_urgent = root
        chain = self._walk()
        for before, slot in zip([root, *chain], [*chain, root], strict=True):
            self._next[before], self._previous[slot] = slot, before
        if self._last_urgent != root:
            self._announce_urgent()  # we may have died between an urgent link and its announcement
        return chain

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
        return generation << 32 | slot + self._first_reference

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
            MailboxBusy: the list is locked by a process that is stopped; nothing was posted.
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
        self._interrupted = True
        self._link([(outlet, payload) for outlet in outlets], 0, urgent)
        self._interrupted = False
        # Race: our link must be visible before we load SLEEP, as the sleeper's SLEEP is before it looks once
        # more; else each could miss the other's store. A lock's acquire is a full fence on x86-64.
        self._fence_in()
        self._fence_out()
        for outlet in outlets:
            if self._words[outlet.sleep_word]:
                self._wake(outlet)
        return full

    def post_many(self, outlet: Outlet, payloads: Sequence[bytes | memoryview], urgent: bool) -> int:
        """Link the first payloads that find room as one chain; returns their number.

        Raises:
            MessageTooLarge, MailboxBusy, MailboxCorrupt: as ``post``; nothing was posted.
        """
        if self._interrupted:
            self.adopt()
        needs = [len(payload) + 7 & -8 for payload in payloads]
        longest = max(map(len, payloads), default=0)
        if longest >= outlet.size:
            raise MessageTooLarge(self._sender, outlet.recipient, longest, outlet.size)
        count = len(payloads)
        total = sum(needs)
        if (
            len(outlet.pending) + count > outlet.reclaim_at
            or total > outlet.size - outlet.written + outlet.freed
        ):
            self._reclaim(outlet)
            room = outlet.size - outlet.written + outlet.freed
            count = min(count, outlet.quota - len(outlet.pending))
            while count and sum(needs[:count]) > room:
                count -= 1
            self.full += len(payloads) - count
        if count:
            self._interrupted = True
            self._link([(outlet, payload) for payload in payloads[:count]], 1, urgent)
            self._interrupted = False
            self._fence_in()  # as in ``post``
            self._fence_out()
            if self._words[outlet.sleep_word]:
                self._wake(outlet)
        return count

    def _wake(self, outlet: Outlet) -> None:
        # Cleared before the ring: cleared after it, we might wipe out the *next* sleep's word.
        self._words[outlet.sleep_word] = 0
        self._ringer.ring(outlet.recipient)

    def post_one(self, outlet: Outlet, payload: bytes) -> bool:
        """``post`` of one copy, not urgent: the usual case, laid out flat. False if there was no room.

        Raises:
            MessageTooLarge, MailboxBusy, MailboxCorrupt: as ``post``.
        """
        length = len(payload)
        position = outlet.written
        written = position + (length + 7 & -8)
        pending = outlet.pending
        if (
            self._interrupted
            or len(pending) >= outlet.reclaim_at
            or written - outlet.freed > outlet.size
            or length >= outlet.size
        ):
            return not self.post((outlet,), payload, False)
        words, memory = self._words, self._memory
        self._interrupted = True
        self._sequence = sequence = self._sequence + 1
        words[self._sequence_word] = sequence
        slot = self._free.pop()
        start = outlet.start + position % outlet.size
        if start + length <= outlet.end:
            memory[start : start + length] = payload
        else:
            outlet.ring.write(position, payload, length)
        at_bytes = self._at_bytes[slot]
        reference = self._refs[slot]
        # Filled by one copy, see ``_fill``.
        memory[at_bytes : at_bytes + 48] = _pack(
            reference >> 32 << 8 | READY,
            0,
            length << 32 | outlet.address,
            position,
            crc32(payload) if length <= CRC_BYTES else checksum(payload),
            sequence,
        )
        self._starts[slot] = position
        outlet.written = written
        pending.append(slot)
        self._append(slot, reference)
        self._interrupted = False
        self.posts += 1
        self.bytes_posted += length
        self._fence_in()  # as in ``post``
        self._fence_out()
        if words[outlet.sleep_word]:
            self._wake(outlet)
        return True

    def _append(self, slot: int, reference: int) -> None:
        """Link one filled slot, whose NEXT is 0, at the end."""
        after, before, root = self._next, self._previous, self._slots
        tail = before[root]
        self._words[self._next_word[tail]] = reference  # the commit
        after[tail] = before[root] = slot
        before[slot] = tail
        after[slot] = root

    def _fill(self, copies: Sequence[Copy], step: int, behind: int) -> list[int]:
        """Fill a slot for each copy and chain them; the last one's NEXT becomes ``behind``.

        Their sequence is the next one, plus ``step`` for each after the first. A slot is filled by one copy,
        in no order of its words: nobody can reach it yet, and a stale look-ahead knows it by its new
        generation, which it got when it was freed. (Many copies at once: hence the local names.)
        """
        refs, free, memory, at_bytes_of, starts = (
            self._refs,
            self._free,
            self._memory,
            self._at_bytes,
            self._starts,
        )
        sequence = self._sequence + 1
        self._sequence = sequence + step * (len(copies) - 1)
        # Stored before the link: a number may be lost in a crash, never used twice.
        self._words[self._sequence_word] = self._sequence
        chain = []
        slot = free.pop()  # cannot fail: the quotas add up to less than the slots
        left = len(copies)
        total = 0
        before: bytes | memoryview | None = None
        for outlet, payload in copies:
            left -= 1
            following = free.pop() if left else -1
            if payload is not before:
                before = payload
                length = len(payload)
                check = crc32(payload) if length <= CRC_BYTES else checksum(payload)
            position = outlet.written
            start = outlet.start + position % outlet.size
            if start + length <= outlet.end:
                memory[start : start + length] = payload
            else:
                outlet.ring.write(position, payload, length)
            at_bytes = at_bytes_of[slot]
            memory[at_bytes : at_bytes + 48] = _pack(
                refs[slot] >> 32 << 8 | READY,
                refs[following] if left else behind,
                length << 32 | outlet.address,
                position,
                check,
                sequence,
            )
            starts[slot] = position
            outlet.written = position + (length + 7 & -8)
            outlet.pending.append(slot)
            chain.append(slot)
            slot = following
            sequence += step
            total += length
        self.posts += len(chain)
        self.bytes_posted += total
        return chain

    def _link(self, copies: Sequence[Copy], step: int, urgent: bool) -> None:
        """Fill a chain and make it visible by one store."""
        after, before, root = self._next, self._previous, self._slots
        left = self._last_urgent if urgent else before[root]
        right = after[left]
        chain = self._fill(copies, step, self._refs[right])
        if urgent:
            self._flag_urgent(chain)
        self._words[self._next_word[left]] = self._refs[chain[0]]  # the commit
        for slot in chain:
            after[left] = slot
            before[slot] = left
            left = slot
        after[left] = right
        before[right] = left
        if urgent:
            self._last_urgent = left
            self._announce_urgent()

    def _flag_urgent(self, chain: Sequence[int]) -> None:
        for slot in chain:
            self._words[self._state_word[slot] + S_CHECK] |= FLAG_URGENT

    def _announce_urgent(self) -> None:
        """Tell takers to look at the head. Without it their own resets (M5) find the chain, later."""
        self._words[self._front_word] = self._words[self._front_word] + 1 & MASK32

    def _reclaim(self, outlet: Outlet) -> None:
        """Free what the outlet's recipient has taken, oldest first.

        Raises:
            MailboxCorrupt: a pending slot is in a state that neither we nor its recipient store.
            MailboxBusy: the list is locked by a process that is stopped.
        """
        words, pending, refs, state_word = self._words, outlet.pending, self._refs, self._state_word
        self._interrupted = True
        done, self._parked = self._parked, []
        while pending:
            slot = pending[0]
            state = words[state_word[slot]]
            if state != refs[slot] >> 32 << 8 | TAKEN:
                if state != refs[slot] >> 32 << 8 | READY:
                    raise MailboxCorrupt(self._where, f"slot {slot} turned into {state:#x}")
                break
            done.append(pending.popleft())
        outlet.freed = self._starts[pending[0]] if pending else outlet.written
        if done:
            self._unlink(done)
        outlet.reclaim_at = min(outlet.quota, len(pending) + RECLAIM_BATCH)
        self._interrupted = False

    def _unlink(self, slots: Sequence[int]) -> None:
        """Take slots out of the list, runs of neighbours at once, and free them; the tail is parked."""
        after, before, count = self._next, self._previous, len(slots)
        tail = before[self._slots]
        at = 0
        while at < count:
            begin, slot = at, slots[at]
            at += 1
            if slot == tail:
                self._parked.append(slot)
                continue
            right = after[slot]
            while at < count and slots[at] == right and right != tail:
                right = after[right]
                at += 1
            left = before[slot]
            self._words[self._next_word[left]] = self._refs[right]
            after[left] = right
            before[right] = left
            run = slots[begin:at]
            if self._last_urgent in run:  # what stands before an urgent slot is urgent, or the head
                self._last_urgent = left
            self._free_run(run)

    def _free_run(self, run: Sequence[int]) -> None:
        """Free slots that were just unlinked; what refers to their present use is void from here on."""
        words, refs, state_word = self._words, self._refs, self._state_word
        for slot in run:
            reference = refs[slot] + _NEXT_GENERATION
            if reference >> 64:
                reference -= 1 << 64
            words[state_word[slot]] = reference >> 32 << 8 | FREE
            refs[slot] = reference
        self._free.extend(run)
        self.reclaimed += len(run)

    def fill_ratio(self, outlet: Outlet) -> float:
        """Share of the outlet's ring that holds payloads not taken yet, 0 to 1. Any thread; approximate."""
        waiting = 0
        for slot in list(outlet.pending):
            word = self._state_word[slot]
            if self._words[word] & 0xFF == READY:
                waiting += (self._words[word + S_ADDRESS] >> 32) + 7 & -8
        return min(1.0, waiting / outlet.size)
