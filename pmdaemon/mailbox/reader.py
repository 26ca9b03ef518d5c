"""Taking what a search has found: payloads checked, copied or shown in place, and put *in hand*.

**In hand.** A message taken stays READY, and in ``held``, until its batch is released; only then is it marked
TAKEN, or, of a bundle not given out whole, its bit in DONE is set. Whoever dies before that is given it
again. ``held`` maps the word to be stored to its value: a slot's STATE, or a bundle's DONE.

**Damage.** Nothing read here is trusted: a message that is longer than its ring, or on no route of ours, or
a bundle that contradicts itself raises MailboxCorrupt; so does a wrong checksum, and the message is
discarded. ``take`` checks the copy that it hands out (but of a bundle above 64 KiB, like ``take_views``, what
lies in the segment).

Thread: one, the taking thread.
"""

from __future__ import annotations

import mmap
import struct
from itertools import pairwise, repeat
from typing import Any, Final, NoReturn
from zlib import crc32

from pmdaemon.mailbox.bundle import all_done, directory_bytes, messages_in, offsets
from pmdaemon.mailbox.errors import MailboxCorrupt, MessageDamaged
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
    SLOT_WORDS,
    TAKEN,
)
from pmdaemon.mailbox.lookahead import Search
from pmdaemon.mailbox.message import ListPlace, LookAhead, Message, View
from pmdaemon.mailbox.ring import CRC_BYTES, IN_PLACE_BYTES, PayloadRing

_unpack: Final = struct.Struct("=8x7Q").unpack_from  # a slot's words after STATE, one load each
_new: Final[Any] = tuple.__new__  # half the time of calling the class of a NamedTuple
_BUNDLE: Final = 1 << BUNDLE_SHIFT
Batch = list[Message] | list[View]


class LaneReader(Search):
    """Takes one recipient's messages from one list.

    Attributes:
        takes, bytes_taken: messages taken and their payload.
        discarded: slots with a wrong checksum.
    """

    def __init__(
        self, memory: mmap.mmap, words: memoryview, place: ListPlace, held: dict[int, int], look: LookAhead
    ) -> None:
        super().__init__(memory, words, place, held, look)
        self.takes = self.bytes_taken = self.discarded = 0

    def collect(self, taken: Batch, max_messages: int, room_bytes: int, views: bool = False) -> int:
        """Append messages to ``taken`` until it has ``max_messages``; returns what is left of ``room_bytes``.

        Each is in ``held`` from here on. A payload above ``room_bytes`` is taken only as the first of all;
        otherwise it stays and -1 is returned.

        Raises:
            MailboxCorrupt: the list is damaged.
            MessageDamaged: the first message's checksum is wrong, and it was discarded.
        """
        while len(taken) < max_messages:
            room_bytes = self._rush(taken, max_messages, room_bytes, views)
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
        if at is None or check & MASK32 != (
            ring.checksum_of_bundle(data, at) if messages else ring.checksum(data)
        ):
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
            self._held[found + S_DONE] = done
            return -1
        state = words[found]
        self._held[found] = state - READY + TAKEN
        self._at, self._generation = found, state >> 8
        return max(0, room_bytes)

    def _rush(self, taken: Batch, max_messages: int, room_bytes: int, views: bool) -> int:
        """The usual case of ``find`` and ``_take``: slot after slot is ours. Stops at whatever is unusual.

        Laid out flat, with local names: this is where a busy recipient spends its time.
        """
        words, at = self._words, self._at
        if at < 0 or self._seeking or words[self._front_word] != self._front:
            return room_bytes
        reference = words[at + S_NEXT]
        if words[at] >> 8 != self._generation:  # after NEXT, as in ``find``
            return room_bytes
        memory, held, rings, kind = self._memory, self._held, self._rings, View if views else Message
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
            if now != reference >> 32 << 8 | READY or found in held:
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
                if (crc32(payload) if length <= CRC_BYTES else ring.checksum(payload)) != check & MASK32:
                    break
                taken.append(_new(kind, (sender, payload, sequence)))
                left -= 1
            held[found] = now + 1  # TAKEN
            # In our hand nobody can free it under our feet; a link changed since is met by ``find``.
            reference, at = behind, found
            room_bytes -= length
            slots += 1
            if not left:
                break
        if slots:
            self._at, self._generation = at, held[at] >> 8
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
        if at is None or ring.checksum_of_bundle(data, at) != check & MASK32:
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
