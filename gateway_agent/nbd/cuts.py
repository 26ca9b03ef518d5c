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
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from gateway_agent.errors import ExportRefused
from gateway_agent.nbd.accounting import StreamAccount, StreamCut
from gateway_agent.nbd.config import ExportConfig
from gateway_agent.nbd.protocol import Rep
from gateway_agent.nbd.thresholds import PlaneThresholds
from pmdaemon.wire.cut import HIST_DTYPE, MISSED_DTYPE, rows_array, worst_late
from pmdaemon.wire.histogram import WIRE_BUCKETS
from pmdaemon.wire.messages.planes import DpCut

MIXED: Final = -1
MAX_KEPT_CUTS: Final = 64  # each threshold change without a collecting link keeps one; beyond that they merge
MAX_STREAMS: Final = (
    320  # 144 B of counters, 2.4 KB of full histograms and 32 limits each still fit a 1 MiB frame
)
MAX_DESCRIPTOR_BYTES: Final = 60_000  # all streams are named in one frame header, which holds 65,535 bytes
_DESCRIPTOR_OVERHEAD_BYTES: Final = 48  # keys, map and string prefixes of one stream in msgpack


class Throttled(Protocol):
    """A volume, asked at each cut."""

    export: ExportConfig

    def take_late(self, now_ns: int) -> tuple[int, int] | None:
        """(I/Os, longest delay in us) of what its caps held for too long in this cut; None for nothing."""


class StreamTable:
    """The streams of this plane, by volume and client.

    When there is no room for another, the ones unused for longest are forgotten: without a connection, and
    with every count in a cut. One that comes back begins its lifetime columns at 0, as after a restart.
    """

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], StreamAccount] = {}  # the one asked for last comes last
        self._descriptor_bytes = 0
        self._made = 0

    @property
    def streams(self) -> list[StreamAccount]:
        """All of them."""
        return list(self._by_name.values())

    def get(self, export: ExportConfig, client: str, thresholds: PlaneThresholds) -> StreamAccount:
        """The stream of one client on one volume, made when it is new.

        Raises:
            ExportRefused: there are more streams in use than one cut can name.
        """
        known = self._by_name.pop((export.volume, client), None)
        if known is not None:
            self._by_name[export.volume, client] = known
            return known
        names = (export.volume, client, export.backend)
        self._make_room(_descriptor_bytes(*names))
        stream = StreamAccount(self._made, *names, export.cost_read, export.cost_write)
        stream.set_thresholds(thresholds)
        self._made += 1
        self._descriptor_bytes += _descriptor_bytes(*names)
        self._by_name[export.volume, client] = stream
        return stream

    def _make_room(self, size_bytes: int) -> None:
        for stream in self.streams:
            if self._has_room(size_bytes):
                return
            if stream.is_unused:
                del self._by_name[stream.volume, stream.client]
                self._descriptor_bytes -= _descriptor_bytes(stream.volume, stream.client, stream.backend)
        if not self._has_room(size_bytes):
            raise ExportRefused(
                Rep.ERR_POLICY,
                f"this gateway process already counts {len(self._by_name)} streams that are in use or not "
                f"yet collected; its limits are {MAX_STREAMS} streams and {MAX_DESCRIPTOR_BYTES} bytes of "
                "names. Spread the volumes over more planes",
            )

    def _has_room(self, size_bytes: int) -> bool:
        return (
            len(self._by_name) < MAX_STREAMS and self._descriptor_bytes + size_bytes <= MAX_DESCRIPTOR_BYTES
        )


def _descriptor_bytes(*names: str) -> int:
    return sum(len(name.encode()) for name in names) + _DESCRIPTOR_OVERHEAD_BYTES


class CutMaker:
    """See the module docstring.

    Args:
        table: the streams.
        now_ns: start of the first cut, monotonic.
        now_unix_us: the same moment on the wall clock.
        starved_us: how long the plane has waited for a processor since its start (``starvation``).
    """

    def __init__(
        self, table: StreamTable, now_ns: int, now_unix_us: int, starved_us: Callable[[], int] = lambda: 0
    ) -> None:
        self.table = table
        self._starved_us = starved_us
        self.thresholds = PlaneThresholds()
        self.volumes: list[Throttled] = []  # they add themselves
        self._next_id = now_unix_us
        self._generation = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._is_finished = False
        self._begin(now_ns, now_unix_us)

    def _begin(self, now_ns: int, now_unix_us: int) -> None:
        self._start_ns, self._start_unix_us = now_ns, now_unix_us
        self._held_generation = self._generation
        self._version = self.thresholds.version
        self._start_starved_us = self._starved_us()

    def set_generation(self, generation: int) -> None:
        """Caps of another generation are in force from now on."""
        if generation != self._generation:
            self._generation, self._held_generation = generation, MIXED

    def set_thresholds(self, thresholds: PlaneThresholds, now_ns: int, now_unix_us: int) -> None:
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

    def finish(self, now_ns: int, now_unix_us: int) -> None:
        """Close the last cut: no I/O is counted any more."""
        self._close(now_ns, now_unix_us, more=True)
        self._is_finished = True

    def collect(self, got: int, now_ns: int, now_unix_us: int) -> bytes | None:
        """The DP_CUT frame that answers a DP_COLLECT; None when the last cut of all is spooled.

        Args:
            got: id of the last cut the link has spooled, 0 for none.
            now_ns: monotonic, the end of a cut made now.
            now_unix_us: the same moment on the wall clock.
        """
        if self._kept and self._kept[0][0] == got:
            self._kept.popleft()
        if not self._kept and self._is_finished:
            return None
        if not self._kept:
            self._close(now_ns, now_unix_us, more=False)
        return self._kept[0][1]

    def _close(self, now_ns: int, now_unix_us: int, *, more: bool) -> None:
        rows = [taken for stream in self.table.streams if (taken := stream.take()) is not None]
        blob, hist_len, missed_len = _columns(rows)
        self._next_id += 1
        starved_us = max(self._starved_us() - self._start_starved_us, 0)
        late = {each.export.volume: found for each in self.volumes if (found := each.take_late(now_ns))}
        made = DpCut(
            id=self._next_id,
            start_ns=self._start_ns,
            end_ns=now_ns,
            start_us=self._start_unix_us,
            throttle_gen=self._held_generation,
            threshold_version=self._version,
            rows=len(rows),
            hist_entries=hist_len,
            missed_entries=missed_len,
            streams=[row.stream.descriptor for row in rows],
            more=more,
            starved_us=starved_us,
            late=worst_late(late) or None,
        )
        self._kept.append((self._next_id, made.encode_with(blob)))
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
