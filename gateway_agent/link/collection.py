"""One collection round: ask every source, wait a little, merge what came into cuts, spool them.

    idle ──begin──► asking ──all answered, or 200 ms──► gather ──(core spools)──► next_round ──► idle
                       ▲                                                              │
                       └───── some source holds more than one finished sample ────────┘

``CollectionRound`` asks and waits. A source that does not answer in time is *left out*: the others' counts go
into this cut. It is not waited for again until it has answered, so a stalled plane costs one poll 200 ms and
the later ones nothing. Its late answer stays with the source and is taken by the next collection, which then
asks it once more. Where a plane made that answer seconds after it was asked, its cut says for how long it was
silent: it was stopped, and may have served nothing. It says so, too, where the link itself did not run for
seconds when a collection was due (a paused machine): the planes, not asked, may have been stopped with it.

``sample_groups`` and ``make_cut`` merge. A cut has one interval, one threshold version and one throttle
generation, so only samples that agree may share one:

- *interval*: starts and ends within a tolerance of each other. A plane that was stalled for three seconds
  hands over three seconds of counts; in one cut with a neighbour's single second, one of the two would get a
  wrong rate.
- *threshold version*: equal, or not counted by the source at all (``host``).
- the throttle generation may differ: the cut then says -1, which keeps it out of control decisions.

The interval of a cut runs from the earliest start to the earliest end of its samples: then the cuts of planes
that are collected within milliseconds of each other tile the time without overlap. Rows with neither activity
nor requests under way are left out; a cut without rows still proves its time as covered. Two samples of one
stream (a volume exported by two planes) are added into one row; of two stalls the longer one counts.

``CutSpooler`` decides what survives a crash. For each group of samples, in this order: 1. new streams are
saved in ``StreamNames``; 2. the cut is appended to the spool, with the marks of the planes in it; 3. the
sources forget their samples. If the process dies before 2 is whole, the planes repeat the same bytes to the
next link and nothing was counted; if it dies later, the next link reads the marks and asks for what follows.
There is no third case: a record of the disk queue is whole or not there.

Thread: the link's loop only; time comes as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog

from gateway_agent.errors import SourceReadFailed, SpoolWriteFailed, StateFileBroken
from gateway_agent.link import state_files
from gateway_agent.link.spool import Spool
from gateway_agent.sources.base import StatisticsSource
from gateway_agent.sources.sample import Sample, StreamKey
from pmdaemon.errors import BadCut, FrameTooLarge
from pmdaemon.wire import cut, names
from pmdaemon.wire.cut import joined_late
from pmdaemon.wire.messages.agent import StreamEntry, Streams

log = structlog.get_logger("collection")


MAX_STREAMS: Final = 16_384  # four times the rows a cut may have
_PER_FRAME: Final = 128  # three names of 128 bytes each stay below the 64 KiB of a frame's header
_FIX: Final = "A new one is begun: streams are announced as they are used"


class StreamNames:
    """The names behind each stream_id that a cut of this gateway mentions, and which the server knows.

    The server must hear of a stream before its first cut. Cuts may wait in the spool for hours and be sent by
    another link process after the data planes that knew the names are gone, so the names are a file
    (``state_dir/streams.json``), written *before* the first cut that mentions a new stream is spooled. A
    crash between the two leaves a stream that no cut mentions, which harms nothing.

    Bound: ``MAX_STREAMS``; the oldest are forgotten (the server has known them for long). ``path`` None keeps
    the names in memory only.
    """

    def __init__(self, gateway_id: str, path: Path | None) -> None:
        self._gateway_id = gateway_id
        self._path = path
        self._streams: dict[int, StreamKey] = {}
        self._ids: dict[StreamKey, int] = {}
        self._unannounced: set[int] = set()
        self._dirty = False
        for fields in self._load():
            self._remember(StreamKey(*fields))

    def _load(self) -> list[list[str]]:
        if self._path is None:
            return []
        try:
            rows = state_files.read_json(self._path, _FIX) or []
        except StateFileBroken as exc:
            log.error("streams-forgotten", problem=str(exc))
            return []
        return [
            row for row in rows if isinstance(row, list) and len(row) == 3 and all(map(names.is_name, row))
        ]

    def _remember(self, key: StreamKey) -> int:
        stream_id = names.stream_id(self._gateway_id, key.volume, key.client)
        # Its backend may have changed: the id does not contain it.
        former = self._streams.pop(stream_id, None)
        if former is not None:
            self._ids.pop(former, None)
        self._streams[stream_id] = key
        self._ids[key] = stream_id
        self._unannounced.add(stream_id)
        while len(self._streams) > MAX_STREAMS:
            oldest = next(iter(self._streams))
            self._ids.pop(self._streams.pop(oldest), None)
            self._unannounced.discard(oldest)
        return stream_id

    def add(self, key: StreamKey) -> int:
        """The stream's id; new ones are remembered, to be saved and announced."""
        known = self._ids.get(key)
        if known is not None:
            return known
        self._dirty = True
        return self._remember(key)

    def save(self) -> None:
        """Write the file if it changed; call before spooling a cut.

        Raises:
            OSError: it could not be written; do not spool the cut.
        """
        if self._dirty and self._path is not None:
            state_files.write_json(self._path, [list(key) for key in self._streams.values()], synced=True)
        self._dirty = False

    def new_session(self) -> None:
        """Another server listens: it knows no stream."""
        self._unannounced = set(self._streams)

    def announcements(self) -> Iterator[Streams]:
        """STREAMS that this session has not seen; consuming them marks them as sent."""
        missing = [stream_id for stream_id in self._streams if stream_id in self._unannounced]
        self._unannounced.clear()
        for start in range(0, len(missing), _PER_FRAME):
            chunk = missing[start : start + _PER_FRAME]
            yield Streams(tuple(StreamEntry(each, *self._streams[each]) for each in chunk))


SILENT_NS: Final = 5_000_000_000
"""A plane that answers sooner was busy; it may have served I/O meanwhile."""
DEADLINE_NS: Final = 200_000_000  # a fifth of the default interval; a healthy plane answers in milliseconds
MAX_ROUNDS: Final = 72  # a plane keeps at most 64 finished cuts; the deadline bounds the time in any case


class CollectionRound:
    """State: whether a collection runs, its deadline, which sources it waits for, and when each was asked.

    Also when this collection should have begun, if the link was stopped then.
    """

    def __init__(self, sources: Sequence[StatisticsSource]) -> None:
        self._sources = sources
        self._waiting: list[StatisticsSource] = []
        self._again: list[StatisticsSource] = []
        self._asked_ns: dict[str, int] = {}
        self._missed_ns: int | None = None
        self._rounds = 0
        self.busy = False
        self.deadline_ns = 0
        self.failures: list[SourceReadFailed] = []

    def begin(self, now_ns: int, due_ns: int | None = None) -> None:
        """Ask all sources that can be asked; it was due, at the latest, at some time before."""
        assert not self.busy  # the core begins one only when none runs
        self._missed_ns = due_ns if due_ns is not None and now_ns - due_ns >= SILENT_NS else None
        self.busy = True
        self.deadline_ns = now_ns + DEADLINE_NS
        self._rounds = 0
        self.failures = []
        # Late answers of a former collection are taken first; their sources hold newer counts behind them.
        self._again = [source for source in self._sources if source.sample is not None]
        self._ask(self._sources, now_ns)

    def _ask(self, sources: Sequence[StatisticsSource], now_ns: int) -> None:
        self._waiting = []
        self._rounds += 1
        for source in sources:
            if not source.can_be_asked or source.awaits_answer:
                continue
            try:
                source.ask()
            except SourceReadFailed as exc:
                self.failures.append(exc)
            if source.awaits_answer:
                self._asked_ns[source.name] = now_ns
                self._waiting.append(source)

    def gather(self, now_ns: int) -> list[Sample] | None:
        """The samples at hand, or None while a source is still waited for."""
        if now_ns < self.deadline_ns and any(source.awaits_answer for source in self._waiting):
            return None
        samples = [source.sample for source in self._sources if source.sample is not None]
        return [self._with_silence(sample) for sample in samples]

    def _with_silence(self, sample: Sample) -> Sample:
        """By the monotonic clock that link and planes share: a slow link makes no plane silent."""
        since_ns = self._asked_ns.get(sample.source, sample.end_ns)
        if self._missed_ns is not None and sample.start_ns <= self._missed_ns:
            since_ns = min(since_ns, self._missed_ns)
        silent_ns = sample.end_ns - since_ns
        return replace(sample, silent_us=silent_ns // 1000) if silent_ns >= SILENT_NS else sample

    def next_round(self, now_ns: int, taken: Sequence[Sample]) -> None:
        """The samples gathered were dealt with; ask again where there is more, else end the collection."""
        more = {sample.source for sample in taken if sample.more}
        answered_nothing = [source for source in self._waiting if not source.awaits_answer]
        repeated = {source.name for source in answered_nothing} - {sample.source for sample in taken}
        unfinished = more | repeated | {source.name for source in self._again}
        self._again = []
        again = [source for source in self._sources if source.name in unfinished and source.sample is None]
        if again and now_ns < self.deadline_ns and self._rounds < MAX_ROUNDS:
            self._ask(again, now_ns)
            if self._waiting or any(source.sample is not None for source in again):
                return
        self.busy = False

    def overdue(self) -> list[str]:
        """Names of the sources that have not answered, after the collection has ended."""
        return [source.name for source in self._sources if source.awaits_answer]


TOLERANCE_RATIO: Final = 0.1  # of the longer interval: bounds the error of a rate
TOLERANCE_FLOOR_NS: Final = 50_000_000  # what a busy host may spread the answers of one question by
_FIRST_ACTIVITY: Final = cut.COL["arrived"]
_END_ACTIVITY: Final = cut.COL["cum_reads"]


@dataclass(frozen=True, slots=True)
class CutIdentity:
    """Who made a cut: everything of it that the samples do not know."""

    gateway_id: str
    epoch: int
    seq: int
    marks: dict[str, int]
    """Per plane, also those not in it, the id of the newest DP_CUT that is spooled once this cut is."""
    waited_us: int | None = None
    """Time since the boot in which tasks of this host waited for I/O; None if it is not known."""


def sample_groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that may share a cut, oldest interval first; every sample is in exactly one group."""
    result: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda item: (item.end_ns, item.start_ns)):
        for group in result:
            if all(_fit(sample, member) for member in group):
                group.append(sample)
                break
        else:
            result.append([sample])
    return result


def _fit(one: Sample, other: Sample) -> bool:
    longest = max(one.end_ns - one.start_ns, other.end_ns - other.start_ns)
    tolerance = max(TOLERANCE_FLOOR_NS, longest * TOLERANCE_RATIO)
    versions = {one.threshold_version, other.threshold_version} - {None}
    return (
        abs(one.start_ns - other.start_ns) <= tolerance
        and abs(one.end_ns - other.end_ns) <= tolerance
        and len(versions) <= 1
        and one.source != other.source
    )


def make_cut(group: Sequence[Sample], stream_names: StreamNames, identity: CutIdentity) -> cut.Cut:
    """One cut of one group. New streams are added to ``stream_names``.

    Header key ``dp`` names each plane's newest spooled DP_CUT: a restarted link goes on from there; ``late``
    is there when caps held I/Os for too long, ``of`` for samples of several sources, ``un`` for planes that
    were silent, ``sq`` where a source counts what is sequential (``wire.cut``).

    Raises:
        BadCut: more streams than a cut may have; split the exports over several gateways.
    """
    counters, hist, missed, sequential = _combine(group, stream_names)
    first = min(group, key=lambda sample: sample.start_ns)
    end_ns = min(sample.end_ns for sample in group)
    generations = {sample.throttle_gen for sample in group} - {None}
    versions = {sample.threshold_version for sample in group} - {None}
    extra: dict[str, Any] = {"dp": identity.marks}
    if len(group) > 1:
        extra["of"] = _planes_of_rows(group, stream_names, counters[cut.COL["stream_id"]])
    if silent := {sample.source: sample.silent_us for sample in group if sample.silent_us and sample.mark}:
        extra["un"] = silent
    if identity.waited_us is not None:
        extra["psi"] = identity.waited_us
    if (sequential >= 0).any():
        extra[cut.SEQUENTIAL] = cut.sequential_bytes(sequential)
    if late := joined_late(sample.late for sample in group):
        extra["late"] = late
    return cut.Cut(
        gateway_id=identity.gateway_id,
        epoch=identity.epoch,
        seq=identity.seq,
        start_unix_us=first.start_unix_us,
        duration_us=(end_ns - first.start_ns) // 1000,
        throttle_gen=_common(generations),
        threshold_version=next((version for version in versions if version is not None), 0),
        counters=counters,
        hist=hist,
        missed=missed,
        # Of which plane it was is lost: an I/O of another may be excused, too, never one of this one accused.
        starved_us=max(sample.starved_us for sample in group),
        extra=extra,
    )


def _planes_of_rows(
    group: Sequence[Sample], stream_names: StreamNames, ids: npt.NDArray[np.int64]
) -> dict[str, bytes]:
    """Key ``of``: which rows each plane has counted in; those of no plane are the host's.

    Streams of a process that has handed over are those of its plane already: it will be named no more, and
    the server should not look for them there.
    """
    found = {sample.source: np.zeros(len(ids), dtype=np.bool_) for sample in group if sample.mark}
    for sample in group:
        if sample.mark:
            mine = np.array([stream_names.add(key) for key in sample.streams], dtype=np.int64)
            found[sample.plane if sample.plane in found else sample.source] |= np.isin(ids, mine)
    return {name: np.packbits(rows, bitorder="little").tobytes() for name, rows in found.items()}


def _common(generations: set[int | None]) -> int:
    """The generation all report; 0 (static policy) when no source has caps, -1 when they differ."""
    if not generations:
        return 0
    only = generations.pop()
    return -1 if generations or only is None else only


def _combine(
    group: Sequence[Sample], stream_names: StreamNames
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Counters, histograms and misses of a cut, and what of each row is sequential, -1 where not known."""
    ids = np.array([stream_names.add(key) for sample in group for key in sample.streams], dtype=np.int64)
    counters = np.concatenate([sample.counters for sample in group], axis=1)
    offsets = np.cumsum([0] + [len(sample.streams) for sample in group])
    hist, missed = (
        np.concatenate([_shifted(getattr(sample, name), int(offset)) for sample, offset in pairs])
        for name in ("hist", "missed")
        for pairs in [list(zip(group, offsets, strict=False))]
    )
    unique_ids, row_of = np.unique(ids, return_inverse=True)
    summed = np.zeros((len(cut.COLUMNS), len(unique_ids)), dtype=np.int64)
    for column in range(len(cut.COLUMNS)):
        np.add.at(summed[column], row_of, counters[column])
    np.minimum(summed[cut.SUMMED], cut.MAX_COUNTER, out=summed[cut.SUMMED])  # else the server refuses all
    summed[cut.COL["stream_id"]] = unique_ids
    hist["row"], missed["row"] = row_of[hist["row"]], row_of[missed["row"]]
    if len(unique_ids) < len(ids):
        missed = _joined(missed)
    keep, counters, hist, missed = _without_idle(summed, hist, missed)
    return counters, hist, missed, _sequential(group, row_of, len(unique_ids))[keep]


def _sequential(group: Sequence[Sample], row_of: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """Of each row the sum, -1 where a sample of it does not know its part; shape (rows,)."""
    said = np.concatenate(
        [
            np.full(len(sample.streams), -1) if sample.sequential is None else sample.sequential
            for sample in group
        ]
    )
    found = np.zeros(rows, dtype=np.int64)
    np.add.at(found, row_of, said)
    found[row_of[said < 0]] = -1
    return found


def _joined(missed: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One entry for each row, kind and threshold: sums, of OUTSTANDING the longest."""
    keys, index = np.unique(missed[["row", "io", "threshold_us"]], return_inverse=True)
    is_outstanding = missed["io"] >= cut.OUTSTANDING
    figures = []
    for name in ("counted", "missed"):
        joined = np.zeros(len(keys), dtype=np.int64)
        np.add.at(joined, index[~is_outstanding], missed[name][~is_outstanding])
        np.maximum.at(joined, index[is_outstanding], missed[name][is_outstanding])
        figures.append(joined.tolist())
    return cut.missed_array(
        (row, io, threshold_us, counted, late)
        for (row, io, threshold_us), counted, late in zip(keys.tolist(), *figures, strict=True)
    )


def _shifted(column: npt.NDArray[Any], offset: int) -> npt.NDArray[Any]:
    moved = column.copy()
    moved["row"] += offset
    return moved


def _without_idle(
    counters: npt.NDArray[np.int64], hist: npt.NDArray[Any], missed: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[Any], npt.NDArray[Any]]:
    """Which rows are kept, and all columns without the others."""
    keep: npt.NDArray[np.bool_] = np.asarray(counters[_FIRST_ACTIVITY:_END_ACTIVITY].any(axis=0))
    keep[hist["row"]] = True
    keep[missed["row"]] = True
    new_row = np.cumsum(keep) - 1
    hist["row"], missed["row"] = new_row[hist["row"]], new_row[missed["row"]]
    return keep, np.ascontiguousarray(counters[:, keep]), hist, missed


MAX_CUT_BYTES: Final = 952 << 10  # the server takes a cut of this size at most (docs/formats/wire.md)


class CutSpooler:
    """Turns what a collection brought into cuts in the spool. Thread: the link's loop only."""

    def __init__(
        self,
        gateway_id: str,
        epoch: int,
        spool: Spool,
        stream_names: StreamNames,
        sources: Sequence[StatisticsSource],
        waited_us: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._gateway_id = gateway_id
        self.epoch = epoch
        self.seq = 0
        self._spool = spool
        self._stream_names = stream_names
        self._all_sources = sources  # the core adds and removes some
        self._waited_us = waited_us

    @property
    def _sources(self) -> dict[str, StatisticsSource]:
        return {source.name: source for source in self._all_sources}

    def spool(self, samples: Sequence[Sample]) -> int:
        """Make cuts of the samples and spool them; returns how many old cuts were dropped to make room.

        Raises:
            SpoolWriteFailed: the cuts up to here are spooled; the sources of the others keep their samples.
            BadCut, FrameTooLarge: more streams than a cut may have.
        """
        dropped = 0
        for group in sample_groups(samples):
            try:
                dropped += self._spool_cut(group)
            except (BadCut, FrameTooLarge):
                if len(group) == 1:
                    raise
                # Too many streams for one cut: each source's own part is bounded and fits alone.
                dropped += sum(self._spool_cut([sample]) for sample in group)
        return dropped

    def _spool_cut(self, group: Sequence[Sample]) -> int:
        # A plane that is no longer configured is named no more: the server would wait for it.
        marks = {name: mark for name, mark in self._spool.marks.items() if name in self._sources}
        marks |= {sample.source: sample.mark for sample in group if sample.mark}
        identity = CutIdentity(self._gateway_id, self.epoch, self.seq + 1, marks, self._waited_us())
        raw = cut.encode(make_cut(group, self._stream_names, identity))
        if len(raw) > MAX_CUT_BYTES:
            raise FrameTooLarge("cut", len(raw), MAX_CUT_BYTES)
        try:
            self._stream_names.save()
        except OSError as exc:
            raise SpoolWriteFailed("the book of streams", str(exc)) from exc
        dropped = self._spool.append(self.epoch, identity.seq, raw, marks)
        self.seq = identity.seq
        sources = self._sources
        for sample in group:
            sources[sample.source].spooled()
        return dropped
