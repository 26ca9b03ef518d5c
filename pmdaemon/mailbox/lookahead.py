"""A list as a recipient sees it: a search that goes on where the last one ended (M3). Both forms.

The look-ahead is (slot, generation) of the last slot *inspected*, in this process's own memory. Following
its NEXT finds what was appended since; an empty look costs three loads, whatever the list's length. Slots
inspected per message are then near 1; from the head they would be as many as stand before it (M9).

**Noticing change.** Every load of NEXT is followed by a check of that slot's generation, and a slot is used
only if its generation is the one its reference names. A mismatch means that it was unlinked and freed
meanwhile: reset to the head.

**Resets** (M5): `invalid` as above; `scans`, more than `threshold` scans since the last reset; `idle`, more
than a quarter of it since the last reset or message of ours; `urgent`, a sender linked something at the
front; `returned`, we gave a message back. An adaptive threshold is halved after a reset of kind `scans` or
`idle` that found a message of ours in front of the old look-ahead (something had been passed over), doubled
after one that did not (``LookAhead``).

**In hand.** A message taken stays READY, and in ``held``, until its batch is released; only then is it marked
TAKEN. Whoever dies before that is given it again. A search passes by what is in hand.

**Damage.** Nothing read here is trusted: a link outside the lane, a linked slot in an impossible state, a
foreign sender, the same slot use met twice in one walk, or a stale link that its holder has not changed (a
sender unlinks before it frees, and takers see stores in order) raise MailboxCorrupt. Steps in one search
are bounded.

Thread: one, the taking thread.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn
from zlib import crc32

from pmdaemon.mailbox.errors import MailboxCorrupt
from pmdaemon.mailbox.layout import (
    MASK32,
    READY,
    S_ADDRESS,
    S_NEXT,
    S_SEQUENCE,
    SLOT_WORDS,
    TAKEN,
    Layout,
)
from pmdaemon.mailbox.ring import CRC_BYTES, Ring, checksum

THRESHOLD_MIN: Final = 64
THRESHOLD_MAX: Final = 65_536
THRESHOLD_FIRST: Final = 1_024  # urgent posts announce themselves, so skipping is not expected
_NEVER: Final = 1 << 62
_HEAD: Final = -1
_unpack: Final = struct.Struct("=6Q").unpack_from  # a slot's words, one load each
_new: Final[Any] = tuple.__new__  # half the time of calling the class of a NamedTuple
_FIRST_LAP: Final = 16  # slots walked before the search for circles begins


class Message(NamedTuple):
    """A message taken.

    Attributes:
        sequence: of the sender's posts to anybody: it rises, and goes on over restarts of the sender.
    """

    sender: str
    payload: bytes
    sequence: int


class View(NamedTuple):
    """A message taken without a copy: ``payload`` is valid until its batch is released, then raises."""

    sender: str
    payload: memoryview
    sequence: int


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How a recipient searches (M5).

    Attributes:
        threshold: scans between two resets at first, and always unless ``adaptive``; None for no such resets
            (then only `invalid`, `urgent` and `returned` remain). A quarter of it is the idle interval.
        adaptive: let it move between THRESHOLD_MIN and THRESHOLD_MAX.
        enabled: False to search from the head each time, for comparison.
    """

    threshold: int | None = THRESHOLD_FIRST
    adaptive: bool = True
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Where a list stands and what in it is ours.

    Attributes:
        first_sender, senders: whose slots stand in it: one sender's, or those of all.
        head_word, front_word: see the layout. recipient: our number.
        rings: by ADDRESS (sender << 16 | recipient), with the sender's name. where: for errors.
    """

    layout: Layout
    first_sender: int
    senders: int
    head_word: int
    front_word: int
    recipient: int
    rings: dict[int, tuple[str, Ring]]
    where: str


class LaneReader:
    """Search in one list for messages to one recipient.

    Attributes:
        takes, bytes_taken: messages taken and their payload.
        scans, inspected: searches, and slots met in them.
        resets: by cause.
        discarded: messages with a wrong checksum.
        threshold: scans between two resets, adaptive.
    """

    def __init__(
        self, memory: mmap.mmap, words: memoryview, place: Place, held: dict[int, int], look: LookAhead
    ) -> None:
        self._memory = memory
        self._words = words
        self._first_sender = place.first_sender
        self._held = held
        self._adaptive = look.adaptive
        self._enabled = look.enabled
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
        self.threshold = _NEVER if look.threshold is None else look.threshold
        self._due = _NEVER if look.threshold is None else 0
        if not look.enabled:
            self._due = -1
        self.takes = self.bytes_taken = self.scans = self.inspected = self.discarded = 0
        self.resets = {"invalid": 0, "scans": 0, "idle": 0, "urgent": 0, "returned": 0}

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
                # Race: ADDRESS before STATE. Were the slot freed and filled anew between the loads, the new
                # address would come with the new generation, and the comparison fails.
                address = words[found + S_ADDRESS]
                state = words[found]
                if state >> 8 != reference >> 32:
                    self._check_stale(at, generation, reference)
                    moved = True
            if moved:  # unlinked under our feet: start again, and expect to meet the same slots again
                self._reset("invalid")
                at, mark, lap = _HEAD, 0, steps + _FIRST_LAP
                steps += 1
                continue
            steps += 1
            if address & mask == mine and state & 0xFF == READY and found not in self._held:
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
        """A slot that we pass by must at least be possible."""
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

    def look_back(self) -> None:
        """Search from the head next time: a message was given back."""
        self._reset("returned")

    def _met(self) -> None:
        """A message of ours was found."""
        self._met_at = self.scans
        if self._seeking:  # in front of the old look-ahead: it had been passed over
            self._seeking = 0
            if self._adaptive:
                self.threshold = max(THRESHOLD_MIN, self.threshold // 2)

    def _nothing_passed_over(self) -> None:
        self._seeking = 0
        if self._adaptive:
            self.threshold = min(THRESHOLD_MAX, self.threshold * 2)

    def collect(
        self, taken: list[Message] | list[View], max_messages: int, room_bytes: int, views: bool = False
    ) -> int:
        """Append messages to ``taken`` until it has ``max_messages``; returns what is left of ``room_bytes``.

        Each is in ``held`` from here on. A payload above ``room_bytes`` is taken only as the first of all;
        otherwise it stays and -1 is returned.

        Raises:
            MailboxCorrupt: the list is damaged; or the first message's checksum is wrong, and it was
            discarded.
        """
        words, held, kind = self._words, self._held, View if views else Message
        while len(taken) < max_messages:
            room_bytes = self._rush(taken, max_messages, room_bytes, views)
            if len(taken) >= max_messages:
                break
            found = self.find()
            if found < 0:
                break
            address = words[found + 2]
            length = address >> 32
            if length > room_bytes and taken:
                return -1
            entry = self._rings.get(address & MASK32)
            if entry is None or length > entry[1].size:
                self._refuse(address, entry)
            sender, ring = entry
            position = words[found + 3]
            payload = ring.view(position, length) if views else ring.read(position, length)
            if checksum(payload) != words[found + 4] & MASK32:
                if taken:
                    return -1  # hand out what is good first; the next take meets it again
                self._discard(found)
            state = words[found]
            held[found] = state + 1  # TAKEN
            self._at, self._generation = found, state >> 8
            self.takes += 1
            self.bytes_taken += length
            room_bytes -= length
            taken.append(_new(kind, (sender, payload, words[found + 5])))
        return room_bytes

    def _rush(
        self, taken: list[Message] | list[View], max_messages: int, room_bytes: int, views: bool
    ) -> int:
        """The usual case of ``find`` and ``collect``: slot after slot is ours. Stops at whatever is unusual.

        Laid out flat, with local names: this is where a busy recipient spends its time.
        """
        words, at = self._words, self._at
        if at < 0 or self._seeking or words[self._front_word] != self._front:
            return room_bytes
        reference = words[at + 1]
        if words[at] >> 8 != self._generation:  # after NEXT, as in ``find``
            return room_bytes
        memory, held, rings, kind = self._memory, self._held, self._rings, View if views else Message
        first, end = self._first_word, self._end_word
        count = len(taken)
        most = min(max_messages - count, self._due - self.scans)
        before_bytes = room_bytes
        while most > 0:
            found = first + ((reference & MASK32) - 1) * SLOT_WORDS
            if not first <= found < end:
                break
            _, behind, address, position, check, sequence = _unpack(memory, found * 8)
            # STATE after ADDRESS, as in ``find``; compared as a whole: right generation, and READY.
            state = words[found]
            entry = rings.get(address & MASK32)
            length = address >> 32
            if entry is None or state != reference >> 32 << 8 | READY or length > room_bytes or found in held:
                break
            sender, ring = entry
            start = ring.start + position % ring.size
            if start + length > ring.end or views:
                if length > ring.size:
                    break
                payload: bytes | memoryview = (
                    ring.view(position, length) if views else ring.read(position, length)
                )
            else:
                payload = memory[start : start + length]
            if (crc32(payload) if length <= CRC_BYTES else checksum(payload)) != check & MASK32:
                break
            held[found] = state + 1  # TAKEN
            # In our hand nobody can free it under our feet; a link changed since is met by ``find``.
            reference = behind
            self._at, self._generation = found, state >> 8
            room_bytes -= length
            taken.append(_new(kind, (sender, payload, sequence)))
            most -= 1
        done = len(taken) - count
        self.scans += done
        self.inspected += done
        self.takes += done
        self.bytes_taken += before_bytes - room_bytes
        if done:
            self._met_at = self.scans
        return room_bytes

    def _refuse(self, address: int, entry: tuple[str, Ring] | None) -> NoReturn:
        if entry is None:
            raise MailboxCorrupt(self._where, f"a message is addressed {address:#x}, which is no route")
        raise MailboxCorrupt(self._where, f"a message of {address >> 32} bytes in a ring of {entry[1].size}")

    def _discard(self, found: int) -> NoReturn:
        state = self._words[found]
        self._words[found] = state - READY + TAKEN
        self._at, self._generation = found, state >> 8
        self.discarded += 1
        sequence = self._words[found + S_SEQUENCE]
        raise MailboxCorrupt(self._where, f"message {sequence} has a wrong checksum and was discarded")
