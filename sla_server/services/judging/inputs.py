"""One read of rollups, indexed the way slices are judged: by stream, by gateway.

Pure. When a gap is *ours*: ``judge``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sla_server.agreements.slices import LimitCounts, StreamSlot
from sla_server.services.judging.track import JudgedStream
from sla_server.services.store import Row, SliceInputs


class SliceRows:
    """One read, indexed by stream and by gateway."""

    def __init__(self, inputs: SliceInputs, outages: Sequence[Row] = ()) -> None:
        self._outages = outages
        missed: dict[tuple[int, int], dict[tuple[int, int], LimitCounts]] = defaultdict(dict)
        for row in inputs.missed:
            counts = LimitCounts(*(row[name] for name in LimitCounts._fields))
            missed[row["slot_us"], row["stream_id"]][row["io"], row["threshold_us"]] = counts
        self._slots: dict[int, list[tuple[int, StreamSlot]]] = defaultdict(list)
        for row in inputs.rows:
            slot = StreamSlot(
                arrived=row["arrived"],
                reads=row["reads"],
                writes=row["writes"],
                read_bytes=row["read_bytes"],
                write_bytes=row["write_bytes"],
                hist_read=row["hist_read"],
                hist_write=row["hist_write"],
                missed=missed.get((row["slot_us"], row["stream_id"]), {}),
                lat_sum_us=row["lat_sum_us"],
                errors=row["errors"],
                failed=row["failed"],
                failed_reads=row["failed_reads"],
                failed_writes=row["failed_writes"],
                oldest_ms=row["oldest_ms"],
                stalled_ms=row["stalled_ms"],
                covered_us=row["covered_us"],
                outstanding=row["held_max"] + row["inflight_max"],
            )
            self._slots[row["stream_id"]].append((row["slot_us"], slot))
        self._coverage: dict[str, list[Row]] = defaultdict(list)
        self.add_coverage(inputs.coverage)

    def add_coverage(self, rows: Iterable[Row]) -> None:
        """More rows of table ``coverage``, later than those known."""
        for row in sorted(rows, key=lambda row: int(row["slot_us"])):
            self._coverage[row["gateway_id"]].append(row)

    def slots(self, scope: Iterable[JudgedStream], start_us: int, end_us: int) -> list[StreamSlot]:
        """What the streams did in the slots that start in the slice."""
        return [
            slot
            for stream in scope
            for slot_us, slot in self._slots.get(stream.stream_id, ())
            if start_us <= slot_us < end_us
        ]

    def covered_us(self, gateway_id: str, start_us: int, end_us: int) -> int:
        """Sum of the durations of the gateway's cuts."""
        rows = self._coverage.get(gateway_id, ())
        return sum(int(row["covered_us"]) for row in rows if start_us <= row["slot_us"] < end_us)

    def cut_us(self, gateway_id: str, start_us: int, end_us: int) -> float:
        """Mean duration of the gateway's cuts in the slice, 0 without any."""
        rows = [row for row in self._coverage.get(gateway_id, ()) if start_us <= row["slot_us"] < end_us]
        cuts = sum(int(row["cuts"]) for row in rows)
        return sum(int(row["covered_us"]) for row in rows) / cuts if cuts else 0.0

    def lost_by_us(self, gateway_id: str, start_us: int, end_us: int) -> str:
        """How we lost cuts of the slice, or of a gap that lasts beyond its end: a reason, or nothing."""
        for row in self._coverage.get(gateway_id, ()):
            if row["slot_us"] >= start_us and (row["gap_cuts"] > 0 or row["gap_ios"] > 0):
                return "cuts-lost"
            if row["slot_us"] >= end_us:
                break
        if any(row["from_us"] < end_us and row["to_us"] > start_us for row in self._outages):
            return "server-down"
        return ""
