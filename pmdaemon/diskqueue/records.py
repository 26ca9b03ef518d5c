"""The live records in memory, as columns: one item of each array for a slot of the index, 42 bytes in all.

A queue may hold hundreds of thousands of records while a reader is away; as objects with their numbers they
took ten times as much. What few records have (a destination, an owner, retries) is kept apart, by slot.

State, guarded by the queue's lock: the columns, ``live`` (number -> slot), ``destinations``, ``work``, and
``durable_seq``: a record is durable if its number is not greater, since rounds take them in their order.

A slot is live (its ``seqs`` is its number), free (0; ``behind`` is the next free one), or was never used.
"""

from __future__ import annotations

from array import array
from typing import Final

from pmdaemon.diskqueue.format import IN_USE, Work
from pmdaemon.diskqueue.slots import SlotMap

GROWTH_SLOTS: Final = 256
COLUMNS: Final = ("seq", "offset", "span", "length", "crc", "kind", "prev", "next")
"""Names of the fields of ``format.SLOT_FIELDS`` that the columns hold, in their order."""


class Records:
    """See the module.

    Attributes:
        seqs: sequence numbers. offsets: in the ring. spans: bytes occupied. lengths: of the data.
        crcs: of the records. kinds: the users' types.
        before, behind: neighbours in the in-use list, NONE at its ends.
        columns: all of these.
    """

    def __init__(self) -> None:
        self.seqs = array("Q")
        self.offsets = array("Q")
        self.spans = array("I")
        self.lengths = array("I")
        self.crcs = array("I")
        self.kinds = array("H")
        self.before = array("I")
        self.behind = array("I")
        self.columns = (
            self.seqs, self.offsets, self.spans, self.lengths,
            self.crcs, self.kinds, self.before, self.behind,
        )  # fmt: skip
        self.live = SlotMap()
        self.destinations: dict[int, bytes] = {}
        self.work: dict[int, Work] = {}
        self.durable_seq = 0

    def __len__(self) -> int:
        """Slots that there is memory for."""
        return len(self.seqs)

    def grow(self, slots: int = GROWTH_SLOTS) -> None:
        """Memory for more slots, zeroed."""
        for column in self.columns:
            column.frombytes(bytes(column.itemsize * slots))

    def end(self, slot: int) -> int:
        """Offset behind the record."""
        return self.offsets[slot] + self.spans[slot]

    def destination(self, slot: int) -> bytes:
        """Its destination, b"" for none."""
        return self.destinations.get(slot, b"") if self.destinations else b""

    def working(self, slot: int) -> Work:
        """Its consumers' part, made when first needed."""
        work = self.work.get(slot)
        if work is None:
            work = self.work[slot] = Work()
        return work

    def is_durable(self, slot: int) -> bool:
        """Whether the record is on disk."""
        return self.seqs[slot] <= self.durable_seq

    def drop(self, slot: int) -> None:
        """The slot holds nothing any more; its neighbours are the caller's affair."""
        self.live.remove(self.seqs[slot])
        self.seqs[slot] = 0
        if self.destinations:
            self.destinations.pop(slot, None)
        if self.work:
            self.work.pop(slot, None)

    def fields(self, slot: int) -> tuple[int, ...]:
        """The fields of ``format.SLOT_FIELDS`` for a live slot."""
        work = self.work.get(slot)
        owner = work.owner if work is not None else None
        return (
            IN_USE,
            self.kinds[slot],
            self.seqs[slot],
            self.offsets[slot],
            self.spans[slot],
            self.lengths[slot],
            self.crcs[slot],
            owner.pid if owner else 0,
            owner.start_ticks if owner else 0,
            work.retries if work else 0,
            self.before[slot],
            self.behind[slot],
            work.last_retry_us if work else 0,
        )
