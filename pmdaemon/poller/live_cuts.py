"""Cuts that went to services ahead of their turn: bounded, however long the backlog takes.

While a backlog is worked off, or dbmanager takes nothing for an hour, the newest cut of each answer is
judged at once and comes again in its turn, when it must not be judged again. The newest cuts follow each
other, so they are held as ranges of seq, nearly always one. An agent that sends what does not follow makes
at most ``RANGES`` an epoch; then two are joined, and what lies between them counts as judged: rather not at
all than twice.

Pure; guarded by the gateway's lock, with the rest of its record.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

RANGES: Final = (
    64  # an extra cut between two answers (CAPS, another interval) ends a range: a minute of those
)


class LiveCuts:
    """Ranges (first, last), by epoch."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._ranges.values()))

    def __contains__(self, cut: tuple[int, int]) -> bool:
        epoch, seq = cut
        return any(first <= seq <= last for first, last in self._ranges.get(epoch, ()))

    def newest(self, epoch: int) -> int:
        """The newest cut of this epoch that went ahead; 0 if none did."""
        ranges = self._ranges.get(epoch)
        return ranges[-1][1] if ranges else 0

    def add(self, epoch: int, seq: int) -> None:
        """This cut went to services."""
        ranges = self._ranges.setdefault(epoch, [])
        if ranges and ranges[-1][1] + 1 == seq:
            ranges[-1] = (ranges[-1][0], seq)
            return
        ranges.append((seq, seq))
        if len(ranges) > RANGES:
            oldest, next_one = ranges[:2]
            ranges[:2] = [(min(oldest[0], next_one[0]), max(oldest[1], next_one[1]))]

    def pass_by(self, epoch: int, seq: int) -> LiveCuts | None:
        """All up to ``seq`` had their turn; returns what is left, if anything."""
        left = [held for held in self._ranges.pop(epoch, ()) if held[1] > seq]
        if left:
            self._ranges[epoch] = left
        return self if self._ranges else None

    def keep_epochs(self, epochs: Container[int]) -> LiveCuts | None:
        """No other epoch will be heard of again; returns what is left, if anything."""
        self._ranges = {epoch: ranges for epoch, ranges in self._ranges.items() if epoch in epochs}
        return self if self._ranges else None
