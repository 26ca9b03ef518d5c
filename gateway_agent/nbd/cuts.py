"""Cuts of one plane: made on request, kept until the link says that it has spooled them.

    collect(got) ──► got is the id of the oldest kept cut?  yes: forget it
                     a cut is kept?                         yes: answer it, the same bytes as before
                                                            no:  make one, keep it, answer it

So a link killed between receiving and spooling loses nothing and doubles nothing. Ids begin at the wall
clock of the plane's start, so that no id of a plane's former life is taken for one of this.

A cut has exactly one version of the threshold set: ``set_thresholds`` closes the cut in progress and keeps
it; its header says ``more``, and the link collects again. ``tg`` is the generation of caps held during the
whole cut, or -1; a change of caps makes no boundary, because it needs none.

Sans-IO: time comes as an argument. Holds: the streams of this plane, the kept cuts, the boundaries.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np

from gateway_agent.errors import ExportRefused
from gateway_agent.nbd.account import Stream, StreamCut
from gateway_agent.nbd.config import ExportConfig
from gateway_agent.nbd.protocol import Rep
from gateway_agent.nbd.thresholds import ThresholdSet
from pmdaemon.wire import frame
from pmdaemon.wire.cut import HIST_DTYPE, MISSED_DTYPE, rows_array
from pmdaemon.wire.histogram import WIRE_BUCKETS
from pmdaemon.wire.kinds import Kind

MIXED: Final = -1
MAX_KEPT_CUTS: Final = 64  # each threshold change without a collecting link keeps one; beyond that they merge
MAX_STREAMS: Final = (
    320  # 144 B of counters, 2.4 KB of full histograms and 32 limits each still fit a 1 MiB frame
)
MAX_DESCRIPTOR_BYTES: Final = 60_000  # all streams are named in one frame header, which holds 65,535 bytes
_DESCRIPTOR_OVERHEAD_BYTES: Final = 48  # keys, map and string prefixes of one stream in msgpack


class StreamTable:
    """Every stream of this plane since its start; the index of a stream never changes."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._by_name: dict[tuple[str, str], Stream] = {}
        self._descriptor_bytes = 0

    def get(self, export: ExportConfig, client: str, thresholds: ThresholdSet) -> Stream:
        """The stream of one client on one volume, made when it is new.

        Raises:
            ExportRefused: there are more streams than one cut can name.
        """
        known = self._by_name.get((export.volume, client))
        if known is not None:
            return known
        names = (export.volume, client, export.backend)
        descriptor_bytes = sum(len(name.encode()) for name in names) + _DESCRIPTOR_OVERHEAD_BYTES
        if (
            self._descriptor_bytes + descriptor_bytes > MAX_DESCRIPTOR_BYTES
            or len(self.streams) >= MAX_STREAMS
        ):
            raise ExportRefused(
                Rep.ERR_POLICY,
                f"this gateway process already counts {len(self.streams)} streams, which is its limit; "
                "spread the volumes over more planes",
            )
        self._descriptor_bytes += descriptor_bytes
        stream = Stream(len(self.streams), *names, export.cost_read, export.cost_write)
        stream.set_thresholds(thresholds)
        self.streams.append(stream)
        self._by_name[export.volume, client] = stream
        return stream


class CutMaker:
    """See the module docstring.

    Args:
        table: the streams.
        now_ns: start of the first cut, monotonic.
        now_unix_us: the same moment on the wall clock.
    """

    def __init__(self, table: StreamTable, now_ns: int, now_unix_us: int) -> None:
        self.table = table
        self.thresholds = ThresholdSet()
        self.forced = 0  # I/Os let through at the hold limit in this cut; sessions' volumes add to it
        self._next_id = now_unix_us
        self._generation = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._begin(now_ns, now_unix_us)

    def _begin(self, now_ns: int, now_unix_us: int) -> None:
        self._start_ns, self._start_unix_us = now_ns, now_unix_us
        self._held_generation = self._generation
        self._version = self.thresholds.version
        self.forced = 0

    def set_generation(self, generation: int) -> None:
        """Caps of another generation are in force from now on."""
        if generation != self._generation:
            self._generation, self._held_generation = generation, MIXED

    def set_thresholds(self, thresholds: ThresholdSet, now_ns: int, now_unix_us: int) -> None:
        """Compare with another set from now on; a set already in force changes nothing."""
        if thresholds == self.thresholds:
            return
        may_close = len(self._kept) < MAX_KEPT_CUTS
        if may_close:
            self._close(now_ns, now_unix_us, more=True)
        self.thresholds = thresholds
        for stream in self.table.streams:
            stream.set_thresholds(thresholds)
        # Too many kept cuts (nobody collects): this one goes on, its missed counts are of no single version.
        self._version = thresholds.version if may_close else MIXED

    def collect(self, got: int, now_ns: int, now_unix_us: int) -> bytes:
        """The DP_CUT frame that answers a DP_COLLECT.

        Args:
            got: id of the last cut the link has spooled, 0 for none.
            now_ns: monotonic, the end of a cut made now.
            now_unix_us: the same moment on the wall clock.
        """
        if self._kept and self._kept[0][0] == got:
            self._kept.popleft()
        if not self._kept:
            self._close(now_ns, now_unix_us, more=False)
        return self._kept[0][1]

    def _close(self, now_ns: int, now_unix_us: int, *, more: bool) -> None:
        rows = [taken for stream in self.table.streams if (taken := stream.take()) is not None]
        blob, hist_len, missed_len = _columns(rows)
        self._next_id += 1
        header: dict[str, Any] = {
            "id": self._next_id,
            "start_ns": self._start_ns,
            "end_ns": now_ns,
            "start_us": self._start_unix_us,
            "tg": self._held_generation,
            "ts": self._version,
            "n": len(rows),
            "h": hist_len,
            "m": missed_len,
            "streams": [row.stream.descriptor for row in rows],
            "more": more,
            "forced": self.forced,
        }
        self._kept.append((self._next_id, frame.encode(Kind.DP_CUT, header, blob)))
        self._begin(now_ns, now_unix_us)


def _columns(rows: list[StreamCut]) -> tuple[bytes, int, int]:
    """Blob as in CUT, and its numbers of histogram and missed entries."""
    counters = rows_array([taken.row for taken in rows])
    dense = np.zeros((len(rows), WIRE_BUCKETS), dtype=np.int64)
    for index, taken in enumerate(rows):
        dense[index] = taken.hist
    row, bucket = np.nonzero(dense)
    hist = np.zeros(len(row), dtype=HIST_DTYPE)
    hist["row"], hist["bucket"], hist["count"] = row, bucket, dense[row, bucket]
    missed = np.array(
        [(index, *entry) for index, taken in enumerate(rows) for entry in taken.missed], dtype=MISSED_DTYPE
    )
    return counters.tobytes() + hist.tobytes() + missed.tobytes(), len(hist), len(missed)
