"""The posting side: filling slots and making them visible. This class is the form `lanes`.

Form `lanes`: every sender has a list of its own, so linking needs no lock; what is given up is the total
order between senders (M1). The form `shared` (module ``shared``) replaces how a chain is linked, unlinked and
walked; slots (``slots``), rings, quotas and takers are the same.

**Post.** Slots for all copies are filled and chained among themselves; then *one* store, the
predecessor's NEXT, makes the whole chain visible. x86-64 keeps stores in order, so whoever sees that store
sees the slots. An urgent chain goes behind the last urgent slot still linked, so urgent slots always form
the front of the list; FRONT is counted up to tell takers to look there.

**Bulk stores.** A slot is filled by one copy of its eight words, and a payload, or a bundle of them
(``bundle``), by another, in no order of their words: nobody can reach them yet, and a stale look-ahead knows
the slot by its new generation, which it got when it was freed. (Not ``pack_into``: it zeroes its target
first, and a look-ahead into generation 0 would take that for its own.)

Thread: one, the posting thread.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from pmdaemon.mailbox.bundle import LENGTHS, Piece, plan, shrink
from pmdaemon.mailbox.doorbell import Ringer
from pmdaemon.mailbox.errors import MessageTooLarge
from pmdaemon.mailbox.layout import BUNDLE_SHIFT, FLAG_URGENT, READY, SLOT_BYTES, Layout
from pmdaemon.mailbox.ring import CRC_BYTES, Outlet
from pmdaemon.mailbox.slots import SlotKeeper

_pack: Final = struct.Struct("=8Q").pack  # the words of a slot that nobody can reach yet
Copy = tuple[Outlet, int, bytes | memoryview | list[bytes | memoryview], int, int]
"""What goes into one slot: outlet, position in its ring, bytes or a bundle's parts, length, sequence."""

Payloads = Sequence[bytes | memoryview]


class LaneWriter(SlotKeeper):
    """Posts of one sender.

    Attributes:
        posts, bytes_posted: messages linked, a copy each, and their payload bytes. full: copies refused.
        busy: posts refused because the list was locked (form `shared`).
    """

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
        super().__init__(memory, words, layout, sender, outlets, where)
        self._sender = layout.participants[sender]
        self._ringer = ringer
        fence = threading.Lock()
        self._fence_in, self._fence_out = fence.acquire, fence.release
        self.posts = self.bytes_posted = self.full = self.busy = 0
        self.adopt()

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
            crc32(payload) if length <= CRC_BYTES else outlet.ring.checksum(payload),
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
            MailboxCorrupt: a stranger wrote into this lane.
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
                self._reclaim(outlet)
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
        pieces = plan(lengths, outlet.bundles)
        copies = self._place(outlet, pieces, payloads, lengths, outlet.reclaim_at)
        posted = len(payloads)
        if len(copies) < len(pieces):
            self._reclaim(outlet)
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
            data = payloads[first] if number == 1 else _parts(payloads, lengths, first, number)
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
        data = payloads[first] if number == 1 else _parts(payloads, lengths, first, number)
        copies.append((outlet, outlet.place(written, span), data, span, self._sequence + 1 + first))
        return number

    def _ring(self, outlets: Sequence[Outlet]) -> None:
        # Race: our link must be visible before we load SLEEP, as the sleeper's SLEEP is before it looks once
        # more; else each could miss the other's store. A lock's acquire is a full fence on x86-64.
        self._fence_in()
        self._fence_out()
        for outlet in outlets:
            if self._words[outlet.sleep_word]:
                self._wake(outlet)

    def _wake(self, outlet: Outlet) -> None:
        # Cleared before the ring: cleared after it, we might wipe out the *next* sleep's word.
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
        """Fill the slots of a chain that nobody can reach yet; the last one's NEXT becomes ``behind``."""
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
                    before, check = data, ring.checksum(data)
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


def _parts(
    payloads: Sequence[bytes | memoryview], lengths: Sequence[int], first: int, count: int
) -> list[bytes | memoryview]:
    """A bundle of some of the payloads: its directory, then they."""
    return [LENGTHS[count].pack(*lengths[first : first + count]), *payloads[first : first + count]]
