"""Cuts that came after their slice was judged, found without judging it again.

Every cut that is ingested counts in table ``coverage``, by slot and gateway. What the table said when a slice
was judged is noted; from time to time the newest slots are read again, and a gateway whose number of cuts is
another one now has late cuts. Reads are bounded: with very many gateways they take turns.

Belongs to the looker's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sla_server.services.judging.track import SECOND_US
from sla_server.services.store import Row, SqlReads

EVERY_US: Final = 10 * SECOND_US
MOST_ROWS: Final = 5_000
"""Of one read: the last five minutes of 1,000 gateways."""
_SLOT_US: Final = 60 * SECOND_US  # a usual slot; only to foresee how much a read returns


class LateCuts:
    """See the module."""

    def __init__(self, store: SqlReads) -> None:
        self._store = store
        self._seen: dict[str, dict[int, int]] = {}
        self._looked_us = 0
        self._turn = 0

    def note(self, coverage: Iterable[Row]) -> None:
        """What was known when slices were judged; rows of one slot together."""
        for gateway_id, slots in _cuts(coverage).items():
            self._seen.setdefault(gateway_id, {}).update(slots)

    def look(self, gateways: Sequence[str], span_us: int, now_us: int) -> list[tuple[str, int]]:
        """(gateway, slot) of what has changed in the last ``span_us``; nothing before the next turn is due.

        Raises:
            SlaError: the database is away (retryable); the same turn comes again.
        """
        if now_us - self._looked_us < EVERY_US or not gateways:
            return []
        size = max(1, MOST_ROWS // max(1, span_us // _SLOT_US))
        first = self._turn if self._turn < len(gateways) else 0
        some = gateways[first : first + size]
        rows = self._store.slice_inputs([], some, now_us - span_us, now_us).coverage
        self._looked_us, self._turn = now_us, first + size
        changed = []
        found = _cuts(rows)
        for gateway_id in some:
            seen = self._seen.get(gateway_id, {})
            slots = found.get(gateway_id, {})
            changed += [(gateway_id, slot) for slot, cuts in slots.items() if seen.get(slot) != cuts]
            self._seen[gateway_id] = slots  # and the older ones are forgotten
        return changed


def _cuts(coverage: Iterable[Row]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for row in coverage:
        slots = found.setdefault(row["gateway_id"], {})
        slots[row["slot_us"]] = slots.get(row["slot_us"], 0) + int(row["cuts"])
    return found
