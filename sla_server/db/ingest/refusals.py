"""Clients that were refused because the storage is not there: a stall, in which nothing could begin.

An agent counts each of them as failed (``wire.cut``, FAILED with threshold 0), but a client that cannot
connect has nothing outstanding, so an agent of before has no stall to report. Here one is made of what it
does report: from the start of the cut with the first refusal to the next completion of a read or write, or to
the end of the slot of the last refusal; refusals less than ``KEPT_US`` apart belong together. Agents that
report outstanding I/O by kind report this stall themselves, and better, as they see a client admitted: once a
gateway has done so, it is left alone.

State: streams with such a stall, gateways that report kinds; none after a start. Belongs to the writer
thread; no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sla_server.db.ingest.batch import CutRows

KEPT_US: Final = 60_000_000
"""Clients try again after a few seconds, at most after a minute."""


@dataclass(slots=True)
class _Refused:
    """A stream of a gateway whose clients are refused: since when, and start of the newest refusing cut."""

    gateway_id: str
    since_us: int
    newest_us: int


@dataclass(frozen=True, slots=True)
class Stall:
    """One to report: of which stream, in which cut of the batch, and how long it is by that cut's end."""

    stream_id: int
    item: int
    stalled_us: int


class RefusedClients:
    """See the module."""

    def __init__(self, slot_us: int) -> None:
        self._slot_us = slot_us
        self._refused: dict[int, _Refused] = {}
        self._tellers = set[str]()  # gateways whose agents report these stalls themselves

    def copy(self) -> tuple[dict[int, _Refused], set[str]]:
        """All of the state, for ``go_back``."""
        return {key: replace(each) for key, each in self._refused.items()}, set(self._tellers)

    def go_back(self, state: tuple[dict[int, _Refused], set[str]]) -> None:
        """What ``copy`` returned is the state again."""
        self._refused, self._tellers = {key: replace(each) for key, each in state[0].items()}, set(state[1])

    def begin_again(self) -> None:
        """Cuts of before may come again."""
        self._refused = {}

    def absorb(self, rows: CutRows) -> list[Stall]:
        """The stalls that the cuts of a batch make longer."""
        tellers = {rows.gateways[item] for item in np.unique(rows.item[rows.tells_kind]).tolist()}
        for gateway_id in tellers - self._tellers:
            self._tellers.add(gateway_id)
            self._refused = {
                key: each for key, each in self._refused.items() if each.gateway_id != gateway_id
            }
        refuses = rows.refused
        if not self._refused and not refuses.any():
            return []
        found: list[Stall] = []
        gateways = {each.gateway_id for each in self._refused.values()}
        gateways |= {rows.gateways[item] for item in rows.item[refuses].tolist()} - self._tellers
        bounds = np.searchsorted(rows.item, np.arange(len(rows.gateways) + 1)).tolist()
        for item, gateway_id in enumerate(rows.gateways):
            if gateway_id in gateways:
                found += self._add_cut(rows, item, slice(bounds[item], bounds[item + 1]))
        return found

    def _add_cut(self, rows: CutRows, item: int, own: slice) -> list[Stall]:
        gateway_id, (start_us, end_us) = rows.gateways[item], rows.span_of(item)
        streams = rows.stream_id[own]
        for stream_id in streams[rows.completed[own] > 0].tolist():
            self._refused.pop(stream_id, None)
        for stream_id in streams[rows.refused[own]].tolist():
            known = self._refused.get(stream_id)
            if known is None or start_us - known.newest_us > KEPT_US:
                known = self._refused[stream_id] = _Refused(gateway_id, start_us, start_us)
            known.newest_us = max(start_us, known.newest_us)
        found = []
        for stream_id, each in list(self._refused.items()):
            if each.gateway_id != gateway_id:
                continue
            if start_us // self._slot_us == each.newest_us // self._slot_us and end_us > each.since_us:
                found.append(Stall(stream_id, item, end_us - each.since_us))
            elif start_us - each.newest_us > KEPT_US:
                del self._refused[stream_id]
        return found
