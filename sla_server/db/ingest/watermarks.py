"""High water: the highest contiguous cut kept, of each (gateway, epoch). Pure.

The rule. A cut is *new* if it directly continues what is kept; ``gap`` cuts that its agent had to drop
before it count as bridged. At or below the high water it is a *duplicate*. Anything else leaves a *hole*:
it is not kept, the PMDaemon rewinds to ack + 1 after 10 s without progress, and the missing cuts come
first.

An epoch begins at 1, also when it was never heard of: a first cut may have been refused by a full mailbox,
and taking the second would make the agent forget the first. When the agent does not hold the cuts below
some ``first`` any more (its spool overflowed, or this server's memory was lost), GATEWAY says so in
``spool``; the high water is then raised to first - 1, which is the only way over such a hole.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

Epoch = tuple[str, int]
"""(gateway_id, epoch)."""


class CutAdmission(Enum):
    """What to do with a cut, and why."""

    NEW = auto()
    DUPLICATE = auto()
    HOLE = auto()


class HighWater:
    """The table of high waters. Not thread-safe: belongs to the intake thread."""

    def __init__(self, rows: Iterable[tuple[str, int, int]] = ()) -> None:
        self._seq: dict[Epoch, int] = {}
        self._epochs: dict[str, list[int]] = {}
        for gateway_id, epoch, seq in rows:
            self.raise_to(gateway_id, epoch, seq)

    def of(self, gateway_id: str, epoch: int) -> int:
        """Highest contiguous seq kept, 0 for none."""
        return self._seq.get((gateway_id, epoch), 0)

    def raise_to(self, gateway_id: str, epoch: int, seq: int) -> bool:
        """Everything up to ``seq`` is kept, or known to be lost; returns whether that is news."""
        key = (gateway_id, epoch)
        if key not in self._seq:
            self._epochs.setdefault(gateway_id, []).append(epoch)
        elif seq <= self._seq[key]:
            return False
        self._seq[key] = seq
        return True

    def put_right(self, gateway_id: str, epoch: int, seq: int) -> None:
        """What was stored of a known epoch is not true: ``seq`` is."""
        self._seq[gateway_id, epoch] = seq

    def knows(self, gateway_id: str) -> bool:
        """Whether anything of this gateway was ever kept."""
        return gateway_id in self._epochs

    def admit(self, gateway_id: str, epoch: int, seq: int, gap: int = 0) -> CutAdmission:
        """Judge one cut; a new one raises the high water."""
        high = self.of(gateway_id, epoch)
        if seq <= high:
            return CutAdmission.DUPLICATE
        if seq - 1 - gap > high:
            return CutAdmission.HOLE
        self.raise_to(gateway_id, epoch, seq)
        return CutAdmission.NEW

    def rows(self, gateway_id: str | None = None) -> list[list[Any]]:
        """[gateway_id, epoch, seq] of one gateway or of all, as WATERMARKS carries them."""
        names = self._epochs if gateway_id is None else (gateway_id,)
        return [
            [name, epoch, self._seq[name, epoch]] for name in names for epoch in self._epochs.get(name, ())
        ]


def spool_floors(header: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(gateway_id, epoch, first - 1) for each well-formed entry of a GATEWAY header's ``spool``."""
    gateway_id, spool = header.get("gw"), header.get("spool")
    if header.get("state") != "up" or not isinstance(gateway_id, str) or not isinstance(spool, list):
        return []
    floors = []
    for entry in spool:
        if isinstance(entry, list | tuple) and len(entry) >= 2:
            epoch, first = entry[0], entry[1]
            if type(epoch) is int and type(first) is int and 0 < epoch < 1 << 64 and 1 < first < 1 << 63:
                floors.append((gateway_id, epoch, first - 1))
    return floors
