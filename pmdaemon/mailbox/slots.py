"""A sender's slots: its private mirror of them, their repair at attach, and how they become free again.

HEAD, NEXT, STATE are shared; everything else here is a private mirror that ``adopt`` rebuilds from them.
``_interrupted`` is set while shared memory and mirror differ; if an exception leaves it set, the next post
adopts first.

**Reclaim.** Only a recipient marks a slot TAKEN, only the sender frees it, later, when it posts. Per route,
from the oldest payload on: ring space is free as soon as the slot is TAKEN; the slot is unlinked (one
store for a run of neighbours), then freed (one store each: generation + 1). The list's tail is never
unlinked: it is *parked* and goes when another has become the tail. A run is freed entirely before the next
one is unlinked, and from its front to its back, also by ``adopt``; takers rely on that (``lookahead``).

**What a crash can leave.** After every single store the chain from HEAD is valid. Slots may be filled but
not linked, or unlinked but not freed: ``adopt`` frees whatever is not reachable. It only repeats such
stores, so it may itself die anywhere.

Thread: one, the posting thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import Final

from pmdaemon.mailbox.errors import MailboxCorrupt
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

_NEXT_GENERATION: Final = 1 << 32

RECLAIM_BATCH: Final = 64
"""Look for taken slots once in so many slots of a route: the look is amortised, and the list that a taker
walks after a reset holds at most that many dead slots a route."""


class SlotKeeper:
    """One sender's slots, and in the form `lanes` the list they stand in.

    Attributes:
        reclaimed: slots freed since attach.
    """

    _first_reference = 1  # of slot 0 in its generation 0

    def __init__(
        self,
        memory: mmap.mmap,
        words: memoryview,
        layout: Layout,
        sender: int,
        outlets: Sequence[Outlet],
        where: str,
    ) -> None:
        control = layout.control_word(sender)
        self._memory = memory
        self._words = words
        self._where = where
        self._slots = layout.slots_per_sender
        self._first_word = layout.slots_word(sender)
        self._head_word = control + C_HEAD
        self._front_word = control + C_FRONT
        self._sequence_word = control + C_SEQUENCE
        self._outlets = outlets
        self._by_address = {outlet.address: outlet for outlet in outlets}
        self._state_word = [self._first_word + slot * SLOT_WORDS + S_STATE for slot in range(self._slots)]
        self._at_bytes = [word * 8 for word in self._state_word]
        self._next_word = [word + S_NEXT for word in self._state_word]
        self._next_word.append(self._head_word)
        self.reclaimed = 0

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
        self._parked: list[int] = []  # taken, but still linked: the tail
        chain = self._adopt_links()
        linked = set(chain)
        for slot in self._front_to_back(linked):
            self._refs[slot] = self._make_free(slot)
        self._free = [slot for slot in range(root - 1, -1, -1) if slot not in linked]  # slot 0 is used first
        self._states = [reference >> 32 << 8 for reference in self._refs]  # its generation as in STATE
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

    def _front_to_back(self, linked: set[int]) -> list[int]:
        """All slots that are not linked, each in front of the one that its NEXT names.

        Race: a taker may stand in a run that was unlinked and not freed. Were a slot freed before the one
        that names it, that taker would find a link that its holder has not changed to a slot that is free.
        """
        words, first = self._words, self._first_word
        named_by = [0] * self._slots  # how many slots of such runs name it
        names: dict[int, int] = {}
        for slot in range(self._slots):
            word = first + slot * SLOT_WORDS
            reference = words[word + S_NEXT]
            named = (reference & MASK32) - self._first_reference
            if slot in linked or words[word] & 0xFF == FREE or not 0 <= named < self._slots:
                continue
            if words[first + named * SLOT_WORDS] >> 8 == reference >> 32:  # else it names an earlier use
                names[slot] = named
                named_by[named] += 1
        ordered = [slot for slot in range(self._slots) if slot not in linked and not named_by[slot]]
        for slot in ordered:  # grows meanwhile
            named = names.get(slot, slot)
            named_by[named] -= 1
            if not named_by[named] and named not in linked:
                ordered.append(named)
        # What names itself in a circle is damage that nobody can reach: any order will do.
        return ordered + [slot for slot in range(self._slots) if slot not in linked and named_by[slot] > 0]

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
            self._adopt_route(self._by_address[address], sorted(entries))

    def _adopt_route(self, outlet: Outlet, entries: Sequence[tuple[int, int, int]]) -> None:
        """``entries``: (sequence, position, slot) of its linked slots, in the order of its ring."""
        words = self._words
        outlet.pending.clear()
        written = freed = 0
        waiting = False  # payloads before the first READY slot are free, and may be overwritten already
        for _, position, slot in entries:
            if position >= COUNT_LIMIT or (written > position and outlet.pending):
                raise MailboxCorrupt(self._where, f"payload of slot {slot} lies in an impossible place")
            if not waiting and words[self._state_word[slot]] & 0xFF == READY:
                waiting = True
                freed = position
            self._starts[slot] = position
            outlet.pending.append(slot)
            written = position + (words[self._state_word[slot] + S_ADDRESS] >> 32) + 7 & -8
        if not waiting:
            freed = written
        if written - freed > outlet.size:
            raise MailboxCorrupt(self._where, f"more in the ring to {outlet.recipient} than it holds")
        outlet.settle(written, freed)
        outlet.reclaim_at = min(outlet.quota, len(outlet.pending) + RECLAIM_BATCH)
        if outlet.room_word:
            outlet.shut()

    def _announce_urgent(self) -> None:
        """Tell takers to look at the head. Without it their own resets (M5) find the chain, later."""
        self._words[self._front_word] = self._words[self._front_word] + 1 & MASK32

    def _reclaim(self, outlet: Outlet) -> None:
        """Free what the outlet's recipient has taken, oldest first.

        Raises:
            MailboxCorrupt: a pending slot is in a state that neither we nor its recipient store.
            MailboxBusy: the list is locked by a process that is stopped.
        """
        words, pending, states, state_word = self._words, outlet.pending, self._states, self._state_word
        if outlet.room_word:
            if not words[outlet.room_word]:
                return  # its recipient was never started
            outlet.room_word = 0
        self._interrupted = True
        done, self._parked = self._parked, []
        parked = len(done)
        for slot in pending:
            if words[state_word[slot]] - states[slot] != TAKEN:
                if words[state_word[slot]] - states[slot] not in (READY, TAKEN):  # TAKEN: just now
                    raise MailboxCorrupt(self._where, f"slot {slot} turned into {words[state_word[slot]]:#x}")
                break
            done.append(slot)
        for _ in range(len(done) - parked):
            pending.popleft()
        outlet.free_up_to(self._starts[pending[0]] if pending else outlet.written)
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
        words, refs, states, state_word = self._words, self._refs, self._states, self._state_word
        for slot in run:
            reference = refs[slot] + _NEXT_GENERATION
            if reference >> 64:
                reference -= 1 << 64
            refs[slot] = reference
            words[state_word[slot]] = states[slot] = reference >> 32 << 8  # FREE
        self._free.extend(run)
        self.reclaimed += len(run)

    def fill_ratios(self) -> dict[str, float]:
        """``fill_ratio`` of every route, by recipient. Any thread."""
        return {outlet.recipient: self.fill_ratio(outlet) for outlet in self._outlets}

    def fill_ratio(self, outlet: Outlet) -> float:
        """Share of the outlet's ring that holds payloads not taken yet, 0 to 1. Any thread; approximate."""
        waiting = 0
        for slot in list(outlet.pending):
            word = self._state_word[slot]
            if self._words[word] & 0xFF == READY:
                waiting += (self._words[word + S_ADDRESS] >> 32) + 7 & -8
        return min(1.0, waiting / outlet.size)
