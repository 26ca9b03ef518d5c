"""The taking side, for both forms: a search that goes on where the last one ended (M3), and its batch.

**Look-ahead.** It is (slot, generation) of the last slot *inspected*, in this process's own memory. Following
its NEXT finds what was appended since; an empty search costs three loads, whatever the list's length. Slots
inspected per message are then near 1; from the head they would be as many as there are before it (M9).

**Noticing change.** Every load of NEXT is followed by a check of that slot's generation, and a slot is used
only if its generation is the one its reference names. A mismatch means that it was unlinked and freed
meanwhile: reset to the head.

**Resets** (M5): `invalid` as above; `scans`, more than `threshold` scans since the last reset; `idle`, more
than a quarter of it since the last reset or message to this recipient; `urgent`, a sender linked something at
the front; `returned`, a message was given back. An adaptive threshold is halved after a reset of kind `scans`
or `idle` that found a message in front of the old look-ahead (something had been passed over), doubled
after one that did not (``LookAhead``).

**Unacknowledged batch.** A message taken stays READY until its batch is released; only then is it marked
TAKEN, or, of a bundle not given out whole, its bit in DONE is set. ``unacked`` maps the word to be stored to
its value: a slot's STATE, or a bundle's DONE. Readers put messages in, each release takes all of them out,
and ``give_back`` some. A search passes by what is in it. A process that dies before the store is given the
message again at its next attach.

**Damage.** Nothing read here is trusted. A link outside the lane, a linked slot in an impossible state, a
foreign sender, the same slot use met twice in one walk, or a stale link that its holder has not changed (a
sender unlinks before it frees, and takers see stores in order) raise MailboxCorrupt; so do a message that is
longer than its ring or on no known route, and a bundle that contradicts itself. A message with a wrong
checksum is discarded (MessageDamaged). ``take`` checks the copy that it hands out (but of a bundle above
64 KiB, like ``take_views``, what lies in the segment). Steps in one search are bounded.

Thread: one, the taking thread, but for ``len(UnackedBatch)``, which any may ask.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any, Final, NoReturn

from isal.isal_zlib import crc32

from pmdaemon.mailbox.errors import MailboxCorrupt, MessageDamaged, PayloadInUse, not_taken
from pmdaemon.mailbox.layout import (
    BUNDLE_SHIFT,
    MASK32,
    READY,
    S_ADDRESS,
    S_CHECK,
    S_DONE,
    S_NEXT,
    S_POSITION,
    S_SEQUENCE,
    S_STATE,
    SLOT_WORDS,
    TAKEN,
    Layout,
)
from pmdaemon.mailbox.message import ListPlace, LookAhead, Message, View
from pmdaemon.mailbox.ring import (
    IN_PLACE_BYTES,
    PayloadRing,
    all_done,
    directory_bytes,
    messages_in,
    offsets,
)

THRESHOLD_MIN: Final = 64
THRESHOLD_MAX: Final = 65_536
_NEVER: Final = 1 << 62
_HEAD: Final = -1
_FIRST_LAP: Final = 16  # slots walked before the search for circles begins


_unpack: Final = struct.Struct("=8x7Q").unpack_from  # a slot's words after STATE, one load each
_new: Final[Any] = tuple.__new__  # half the time of calling the class of a NamedTuple
_BUNDLE: Final = 1 << BUNDLE_SHIFT
Batch = list[Message] | list[View]


class LaneReader:
    """Finds and takes one recipient's messages in one list.

    Attributes:
        scans, inspected: searches, and slots met in them.
        resets: by cause.
        threshold: scans between two resets, adaptive.
        takes, bytes_taken: messages taken and their payload.
        discarded: slots with a wrong checksum.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        words: memoryview,
        place: ListPlace,
        unacked: dict[int, int],
        look_ahead: LookAhead,
    ) -> None:
        self._memory = memory
        self._words = words
        self._first_sender = place.first_sender
        self._unacked = unacked
        self._adaptive = look_ahead.adaptive
        self._enabled = look_ahead.enabled
        self._where = place.where
        if place.senders == 1:  # every slot there has the same sender: compare it, too
            self._mine, self._mask = place.first_sender << 16 | place.recipient, MASK32
        else:
            self._mine, self._mask = place.recipient, 0xFFFF
        self._per_sender = place.layout.slots_per_sender
        self._participants = len(place.layout.participants)
        self._slots = self._per_sender * place.senders
        self._step_limit = 4 * self._slots + 64  # enough for the mark below to close any circle
        self._first_word = place.layout.slots_word(place.first_sender)
        self._end_word = self._first_word + self._slots * SLOT_WORDS
        self._rings = place.rings
        self._head_word, self._front_word = place.head_word, place.front_word
        self._front = words[self._front_word]
        self._at = _HEAD  # look-ahead: word index of the slot, and its generation
        self._generation = 0
        self._seeking = 0  # reference of the look-ahead given up in the last reset, while not met again
        self._reset_at = self._met_at = 0
        self.threshold = _NEVER if look_ahead.threshold is None else look_ahead.threshold
        self._due = _NEVER if look_ahead.threshold is None else 0
        if not look_ahead.enabled:
            self._due = -1
        self.scans = self.inspected = 0
        self.resets = {"invalid": 0, "scans": 0, "idle": 0, "urgent": 0, "returned": 0}
        self.takes = self.bytes_taken = self.discarded = 0

    @property
    def scans_since_reset(self) -> int:
        """Searches since the last reset (M6)."""
        return self.scans - self._reset_at

    @property
    def scans_since_met(self) -> int:
        """Searches since a message for us was found (M6)."""
        return self.scans - self._met_at

    def find(self) -> int:
        """Word index of the next READY slot for us, or -1; the look-ahead moves up to its predecessor.

        One long function, because each slot on the way would pay for every call.

        Raises:
            MailboxCorrupt: see the module.
        """
        words = self._words
        self.scans += 1
        if words[self._front_word] != self._front:
            self._front = words[self._front_word]
            self._reset("urgent")
        elif self.scans > self._due:
            self._reset_if_due()
        at, generation, mine, mask = self._at, self._generation, self._mine, self._mask
        mark = steps = 0
        lap = _FIRST_LAP
        while steps <= self._step_limit:  # a live list grows while we walk, but not faster than we walk
            if at == _HEAD:
                reference = words[self._head_word]
                moved = False
            else:
                reference = words[at + S_NEXT]
                moved = words[at] >> 8 != generation
            if not moved:
                if not reference:
                    break
                slot = (reference & MASK32) - 1
                if not 0 <= slot < self._slots:
                    raise MailboxCorrupt(self._where, f"link {reference:#x} leads outside the lane")
                found = self._first_word + slot * SLOT_WORDS
                # Race: ADDRESS before STATE. Were the slot freed and filled again between the loads, the new
                # address would come with the new generation, and the comparison fails.
                address = words[found + S_ADDRESS]
                state = words[found]
                if state >> 8 != reference >> 32:
                    self._check_stale(at, generation, reference)
                    moved = True
            if moved:  # unlinked meanwhile: start again, and expect to meet the same slots again
                self._reset("invalid")
                at, mark, lap = _HEAD, 0, steps + _FIRST_LAP
                steps += 1
                continue
            steps += 1
            if address & mask == mine and state & 0xFF == READY and found not in self._unacked:
                self._at, self._generation = at, generation
                self.inspected += steps
                self._met()
                return found
            if reference == mark:
                raise MailboxCorrupt(self._where, f"the list leads back to slot {slot}")
            if reference == self._seeking:
                self._nothing_passed_over()
            self._check_slot(slot, address, state)
            if steps >= lap:  # Brent: compare with a mark that moves up at powers of two
                mark, lap = reference, lap * 2
            at, generation = found, state >> 8
        if self._seeking:
            self._nothing_passed_over()
        self._at, self._generation = at, generation
        self.inspected += steps
        return -1

    def _check_slot(self, slot: int, address: int, state: int) -> None:
        """A slot that the search passes by must at least be possible."""
        sender = self._first_sender + slot // self._per_sender
        if address >> 16 & 0xFFFF != sender or address & 0xFFFF >= self._participants:
            raise MailboxCorrupt(self._where, f"slot {slot} is addressed {address:#x}")
        if state & 0xFF not in (READY, TAKEN):
            raise MailboxCorrupt(self._where, f"slot {slot} is linked in state {state:#x}")

    def _check_stale(self, at: int, generation: int, reference: int) -> None:
        """A reference led to a slot of another generation: fine if its holder has changed, else damage."""
        words = self._words
        if at == _HEAD:
            unchanged = words[self._head_word] == reference
        else:
            unchanged = words[at + S_NEXT] == reference and words[at] >> 8 == generation
        if unchanged:
            raise MailboxCorrupt(self._where, f"link {reference:#x} leads to a slot that was freed")

    def _reset_if_due(self) -> None:
        """Reset when one of the two thresholds has passed (M5 b, c); else note when to ask again."""
        if not self._enabled:
            self._at = _HEAD
            return
        scans_due = self._reset_at + self.threshold
        idle_due = max(self._met_at, self._reset_at) + self.threshold // 4
        if self._at == _HEAD:
            self._due = self.scans + self.threshold // 4  # there already
        elif self.scans > min(scans_due, idle_due):
            seeking = self._generation << 32 | (self._at - self._first_word) // SLOT_WORDS + 1
            self._reset("scans" if self.scans > scans_due else "idle")
            self._seeking = seeking
        else:
            self._due = min(scans_due, idle_due)

    def _reset(self, cause: str) -> None:
        """Start at the head."""
        self.resets[cause] += 1
        self._at = _HEAD
        self._seeking = 0
        self._reset_at = self.scans
        if self._enabled:
            self._due = self.scans + self.threshold // 4

    def search_from_head(self) -> None:
        """Search from the head next time: a message was given back."""
        self._reset("returned")

    def _met(self) -> None:
        """A message was found."""
        self._met_at = self.scans
        if self._seeking:  # in front of the old look-ahead: it had been passed over
            self._seeking = 0
            if self._adaptive:
                self.threshold = max(THRESHOLD_MIN, self.threshold // 2)

    def _nothing_passed_over(self) -> None:
        self._seeking = 0
        if self._adaptive:
            self.threshold = min(THRESHOLD_MAX, self.threshold * 2)

    def collect(self, taken: Batch, max_messages: int, room_bytes: int, views: bool = False) -> int:
        """Append messages to ``taken`` until it has ``max_messages``; returns what is left of ``room_bytes``.

        Each is in ``unacked`` from here on. A payload above ``room_bytes`` is taken only as the first of all;
        otherwise it stays and -1 is returned.

        Raises:
            MailboxCorrupt: the list is damaged.
            MessageDamaged: the first message's checksum is wrong, and it was discarded.
        """
        while len(taken) < max_messages:
            room_bytes = self._take_fast(taken, max_messages, room_bytes, views)
            if len(taken) >= max_messages:
                break
            found = self.find()
            if found < 0:
                break
            before = len(taken)
            left = self._take(found, taken, max_messages, room_bytes, views)
            self.takes += len(taken) - before
            self.bytes_taken += sum([len(message[1]) for message in taken[before:]])
            if left < 0:
                return -1
            room_bytes = left
        return room_bytes

    def _take(self, found: int, taken: Batch, max_messages: int, room_bytes: int, views: bool) -> int:
        """Take the slot that ``find`` has found, or part of a bundle; -1 if something of it stays."""
        words = self._words
        address, check = words[found + S_ADDRESS], words[found + S_CHECK]
        length = address >> 32
        entry = self._rings.get(address & MASK32)
        if entry is None or length > entry[1].size:
            self._refuse(address, entry)
        sender, ring = entry
        position, messages = words[found + S_POSITION], messages_in(check)
        if length > room_bytes and taken and not messages:
            return -1
        in_place = views or (messages > 0 and length > IN_PLACE_BYTES)
        data = ring.view(position, length) if in_place else ring.read(position, length)
        at = offsets(data, messages) if messages else [0, length]
        if at is None or check & MASK32 != crc32(data):
            if taken:
                return -1  # hand out what is good first; the next take meets it again
            self._discard(found)
        kind, sequence = View if views else Message, words[found + S_SEQUENCE]
        everything = all_done(len(at) - 1)
        done = words[found + S_DONE] & everything if messages else 0
        for number in range(len(at) - 1):
            size = at[number + 1] - at[number]
            if done >> number & 1:
                continue
            if len(taken) >= max_messages or (size > room_bytes and taken):
                break
            payload = data[at[number] : at[number + 1]]
            if in_place and not views:
                payload = bytes(payload)
            taken.append(_new(kind, (sender, payload, sequence + number)))
            room_bytes -= size
            done |= 1 << number
        if done != everything:  # the look-ahead stays in front of it
            self._unacked[found + S_DONE] = done
            return -1
        state = words[found]
        self._unacked[found] = state - READY + TAKEN
        self._at, self._generation = found, state >> 8
        return max(0, room_bytes)

    def _take_fast(self, taken: Batch, max_messages: int, room_bytes: int, views: bool) -> int:
        """``find`` and ``_take`` for the case that slot after slot is for us; stops at any other.

        Laid out flat, with local names: a message then costs a third of ``find`` and ``_take`` at 100 B, less
        than half at 4 KB, and two thirds in bundles of 64 (one process, 2 cores, when it was written).
        ``make bench-mailbox`` measures taking with it.
        """
        words, at = self._words, self._at
        if at < 0 or self._seeking or words[self._front_word] != self._front:
            return room_bytes
        reference = words[at + S_NEXT]
        if words[at] >> 8 != self._generation:  # after NEXT, as in ``find``
            return room_bytes
        memory, unacked, rings, kind = self._memory, self._unacked, self._rings, View if views else Message
        first, end = self._first_word, self._end_word
        count, before_bytes, route, slots = len(taken), room_bytes, -1, 0
        left, most = max_messages - count, self._due - self.scans
        while slots < most:
            found = first + ((reference & MASK32) - 1) * SLOT_WORDS
            if not first <= found < end:
                break
            behind, address, position, check, sequence, _, done = _unpack(memory, found * 8)
            # STATE after ADDRESS, as in ``find``; compared as a whole: right generation, and READY.
            now = words[found]
            length = address >> 32
            if now != reference >> 32 << 8 | READY or found in unacked:
                break
            if address & MASK32 != route:  # the one that ``sender`` and ``ring`` are of
                route = address & MASK32
                entry = rings.get(route)
                if entry is None:
                    break
                sender, ring = entry
            start = ring.start + position % ring.size
            if check >= _BUNDLE:
                messages = check >> BUNDLE_SHIFT
                whole_bytes = length
                length -= directory_bytes(messages)
                if done or messages > left or length > room_bytes:
                    break
                whole = self._open(ring, start, whole_bytes, check, views)
                if not whole:
                    break
                # The tuples are made by C code from start to end: a third of the time of a loop.
                numbers = range(sequence, sequence + messages)
                taken.extend(map(_new, repeat(kind), zip(repeat(sender), whole, numbers)))
                left -= messages
            else:
                if length > room_bytes:
                    break
                if start + length <= ring.end and not views:
                    payload: bytes | memoryview = memory[start : start + length]
                elif length <= ring.size:
                    payload = ring.view(position, length) if views else ring.read(position, length)
                else:
                    break
                if crc32(payload) != check & MASK32:
                    break
                taken.append(_new(kind, (sender, payload, sequence)))
                left -= 1
            unacked[found] = now + 1  # TAKEN
            # Its sender cannot free it before the release; a link changed since is met by ``find``.
            reference, at = behind, found
            room_bytes -= length
            slots += 1
            if not left:
                break
        if slots:
            self._at, self._generation = at, unacked[at] >> 8
            self.scans += slots
            self._met_at = self.scans
        self.inspected += slots
        self.takes += len(taken) - count
        self.bytes_taken += before_bytes - room_bytes
        return room_bytes

    def _open(
        self, ring: PayloadRing, start: int, length: int, check: int, views: bool
    ) -> list[bytes | memoryview]:
        """All payloads of a bundle that lies in one piece; none if there is any doubt."""
        if start + length > ring.end:
            return []
        memory = self._memory
        if views or length > IN_PLACE_BYTES:
            data: bytes | memoryview = ring.view(start - ring.start, length)
        else:
            data = memory[start : start + length]
        at = offsets(data, check >> BUNDLE_SHIFT)
        if at is None or crc32(data) != check & MASK32:
            return []
        if views or length <= IN_PLACE_BYTES:
            return [data[one:two] for one, two in pairwise(at)]
        return [memory[start + one : start + two] for one, two in pairwise(at)]

    def _refuse(self, address: int, entry: tuple[str, PayloadRing] | None) -> NoReturn:
        if entry is None:
            raise MailboxCorrupt(self._where, f"a message is addressed {address:#x}, which is no route")
        raise MailboxCorrupt(self._where, f"a message of {address >> 32} bytes in a ring of {entry[1].size}")

    def _discard(self, found: int) -> NoReturn:
        state = self._words[found]
        self._words[found] = state - READY + TAKEN
        self._at, self._generation = found, state >> 8
        self.discarded += 1
        raise MessageDamaged(self._where, self._words[found + S_SEQUENCE])


class UnackedBatch:
    """What one recipient has taken and not released yet.

    Attributes:
        unacked: see the module. views: those handed out of this batch.
    """

    def __init__(self, words: memoryview, layout: Layout, name: str) -> None:
        self._words = words
        self._names = layout.participants
        self._name = name
        self._interrupted = False  # a release has begun and not ended
        self.unacked: dict[int, int] = {}
        self.views: list[memoryview] = []

    def release(self) -> None:
        """Release the whole batch.

        Raises:
            PayloadInUse: a view is in use still; everything stays.
        """
        if self.views:
            self._drop_views()
        if self._interrupted:
            self._forget_released()
        words = self._words
        self._interrupted = True
        for word, value in self.unacked.items():
            words[word] = value
        self.unacked.clear()
        self._interrupted = False

    def _forget_released(self) -> None:
        """An exception (of a signal handler) has ended a release: what it has stored is released.

        Such a slot may have been used again since, and a second store would destroy that use.
        """
        words = self._words
        for word, value in self.unacked.copy().items():
            if word % SLOT_WORDS == S_STATE and words[word] != value - TAKEN + READY:
                del self.unacked[word]

    def _drop_views(self) -> None:
        while self.views:
            try:
                self.views[-1].release()
            except BufferError:
                raise PayloadInUse(self._name) from None
            self.views.pop()

    def _slots(self) -> Iterator[tuple[int, int]]:
        """(first word, messages of it in the batch as bits) of each slot. Any thread."""
        words = self._words
        for word, value in self.unacked.copy().items():  # the taking thread changes it meanwhile
            slot = word - word % SLOT_WORDS  # slots begin at multiples of their size
            if word != slot:
                yield slot, value & ~words[word]
            else:
                messages = messages_in(words[slot + S_CHECK])
                yield slot, all_done(messages) & ~words[slot + S_DONE] if messages else 1

    def __len__(self) -> int:
        return sum(bits.bit_count() for _, bits in self._slots())

    def give_back(self, messages: Sequence[Message | View]) -> None:
        """Take these messages out of the batch; they stay where they were.

        Raises:
            MailboxError: one is not in the batch; none was given back.
        """
        found = {}
        for slot, bits in self._slots():
            sender = self._names[self._words[slot + S_ADDRESS] >> 16 & 0xFFFF]
            first = self._words[slot + S_SEQUENCE]
            for number in range(bits.bit_length()):
                if bits >> number & 1:
                    found[sender, first + number] = slot, 1 << number
        returned: dict[int, int] = {}
        for message in messages:
            place = found.get((message.sender, message.sequence))
            if place is None:
                raise not_taken(message.sender, message.sequence)
            slot, bit = place
            returned[slot] = returned.get(slot, 0) | bit
        kept = {slot: bits & ~returned[slot] for slot, bits in self._slots() if slot in returned}
        for slot, bits in kept.items():
            self._keep(slot, bits)

    def _keep(self, slot: int, bits: int) -> None:
        """Of the slot only the messages ``bits`` stay in the batch."""
        self.unacked.pop(slot, None)
        self.unacked.pop(slot + S_DONE, None)
        if bits:  # of a bundle: some were released before, some are returned, some stay
            self.unacked[slot + S_DONE] = self._words[slot + S_DONE] | bits
