"""Which slot holds which record: sequence number to slot, without an object for each. Pure.

Numbers are given one after another and mostly go in that order, so they are kept by pages of ``PAGE`` of
them: 4 bytes a number, and some 200 for the page, which goes with the last of its records. A dict of numbers
took 20 times as much.

Counts go up before numbers come and down after they went: what is interrupted (a signal, no memory) leaves
them too great at most, so a page never goes with numbers in it, and the map is never taken for empty.

Guarded by the queue's lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

NO_SLOT: Final = 0xFFFFFFFF
PAGE_BITS: Final = 6
PAGE: Final = 1 << PAGE_BITS
_MASK: Final = PAGE - 1
_EMPTY: Final = array("I", [NO_SLOT] * PAGE + [0])  # the last item counts the numbers that have a slot


class SlotMap:
    """See the module.

    Attributes:
        pages: by ``seq >> PAGE_BITS``; item ``seq % PAGE`` is the slot, or NO_SLOT.
    """

    def __init__(self) -> None:
        self.pages: dict[int, array[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many numbers have a slot."""
        return self._count

    def __contains__(self, seq: object) -> bool:
        """Whether a number has a slot."""
        return isinstance(seq, int) and self.get(seq) != NO_SLOT

    def get(self, seq: int) -> int:
        """The slot of a number; NO_SLOT if it has none."""
        page = self.pages.get(seq >> PAGE_BITS)
        return NO_SLOT if page is None else page[seq & _MASK]

    def add(self, first_seq: int, slots: Sequence[int]) -> None:
        """Numbers from ``first_seq`` on, none of which has a slot, get these."""
        done, count, pages = 0, len(slots), self.pages
        self._count += count
        while done < count:
            seq = first_seq + done
            page = pages.get(seq >> PAGE_BITS)
            if page is None:
                page = pages[seq >> PAGE_BITS] = _EMPTY[:]
            place = seq & _MASK
            some = min(PAGE - place, count - done)
            page[PAGE] += some
            if count == 1:
                page[place] = slots[0]
            else:
                page[place : place + some] = array("I", slots[done : done + some])
            done += some

    def take_back(self, first_seq: int, limit: int, count: int) -> None:
        """As before ``add``, also before one that was interrupted.

        Args:
            first_seq: of what was added; no number from it on has a slot then.
            limit: behind what was added.
            count: how many numbers had one.
        """
        for number in range(first_seq >> PAGE_BITS, ((limit - 1) >> PAGE_BITS) + 1):
            page = self.pages.get(number)
            if page is not None:
                begin = max(0, first_seq - (number << PAGE_BITS))
                page[begin:PAGE] = _EMPTY[begin:PAGE]
                page[PAGE] = PAGE - page[:PAGE].count(NO_SLOT)
                if not page[PAGE]:
                    del self.pages[number]
        self._count = count

    def remove(self, seq: int) -> None:
        """The number has no slot any more; nothing happens if it had none."""
        page = self.pages.get(seq >> PAGE_BITS)
        if page is None or page[seq & _MASK] == NO_SLOT:
            return
        if page[PAGE] == 1:
            del self.pages[seq >> PAGE_BITS]
        else:
            page[seq & _MASK] = NO_SLOT
            page[PAGE] -= 1
        self._count -= 1

    def first(self, seq: int, limit: int) -> int:
        """The smallest number from ``seq`` on that has a slot; ``limit`` if none below that has one."""
        pages = self.pages
        while seq < limit:
            page = pages.get(seq >> PAGE_BITS)
            if page is None:
                seq = (seq | _MASK) + 1
            elif page[seq & _MASK] != NO_SLOT:
                return seq
            else:
                seq += 1
        return limit

    def between(self, first_seq: int, last_seq: int) -> Iterator[tuple[int, int]]:
        """(number, slot) of those from the one to the other, in order; those found next may be removed."""
        seq = first_seq
        while seq <= last_seq:
            page = self.pages.get(seq >> PAGE_BITS)
            if page is None:
                seq = (seq | _MASK) + 1
                continue
            for number in range(seq, min(seq | _MASK, last_seq) + 1):
                slot = page[number & _MASK]
                if slot != NO_SLOT:
                    yield number, slot
            seq = (seq | _MASK) + 1
