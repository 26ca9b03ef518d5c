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

What is found is taken by ``taking``. A search passes by what is in hand.

**Damage.** Nothing read here is trusted: a link outside the lane, a linked slot in an impossible state, a
foreign sender, the same slot use met twice in one walk, or a stale link that its holder has not changed (a
sender unlinks before it frees, and takers see stores in order) raise MailboxCorrupt. Steps in one search
are bounded.

Thread: one, the taking thread.
"""

from __future__ import annotations

import mmap
from typing import Final

from pmdaemon.mailbox.errors import MailboxCorrupt
from pmdaemon.mailbox.layout import (
    MASK32,
    READY,
    S_ADDRESS,
    S_NEXT,
    SLOT_WORDS,
    TAKEN,
)
from pmdaemon.mailbox.message import ListPlace, LookAhead

THRESHOLD_MIN: Final = 64
THRESHOLD_MAX: Final = 65_536
_NEVER: Final = 1 << 62
_HEAD: Final = -1
_FIRST_LAP: Final = 16  # slots walked before the search for circles begins


class Search:
    """Search in one list for messages to one recipient.

    Attributes:
        scans, inspected: searches, and slots met in them.
        resets: by cause.
        threshold: scans between two resets, adaptive.
    """

    def __init__(
        self, memory: mmap.mmap, words: memoryview, place: ListPlace, held: dict[int, int], look: LookAhead
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
        self.scans = self.inspected = 0
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
