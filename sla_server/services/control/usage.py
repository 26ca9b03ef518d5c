"""What is known of gateways, their streams and their newest cuts.

State: one ``GatewayTable`` a gateway. A stream is a row, with a column of the ``StreamStates``; ``recent``
keeps what the newest cuts say of the rows, from which views and percentiles are made on demand. The smoothed
use of each volume through each gateway, a *place*, is stored in one ``UsageTable`` for all of them, so that a
batch of cuts updates it at once (``cut_batch``); a ``Usage`` is one of its columns. A volume that a cut
leaves out is apart, waiting or idle, as its streams are (``stream_states``): only an idle one had no use.

Invariants: rows and places are only added, never moved, and those of a volume that is the gateway's no more
(``GatewayTable.forget``) stay, empty; a (epoch, seq) is taken at most once; cuts that are
not newer than the newest one taken, or older than the settings allow, change nothing here (they are judged
from SQL, not from here). Changed only by the controller's one thread. No clock: every time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import COL, HIST_DTYPE, Cut
from pmdaemon.wire.messages.agent import (
    BURST_CAPS,
    CLIENT_CAPS,
    GROUP_CAPS,
    LARGE_CAPS,
    OTHER_CLIENT_CAPS,
    WHOLE_CLIENT_CAPS,
)
from sla_server.agreements.thresholds import BESIDE_PREFIXES
from sla_server.services.control.pieces import evenly
from sla_server.services.control.stream_states import APART_US, Span, StreamStates

RECENT_CUTS: Final = 3
"""Cuts a view sums over: one alone would show sampling noise. Cuts of the same time count as one."""
MOST_RECENT: Final = 16
"""Cuts kept for it: those of five planes that are all kept apart."""
RECENT_COLUMNS: Final = (
    "reads",
    "writes",
    "read_bytes",
    "write_bytes",
    "delay_sum_us",
    "inflight",
    "held",
    "cost_milli",
)
RECENT: Final = {name: index for index, name in enumerate(RECENT_COLUMNS)}
_SELECT: Final = np.array([COL[name] for name in RECENT_COLUMNS])
SMOOTHING: Final = 0.5
"""Weight of the newest cut in a volume's smoothed rate: half forgotten after a poll."""
FAILING_RATIO: Final = 0.5
"""Share of a volume's I/Os that fail, from which on the volume as a whole does."""
PEAK_DECAY: Final = 0.9
"""A peak counts less by this factor with each cut: half of it after some 7 s."""
PEAK_PART: Final = 1 / 30
"""Of the time after which a gateway is silent, so a tenth of a poll. In a cut that caps have ended sooner a
few I/Os are a high rate: that is no peak in full."""
NO_VOLUME: Final = ""
"""Of the rows of streams that are their gateway's no more."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_END, _SEEN, _DRY, _PROOF, _AS_SEEN = 12, 13, 14, 15, 16
_SAME_US: Final = 1000.0
"""Two times of the server's that differ by less are one."""
_WHOLE_RATIO: Final = 0.9
"""Of a time, which cuts show to have passed: a poll may be that much shorter than the next one."""


@dataclass(frozen=True, slots=True)
class KnownStream:
    """One client's use of one volume through one gateway."""

    stream_id: int
    volume: str
    client: str
    backend: str


class UsageTable:
    """Recent use of every place: rates a second, gauges at the newest cut's end.

    ``values`` has the shape (len(COLUMNS), places): smoothed cost, ops and bytes, a fading peak of cost, the
    newest cut's cost, ops and bytes, held, inflight, failed a second, for how long at least (us) nothing has
    completed of what was sent upstream, and reads and writes outstanding (-1: not known); when the newest cut
    with the place ended (agent's clock, us) and came (ns); for how long at least (us) no I/O has completed;
    when the newest cut began in which I/Os completed, most of them well (us); and the first three as they
    were when the newest cut with the place came. Grown by doubling. ``streams``: of all gateways.
    """

    COLUMNS: Final = 19

    def __init__(self, silent_s: float = 3.0) -> None:
        self._silent_ns, self._least_s = silent_s * 1e9, PEAK_PART * silent_s
        self.streams = StreamStates(silent_s)
        self.values: Floats = np.zeros((self.COLUMNS, 64))
        self.volumes: list[str] = []
        """Name by place."""
        self.backends: dict[str, int] = {}
        """Number by name."""
        self._backend: Ints = np.zeros(64, np.int64)
        self._is_gap: Bools = np.zeros(64, np.bool_)  # the newest cut left it out, as it was idle

    def allot(self, volume: str, backend: str) -> int:
        """A new place, without use."""
        if len(self.volumes) == len(self._backend):
            self.values = np.concatenate((self.values, np.zeros_like(self.values)), axis=1)
            self._backend = np.concatenate((self._backend, np.zeros_like(self._backend)))
            self._is_gap = np.concatenate((self._is_gap, np.zeros_like(self._is_gap)))
        self.volumes.append(volume)
        place = len(self.volumes) - 1
        self.values[11, place], self.values[_DRY, place] = -1.0, np.inf
        self.move(place, backend)
        return place

    def resync(self, places: Ints) -> None:
        """A cut of these places was not seen: what was outstanding says nothing any more."""
        self.values[10, places], self.values[11, places] = 0.0, -1.0

    def clear(self, place: int) -> None:
        """A place is of no volume any more."""
        self.values[:, place] = 0.0
        self.values[11, place], self.values[_DRY, place] = -1.0, np.inf

    def move(self, place: int, backend: str) -> None:
        """The volume of a place is on this backend."""
        self._backend[place] = self.backends.setdefault(backend, len(self.backends))

    def cost_by_backend(self, silent: Iterable[Ints]) -> dict[str, float]:
        """Smoothed cost rate of each backend, ``silent`` places left out."""
        count = len(self.volumes)
        cost = self.values[0, :count].copy()
        for places in silent:
            cost[places] = 0.0
        sums = np.bincount(self._backend[:count], weights=cost, minlength=len(self.backends)).tolist()
        return dict(zip(self.backends, sums, strict=True))

    def update(self, places: Ints, sums: Floats, seconds: Floats, span: Span, is_present: Bools) -> None:
        """Enter one cut for each of these places, which are distinct.

        Args:
            places: shape (n,).
            sums: shape (8, n): cost in 1/1000, ops, bytes, held, inflight, failed, reads and writes
                outstanding when the cut began, and when it ended.
            seconds: duration of the cut, shape (n,).
            span: the time of the cut, shape (n,).
            is_present: whether the cut has the place, shape (n,).
        """
        at = evenly(places)
        before = self.values[:, at].copy()
        if not is_present.all():
            waiting = (before[11] > 0) & (span.now_ns - before[_SEEN] <= self._silent_ns)
            says_nothing = ~is_present & (waiting | span.is_apart(before[_END]))
            if says_nothing.any():
                keep = ~says_nothing
                places, sums, seconds, before = places[keep], sums[:, keep], seconds[keep], before[:, keep]
                span, is_present, at = span.at(keep), is_present[keep], evenly(places)
        held, inflight, outstanding = sums[3], sums[4], sums[7]
        stuck = (sums[1] == 0) & (before[8] > 0) & (inflight > 0)
        stuck &= (sums[6] > before[7]) & (outstanding > held)
        self.values[10, at] = (before[10] + seconds * 1e6) * stuck
        self.values[11, at] = outstanding
        self.values[_DRY, at] = np.where(sums[1] > 0, 0.0, before[_DRY] + seconds * 1e6)
        # Of cuts that come together only the last one ended when it came.
        lasted_us = seconds * 1e6
        before_us = before[_PROOF] - lasted_us * (span.now_ns == before[_SEEN])
        began_us = span.now_ns / 1000 - lasted_us
        self.values[_PROOF, at] = np.where(sums[5] < FAILING_RATIO * sums[1], began_us, before_us)
        last = sums[:3]
        last[0] /= 1000
        last /= seconds
        smoothed = before[:3]
        gap = self._is_gap[at]
        if gap.any():  # a cut that comes late begins where its place was last seen: it was not idle since
            follows = is_present & gap & (np.abs(span.start_us - before[_END]) <= span.slack_us)
            smoothed = np.where(follows, before[_AS_SEEN:], smoothed)
        seen, times = at, span
        if not is_present.all():
            begins = places[~is_present & ~gap]
            self.values[_AS_SEEN:, begins] = self.values[:3, begins]
            seen, times = places[is_present], span.at(is_present)
        self._is_gap[at] = ~is_present
        self.values[_END, seen], self.values[_SEEN, seen] = times.end_us, times.now_ns
        smoothed += SMOOTHING * (last - smoothed)
        peak = np.maximum(last[0] * np.minimum(seconds / self._least_s, 1.0), PEAK_DECAY * before[3])
        for row, part in enumerate((*smoothed, peak, *sums[:5], sums[5] / seconds)):
            self.values[row, at] = part

    def faults(self, silent: Iterable[GatewayTable], stall_us: float) -> tuple[dict[str, str], set[str]]:
        """Backends that hang or fail as the newest cuts have it, and those that may; see ``storage_faults``.

        Args:
            silent: gateways whose places say nothing of now; asked only if there is something to see.
            stall_us: how long nothing of a volume must have completed.
        """
        count = len(self.volumes)
        ops, errors, stall = self.values[5, :count], self.values[9, :count], self.values[10, :count]
        least_us = _WHOLE_RATIO * stall_us
        waits, failing = stall > 0, (ops > 0) & (errors >= FAILING_RATIO * ops)
        if not (waits | failing).any():
            return {}, set()
        fresh = np.ones(count, np.bool_)
        for table in silent:
            fresh[table.places] = False
        backend = self._backend[:count]

        def backends(places: Bools) -> Bools:
            return np.bincount(backend[places & fresh], minlength=len(self.backends)) > 0

        well = (ops > 0) & ~failing
        fails = backends(failing) & ~backends(well)
        # Caps end a cut, and in the rest of the poll, which may be short, a busy volume may complete nothing.
        hangs = backends(stall >= least_us) & ~backends(self.values[_DRY, :count] < least_us)
        # The newest cut of another gateway may be of before the storage hung, or of some time before.
        came_us = self.values[_SEEN, :count] / 1000
        stuck_us, proof_us = np.full(len(self.backends), np.inf), np.full(len(self.backends), -np.inf)
        np.minimum.at(stuck_us, backend[waits & fresh], (came_us - stall)[waits & fresh])
        np.maximum.at(proof_us, backend[fresh], self.values[_PROOF, :count][fresh])
        names = list(self.backends)
        found = {names[number]: "fails" for number in np.flatnonzero(fails).tolist()}
        found |= {names[number]: "hangs" for number in np.flatnonzero(hangs).tolist()}
        may = np.flatnonzero(np.isfinite(stuck_us) & (proof_us < stuck_us - _SAME_US))
        return found, {names[number] for number in may.tolist()}


class Usage:
    """Recent use of one volume through one gateway; see ``UsageTable``."""

    __slots__ = ("_place", "_usage")

    def __init__(self, usage_table: UsageTable, place: int) -> None:
        self._usage, self._place = usage_table, place

    @property
    def place(self) -> int:
        """Its column in the table."""
        return self._place

    @property
    def cost_per_s(self) -> float:
        """Smoothed cost rate."""
        return self._usage.values.item(0, self._place)

    @property
    def ops_per_s(self) -> float:
        """Smoothed rate of I/Os."""
        return self._usage.values.item(1, self._place)

    @property
    def bytes_per_s(self) -> float:
        """Smoothed throughput."""
        return self._usage.values.item(2, self._place)

    @property
    def peak_cost_per_s(self) -> float:
        """The most recently, fading."""
        return self._usage.values.item(3, self._place)

    @property
    def last_cost_per_s(self) -> float:
        """Of the newest cut."""
        return self._usage.values.item(4, self._place)

    @property
    def last_ops_per_s(self) -> float:
        """Of the newest cut."""
        return self._usage.values.item(5, self._place)

    @property
    def last_bytes_per_s(self) -> float:
        """Of the newest cut."""
        return self._usage.values.item(6, self._place)

    @property
    def held(self) -> int:
        """I/Os held back at the newest cut's end."""
        return int(self._usage.values[7, self._place])

    @property
    def inflight(self) -> int:
        """I/Os under way at the newest cut's end."""
        return int(self._usage.values[8, self._place])


class Recent(NamedTuple):
    """What views need of one cut.

    Attributes:
        number: of the time it is of; time_us: when the first cut of that began and ended, agent's clock.
        span_us: when it began and ended itself.
        rows: table row of each row of the cut, -1 for a stream not announced; shape (n,).
        scalars: shape (len(RECENT_COLUMNS), n).
        histograms: of the cut, as bytes.
    """

    number: int
    time_us: tuple[int, int]
    span_us: tuple[int, int]
    rows: Ints
    scalars: Ints
    histograms: bytes

    def sums_of(self, at: Ints) -> Ints:
        """Sums over some rows of the cut, at least one; shape (len(RECENT_COLUMNS),)."""
        if len(at) == 1:
            one: Ints = self.scalars[:, at[0]]
            return one
        found: Ints = self.scalars[:, at].sum(axis=1)
        return found

    @property
    def hist(self) -> npt.NDArray[Any]:
        """Sparse histograms, HIST_DTYPE; ``row`` counts the cut's rows."""
        return np.frombuffer(self.histograms, HIST_DTYPE)


@dataclass(slots=True)
class GatewayTable:
    """One gateway. ``state`` is "up" or "lost"; ``exports`` maps a volume to its backend.

    ``is_announced``: its session was announced to this process; else ``state`` is what SQL had at the start.

    ``only_seen``: volumes that it counts beside the I/O path: without latencies, and it cannot throttle them.
    ``has_beside``: a volume's name says that it, or more of it, is counted beside the path.
    ``says_more``: its cuts have entries of what failed, so ``errors`` alone are its clients' own mistakes.
    ``tells_kinds``: of what is outstanding they tell reads from writes, and leave out flush and trim.
    ``numbers``: of its rows in the stream states.
    ``skipped``: the cut before the newest one was not taken here.
    ``refused``: volumes of which it refused the newest caps.
    ``caps_clients``: whether it applies caps of single clients; None while its agent did not say.
    ``caps_others``: whether it applies one cap to all clients that no agreement names; the same.
    ``caps_large``: whether it takes a set of caps above 64 KiB; the same.
    ``caps_groups``: whether it applies caps of groups; the same. ``no_groups``: volumes of which it cannot.
    ``caps_bursts``: whether it holds bursts to their peak; the same.
    ``caps_whole_clients``: whether it applies caps of clients over all their volumes; the same.
    ``starved_ratio``: share of the newest cut in which it was kept waiting for the processor of its host.
    ``io_waited_ratio``: share of the time between the two newest in which tasks of its host waited for I/O.
    """

    gateway_id: str
    usage_table: UsageTable = field(default_factory=UsageTable)
    name: str = ""
    state: str = "up"
    is_announced: bool = True
    reason: str = ""
    exports: dict[str, str] = field(default_factory=dict)
    only_seen: frozenset[str] = frozenset()
    has_beside: bool = False
    refused: frozenset[str] = frozenset()
    caps_clients: bool | None = None
    caps_others: bool | None = None
    caps_large: bool | None = None
    caps_groups: bool | None = None
    caps_bursts: bool | None = None
    caps_whole_clients: bool | None = None
    no_groups: frozenset[str] = frozenset()
    says_more: bool = False
    tells_kinds: bool = False
    skipped: bool = False
    epoch: int = 0
    old_epochs: set[int] = field(default_factory=set)
    seq: int = 0
    end_unix_us: int = 0
    last_cut_ns: int | None = None
    throttle_gen: int = 0
    offset_us: int = 0
    streams: list[KnownStream] = field(default_factory=list)
    row_of: dict[int, int] = field(default_factory=dict)
    volumes: list[str] = field(default_factory=list)
    places: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    volume_of_row: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    numbers: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    recent: deque[Recent] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    use: dict[str, Usage] = field(default_factory=dict)
    ignored: int = 0
    dropped_cuts: int = 0
    starved_ratio: float = 0.0
    io_waited_ratio: float | None = None
    io_waited: tuple[int, int] | None = None  # the newest cut's end, and what it says of its host
    unknown_rows: int = 0

    def set_features(self, known: Collection[str]) -> None:
        """What its agent can do, as it says before it is up."""
        self.caps_clients, self.caps_large = CLIENT_CAPS in known, LARGE_CAPS in known
        self.caps_groups, self.caps_others = GROUP_CAPS in known, OTHER_CLIENT_CAPS in known
        self.caps_bursts, self.caps_whole_clients = BURST_CAPS in known, WHOLE_CLIENT_CAPS in known

    @property
    def shown_state(self) -> str:
        """For people: that one was up before this process began does not say that it is there."""
        is_there = self.is_announced or self.last_cut_ns is not None
        return self.state if is_there or self.state != "up" else "detached"

    def add_streams(self, streams: list[KnownStream]) -> list[int]:
        """Add rows for the streams not seen before; returns the new rows."""
        new = list({s.stream_id: s for s in streams if s.stream_id not in self.row_of}.values())
        if not new:
            return []
        self.has_beside |= any(stream.volume.startswith(BESIDE_PREFIXES) for stream in new)
        first, places = len(self.streams), []
        for row, stream in enumerate(new, first):
            backend = self.exports.get(stream.volume, stream.backend)
            self.streams.append(replace(stream, backend=backend))
            self.row_of[stream.stream_id] = row
            if stream.volume not in self.use:
                self.volumes.append(stream.volume)
                places.append(self.usage_table.allot(stream.volume, backend))
                self.use[stream.volume] = Usage(self.usage_table, places[-1])
        self.places = np.concatenate((self.places, np.array(places, dtype=np.int64)))
        position = {volume: index for index, volume in enumerate(self.volumes)}
        added = np.array([position[stream.volume] for stream in new], dtype=np.int64)
        self.volume_of_row = np.concatenate((self.volume_of_row, added))
        self.numbers = np.concatenate((self.numbers, self.usage_table.streams.allot(len(new))))
        return list(range(first, len(self.streams)))

    def set_exports(self, exports: dict[str, str]) -> list[int]:
        """Volumes it exports, with their backends; returns rows of streams that are on another one now."""
        self.exports = exports
        return self.set_backends(exports)

    def set_backends(self, backends: Mapping[str, str]) -> list[int]:
        """Volumes are on these backends; returns the rows of streams for which that is news."""
        for index, volume in enumerate(self.volumes):
            if volume in backends:
                self.usage_table.move(int(self.places[index]), backends[volume])
        moved = [row for row, s in enumerate(self.streams) if backends.get(s.volume, s.backend) != s.backend]
        for row in moved:
            self.streams[row] = replace(self.streams[row], backend=backends[self.streams[row].volume])
        return moved

    def forget(self, volumes: Collection[str]) -> list[int]:
        """It carries these no more; returns their rows, which stay and are of no volume from then on."""
        rows = [row for row, stream in enumerate(self.streams) if stream.volume in volumes]
        for row in rows:
            self.row_of.pop(self.streams[row].stream_id, None)
            self.streams[row] = KnownStream(self.streams[row].stream_id, NO_VOLUME, "", "")
        for index, volume in enumerate(self.volumes):
            if volume in volumes:
                self.usage_table.clear(int(self.places[index]))
                self.volumes[index] = NO_VOLUME
        for volume in volumes:
            self.use.pop(volume, None)
        self.exports = {volume: backend for volume, backend in self.exports.items() if volume not in volumes}
        kept = [each._replace(rows=np.where(np.isin(each.rows, rows), -1, each.rows)) for each in self.recent]
        self.recent.clear()
        self.recent.extend(kept)
        return rows

    def carries(self, volume: str) -> bool:
        """Whether this gateway exports the volume or has served a stream of it."""
        return volume in self.exports or volume in self.use

    def can_throttle(self, volume: str) -> bool:
        """Whether caps of a volume that it carries have an effect here."""
        return volume not in self.only_seen and volume not in self.refused

    def backend_of(self, volume: str) -> str:
        """Backend of a volume that this gateway carries; "" if it did, and no I/O of it was ever seen."""
        if volume in self.exports:
            return self.exports[volume]
        return next((stream.backend for stream in self.streams if stream.volume == volume), "")

    def accept(self, cut: Cut, recv_us: int, offset_us: int, stale_us: float, now_ns: int) -> bool:
        """Note a cut's identity and times; False if it came before, comes out of order, or is too old."""
        end_us = cut.start_unix_us + offset_us + cut.duration_us
        if cut.epoch == self.epoch:
            late = cut.seq <= self.seq
        else:
            late = cut.epoch in self.old_epochs or (self.epoch != 0 and end_us <= self.end_unix_us)
        if late or recv_us - end_us > stale_us or cut.duration_us <= 0:
            self.ignored += 1
            return False
        self.skipped = cut.epoch != self.epoch or cut.seq != self.seq + 1
        if cut.epoch != self.epoch and self.epoch:
            self.old_epochs.add(self.epoch)
            self.says_more = self.tells_kinds = False  # another release of the agent may have been started
        self.epoch, self.seq, self.end_unix_us = cut.epoch, cut.seq, end_us
        self.last_cut_ns, self.offset_us, self.throttle_gen = now_ns, offset_us, cut.throttle_gen
        self.starved_ratio = cut.starved_us / cut.duration_us
        self._waited(cut.extra.get("psi"), end_us)
        return True

    def _waited(self, said: Any, end_us: int) -> None:
        before, self.io_waited_ratio = self.io_waited, None
        self.io_waited = (end_us, said) if isinstance(said, int) else None
        if before is None or self.io_waited is None or end_us <= before[0]:
            return
        if said >= before[1]:  # else its host was started again
            self.io_waited_ratio = round(min((said - before[1]) / (end_us - before[0]), 1.0), 3)

    def rows_of(self, stream_ids: Ints) -> Ints:
        """Table row of each stream, -1 for one not announced yet."""
        ids = stream_ids.tolist()
        return np.fromiter((self.row_of.get(i, -1) for i in ids), dtype=np.int64, count=len(ids))

    def keep(self, cut: Cut, rows: Ints) -> None:
        """Keep what views need of an accepted cut: copies, since the cut is a view into a mailbox batch.

        Histograms as bytes: an array of records is copied field by field, which takes eight times as long.
        """
        recent, start_us = self.recent, cut.start_unix_us
        end_us = start_us + cut.duration_us
        newest = recent[0] if recent else None
        # A time is that of its first cut; others reach into it, unless the clock was put back.
        if newest is None or start_us >= newest.time_us[1] - APART_US or end_us <= newest.time_us[0]:
            number, time_us = (newest.number + 1 if newest is not None else 0), (start_us, end_us)
        else:
            number, time_us = newest.number, newest.time_us
        span = start_us, end_us
        kept = Recent(number, time_us, span, rows, cut.counters[_SELECT], cut.hist.tobytes())
        recent.appendleft(kept)
        while recent[-1].number <= number - RECENT_CUTS:
            recent.pop()


def backend_among(tables: Mapping[str, GatewayTable], volume: str) -> str:
    """Backend of a volume as the gateways that carry it have it, those that are up first; "" for none."""
    found = sorted(tables.values(), key=lambda table: table.state != "up")
    return next((table.backend_of(volume) for table in found), "")
