"""What agents counted while no cut of them arrived: the proof that a gap is ours (SLA-MODEL.md 2).

Each cut carries the lifetime counters of its streams. When a cut does not follow the one before it, in time
or in number, the counters of both are compared: what moved in between, less what the cut itself counts, are
I/Os that an agent saw and that no cut tells of. A host that was gone counts nothing. Only streams of both
cuts can be compared, and only within one epoch, as counters begin at 0 with each.

State: of each gateway the newest cut's counters; nothing after a start, so the first cut of each proves
nothing then. Values are replaced, never changed, so that ``copy`` is cheap. Belongs to the writer thread; no
I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pmdaemon.wire.cut import COL, Cut
from sla_server.db.histogram_codec import Int64s

_KEPT: Final = np.array([COL["stream_id"], COL["cum_reads"], COL["cum_writes"]])
GAP_RATIO: Final = 0.1  # of a cut: what lies between two cuts that follow each other is far less


@dataclass(frozen=True, slots=True)
class _Newest:
    epoch: int
    seq: int
    end_us: int
    counters: Int64s  # those of _KEPT, a row each


class CounterMemory:
    """See the module."""

    def __init__(self) -> None:
        self._newest: dict[str, _Newest] = {}

    def copy(self) -> dict[str, _Newest]:
        """All of the state, for ``go_back``."""
        return dict(self._newest)

    def go_back(self, state: dict[str, _Newest]) -> None:
        """What ``copy`` returned is the state again."""
        self._newest = dict(state)

    def begin_again(self) -> None:
        """Cuts of before may come again: forget the newest ones."""
        self._newest = {}

    def unseen_ios(self, cut: Cut, start_us: int) -> int:
        """I/Os since the gateway's cut before that no cut counts, at least; notes this cut.

        Args:
            cut: the next in order of its gateway.
            start_us: its corrected start.
        """
        before = self._newest.get(cut.gateway_id)
        end_us = start_us + cut.duration_us
        if before is not None and before.epoch == cut.epoch and cut.seq <= before.seq:
            return 0  # read again from the queue
        self._newest[cut.gateway_id] = _Newest(cut.epoch, cut.seq, end_us, cut.counters[_KEPT])
        if before is None or before.epoch != cut.epoch:
            return 0
        is_next = cut.seq == before.seq + 1 and start_us - before.end_us <= GAP_RATIO * cut.duration_us
        if is_next:
            return 0
        _, here, there = np.intersect1d(cut.column("stream_id"), before.counters[0], return_indices=True)
        own = cut.column("reads") + cut.column("writes")
        moved = cut.column("cum_reads") + cut.column("cum_writes") - own
        return int(np.maximum(moved[here] - before.counters[1:].sum(axis=0)[there], 0).sum())
