"""The posting side: a sender's slots, their filling, linking and reclaim. ``LaneWriter`` is the form `lanes`.

Form `lanes`: every sender has a list of its own, so linking needs no lock; what is given up is the total
order between senders (M1). The form `shared` (``shared_writer``) replaces how a chain is linked, unlinked and
walked; slots, rings, quotas and takers are the same.

**Post.** Slots for all copies are filled and chained among themselves; then *one* store, the
predecessor's NEXT, makes the whole chain visible. x86-64 keeps stores in order, so a process that sees that
store sees the slots. An urgent chain goes behind the last urgent slot still linked, so urgent slots always
form the front of the list; FRONT is counted up so that takers search there.

**Bulk stores.** A slot is filled by one copy of its eight words, and a payload, or a bundle of them
(``ring``), by another, in no order of their words: no process can reach them yet, and a stale look-ahead
knows the slot by its new generation, which it got when it was freed. (Not ``pack_into``: it zeroes its target
first, and a look-ahead into generation 0 would take that for its own.)

**Mirror.** HEAD, NEXT, STATE are shared; everything else here is a private mirror that ``adopt`` rebuilds
from them. ``_interrupted`` is set while shared memory and mirror differ; if an exception leaves it set, the
next post adopts first.

**Reclaim.** Only a recipient marks a slot TAKEN, only the sender frees it, later, when it posts. Per route,
from the oldest payload on: ring space is free as soon as the slot is TAKEN; the slot is unlinked (one
store for a run of neighbours), then freed (one store each: generation + 1). The list's tail is never
unlinked: it is *parked* and goes when another has become the tail. A run is freed entirely before the next
one is unlinked, and from its front to its back, also by ``adopt``; takers rely on that (``reader``).

**What a crash can leave.** After every single store the chain from HEAD is valid. Slots may be filled but
not linked, or unlinked but not freed: ``adopt`` frees whatever is not reachable. It only repeats such
stores, so it may itself die anywhere.

Thread: one, the posting thread.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from pmdaemon.mailbox.doorbell import Ringer
from pmdaemon.mailbox.errors import MailboxCorrupt, MessageTooLarge
from pmdaemon.mailbox.layout import (
    BUNDLE_SHIFT,
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
    SLOT_BYTES,
    SLOT_WORDS,
    TAKEN,
    Layout,
)
from pmdaemon.mailbox.ring import Outlet, Piece, bundle, plan, shrink

_NEXT_GENERATION: Final = 1 << 32

RECLAIM_BATCH: Final = 64
"""Search for taken slots once in so many slots of a route: the search is amortised, and the list that a taker
walks after a reset holds at most that many dead slots a route."""


_pack: Final = struct.Struct("=8Q").pack  # the words of a slot that no process can reach yet
Copy = tuple[Outlet, int, bytes | memoryview | list[bytes | memoryview], int, int]
"""What goes into one slot: outlet, position in its ring, bytes or a bundle's parts, length, sequence."""

Payloads = Sequence[bytes | memoryview]


class SenderPlace(NamedTuple):
    """What a writer works on: a sender's place in a segment.

    Attributes:
        memory, words: the segment, as bytes and as words of 64 bits.
        sender: index of the participant.
        outlets: its side of each of its routes.
        where: the list it writes to, for messages.
    """

    memory: mmap.mmap
    words: memoryview
    layout: Layout
    sender: int
    outlets: Sequence[Outlet]
    ringer: Ringer
    where: str


class LaneWriter:
    """Posts of one sender.

    Attributes:
        posts, bytes_posted: messages linked, a copy each, and their payload bytes. full: copies refused.
        busy: posts refused because the list was locked (form `shared`).
        reclaimed: slots freed since attach.
    """

    _first_reference = 1  # of slot 0 in its generation 0

    # The mirror, which ``adopt`` makes.
    _interrupted: bool
    _sequence: int
    _refs: list[int]  # each slot's reference in its present use
    _starts: list[int]  # position of its payload
    _states: list[int]  # its generation as in STATE
    _free: list[int]
    _parked: list[int]  # taken, but still linked: the tail
    _next: list[int]  # a circle of slots closed by the number of slots, which means HEAD and the end
    _previous: list[int]
    _last_urgent: int

    def __init__(self, place: SenderPlace) -> None:
        self._memory, self._words, layout, sender, self._outlets, self._ringer, self._where = place
        control = layout.control_word(sender)
        self._slots = layout.slots_per_sender
        self._first_word = layout.slots_word(sender)
        self._head_word = control + C_HEAD
        self._front_word = control + C_FRONT
        self._sequence_word = control + C_SEQUENCE
        self._by_address = {outlet.address: outlet for outlet in self._outlets}
        self._state_word = [self._first_word + slot * SLOT_WORDS + S_STATE for slot in range(self._slots)]
        self._at_bytes = [word * 8 for word in self._state_word]
        self._next_word = [word + S_NEXT for word in self._state_word]
        self._next_word.append(self._head_word)
        self._sender = layout.participants[sender]
        fence = threading.Lock()
        self._fence_in, self._fence_out = fence.acquire, fence.release
        self.posts = self.bytes_posted = self.full = self.busy = self.reclaimed = 0
        self.adopt()

    def post_one(self, outlet: Outlet, payload: bytes) -> bool:
        """``post`` of one copy, not urgent, laid out flat: False if there was no room.

        It costs half of ``post`` at 100 B and six tenths at 4 KB (one process, 2 cores).

        Raises:
            MessageTooLarge, MailboxBusy, MailboxCorrupt: as ``post``.
        """
        length = len(payload)
        position = outlet.written
        written = position + (length + 7 & -8)
        pending = outlet.pending
        if (
            written > outlet.limit
            or len(pending) >= outlet.reclaim_at
            or length >= outlet.size
            or self._interrupted
        ):
            return not self.post((outlet,), payload, False)
        words, memory = self._words, self._memory
        self._interrupted = True
        self._sequence = sequence = self._sequence + 1
        words[self._sequence_word] = sequence  # before the link: may be lost in a crash, never used twice
        slot = self._free.pop()  # cannot fail: the quotas add up to less than the slots
        start = outlet.start + position % outlet.size
        if start + length <= outlet.end:
            memory[start : start + length] = payload
        else:
            outlet.ring.write(position, payload, length)
        at_bytes = self._at_bytes[slot]
        memory[at_bytes : at_bytes + SLOT_BYTES] = _pack(
            self._states[slot] + READY,
            0,
            length << 32 | outlet.address,
            position,
            crc32(payload),
            sequence,
            0,
            0,
        )
        self._starts[slot] = position
        outlet.written = written
        pending.append(slot)
        self._append(slot, self._refs[slot])
        self._interrupted = False
        self.posts += 1
        self.bytes_posted += length
        self._fence_in()  # see ``_ring``
        self._fence_out()
        if words[outlet.sleep_word]:
            self._wake(outlet)
        return True

    def post(self, outlets: Sequence[Outlet], payload: bytes | memoryview, urgent: bool) -> list[Outlet]:
        """Link one copy of ``payload`` for each outlet that has room; returns the outlets that had none.

        Raises:
            MessageTooLarge: it can never fit one of the rings; nothing was posted.
            MailboxBusy: the list is locked by a process that is stopped; nothing was posted.
            MailboxCorrupt: another program wrote into this lane.
        """
        if self._interrupted:
            self.adopt()
        length = len(payload)
        need = length + 7 & -8
        full: list[Outlet] = []
        for outlet in outlets:
            if length >= outlet.size:
                raise MessageTooLarge(self._sender, outlet.recipient, length, outlet.size)
            if len(outlet.pending) >= outlet.reclaim_at or outlet.written + need > outlet.limit:
                self._reclaim(outlet, need)
                if len(outlet.pending) >= outlet.quota or outlet.written + need > outlet.limit:
                    full.append(outlet)
        if full:
            self.full += len(full)
            outlets = [outlet for outlet in outlets if outlet not in full]
        if outlets:
            sequence = self._sequence + 1
            copies: list[Copy] = [(outlet, outlet.written, payload, length, sequence) for outlet in outlets]
            self._commit(copies, sequence, urgent)
            self.posts += len(outlets)
            self.bytes_posted += length * len(outlets)
            self._ring(outlets)
        return full

    def post_many(self, outlet: Outlet, payloads: Sequence[bytes | memoryview], urgent: bool) -> int:
        """Make the first payloads that find room visible by one store; returns their number.

        Raises:
            MessageTooLarge, MailboxBusy, MailboxCorrupt: as ``post``; nothing was posted.
        """
        if not payloads:
            return 0
        if self._interrupted:
            self.adopt()
        lengths = list(map(len, payloads))
        longest = max(lengths)
        if longest >= outlet.size:
            raise MessageTooLarge(self._sender, outlet.recipient, longest, outlet.size)
        pieces = plan(lengths)
        copies = self._place(outlet, pieces, payloads, lengths, outlet.reclaim_at)
        posted = len(payloads)
        if len(copies) < len(pieces):
            self._reclaim(outlet, sum([span + 7 & -8 for _, _, span in pieces]))
            copies = self._place(outlet, pieces, payloads, lengths, outlet.quota)
            posted = sum([number for _, number, _ in pieces[: len(copies)]])
            if len(copies) < len(pieces):
                posted += self._shorten(outlet, copies, pieces[len(copies)], payloads, lengths)
            self.full += len(payloads) - posted
        if posted:
            self._commit(copies, self._sequence + posted, urgent)
            self.posts += posted
            self.bytes_posted += sum(lengths[:posted])
            self._ring((outlet,))
        return posted

    def _place(
        self,
        outlet: Outlet,
        pieces: Sequence[Piece],
        payloads: Payloads,
        lengths: Sequence[int],
        most_pending: int,
    ) -> list[Copy]:
        """Copies for the first pieces that find slots and ring space."""
        written, size, limit, sequence = outlet.written, outlet.size, outlet.limit, self._sequence + 1
        copies: list[Copy] = []
        for first, number, span in pieces[: max(0, most_pending - len(outlet.pending))]:
            rest = size - written % size
            if span > rest and written + rest + span <= limit:
                written += rest  # begin at the ring's start, so that it lies in one piece
            after = written + (span + 7 & -8)
            if after > limit:
                break
            data = payloads[first] if number == 1 else bundle(payloads, lengths, first, number)
            copies.append((outlet, written, data, span, sequence + first))
            written = after
        return copies

    def _shorten(
        self, outlet: Outlet, copies: list[Copy], piece: Piece, payloads: Payloads, lengths: Sequence[int]
    ) -> int:
        """Add as much as fits of the first piece that did not; returns the number of its messages."""
        if len(copies) >= outlet.quota - len(outlet.pending):
            return 0
        _, position, _, span, _ = copies[-1] if copies else (0, outlet.written, 0, 0, 0)
        written = position + (span + 7 & -8)
        part = shrink(lengths, piece, outlet.limit - written)
        if not part:
            return 0
        first, number, span = part
        data = payloads[first] if number == 1 else bundle(payloads, lengths, first, number)
        copies.append((outlet, outlet.place(written, span), data, span, self._sequence + 1 + first))
        return number

    def _ring(self, outlets: Sequence[Outlet]) -> None:
        # Race: the link must be visible before SLEEP is loaded, as the sleeper's SLEEP is before its last
        # search; else each could miss the other's store. A lock's acquire is a full fence on x86-64.
        self._fence_in()
        self._fence_out()
        for outlet in outlets:
            if self._words[outlet.sleep_word]:
                self._wake(outlet)

    def _wake(self, outlet: Outlet) -> None:
        # Cleared before the ring: cleared after it, it might be the *next* sleep's word.
        self._words[outlet.sleep_word] = 0
        self._ringer.ring(outlet.recipient)

    def _commit(self, copies: Sequence[Copy], sequence: int, urgent: bool) -> None:
        """Fill a slot for each copy and make them visible together; ``sequence`` is the last used."""
        self._interrupted = True
        self._sequence = sequence
        self._words[self._sequence_word] = sequence  # as in ``post_one``
        chain = [self._free.pop() for _ in copies]
        self._link(chain, copies, urgent)
        self._interrupted = False

    def _fill(self, chain: Sequence[int], copies: Sequence[Copy], behind: int, urgent: bool) -> None:
        """Fill the slots of a chain that no process can reach yet; the last one's NEXT becomes ``behind``."""
        flags = FLAG_URGENT if urgent else 0
        memory, refs, starts, states = self._memory, self._refs, self._starts, self._states
        references = [refs[slot] for slot in chain[1:]]
        references.append(behind)
        before: object = None
        for slot, following, (outlet, position, data, length, sequence) in zip(
            chain, references, copies, strict=True
        ):
            ring = outlet.ring
            if isinstance(data, list):
                check = len(data) - 1 << BUNDLE_SHIFT | ring.write_parts(position, data, length)
            else:
                if data is not before:  # else it is a copy for another recipient
                    before, check = data, crc32(data)
                start = ring.start + position % ring.size
                if start + length <= ring.end:
                    memory[start : start + length] = data
                else:
                    ring.write(position, data, length)
            at_bytes = self._at_bytes[slot]
            memory[at_bytes : at_bytes + SLOT_BYTES] = _pack(
                states[slot] + READY,
                following,
                length << 32 | outlet.address,
                position,
                flags | check,
                sequence,
                0,
                0,
            )
            starts[slot] = position
            outlet.written = position + (length + 7 & -8)
            outlet.pending.append(slot)

    def _append(self, slot: int, reference: int) -> None:
        """Link one filled slot, whose NEXT is 0, at the end."""
        after, before, root = self._next, self._previous, self._slots
        tail = before[root]
        self._words[self._next_word[tail]] = reference  # the commit
        after[tail] = before[root] = slot
        before[slot] = tail
        after[slot] = root

    def _link(self, chain: Sequence[int], copies: Sequence[Copy], urgent: bool) -> None:
        """Fill a chain and make it visible by one store."""
        after, before, root = self._next, self._previous, self._slots
        left = self._last_urgent if urgent else before[root]
        right = after[left]
        self._fill(chain, copies, self._refs[right], urgent)
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

    def adopt(self) -> None:
        """Rebuild the mirror from shared memory and free what an interrupted post or reclaim left behind.

        Raises:
            MailboxCorrupt: the chain is damaged in a way that no crash can cause.
            MailboxBusy: the list is locked by a process that is stopped.
        """
        self._interrupted = True
        root = self._slots
        self._refs = [0] * (root + 1)
        self._starts = [0] * root
        self._parked = []
        chain = self._adopt_links()
        linked = set(chain)
        for slot in self._front_to_back(linked):
            self._refs[slot] = self._make_free(slot)
        self._free = [slot for slot in range(root - 1, -1, -1) if slot not in linked]  # slot 0 is used first
        self._states = [reference >> 32 << 8 for reference in self._refs]
        self._sequence = self._words[self._sequence_word]
        if self._sequence >= COUNT_LIMIT:
            raise MailboxCorrupt(self._where, f"sequence {self._sequence:#x} is impossible")
        self._adopt_routes(chain)
        self._interrupted = False

    def _adopt_links(self) -> list[int]:
        """Rebuild the mirror of the list; returns the sender's linked slots in order."""
        root = self._slots
        self._next, self._previous = [root] * (root + 1), [root] * (root + 1)
        self._last_urgent = root
        chain = self._walk()
        for before, slot in zip([root, *chain], [*chain, root], strict=True):
            self._next[before], self._previous[slot] = slot, before
        if self._last_urgent != root:
            self._announce_urgent()  # a crash may have come between an urgent link and its announcement
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

        Race: a taker may be in a run that was unlinked and not freed. Were a slot freed before the one
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
        # What names itself in a circle is damage that no process can reach: any order will do.
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
        outlet.set_ends(written, freed)
        outlet.reclaim_at = min(outlet.quota, len(outlet.pending) + RECLAIM_BATCH)
        if outlet.room_word:
            outlet.block()

    def _announce_urgent(self) -> None:
        """Let takers search from the head. Without it their own resets (M5) find the chain, later."""
        self._words[self._front_word] = self._words[self._front_word] + 1 & MASK32

    def _reclaim(self, outlet: Outlet, need: int = 0) -> None:
        """Free what the outlet's recipient has taken, oldest first; then make room for ``need`` bytes.

        Raises:
            MailboxCorrupt: a pending slot is in a state that neither this sender nor its recipient stores.
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
        outlet.free_up_to(self._starts[pending[0]] if pending else outlet.written, need)
        if done:
            self._unlink(done)
        outlet.reclaim_at = min(outlet.quota, len(pending) + RECLAIM_BATCH)
        outlet.grow(need)
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
            if self._last_urgent in run:  # what is before an urgent slot is urgent, or the head
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
