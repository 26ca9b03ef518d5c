"""The streams of a plane, and the cuts made of them.

Cuts are made on request and kept until the link says that it has spooled them:

    collect(got) ──► got is the id of the oldest kept cut?  yes: forget it
                     a cut is kept?                         yes: answer it, the same bytes as before
                                                            no:  make one, keep it, answer it

So a link killed between receiving and spooling loses nothing and doubles nothing. Ids begin at the wall
clock of the plane's start, so that no id of a plane's former life is taken for one of this.

A cut has exactly one version of the threshold set: ``set_thresholds`` closes the cut in progress and keeps
it; its header says ``more``, and the link collects again. ``tg`` is the generation of caps in force during
the whole cut, or -1; a change of caps makes no boundary, because it needs none.

The largest cut fits a frame: ``StreamTable`` gives each stream room for every bucket of its histograms and
for all entries of all its limits. Clients beyond that share one stream for each volume, ``SHARED_CLIENT``;
a cut that these make too large has histograms of half as many buckets (``_coarser``). Room for one stream of
each export is always kept, so that no client is refused; where a volume has one and there is no room for
another, its further clients are counted there.

No I/O but ``RunDelay``'s; time comes as an argument.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import structlog

from gateway_agent.config import ExportConfig
from gateway_agent.errors import ExportRefused
from gateway_agent.nbd.accounting import StreamAccount, StreamCut
from gateway_agent.nbd.limits import Ints
from gateway_agent.nbd.protocol import Rep
from pmdaemon.wire import histogram
from pmdaemon.wire.cut import (
    COLUMNS,
    HIST_DTYPE,
    MISSED_DTYPE,
    hist_array,
    joined_late,
    missed_array,
    rows_array,
    sequential_bytes,
)
from pmdaemon.wire.messages.plane_sets import Limit, PlaneThresholds
from pmdaemon.wire.messages.planes import DpCut

log = structlog.get_logger("cuts")

MIXED: Final = -1
MAX_KEPT_CUTS: Final = 64  # each threshold change without a collecting link keeps one; beyond that they merge
MAX_STREAMS: Final = 320  # with names of their own
SHARED_CLIENT: Final = "other-clients"
MAX_COLUMN_BYTES: Final = 970_000  # a cut has at most 952 KiB (``link.collection``), 4 KiB of it a header
_STREAM_BYTES: Final = (
    8 * len(COLUMNS) + HIST_DTYPE.itemsize * histogram.WIRE_BUCKETS + 9 * MISSED_DTYPE.itemsize
)
"""Of a stream in the largest cut: counters, every bucket; failed, abandoned and outstanding I/O by kind."""
_LIMIT_BYTES: Final = 3 * MISSED_DTYPE.itemsize
"""Compared, overdue and failed: so 320 streams have room for 7 limits each."""
_COARSE_STREAM_BYTES: Final = 8 * len(COLUMNS) + HIST_DTYPE.itemsize * 150 + 9 * MISSED_DTYPE.itemsize
"""The same with histograms of half as many buckets."""
MAX_DESCRIPTOR_BYTES: Final = 60_000  # all streams are named in one frame header, which holds 65,535 bytes
MAX_NAMED_BYTES: Final = 48_000  # of streams with names of their own
_DESCRIPTOR_OVERHEAD_BYTES: Final = 52  # keys, map and string prefixes of one stream in msgpack, and its "sq"
FORGET_NS: Final = 600 * 10**9  # a stream without a client: long enough for a host that starts again
_FORGET_CHECK_NS: Final = 60 * 10**9
_SECTIONS: Final = (
    (histogram.TOTAL_READ, histogram.BUCKETS),
    (histogram.TOTAL_WRITE, histogram.BUCKETS),
    (histogram.SERVICE, histogram.COARSE_BUCKETS),
    (histogram.DELAY, histogram.COARSE_BUCKETS),
)


class ThrottledVolume(Protocol):
    """A volume, asked at each cut; tests of cuts have one with two fields and no sockets."""

    export: ExportConfig

    def take_late(self, now_ns: int) -> tuple[int, int] | None:
        """(I/Os, longest delay in us) of what its caps held for too long in this cut; None for nothing."""


class _Room:
    """What the fullest cut needs for some streams, and for one of each export that has none.

    It says whether there is room for one more, if need be with coarser histograms.
    """

    def __init__(self, streams: Sequence[StreamAccount], exports: Sequence[ExportConfig]) -> None:
        self._kept = {
            each.volume: _descriptor_bytes(each.volume, SHARED_CLIENT, each.backend) for each in exports
        }
        self._kept_bytes = sum(self._kept.values())
        self._name_bytes = self._coarse_bytes = 0
        self._named, self._named_name_bytes, self._named_column_bytes = 0, 0, 0
        for each in streams:
            self.add((each.volume, each.client, each.backend), each.limits)

    def add(self, names: tuple[str, str, str], limits: Sequence[Limit]) -> None:
        name_bytes = _descriptor_bytes(*names)
        self._kept_bytes -= self._kept.pop(names[0], 0)
        self._name_bytes += name_bytes
        self._coarse_bytes += _column_bytes(limits, _COARSE_STREAM_BYTES)
        if names[1] != SHARED_CLIENT:
            self._named += 1
            self._named_name_bytes += name_bytes
            self._named_column_bytes += _column_bytes(limits)

    def has(self, names: tuple[str, str, str], limits: Sequence[Limit]) -> bool:
        name_bytes = _descriptor_bytes(*names)
        kept_bytes = self._kept_bytes - self._kept.get(names[0], 0)
        kept = len(self._kept) - (names[0] in self._kept)
        coarse_bytes = self._coarse_bytes + _column_bytes(limits, _COARSE_STREAM_BYTES)
        if (
            self._name_bytes + name_bytes + kept_bytes > MAX_DESCRIPTOR_BYTES
            or coarse_bytes + kept * _COARSE_STREAM_BYTES > MAX_COLUMN_BYTES
        ):
            return False
        return names[1] == SHARED_CLIENT or (
            self._named < MAX_STREAMS
            and self._named_name_bytes + name_bytes <= MAX_NAMED_BYTES
            and self._named_column_bytes + _column_bytes(limits) <= MAX_COLUMN_BYTES
        )


class StreamTable:
    """The streams of this plane, by volume and client.

    One without a connection, and with every count in a cut, is forgotten after ``FORGET_NS``, or when there
    is no room for another, the longest unused first. One that comes back begins its lifetime columns at 0,
    as after a restart. When all are in use, further clients of a volume are counted together.
    """

    def __init__(self) -> None:
        self._exports: Sequence[ExportConfig] = ()
        self._room: _Room | None = None  # None: to be computed again
        self._by_name: dict[tuple[str, str], StreamAccount] = {}  # the one asked for last comes last
        self._made = 0
        self._checked_ns = 0

    @property
    def streams(self) -> list[StreamAccount]:
        """All of them."""
        return list(self._by_name.values())

    def set_exports(self, exports: Sequence[ExportConfig]) -> None:
        """These are the plane's: each that has no stream yet has room for one."""
        self._exports, self._room = exports, None

    def get(self, export: ExportConfig, client: str, thresholds: PlaneThresholds) -> StreamAccount:
        """The stream of one client on one volume, made when it is new.

        One that is kept from before counts for the backend, and charges the costs, that ``export`` has now:
        a volume that was taken out and put back may have others.

        Raises:
            ExportRefused: there is no room, and no stream of a volume that is not among the exports.
        """
        known = self._by_name.pop((export.volume, client), None)
        if known is not None:
            self._by_name[export.volume, client] = known
            self._set_export(known, export)
            return known
        names = (export.volume, client, export.backend)
        limits = thresholds.limits_for(export.volume, client)
        if not self._make_room(names, limits):
            if client != SHARED_CLIENT:
                shared = self.get(export, SHARED_CLIENT, thresholds)
                shared.share(client)
                return shared
            found = [stream for stream in self.streams if stream.volume == export.volume]
            if found:
                return found[-1]
            if not self._make_room(names, limits := ()):
                raise self._refusal()
        if client == SHARED_CLIENT:
            log.warning("clients-share-a-stream", volume=export.volume, client=client, named=MAX_STREAMS)
        stream = StreamAccount(self._made, *names, export.cost_read, export.cost_write, export.cost_bytes)
        stream.set_limits(limits, 0)  # it has no session yet
        self._made += 1
        self._by_name[export.volume, client] = stream
        assert self._room is not None  # it was asked
        self._room.add(names, limits)
        return stream

    def set_thresholds(self, thresholds: PlaneThresholds, now_ns: int) -> int:
        """Compare all streams with another set from now on; returns how many limits found no room.

        The server judges by histograms what is not counted, and says so.
        """
        wanted = [(stream, thresholds.limits_for(stream.volume, stream.client)) for stream in self.streams]
        most = sum(len(limits) for _, limits in wanted)
        named = [limits for stream, limits in wanted if stream.client != SHARED_CLIENT]
        for size, chosen in (
            (_STREAM_BYTES, named),
            (_COARSE_STREAM_BYTES, [limits for _, limits in wanted]),
        ):
            if chosen and sum(size + _LIMIT_BYTES * len(limits) for limits in chosen) > MAX_COLUMN_BYTES:
                most = min(most, (MAX_COLUMN_BYTES // len(chosen) - size) // _LIMIT_BYTES)
        for stream, limits in wanted:
            stream.set_limits(limits[:most], now_ns)
        self._room = None
        return sum(max(len(limits) - most, 0) for _, limits in wanted)

    def change(self, export: ExportConfig) -> None:
        """An export has another backend or other costs.

        Where there is no room for a longer name of the backend, the former stays until the stream is new.
        """
        for stream in self.streams:
            if stream.volume == export.volume:
                self._set_export(stream, export)

    def _set_export(self, stream: StreamAccount, export: ExportConfig) -> None:
        more = len(export.backend.encode()) - len(stream.backend.encode())
        has_room = more <= 0 or self._name_bytes(self.streams) + more <= MAX_DESCRIPTOR_BYTES
        backend = export.backend if has_room else stream.backend
        if backend != stream.backend:
            self._room = None
        stream.set_export(backend, export.cost_read, export.cost_write, export.cost_bytes)

    def forget_unused(self, now_ns: int) -> None:
        """Forget what has been unused for ``FORGET_NS``; looks once a minute."""
        if now_ns - self._checked_ns < _FORGET_CHECK_NS:
            return
        self._checked_ns = now_ns
        for stream in self.streams:
            if not stream.is_unused:
                stream.unused_since_ns = None
            elif stream.unused_since_ns is None:
                stream.unused_since_ns = now_ns
            elif now_ns - stream.unused_since_ns >= FORGET_NS:
                self._forget(stream)

    def _forget(self, stream: StreamAccount) -> None:
        del self._by_name[stream.volume, stream.client]
        self._room = None

    def _make_room(self, names: tuple[str, str, str], limits: Sequence[Limit]) -> bool:
        if self._has_room(names, limits):
            return True
        for stream in self.streams:
            if stream.is_unused:
                self._forget(stream)
                if self._has_room(names, limits):
                    return True
        return False

    def _has_room(self, names: tuple[str, str, str], limits: Sequence[Limit]) -> bool:
        if self._room is None:
            self._room = _Room(self.streams, self._exports)
        return self._room.has(names, limits)

    @staticmethod
    def _name_bytes(streams: Sequence[StreamAccount]) -> int:
        return sum(_descriptor_bytes(each.volume, each.client, each.backend) for each in streams)

    def _refusal(self) -> ExportRefused:
        return ExportRefused(
            Rep.ERR_POLICY,
            f"this gateway process already counts {len(self._by_name)} streams that are in use or not yet "
            f"collected, and has no room for another volume; its limits are {MAX_DESCRIPTOR_BYTES} bytes of "
            f"names and {MAX_COLUMN_BYTES} bytes of counts. Spread the volumes over more planes",
        )


def _column_bytes(limits: Sequence[Limit], stream_bytes: int = _STREAM_BYTES) -> int:
    return stream_bytes + _LIMIT_BYTES * len(limits)


def _descriptor_bytes(*names: str) -> int:
    return sum(len(name.encode()) for name in names) + _DESCRIPTOR_OVERHEAD_BYTES


class LastCut(NamedTuple):
    """What the newest cut says, for people at this host: rows in COLUMNS order of streams with activity."""

    start_ns: int
    end_ns: int
    rows: dict[StreamAccount, list[int]]


class CutMaker:
    """See the module docstring. Holds the streams of the plane, the kept cuts and the boundaries.

    Args:
        table: the streams.
        now_ns: start of the first cut, monotonic.
        now_unix_us: the same moment on the wall clock.
        starved_us: how long the plane has waited for a processor since its start (``RunDelay``).
    """

    def __init__(
        self, table: StreamTable, now_ns: int, now_unix_us: int, starved_us: Callable[[], int] = lambda: 0
    ) -> None:
        self.table = table
        self._starved_us = starved_us
        self.thresholds = PlaneThresholds()
        self.volumes: list[ThrottledVolume] = []  # they add themselves
        self._next_id = now_unix_us
        self._generation = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._is_finished = False
        self.last = LastCut(now_ns, now_ns, {})
        self._begin(now_ns, now_unix_us)

    def _begin(self, now_ns: int, now_unix_us: int) -> None:
        self._start_ns, self._start_unix_us = now_ns, now_unix_us
        self._common_generation = self._generation
        self._version = self.thresholds.version
        self._start_starved_us = self._starved_us()

    @property
    def start(self) -> tuple[int, int]:
        """When the cut in progress began: monotonic ns, wall clock us."""
        return self._start_ns, self._start_unix_us

    def succeed(
        self, start_ns: int, start_unix_us: int, thresholds: PlaneThresholds | None, generation: int
    ) -> None:
        """Before the first I/O: another process has counted the plane's until now, under the same orders.

        Args:
            start_ns: when its cut in progress began; the first cut here begins there, too.
            start_unix_us: the same moment on the wall clock.
            thresholds: that it compared with.
            generation: of the caps in force.
        """
        self.thresholds = thresholds or self.thresholds
        self._generation = generation
        self.last = LastCut(start_ns, start_ns, {})
        self._begin(start_ns, start_unix_us)

    def set_generation(self, generation: int) -> None:
        """Caps of another generation are in force from now on."""
        if generation != self._generation:
            self._generation, self._common_generation = generation, MIXED

    def set_thresholds(self, thresholds: PlaneThresholds, now_ns: int, now_unix_us: int) -> int:
        """Compare with another set from now on; a set already in force changes nothing.

        Returns:
            How many limits of streams were left out, see ``StreamTable``.
        """
        if thresholds == self.thresholds:
            return 0
        may_close = len(self._kept) < MAX_KEPT_CUTS
        if may_close:
            self._close(now_ns, now_unix_us, more=True)
        self.thresholds = thresholds
        left_out = self.table.set_thresholds(thresholds, now_ns)
        # Too many kept cuts (no link collects): this one goes on, its missed counts are of no single version.
        self._version = thresholds.version if may_close else MIXED
        return left_out

    def finish(self, now_ns: int, now_unix_us: int) -> None:
        """Close the last cut: no I/O is counted any more."""
        self._close(now_ns, now_unix_us, more=True)
        self._is_finished = True

    @property
    def has_kept(self) -> bool:
        """Whether a cut was made that the link has not spooled."""
        return bool(self._kept)

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
        rows = [taken for stream in self.table.streams if (taken := stream.take(now_ns)) is not None]
        blob, hist_len, missed_len = _columns(rows)
        self.last = LastCut(self._start_ns, now_ns, {each.stream: each.row for each in rows})
        self.table.forget_unused(now_ns)
        self._next_id += 1
        starved_us = max(self._starved_us() - self._start_starved_us, 0)
        late = [{each.export.volume: found} for each in self.volumes if (found := each.take_late(now_ns))]
        made = DpCut(
            id=self._next_id,
            start_ns=self._start_ns,
            end_ns=now_ns,
            start_us=self._start_unix_us,
            throttle_gen=self._common_generation,
            threshold_version=self._version,
            rows=len(rows),
            hist_entries=hist_len,
            missed_entries=missed_len,
            streams=[row.stream.descriptor for row in rows],
            more=more,
            starved_us=starved_us,
            late=joined_late(late) or None,
            sequential=sequential_bytes(np.array([row.sequential for row in rows], dtype=np.int64)) or None,
        )
        self._kept.append((self._next_id, made.encode_with(blob)))
        self._begin(now_ns, now_unix_us)


def _columns(rows: list[StreamCut]) -> tuple[bytes, int, int]:
    """Blob as in CUT, and its numbers of histogram and missed entries."""
    counters = rows_array([taken.row for taken in rows])
    dense = np.zeros((len(rows), histogram.WIRE_BUCKETS), dtype=np.int64)
    for index, taken in enumerate(rows):
        dense[index] = taken.hist
    missed = missed_array((index, *entry) for index, taken in enumerate(rows) for entry in taken.missed)
    room = MAX_COLUMN_BYTES - counters.nbytes - missed.nbytes
    if HIST_DTYPE.itemsize * np.count_nonzero(dense) > room:
        dense = _coarser(dense)
    row, bucket = np.nonzero(dense)
    hist = hist_array(row, bucket, dense[row, bucket])
    return counters.tobytes() + hist.tobytes() + missed.tobytes(), len(hist), len(missed)


def _coarser(dense: Ints) -> Ints:
    """Half as many buckets: each even one is added to its upper neighbour, so that no latency looks smaller.

    Args:
        dense: shape (rows, histogram.WIRE_BUCKETS).
    """
    found = dense.copy()
    for first, buckets in _SECTIONS:
        last = first + buckets - buckets % 2
        found[:, first + 1 : last : 2] += found[:, first:last:2]
        found[:, first:last:2] = 0
    return found


class RunDelay:
    """How long this process has waited for a processor although it wanted to run.

    A data plane that its own host keeps waiting sees requests and answers late, and what it counts then is
    its host's doing, not the storage's. Each cut says so (``st``), so that the server slows no neighbour down
    for it.

    Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat: time on the processor, time
    waiting on a run queue, both ns, and the number of turns. It is of the main thread, in which a plane does
    all its work but that of file workers. Not in it: what a hypervisor takes away (steal).

    Args:
        path: for tests.
    """

    def __init__(self, path: str = "/proc/self/schedstat") -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # a kernel without CONFIG_SCHED_INFO: nothing is known
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def total_us(self) -> int:
        """Since the start of the process; 0 where the kernel does not say."""
        if self._fd is None:
            return 0
        try:
            return int(os.pread(self._fd, 128, 0).split()[1]) // 1000
        except (OSError, ValueError, IndexError):
            return 0

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
