"""A cut: one gateway's batch of all its streams since the cut before (DESIGN.md 4).

A cut is one frame of kind CUT; the same bytes are in the agent's spool, on the wire, in the mailboxes and
in the ingest queue. Identity: (gateway_id, epoch, seq). It is self-contained: a reader needs no session
state, no threshold table and no earlier cut.

Header keys:

    gw   gateway_id, 16 bytes (UUID)         n   rows (streams)
    ep   epoch, random u64 of an agent start  h   histogram entries
    seq  1, 2, 3, ... within the epoch        m   missed entries
    t    start, wall clock of the agent, us   tg  throttle_gen held during the *whole* cut, -1 if it changed
    d    duration, monotonic, us              ts  version of the threshold set in force
    gap  cuts dropped directly before this one (spool overflow)
    st   us of the cut in which the gateway's data plane wanted to run and got no processor; only if above 0
    dp   {plane: id}, the newest DP_CUT of each plane that went into this or an earlier cut
    of   {plane: bitmap}, in a cut of several sources: bit i, from the lowest of the first byte, says that row
         i is of that plane; the rows of no plane are the host's
    un   {plane: us}, planes in this cut that gave the link no answer for so long before its end: they were
         stopped and served nothing; absent when there is none
    sq   u32 a row: of ``arrived``, reads and writes that began where the one before of their connection and
         kind had ended; all bits set where the source does not count it. Absent where none does
    late {volume: [ios, longest_us]}, I/Os that caps held longer than max_hold_s; absent when there is none
    psi  us since the boot of the host in which tasks waited for I/O; absent where it is not known

Blob, little-endian:

    i64  counters[len(COLUMNS)][n]                        column-major, names in COLUMNS
    h x {u16 row, u16 bucket, u32 count}                  sparse histograms, ``histogram`` numbers the buckets
    m x {u16 row, u16 io, u32 threshold_us, u32 counted, u32 missed}

A missed entry says that ``counted`` I/Os of kind ``io`` (IO_ANY, IO_READ, IO_WRITE) were compared with the
threshold and ``missed`` of them took longer. It is present for every threshold that applied to a stream with
I/O in this cut, also when nothing was missed. Entries with a higher ``io`` say what completions do not show:

``OVERDUE + io``, with a threshold: ``counted`` outstanding I/Os passed it in this cut, and ``missed``
completions of this cut had passed it in a cut before, which said so. So the I/Os slower than a threshold are
missed + overdue - settled of counted + overdue - settled, each once, over any number of cuts. Those of a
client that left in the meantime are never settled. With threshold 0: I/Os whose client left before they
completed. ``counted`` of them were *abandoned* in this cut, when they were ``missed`` ms old in all; a mean
latency is at least (lat_sum_us + 1000 * missed) over (completed + counted). IO_ANY is the sum of both kinds.

``FAILED + io``, with a threshold: ``counted`` completions had an error, and ``missed`` of them are in the
missed of that threshold. With threshold 0: all of a kind that failed; IO_ANY also flush, trim, zeroing, and
clients that were refused because the storage is not there. What a gateway refuses for what it asks
(read-only, out of range) is its client's error, and in the column ``errors`` alone.

``OUTSTANDING + io``, with threshold 0, about reads and writes (flush, trim and zeroing are not counted
here): ``counted`` is the age in ms of the oldest one of this kind that is outstanding at the cut's end (0:
none is left), ``missed`` the longest time in ms without a completion of this kind (of IO_ANY: of either
kind) while one was outstanding. That may have begun in a cut before, and goes on over clients that leave and
come again: idle time between counts nothing, and where the I/O of the next client completes within a second,
what was before is not reported again. Clients that are refused because the storage is not there are a stall
of all kinds alike, from the first attempt until one is let in or an I/O completes, and for 30 s after the
last attempt. An entry is there for I/O outstanding at the cut's end, and for a stall of 1 s and more within
it. IO_ANY never comes without IO_READ or IO_WRITE; so a row that has IO_ANY alone is of an agent of before,
and has flush, trim and zeroing in it. An I/O ages until its answer is complete; not while it waits, behind
answers, for its client to take them.

An entry of nothing but zeroes is left out, with one exception. An agent of before these kinds sends none of
them; so in a row with something in flight or in ``errors``, but without an entry of FAILED or OUTSTANDING,
``OUTSTANDING + IO_READ`` with zeroes says that no read or write waits, and that none failed.

A cut with the flag LIVE is the newest one, sent beside a backlog for judging only; it is not acknowledged.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.errors import BadCut
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import frame
from pmdaemon.wire.histogram import WIRE_BUCKETS
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.names import is_name

SCHEMA_ID: Final = 1
COLUMNS: Final = (
    "stream_id",  # names.stream_id of (gateway, volume, client)
    "arrived",  # I/Os that arrived (offered), also those our throttle still holds
    "reads",  # completed
    "writes",
    "read_bytes",
    "write_bytes",
    "others",  # completed flush, trim, write-zeroes
    "errors",  # completed with an error
    "lat_sum_us",  # sum over reads and writes, arrival to completion
    "svc_sum_us",  # sum, sent upstream to completion
    "delay_sum_us",  # sum, held by our throttle
    "cost_milli",  # completed cost in 1/1000 cost units
    "inflight",  # gauge at the cut's end: sent upstream, not completed
    "held",  # gauge at the cut's end: held by our throttle
    "cum_reads",  # lifetime of the stream on this gateway epoch
    "cum_writes",
    "cum_read_bytes",
    "cum_write_bytes",
)
COL: Final = {name: index for index, name in enumerate(COLUMNS)}
MAX_TIME_US: Final = 1 << 53  # the year 2255; for wall clocks and durations
MAX_UNIX_US: Final = 4_102_444_800_000_000  # the year 2100; for a start that the server has corrected
MAX_DURATION_US: Final = 86_400_000_000  # a day, of what the server stores
MAX_ROWS: Final = 4096  # one gateway's streams; 4096 rows of counters alone are 590 KB of the 1 MiB frame

MAX_COUNTER: Final = 1 << 47  # of one cut: 140 TB read or 4 years of summed latency; 2**16 such fit int64
SUMMED: Final = slice(COL["arrived"], COL["cum_reads"])  # rows of ``counters`` that are added up

SEQUENTIAL: Final = "sq"
NOT_PLACED: Final = 0xFFFF_FFFF
"""Of a row whose source does not count which I/Os follow one another."""
MOST_LATE: Final = 16
"""Volumes named in ``late``: 2.4 KB beside the names of all streams in a header of 64 KB."""
Late = dict[str, tuple[int, int]]
"""I/Os that caps held back for longer than the gateway's ``max_hold_s``: volume to (ios, longest_us).

``ios`` were let through in this cut after such a delay; ``longest_us`` is the longest one, also of an I/O
that is still held at the cut's end (``ios`` may then be 0). The rate is kept all the same: the figure says
that more is outstanding than the caps let through, so that a client may time out.
"""

IO_ANY: Final = 0
IO_READ: Final = 1
IO_WRITE: Final = 2
IO_KINDS: Final = {"any": IO_ANY, "read": IO_READ, "write": IO_WRITE}
OVERDUE: Final = 4
FAILED: Final = 8
OUTSTANDING: Final = 12
OUTSTANDING_COLUMNS: Final = (
    "oldest_ms",
    "stalled_ms",
    "oldest_read_ms",
    "stalled_read_ms",
    "oldest_write_ms",
    "stalled_write_ms",
    "kindless_oldest_ms",
    "kindless_stalled_ms",
)
"""What the cuts of a slot said of outstanding I/O, the largest of each, as SQL and verdicts call it: of reads
and writes together, of each, and of all kinds together by agents that do not tell them apart (these are in
the first two, too)."""
_COMPARED: Final = np.array([kind <= IO_WRITE or FAILED <= kind <= FAILED + IO_WRITE for kind in range(16)])
_KNOWN_KINDS: Final = np.array([kind % 4 <= IO_WRITE for kind in range(16)])

HIST_DTYPE: Final = np.dtype([("row", "<u2"), ("bucket", "<u2"), ("count", "<u4")])
MISSED_DTYPE: Final = np.dtype(
    [("row", "<u2"), ("io", "<u2"), ("threshold_us", "<u4"), ("counted", "<u4"), ("missed", "<u4")]
)
_COUNTER_DTYPE: Final = np.dtype("<i8")
_MOST_COUNT: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Cut:
    """One decoded cut.

    Attributes:
        counters: int64, shape (len(COLUMNS), n).
        hist: HIST_DTYPE, shape (h,).
        missed: MISSED_DTYPE, shape (m,).
        starved_us: while the data plane waited for the processor of its host; no more than the duration.
    """

    gateway_id: str
    epoch: int
    seq: int
    start_unix_us: int
    duration_us: int
    throttle_gen: int
    threshold_version: int
    counters: npt.NDArray[np.int64]
    hist: npt.NDArray[Any]
    missed: npt.NDArray[Any]
    gap: int = 0
    starved_us: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of streams."""
        return int(self.counters.shape[1])

    @property
    def sequential(self) -> bytes:
        """Key ``sq``; empty where it is absent, or not that of so many rows."""
        said = self.extra.get(SEQUENTIAL)
        return said if isinstance(said, bytes) and len(said) == 4 * self.rows else b""

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Counters of one name, shape (n,)."""
        column: npt.NDArray[np.int64] = self.counters[COL[name]]
        return column

    def entries(self, kind: int) -> npt.NDArray[Any]:
        """Missed entries of a kind, with ``io`` as IO_ANY, IO_READ or IO_WRITE; MISSED_DTYPE.

        Args:
            kind: 0 for those of completions, else OVERDUE, FAILED or OUTSTANDING.
        """
        chosen: npt.NDArray[Any] = self.missed[self.missed["io"] >> 2 == kind >> 2].copy()
        chosen["io"] -= kind
        return chosen

    def dense_hist(self, first_bucket: int, buckets: int) -> npt.NDArray[np.int64]:
        """Shape (n, buckets): one of the four histograms, e.g. ``dense_hist(TOTAL_READ, BUCKETS)``."""
        dense = np.zeros((self.rows, buckets), dtype=np.int64)
        bucket = self.hist["bucket"].astype(np.int64) - first_bucket
        chosen = (bucket >= 0) & (bucket < buckets)
        np.add.at(dense, (self.hist["row"][chosen], bucket[chosen]), self.hist["count"][chosen])
        return dense


def schema_header() -> dict[str, Any]:
    """Header of the SCHEMA frame an agent sends once a session, before its first cut."""
    return {
        "sch": SCHEMA_ID,
        "columns": list(COLUMNS),
        "types": {"counters": "i64", "hist": HIST_DTYPE.descr, "missed": MISSED_DTYPE.descr},
        "buckets": WIRE_BUCKETS,
    }


def encode(cut: Cut) -> bytes:
    """One CUT frame.

    Raises:
        BadCut: more rows than MAX_ROWS, or a counters array of another shape.
        FrameTooLarge: the whole is above the frame limit.
    """
    if cut.counters.shape[0] != len(COLUMNS) or cut.rows > MAX_ROWS:
        raise BadCut(f"counters have shape {cut.counters.shape}, limit ({len(COLUMNS)}, {MAX_ROWS})")
    header = {
        "gw": uuid.UUID(cut.gateway_id).bytes,
        "ep": cut.epoch,
        "seq": cut.seq,
        "t": cut.start_unix_us,
        "d": cut.duration_us,
        "tg": cut.throttle_gen,
        "ts": cut.threshold_version,
        "gap": cut.gap,
        "n": cut.rows,
        "h": len(cut.hist),
        "m": len(cut.missed),
        "sch": SCHEMA_ID,
        **({"st": cut.starved_us} if cut.starved_us else {}),
        **cut.extra,
    }
    blob = b"".join(
        (
            np.ascontiguousarray(cut.counters, dtype="<i8").tobytes(),
            np.ascontiguousarray(cut.hist, dtype=HIST_DTYPE).tobytes(),
            np.ascontiguousarray(cut.missed, dtype=MISSED_DTYPE).tobytes(),
        )
    )
    return frame.encode(Kind.CUT, header, blob)


_KEYS: Final = ("t", "d", "n", "h", "m")
_OPTIONAL: Final = {"tg": -1, "ts": 0, "gap": 0, "st": 0}
_KNOWN: Final = frozenset((*_KEYS, *_OPTIONAL, "gw", "ep", "seq", "sch"))
_ROW_BYTES: Final = len(COLUMNS) * 8
_HIST_BYTES: Final = HIST_DTYPE.itemsize
_MISSED_BYTES: Final = MISSED_DTYPE.itemsize
_INTEGERS: Final = frozenset((int,))


def identity(header: dict[str, Any]) -> tuple[str, int, int]:
    """(gateway_id, epoch, seq) from a CUT header, without touching its columns.

    Raises:
        BadCut: a key is missing or of the wrong type.
    """
    gateway, epoch, seq = header.get("gw"), header.get("ep"), header.get("seq")
    if not isinstance(gateway, bytes) or len(gateway) != 16:
        raise BadCut("key 'gw' is not 16 bytes")
    if type(epoch) is not int or type(seq) is not int or not 0 < epoch < 1 << 64 or seq < 1:
        raise BadCut(f"epoch {excerpt(epoch)} or seq {excerpt(seq)} out of range")
    return _gateway_text(gateway), epoch, seq


def gap_of(header: dict[str, Any]) -> int:
    """Cuts that the agent dropped directly before this one; 0 for what cannot be a number of them."""
    gap = header.get("gap", 0)
    return gap if type(gap) is int and gap > 0 else 0


@lru_cache(maxsize=16_384)
def _gateway_text(raw: bytes) -> str:
    """A gateway_id as text: the same few thousand come again with every cut."""
    return str(uuid.UUID(bytes=raw))


def check(parsed: frame.Frame) -> tuple[bytes, int, int]:
    """(gateway_id as 16 bytes, epoch, seq) of a CUT frame whose sizes fit, without touching its columns.

    What a process needs that only hands the frame on: about 2 us, whatever the number of streams.

    Raises:
        BadCut: a key is missing, of the wrong type, or the sizes contradict each other.
    """
    header = parsed.header
    gateway, epoch, seq = header.get("gw"), header.get("ep"), header.get("seq")
    if not isinstance(gateway, bytes) or len(gateway) != 16:
        raise BadCut("key 'gw' is not 16 bytes")
    if type(epoch) is not int or type(seq) is not int or not 0 < epoch < 1 << 64 or not 0 < seq < 1 << 63:
        raise BadCut(f"epoch {excerpt(epoch)} or seq {excerpt(seq)} out of range")
    get = header.get
    needed: tuple[Any, ...] = (get("t"), get("d"), get("n"), get("h"), get("m"))
    values = (*needed, get("tg", 0), get("ts", 0), get("gap", 0), get("st", 0))
    # One look at all of them (the usual cut), and one by one only to say which is wrong.
    if not _INTEGERS.issuperset(map(type, values)) or min(values) < 0 or max(values) >= 1 << 63:
        _check_one_by_one(header)
    if header["t"] >= MAX_TIME_US or header["d"] >= MAX_TIME_US:
        raise BadCut(f"start {header['t']} us or duration {header['d']} us is not below {MAX_TIME_US}")
    rows, hists, misses = header["n"], header["h"], header["m"]
    if get("sch", SCHEMA_ID) != SCHEMA_ID:
        raise BadCut(f"schema {excerpt(header['sch'])} is unknown; this side knows {SCHEMA_ID}")
    if not fits(rows, hists, misses, len(parsed.blob)):
        if rows > MAX_ROWS:
            raise BadCut(f"{rows} rows, limit {MAX_ROWS}")
        need = rows * _ROW_BYTES + hists * _HIST_BYTES + misses * _MISSED_BYTES
        raise BadCut(f"columns need {need} bytes, the blob has {len(parsed.blob)}")
    return gateway, epoch, seq


def fits(rows: int, hists: int, misses: int, blob_bytes: int) -> bool:
    """Whether a blob of this size, its padding included, is that of so many rows and entries."""
    spare = blob_bytes - (rows * _ROW_BYTES + hists * _HIST_BYTES + misses * _MISSED_BYTES)
    return 0 <= spare < 8 and rows <= MAX_ROWS


def _check_one_by_one(header: dict[str, Any]) -> None:
    for key in _KEYS:
        value = header.get(key)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise BadCut(f"key {key!r} is {excerpt(value)}, expected an integer from 0 to 2^63 - 1")
    for key, default in _OPTIONAL.items():
        if type(value := header.get(key, default)) is not int or not -1 <= value < 1 << 63:
            raise BadCut(f"key {key!r} is {excerpt(value)}, expected an integer from -1 to 2^63 - 1")


def decode(source: frame.Frame | memoryview | bytes) -> Cut:
    """Decode a CUT frame. Arrays are read-only views into the frame's bytes.

    Raises:
        BadCut: sizes, references or counts that contradict each other.
        MalformedFrame: not a frame at all.
    """
    cut = view(source)
    problem = problem_of(cut.counters, cut.hist, cut.missed, cut.rows, cut.rows)
    if problem is not None:
        raise BadCut(problem)
    return cut


def problem_of(
    counters: npt.NDArray[np.int64],
    hist: npt.NDArray[Any],
    missed: npt.NDArray[Any],
    hist_rows: int | npt.NDArray[np.int64],
    missed_rows: int | npt.NDArray[np.int64],
) -> str | None:
    """What is wrong in the columns of a cut, or of many cuts joined; None if nothing is.

    Args:
        counters: as in ``Cut``; ``hist`` and ``missed``, too.
        hist: see there.
        missed: see there.
        hist_rows: rows of the cut that an entry belongs to, of all entries or of each.
        missed_rows: the same for ``missed``.
    """
    if bool((hist["row"] >= hist_rows).any()) or bool((hist["bucket"] >= WIRE_BUCKETS).any()):
        return "a histogram entry names a row or bucket that does not exist"
    kind = missed["io"]
    if bool((kind >= len(_KNOWN_KINDS)).any()) or not bool(_KNOWN_KINDS[kind].all()):
        return "a missed entry names an I/O kind that does not exist"
    more = missed["missed"] > missed["counted"]
    if bool((missed["row"] >= missed_rows).any()) or bool((more & _COMPARED[kind]).any()):
        return "a missed entry names a row that does not exist, or misses more than it counted"
    if counters.size and int(counters.min()) < 0:
        return "a counter is negative"
    return None


def overflows(counters: npt.NDArray[np.int64]) -> bool:
    """Whether a counter that is added up is above ``MAX_COUNTER``; shape as in ``Cut``."""
    return bool(counters.size) and int(counters[SUMMED].max()) > MAX_COUNTER


def fault_of(cut: Cut) -> str | None:
    """Why the columns of one cut cannot be true, or None; a server refuses it, or sums could overflow."""
    problem = problem_of(cut.counters, cut.hist, cut.missed, cut.rows, cut.rows)
    return problem or ("a counter exceeds 2**47" if overflows(cut.counters) else None)


def are_sound(found: Sequence[Cut]) -> bool:
    """Whether ``fault_of`` finds nothing in any of the cuts: one look at all of them joined."""
    if not found:
        return True
    rows = np.array([cut.rows for cut in found])
    # Joined as bytes: numpy copies records field by field, and works out their common type for each array.
    problem = problem_of(
        np.concatenate([cut.counters.ravel() for cut in found]),
        np.frombuffer(b"".join([cut.hist.tobytes() for cut in found]), HIST_DTYPE),
        np.frombuffer(b"".join([cut.missed.tobytes() for cut in found]), MISSED_DTYPE),
        np.repeat(rows, [len(cut.hist) for cut in found]),
        np.repeat(rows, [len(cut.missed) for cut in found]),
    )
    summed = np.concatenate([cut.counters[SUMMED].ravel() for cut in found])
    return problem is None and (not summed.size or int(summed.max()) <= MAX_COUNTER)


def time_fault_of(cut: Cut, offset_us: int) -> str | None:
    """Why the header of a cut cannot be stored, or None; looks at no column.

    Args:
        cut: as decoded.
        offset_us: what the server adds to the agent's clock.
    """
    start_us = cut.start_unix_us + offset_us
    if cut.duration_us > MAX_DURATION_US:
        return f"it lasts {cut.duration_us} us, more than a day"
    if not 0 <= start_us <= MAX_UNIX_US:
        return f"its corrected start {start_us} us lies before 1970 or behind 2100"
    if cut.seq >= 1 << 63 or cut.gap >= 1 << 63:
        return f"its sequence number {cut.seq} or gap {cut.gap} exceeds 63 bits"
    return None


def view(source: frame.Frame | memoryview | bytes) -> Cut:
    """As ``decode``, without a look at the columns: ``fault_of`` or ``are_sound`` must, before they are used.

    For readers of many cuts at once: one look at all of them joined costs a tenth.
    """
    parsed = source if isinstance(source, frame.Frame) else frame.decode(source)
    header, blob = parsed.header, parsed.blob
    if parsed.kind != Kind.CUT:
        raise BadCut(f"frame kind {parsed.kind} is not CUT")
    gateway, epoch, seq = check(parsed)
    rows, hist_len, missed_len = header["n"], header["h"], header["m"]
    counters_end = rows * _ROW_BYTES
    hist_end = counters_end + hist_len * HIST_DTYPE.itemsize
    missed_end = hist_end + missed_len * MISSED_DTYPE.itemsize
    counters = np.frombuffer(blob[:counters_end], dtype=_COUNTER_DTYPE).reshape(len(COLUMNS), rows)
    hist = np.frombuffer(blob[counters_end:hist_end], dtype=HIST_DTYPE)
    missed = np.frombuffer(blob[hist_end:missed_end], dtype=MISSED_DTYPE)
    return Cut(
        gateway_id=_gateway_text(gateway),
        epoch=epoch,
        seq=seq,
        start_unix_us=header["t"],
        duration_us=header["d"],
        throttle_gen=header.get("tg", -1),
        threshold_version=header.get("ts", 0),
        counters=counters,
        hist=hist,
        missed=missed,
        gap=max(header.get("gap", 0), 0),
        starved_us=min(max(header.get("st", 0), 0), header["d"]),
        extra={key: value for key, value in header.items() if key not in _KNOWN},
    )


def sequential_bytes(counts: npt.NDArray[np.int64]) -> bytes:
    """Key ``sq`` of counts, shape (rows,); below 0: not known."""
    known = np.minimum(counts, NOT_PLACED - 1)
    return np.where(counts < 0, NOT_PLACED, known).astype("<u4").tobytes()


def sequential_counts(said: bytes) -> npt.NDArray[np.int64]:
    """The reverse; -1 where it is not known."""
    found = np.frombuffer(said, "<u4").astype(np.int64)
    return np.where(found == NOT_PLACED, -1, found)


def rows_array(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Counters matrix, shape (len(COLUMNS), n), from one sequence a stream in COLUMNS order."""
    if not rows:
        return np.zeros((len(COLUMNS), 0), dtype=np.int64)
    return np.ascontiguousarray(np.array(rows, dtype=np.int64).T)


def missed_array(entries: Iterable[tuple[int, int, int, int, int]]) -> npt.NDArray[Any]:
    """MISSED_DTYPE of (row, io, threshold_us, counted, missed).

    A count that no u32 holds is in several entries with the same key, as readers add them up: of an agent
    that no server has asked for a day.
    """
    found = []
    for row, io, threshold_us, counted, missed in entries:
        while counted > _MOST_COUNT or missed > _MOST_COUNT:
            part = min(counted, _MOST_COUNT), min(missed, _MOST_COUNT)
            found.append((row, io, threshold_us, *part))
            counted, missed = counted - part[0], missed - part[1]
        found.append((row, io, threshold_us, counted, missed))
    return np.array(found, dtype=MISSED_DTYPE)


def hist_array(
    row: npt.NDArray[np.int64], bucket: npt.NDArray[np.int64], count: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """HIST_DTYPE of columns of one length; a count that no u32 holds as in ``missed_array``."""
    parts = []
    while len(count):
        hist = np.zeros(len(row), dtype=HIST_DTYPE)
        hist["row"], hist["bucket"], hist["count"] = row, bucket, np.minimum(count, _MOST_COUNT)
        parts.append(hist)
        more = count > _MOST_COUNT
        row, bucket, count = row[more], bucket[more], count[more] - _MOST_COUNT
    return np.concatenate(parts) if parts else np.zeros(0, dtype=HIST_DTYPE)


def worst_late(late: Late) -> Late:
    """Key ``late``: at most ``MOST_LATE`` volumes: those with the longest delay."""
    return dict(sorted(late.items(), key=lambda item: -item[1][1])[:MOST_LATE])


def joined_late(parts: Iterable[Late]) -> Late:
    """Key ``late`` of several samples as one: sums of I/Os, the longest delay."""
    result: Late = {}
    for part in parts:
        for volume, (ios, longest_us) in part.items():
            before = result.get(volume, (0, 0))
            result[volume] = (before[0] + ios, max(before[1], longest_us))
    return worst_late(result)


def parse_late(value: Any) -> Late:
    """What a header's key says; entries that cannot be are left out, as the figure only informs."""
    result: Late = {}
    for volume, figures in list(value.items())[:MOST_LATE] if isinstance(value, dict) else ():
        match figures:
            case [int(ios), int(longest_us)] if 0 <= ios < MAX_TIME_US and 0 <= longest_us < MAX_TIME_US:
                if isinstance(volume, str) and is_name(volume):
                    result[volume] = (ios, longest_us)
    return result
