"""The batch in hand: what a recipient has taken and not released yet.

``held`` maps a word of shared memory to what is stored there at release: the STATE of a slot (TAKEN), or the
DONE word of a bundle of which only some messages are in hand. Readers put messages in (``taking``), each
release takes all of them out, and ``give_back`` some.

Thread: one, the taking thread, but for ``len``, which any may ask. Crash: before the store of its word, a
message is given to the next attach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pmdaemon.mailbox.bundle import all_done, messages_in
from pmdaemon.mailbox.errors import NotInHand, PayloadInUse
from pmdaemon.mailbox.layout import (
    READY,
    S_ADDRESS,
    S_CHECK,
    S_DONE,
    S_SEQUENCE,
    S_STATE,
    SLOT_WORDS,
    TAKEN,
    Layout,
)
from pmdaemon.mailbox.message import Message, View


class UnackedBatch:
    """What one recipient has in hand.

    Attributes:
        held: see the module. views: those handed out of this batch.
    """

    def __init__(self, words: memoryview, layout: Layout, name: str) -> None:
        self._words = words
        self._names = layout.participants
        self._name = name
        self._interrupted = False  # a release has begun and not ended
        self.held: dict[int, int] = {}
        self.views: list[memoryview] = []

    def release(self) -> None:
        """Everything in hand is done with.

        Raises:
            PayloadInUse: a view is in use still; everything stays.
        """
        if self.views:
            self._drop_views()
        if self._interrupted:
            self._forget_released()
        words = self._words
        self._interrupted = True
        for word, value in self.held.items():
            words[word] = value
        self.held.clear()
        self._interrupted = False

    def _forget_released(self) -> None:
        """An exception (of a signal handler) has ended a release: what it has stored is in hand no more.

        Such a slot may have been used again since, and a second store would destroy that use.
        """
        words = self._words
        for word, value in self.held.copy().items():
            if word % SLOT_WORDS == S_STATE and words[word] != value - TAKEN + READY:
                del self.held[word]

    def _drop_views(self) -> None:
        while self.views:
            try:
                self.views[-1].release()
            except BufferError:
                raise PayloadInUse(self._name) from None
            self.views.pop()

    def _slots(self) -> Iterator[tuple[int, int]]:
        """(first word, messages of it in hand as bits) of each slot. Any thread."""
        words = self._words
        for word, value in self.held.copy().items():  # the taking thread changes it meanwhile
            slot = word - word % SLOT_WORDS  # slots begin at multiples of their size
            if word != slot:
                yield slot, value & ~words[word]
            else:
                messages = messages_in(words[slot + S_CHECK])
                yield slot, all_done(messages) & ~words[slot + S_DONE] if messages else 1

    def __len__(self) -> int:
        return sum(bits.bit_count() for _, bits in self._slots())

    def give_back(self, messages: Sequence[Message | View]) -> None:
        """Take these messages out of the hand; they stand where they stood.

        Raises:
            NotInHand: one is not in hand; none was given back.
        """
        in_hand = {}
        for slot, bits in self._slots():
            sender = self._names[self._words[slot + S_ADDRESS] >> 16 & 0xFFFF]
            first = self._words[slot + S_SEQUENCE]
            for number in range(bits.bit_length()):
                if bits >> number & 1:
                    in_hand[sender, first + number] = slot, 1 << number
        returned: dict[int, int] = {}
        for message in messages:
            place = in_hand.get((message.sender, message.sequence))
            if place is None:
                raise NotInHand(message.sender, message.sequence)
            slot, bit = place
            returned[slot] = returned.get(slot, 0) | bit
        kept = {slot: bits & ~returned[slot] for slot, bits in self._slots() if slot in returned}
        for slot, bits in kept.items():
            self._keep(slot, bits)

    def _keep(self, slot: int, bits: int) -> None:
        """Of the slot only the messages ``bits`` stay in hand."""
        self.held.pop(slot, None)
        self.held.pop(slot + S_DONE, None)
        if bits:  # of a bundle: some were released before, some are returned, some stay
            self.held[slot + S_DONE] = self._words[slot + S_DONE] | bits
