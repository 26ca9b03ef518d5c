"""From samples to spooled cuts: the step that decides what survives a crash.

For each group of samples, in this order: 1. new streams are saved in the book; 2. the cut is appended to the
spool, with the marks of the planes in it; 3. the sources forget their samples. Killed before 2 is whole, the
planes repeat the same bytes to the next link and nothing was counted; killed after it, the next link reads
the marks and asks for what follows. There is no third case: a record of the disk queue is whole or not there.

Holds: the epoch and the seq of this link process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway_agent.link import merge
from gateway_agent.link.errors import SpoolWriteFailed
from gateway_agent.link.spool import Spool
from gateway_agent.link.streams import StreamNames
from gateway_agent.sources.base import StatisticsSource
from gateway_agent.sources.sample import Sample
from pmdaemon.errors import BadCut, FrameTooLarge
from pmdaemon.wire import cut

MAX_CUT_BYTES: Final = 952 << 10  # the server takes a cut of this size at most (docs/formats/wire.md)


class Gatherer:
    """Turns what a collection brought into cuts in the spool. Thread: the link's loop only."""

    def __init__(
        self,
        gateway_id: str,
        epoch: int,
        spool: Spool,
        book: StreamNames,
        sources: Sequence[StatisticsSource],
    ) -> None:
        self._gateway_id = gateway_id
        self.epoch = epoch
        self.seq = 0
        self._spool = spool
        self._book = book
        self._sources = {source.name: source for source in sources}

    def spool(self, samples: Sequence[Sample]) -> int:
        """Make cuts of the samples and spool them; returns how many old cuts were dropped to make room.

        Raises:
            SpoolWriteFailed: the cuts up to here are spooled; the sources of the others keep their samples.
            BadCut, FrameTooLarge: more streams than a cut may have.
        """
        dropped = 0
        for group in merge.groups(samples):
            try:
                dropped += self._spool_cut(group)
            except (BadCut, FrameTooLarge):
                if len(group) == 1:
                    raise
                # Too many streams for one cut: each source's own part is bounded and fits alone.
                dropped += sum(self._spool_cut([sample]) for sample in group)
        return dropped

    def _spool_cut(self, group: Sequence[Sample]) -> int:
        marks = {**self._spool.marks, **{sample.source: sample.mark for sample in group if sample.mark}}
        identity = merge.CutIdentity(self._gateway_id, self.epoch, self.seq + 1, marks)
        raw = cut.encode(merge.make_cut(group, self._book, identity))
        if len(raw) > MAX_CUT_BYTES:
            raise FrameTooLarge("cut", len(raw), MAX_CUT_BYTES)
        try:
            self._book.save()
        except OSError as exc:
            raise SpoolWriteFailed("the book of streams", str(exc)) from exc
        dropped = self._spool.append(self.epoch, identity.seq, raw, marks)
        self.seq = identity.seq
        for sample in group:
            self._sources[sample.source].spooled()
        return dropped
